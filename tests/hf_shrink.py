"""Small configurations of Hugging Face models, made from the default ones by dividing their sizes: nothing here knows a
model by name.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig, ResNetConfig

# `width` divides everything that is a number of features, so that sizes which must fit each other still do
_WIDTH = re.compile(
    r"hidden_size|intermediate|dim|channel|width|embd|embed|d_model|d_ff|d_kv|ffn|_ff$|filters|rank|inner|units|features$|"
    r"projection_size|head_size|coordinate_size|shape_size|pos_feats|expert_size|mlp_size|proj_size|feature_size"
)
_NOT_WIDTH = re.compile(
    r"vocab|patch|image|kernel|window|chunk|block|pool|stride|max_|_per_|groups|batch|sample|crop|grid|merge|state|layers|"
    r"num_channels|in_chans|input_channels|audio_channels|num_embed|num_pos_emb|position|index|dimension|ratio|"
    r"num_mel|input_dim|mel_dim|feature_size|num_features"
)
_DEPTH = re.compile(r"layers?$|^depth$")
_EXPERTS = re.compile(r"^(num_|n_|moe_num_)?(local_|routed_)?experts$")
_TOKEN = re.compile(r"(_token_id|_token_index|_idx|_id|_index|_tokens?_ids?)$")
_LENGTH = re.compile(
    r"(max_\w*position\w*|n_positions|max_seq_len|max_sequence_length|seq_length|n_ctx|context_length)$"
)
_NEEDED = {"prediction_length": 8, "num_experts_per_tok": 2, "num_selected_experts": 2}  # where the default is None
TOKENS = 128  # the vocabulary; the last of them are the special tokens
_FIRST_SPECIAL = 100


@dataclass(frozen=True)
class Level:
    """How small: widths are divided by `width`; `depth` layers; pictures of `image` pixels (0: as they are)."""

    width: int = 16
    depth: int = 2
    image: int = 64
    vocab: int = TOKENS
    experts: int = 4

    def __str__(self) -> str:
        return f"width/{self.width}, {self.depth or 'all'} layers, images {self.image or 'whole'}"


LEVELS = (
    Level(),
    Level(image=0),
    Level(width=8),
    Level(width=4, image=0),
    Level(depth=0, image=0),
    Level(width=8, depth=4, image=0),
    Level(width=1, image=0),
    Level(width=1, depth=0, image=0, experts=0),
)


def small(config_class: type[PreTrainedConfig], level: Level) -> PreTrainedConfig:
    """A configuration of `config_class` with every size shrunken as `level` says. Derived values are derived anew.

    Raises whatever the class raises for values that do not fit each other.
    """
    return _smaller(config_class(), level, {})


def _smaller(config: PreTrainedConfig, level: Level, special: dict[int, int]) -> PreTrainedConfig:
    kind = type(config)
    fresh = kind()
    defaults = {f.name: f.default for f in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else {}
    changed: dict[str, Any] = {}
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig) and value.model_type == "timm_backbone":
            value = ResNetConfig(out_features=["stage2", "stage3", "stage4"])  # timm is another library
        if isinstance(value, PreTrainedConfig):
            changed[name] = _smaller(value, level, special)
            continue
        derived = defaults.get(name, 0) is None and value == getattr(fresh, name, None)
        if value is None and name in _NEEDED:
            changed[name] = _NEEDED[name]
        if name.startswith("_") or derived or value is None:
            continue
        if isinstance(value, dict) and "mrope_section" in value:
            changed[name] = {**value, "mrope_section": [part // level.width for part in value["mrope_section"]]}
            continue
        new = False if name in ("use_cache", "use_timm_backbone", "use_pretrained_backbone") else None
        new = new if new is False else _value(name, value, level, special)
        if new != value or value != getattr(fresh, name, None):
            changed[name] = new
    for name in ("transformers_version", "dtype", "architectures", "id2label", "label2id"):
        changed.pop(name, None)
    return kind(**changed)


def _value(name: str, value: Any, level: Level, special: dict[int, int]) -> Any:
    if isinstance(value, list | tuple):
        if value and all(isinstance(each, int) and not isinstance(each, bool) for each in value):
            return type(value)(_value(name, each, level, special) for each in value)
        return value
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    if "vocab" in name or name in ("num_embeddings", "n_vocab", "codebook_size"):
        return min(value, level.vocab) if value >= 200 else value
    if _TOKEN.search(name):
        if value >= level.vocab:
            return special.setdefault(value, _FIRST_SPECIAL + len(special) % (TOKENS - _FIRST_SPECIAL))
        return value
    if _EXPERTS.search(name):
        return min(value, level.experts) if level.experts else value
    if name in ("num_experts_per_tok", "top_k", "moe_topk", "moe_k", "num_selected_experts") and level.experts:
        return min(value, 2)
    if name in ("n_group", "topk_group", "num_expert_group") and level.experts:
        return 1
    if name in ("image_size", "img_size", "input_size", "pretrain_image_size", "resolution") and level.image:
        return level.image if value > level.image else value
    if _DEPTH.search(name) and level.depth and name not in ("num_feature_layers", "num_feat_extract_layers"):
        return min(value, level.depth)
    if name in ("depths", "layer_depths", "num_blocks") and level.depth:
        return min(value, 1)
    if name.endswith("chunk_size") and value >= 64:
        return 16  # scans written out in Python work on whole chunks
    if _LENGTH.search(name):
        return min(value, 1024)
    if _WIDTH.search(name) and not _NOT_WIDTH.search(name) and value >= 16:
        return max(value // level.width, 2)
    return value
