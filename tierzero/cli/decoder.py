"""The built-in decoder: Llama-style, plain torch, no dependency.

Parameter names and arithmetic follow the Llama checkpoints of Hugging Face, so an export of it loads there too.
It knows nothing of tierzero: the same module trains in a plain loop.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class DecoderConfig:
    """Shape of a decoder. `ffn` 0 means 8/3 of `hidden`, rounded up to a multiple of 128."""

    hidden: int = 512
    layers: int = 32
    heads: int = 8
    vocab: int = 256
    ffn: int = 0
    rope_theta: float = 10000.0
    eps: float = 1e-5
    std: float = 0.02

    @property
    def ffn_size(self) -> int:
        return self.ffn or -(-8 * self.hidden // (3 * 128)) * 128

    def llama_config(self, sequence: int, dtype: torch.dtype) -> dict[str, Any]:
        """The `config.json` under which transformers loads the exported weights."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "vocab_size": self.vocab,
            "max_position_embeddings": sequence,
            "hidden_act": "silu",
            "rms_norm_eps": self.eps,
            "rope_theta": self.rope_theta,
            "initializer_range": self.std,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "mlp_bias": False,
            "bos_token_id": None,
            "eos_token_id": None,
            "torch_dtype": str(dtype).removeprefix("torch."),
            "tierzero": asdict(self),
        }


class Projection(nn.Linear):
    """A linear map without bias, initialised N(0, std)."""

    def __init__(self, inputs: int, outputs: int, std: float) -> None:
        self.std = std  # before nn.Linear.__init__, which calls reset_parameters
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


class TokenEmbedding(nn.Embedding):
    """Token embedding [vocab, hidden], initialised N(0, 1): the residual stream starts at the scale the norms give."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)


class RMSNorm(nn.Module):
    """x / rms(x) * weight; the mean of squares in fp32, the result in the dtype of `x`."""

    def __init__(self, hidden: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * (wide * scale).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention with rotary positions; x [batch, time, hidden]."""

    def __init__(self, config: DecoderConfig, out_std: float) -> None:
        super().__init__()
        self.heads = config.heads
        self.q_proj = Projection(config.hidden, config.hidden, config.std)
        self.k_proj = Projection(config.hidden, config.hidden, config.std)
        self.v_proj = Projection(config.hidden, config.hidden, config.std)
        self.o_proj = Projection(config.hidden, config.hidden, out_std)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, time, hidden = x.shape
        q, k, v = (
            proj(x).view(batch, time, self.heads, hidden // self.heads).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, time, hidden))
        return out


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: DecoderConfig, out_std: float) -> None:
        super().__init__()
        self.gate_proj = Projection(config.hidden, config.ffn_size, config.std)
        self.up_proj = Projection(config.hidden, config.ffn_size, config.std)
        self.down_proj = Projection(config.ffn_size, config.hidden, out_std)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """Pre-norm transformer block; x [batch, time, hidden], cos and sin [1, time, head] -> x's shape and dtype."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        out_std = config.std / math.sqrt(2 * config.layers)  # keeps the residual stream's variance independent of depth
        self.self_attn = Attention(config, out_std)
        self.mlp = FeedForward(config, out_std)
        self.input_layernorm = RMSNorm(config.hidden, config.eps)
        self.post_attention_layernorm = RMSNorm(config.hidden, config.eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Trunk(nn.Module):
    """Embedding, blocks and last norm: tokens [batch, time] -> hidden states [batch, time, hidden]."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.recompute = False
        self.embed_tokens = TokenEmbedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.eps)
        self._tables: tuple[Tensor, Tensor] | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        cos, sin = (table[None] for table in self.rope(tokens.shape[1], x.device))  # plainly not a row of the batch
        for block in self.layers:
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(block, x, cos, sin, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x, cos, sin)
        out: Tensor = self.norm(x)
        return out

    def rope(self, time: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos and sin tables [time, head] in fp32, kept for the longest sequence seen; no parameter and no buffer."""
        if self._tables is None or self._tables[0].shape[0] < time or self._tables[0].device != device:
            head = self.config.hidden // self.config.heads
            exponents = torch.arange(0, head, 2, dtype=torch.float32, device=device) / head
            frequencies = 1.0 / self.config.rope_theta**exponents
            angles = torch.arange(time, dtype=torch.float32, device=device)[:, None] * frequencies
            both = torch.cat((angles, angles), dim=-1)
            self._tables = (both.cos(), both.sin())
        cos, sin = self._tables
        return cos[:time], sin[:time]


class Decoder(nn.Module):
    """Causal language model: `model(tokens)` gives logits, `model(tokens, labels)` the mean cross entropy."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Trunk(config)
        self.lm_head = Projection(config.hidden, config.vocab, config.std)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        """tokens, labels int64 [batch, time] -> logits [batch, time, vocab] in the model's dtype, or a fp32 scalar."""
        logits: Tensor = self.lm_head(self.model(tokens))
        if labels is None:
            return logits
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on x [batch, heads, time, head], in the dtype of `x`."""
    first, second = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat((-second, first), dim=-1) * sin.to(x.dtype)


class BlankWeights(TorchFunctionMode):
    """Inside, torch.nn.init leaves tensors as they are: on the meta device it takes a second and changes nothing."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__module__", "") == "torch.nn.init":
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


def build_decoder(
    config: DecoderConfig,
    device: torch.device | str = "meta",
    dtype: torch.dtype = torch.bfloat16,
    recompute: bool = True,
) -> Decoder:
    """A decoder on `device` in `dtype`, not yet initialised: follow with `init_decoder`, or `tierzero.initialize`."""
    with torch.device("meta"), BlankWeights():
        model = Decoder(config)
    model.model.recompute = recompute
    return model.to(dtype) if torch.device(device).type == "meta" else model.to(dtype).to_empty(device=device)


def init_decoder(model: nn.Module) -> nn.Module:
    """Initialise in module order under the current torch seed, as `tierzero.initialize` does for an offloaded model."""
    with torch.no_grad():
        for module in model.modules():
            if any(True for _ in module.parameters(recurse=False)):
                module.reset_parameters()  # type: ignore[operator]
    return model
