"""transformers.Trainer on an offloaded model, against the same Trainer in memory."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_process import tierzero_here
from pieces import in_slices
from trainers import MasterAdamW, Tokens, assert_same_weights, build, tiers

import tierzero as tz
from tierzero.errors import ConfigError, TierzeroError

pytest.importorskip("accelerate")
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

from tierzero.integrations.transformers import TierzeroTrainer

pytestmark = pytest.mark.usefixtures("one_thread")
HYPER: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8}


def arguments(out: Path, **options: Any) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(out),
        **{
            "max_steps": 6,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "learning_rate": HYPER["lr"],
            "weight_decay": 0.1,
            "max_grad_norm": 1.0,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "use_cpu": True,
            "disable_tqdm": True,
            "optim": "adamw_torch_fused",
            **options,
        },
    )


def history(trainer: Trainer) -> list[dict[str, Any]]:
    """What was logged, but for times."""
    keys = ("loss", "grad_norm", "learning_rate", "eval_loss", "step")
    return [{key: line[key] for key in keys if key in line} for line in trainer.state.log_history]


def train(kind: Any, model: Any, args: TrainingArguments, resume: Any = None, **options: Any) -> Any:
    trainer = kind(model=model, args=args, train_dataset=Tokens(), eval_dataset=Tokens(6), **options)
    try:
        trainer.train(resume_from_checkpoint=resume)
    except BaseException:
        if kind is TierzeroTrainer:
            tz.close(trainer.model)
        raise
    return trainer


def compare(tmp_path: Path, prepare: Any = build, **options: Any) -> None:
    """The same losses, norms and weights as Trainer's."""
    plain = train(Trainer, prepare(), arguments(tmp_path / "plain", **options))
    ours = train(TierzeroTrainer, prepare(), arguments(tmp_path / "ours", **options), tiers=tiers(tmp_path / "store"))
    assert history(ours) == history(plain)
    assert_same_weights(ours.model, plain.model)
    assert tz.stats(ours.model)["steps"] == 6
    tz.close(ours.model)


def test_losses_and_weights_are_those_of_trainer(tmp_path: Path) -> None:
    """With dropout, clipping, accumulation, evaluation on the way, and a last micro-batch that is cut short."""
    compare(tmp_path, eval_strategy="steps", eval_steps=2)


def test_without_clipping(tmp_path: Path) -> None:
    compare(tmp_path, max_grad_norm=0.0, optim="adamw_torch_fused")


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(tmp_path: Path, reentrant: bool) -> None:
    compare(tmp_path, gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": reentrant})


def test_autocast(tmp_path: Path) -> None:
    """bf16=True on a float32 model."""
    compare(tmp_path, bf16=True)


def test_the_best_model_is_loaded_at_the_end(tmp_path: Path) -> None:
    every: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    compare(tmp_path, load_best_model_at_end=True, save_total_limit=1, learning_rate=5e-2, **every)


def lora() -> Any:
    peft = pytest.importorskip("peft")
    model = build()
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "down_proj"]))


def test_lora(tmp_path: Path) -> None:
    """The base is frozen; a checkpoint's adapter loads, and training goes on from it."""
    peft = pytest.importorskip("peft")
    compare(tmp_path, lora)
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3}
    whole = train(TierzeroTrainer, lora(), arguments(tmp_path / "a", **options), tiers=tiers(tmp_path / "one"))
    again = peft.PeftModel.from_pretrained(build(), tmp_path / "a" / "checkpoint-6")
    assert_same_weights(again, whole.model)
    half = str(tmp_path / "a" / "checkpoint-3")
    rest = train(TierzeroTrainer, lora(), arguments(tmp_path / "b"), half, tiers=tiers(tmp_path / "two"))
    assert history(rest) == history(whole)
    assert_same_weights(rest.model, whole.model)
    tz.close(rest.model)
    tz.close(whole.model)


def test_micro_batches(tmp_path: Path) -> None:
    """Three rows run through every layer as two and one, with dropout, evaluation and accumulation: as Trainer with a
    model whose layers run over slices.
    """
    options: dict[str, Any] = {"per_device_train_batch_size": 3, "eval_strategy": "steps", "eval_steps": 2}
    model = build()
    plain = train(Trainer, in_slices(model, model.model.layers, 2), arguments(tmp_path / "plain", **options))
    place: dict[str, Any] = {"tiers": tiers(tmp_path / "store"), "micro_batches": 2}
    ours = train(TierzeroTrainer, build(), arguments(tmp_path / "ours", **options), **place)
    assert history(ours) == history(plain)
    assert_same_weights(ours.model, plain.model)
    tz.close(ours.model)


def test_16_bit_models_train_on_float32_masters(tmp_path: Path) -> None:
    model = build(torch.bfloat16)
    plain = Trainer(model=model, args=arguments(tmp_path / "plain", max_grad_norm=0.0), train_dataset=Tokens())
    names = plain.get_decay_parameter_names(model)
    groups = [
        {"params": [p for n, p in model.named_parameters() if (n in names) is decayed], "weight_decay": decay}
        for decayed, decay in ((True, 0.1), (False, 0.0))
    ]
    plain.optimizer = MasterAdamW(groups, 1.0, list(model.parameters()), **HYPER)
    plain.train()
    ours = train(TierzeroTrainer, build(torch.bfloat16), arguments(tmp_path / "ours"), tiers=tiers(tmp_path / "store"))
    assert [line.get("loss") for line in history(ours)] == [line.get("loss") for line in history(plain)]
    assert_same_weights(ours.model, plain.model)
    tz.close(ours.model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ten_and_ten_steps_are_twenty(tmp_path: Path, dtype: torch.dtype) -> None:
    """Saved by one trainer, gone on with by another under other budgets: all as in one go."""
    options: dict[str, Any] = {"max_steps": 20, "save_strategy": "steps", "save_steps": 10}
    whole = train(TierzeroTrainer, build(dtype), arguments(tmp_path / "a", **options), tiers=tiers(tmp_path / "one"))
    if dtype == torch.float32:
        plain = train(Trainer, build(), arguments(tmp_path / "plain", max_steps=20))
        assert history(whole) == history(plain)
    other = tz.Tiers(host="256MiB", device="16MiB", compute="cpu")
    torch.manual_seed(7)  # nothing of the generator's state may be what it was
    resumed = train(
        TierzeroTrainer,
        build(dtype),
        arguments(tmp_path / "b", **options),
        str(tmp_path / "a" / "checkpoint-10"),
        tiers=other,
    )
    assert history(resumed) == history(whole)
    assert_same_weights(resumed.model, whole.model)
    tz.close(resumed.model)
    tz.close(whole.model)
    listed = json.loads(tierzero_here("ckpt", "ls", str(tmp_path / "a"), "--json").stdout)
    assert [(one["name"], one["step"]) for one in listed] == [
        ("checkpoint-10/tierzero", 10),
        ("checkpoint-20/tierzero", 20),
    ]


def test_resuming_from_the_last_whole_one(tmp_path: Path) -> None:
    """And from what Trainer without tiers has saved."""
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 2}
    whole = train(Trainer, build(), arguments(tmp_path / "plain", **options))
    args = arguments(tmp_path / "out", **options)
    first = train(TierzeroTrainer, build(), args, tiers=tiers(tmp_path / "one"))
    tz.close(first.model)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["checkpoint-4", "checkpoint-6"]
    os.rename(tmp_path / "out" / "checkpoint-6" / "tierzero", tmp_path / "gone")  # as a crash leaves it
    with pytest.raises(TierzeroError, match="was not saved whole"):
        train(TierzeroTrainer, build(), args, str(tmp_path / "out" / "checkpoint-6"), tiers=tiers(tmp_path / "two"))
    for start in (True, str(tmp_path / "plain" / "checkpoint-4")):
        again = train(TierzeroTrainer, build(), args, start, tiers=tiers(tmp_path / str(start is True)))
        assert history(again) == history(whole)
        assert_same_weights(again.model, whole.model)
        tz.close(again.model)


def test_a_saved_model_loads_with_from_pretrained(tmp_path: Path) -> None:
    ours = train(TierzeroTrainer, build(), arguments(tmp_path / "out", max_steps=1), tiers=tiers(tmp_path / "store"))
    ours.save_model(str(tmp_path / "saved"))
    again = LlamaForCausalLM.from_pretrained(tmp_path / "saved")
    assert_same_weights(ours.model, again)
    tz.close(ours.model)


def test_a_model_that_is_offloaded_already(tmp_path: Path) -> None:
    """As one is that was larger than memory and loaded tensor by tensor; with states in another format."""
    model = tz.offload(build(), tiers(tmp_path / "store"))
    ours = train(
        TierzeroTrainer,
        model,
        arguments(tmp_path, max_steps=2),
        optimizer_cls_and_kwargs=(tz.AdamW, {"lr": 1e-2, "state_dtype": torch.bfloat16}),
    )
    ours.train()  # again, with the same optimizer
    assert tz.stats(model)["steps"] == 4
    assert ours.evaluate()["eval_loss"] > 0
    tz.close(model)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("deepspeed", {"zero_optimization": {}}, "leave it out"),
        ("fsdp", "full_shard", "leave it out"),
        ("fp16", True, "bfloat16"),
        ("bf16_full_eval", True, "keeps its dtype"),
        ("torch_compile", True, "paged out"),
    ],
)
def test_arguments_that_cannot_work(tmp_path: Path, name: str, value: Any, said: str) -> None:
    args = arguments(tmp_path)
    setattr(args, name, value)
    with pytest.raises(ConfigError, match=said):
        TierzeroTrainer(model=build(), args=args, train_dataset=Tokens(), tiers=tiers(tmp_path / "store"))
    assert not (tmp_path / "store").exists()


def test_what_else_cannot_work(tmp_path: Path) -> None:
    args = arguments(tmp_path, max_steps=1)
    with pytest.raises(ConfigError, match="needs tiers="):
        TierzeroTrainer(model=build(), args=args)
    with pytest.raises(ConfigError, match="takes model="):
        TierzeroTrainer(model_init=build, args=args, tiers=tiers(tmp_path / "store"))
    model = build()
    mine = torch.optim.AdamW(model.parameters())
    with pytest.raises(ConfigError, match="AdamW cannot step an offloaded model"):
        train(TierzeroTrainer, model, args, tiers=tiers(tmp_path / "store"), optimizers=(mine, None))
    with pytest.raises(ConfigError, match='optim="adafactor"'):
        train(TierzeroTrainer, build(), arguments(tmp_path, optim="adafactor"), tiers=tiers(tmp_path / "other"))
