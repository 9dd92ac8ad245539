"""A few of the classes of the sweep over transformers, of kinds that differ, and the sweep's own parts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from hf_shrink import LEVELS, TOKENS, small  # noqa: E402
from hf_sweep import MARK, classes, judge, sweep, table  # noqa: E402
from hf_training import generators_kept  # noqa: E402

pytestmark = pytest.mark.usefixtures("kept", "one_thread")
SAMPLE = (
    *("BartModel", "BloomModel", "DebertaV2Model", "LongT5Model", "RwkvModel"),
    *("SwitchTransformersModel", "SwinModel", "ConvNextModel", "Data2VecAudioModel", "XLNetModel"),
)


@pytest.fixture
def kept() -> Iterator[None]:
    with generators_kept():
        yield


@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_is_equal(name: str, tmp_path: Path) -> None:
    """Three steps of the class, shrunken and fed as the sweep does it."""
    model_type, kind = classes()[name]
    answer = judge(name, model_type, tmp_path)
    assert kind == "base"
    assert answer["result"] == "equal", answer


def test_sizes_shrink_together() -> None:
    """Widths are divided, what is derived from them is derived anew, special tokens stay inside the vocabulary."""
    config = small(transformers.LlamaConfig, LEVELS[0])
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (4096 // 16, 2, TOKENS)
    assert config.head_dim == config.hidden_size // config.num_attention_heads
    both = small(transformers.LlavaConfig, LEVELS[0])
    assert both.image_token_index < TOKENS == both.text_config.vocab_size
    assert both.vision_config.image_size == 64
    whole = small(transformers.LlamaConfig, LEVELS[-1])
    assert (whole.hidden_size, whole.num_hidden_layers) == (4096, 32)


def test_what_is_recorded_is_not_repeated(tmp_path: Path) -> None:
    """A class that ended the process is a crash; the others keep their results; unknown names are tried."""
    record = tmp_path / "record.jsonl"
    done = {"name": "BertModel", "result": "equal", "detail": "", "type": "bert", "kind": "base", "seconds": 1.0}
    record.write_text(f"{json.dumps(done)}\n{json.dumps({'name': 'T5Model'})}\n")
    wanted = dict.fromkeys(("BertModel", "T5Model", "NoSuchModel"), ("no such type", "base"))
    said: list[str] = []
    results = sweep(wanted, record, said.append)
    assert {name: result["result"] for name, result in results.items()} == {
        "BertModel": "equal",
        "T5Model": "crash",
        "NoSuchModel": "not in plain",
    }
    assert len(said) == 1
    assert sweep(wanted, record, said.append).keys() == results.keys()
    assert len(said) == 1


def test_the_table() -> None:
    """Totals, what is not equal with its words, and the equal ones by what they are for."""
    entry: dict[str, Any] = {"detail": "", "type": "a", "kind": "base"}
    results = {
        "AModel": {**entry, "result": "equal"},
        "AForCausalLM": {**entry, "result": "equal", "kind": "causal lm"},
        "BModel": {**entry, "result": "differs", "detail": "x | y", "type": "b"},
        "CModel": {**entry, "result": "not in plain", "type": "c"},
    }
    text = table(results)
    assert (
        f"4 of {len(classes())} classes (3 model types) tried, 3 train in plain PyTorch here, 2 of them (1 model types)"
        in text
    )
    assert "| BModel | differs | x / y |" in text
    assert "| base (1) | AModel |" in text
    assert "CModel" not in text


def test_the_page_has_the_sweeps_table() -> None:
    """What docs/models.md says was written by the script, about the installed versions' names."""
    page = (Path(__file__).parent.parent / "docs" / "models.md").read_text()
    made = page.partition(MARK)[2]
    assert made.startswith("transformers ")
    assert "| equal |" in made
    assert torch.__version__.split("+")[0].split(".")[0] in made
