"""First values of models that were built without any: those of the plain model under the same seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import pytest
import torch
from oracle import batches, loss_of, make, same, tiered, tiers_for
from torch import nn

import tierzero as tz

pytestmark = pytest.mark.usefixtures("no_leaks")


def draw(module: nn.Module) -> None:
    """Sets some modules through `.data`, some in place, one through its parent."""
    if isinstance(module, nn.Linear | nn.Embedding):
        module.weight.data.normal_(0, 0.3)
        if getattr(module, "bias", None) is not None:
            nn.init.uniform_(module.bias)  # type: ignore[arg-type]
    elif isinstance(module, nn.LayerNorm):
        nn.init.ones_(module.weight)
        nn.init.zeros_(module.bias)
    elif isinstance(module, models.Block):
        nn.init.normal_(module.up.weight)


@pytest.mark.parametrize("placement", ["host", "nvme", "mixed"])
@pytest.mark.parametrize("factory", [models.Net, models.Tied])
def test_a_function_of_modules(factory: Any, placement: str, tmp_path: Path) -> None:
    """`init=` gives what `plain.apply(init)` gives, and leaves the generator where that leaves it."""
    with torch.device("meta"):
        model = factory()
    with tiered(model, tiers_for(model, placement, tmp_path)) as run:
        torch.manual_seed(3)
        tz.initialize(run.model, draw)
        after = torch.get_rng_state()
        plain = factory()
        torch.manual_seed(3)
        plain.apply(draw)
        assert torch.equal(after, torch.get_rng_state())
        assert all(same(a.read(), b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
        ids = next(batches(1))
        assert same(loss_of(run.model, ids), loss_of(plain, ids))


def test_a_parameter_without_a_value_is_named(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = models.Net()
    with tiered(model, tiers_for(model, "nvme", tmp_path)) as run:
        with pytest.raises(tz.TierzeroError, match=r"embed.weight was given no value by .*partial"):
            tz.initialize(run.model, partial)
        with pytest.raises(tz.TierzeroError, match="never given a value"):
            run.model(next(batches(1)))
        with pytest.raises(ZeroDivisionError):
            tz.initialize(run.model, lambda module: 1 // 0)
        tz.initialize(run.model)
        run.model(next(batches(1)))


def partial(module: nn.Module) -> None:
    if not isinstance(module, nn.Embedding):
        draw(module)


def test_only_what_it_changes_is_written(tmp_path: Path) -> None:
    """On a model that has values: the rest stays, and is not written again."""
    model = make(models.Net)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with tiered(model, tiers_for(model, "nvme", tmp_path)) as run:
        written = tz.stats(run.model)["nvme_written_expected"]
        tz.initialize(run.model, lambda module: None)
        assert tz.stats(run.model)["nvme_written_expected"] == written
        tz.initialize(run.model, lambda m: m.weight.zero_() if isinstance(m, nn.LayerNorm) else None)
        for name, value in run.model.state_dict().items():
            assert same(value.clone(), before[name] * (0 if name.endswith("norm.weight") else 1)), name


def test_inner_models_have_their_own(tmp_path: Path) -> None:
    """Of a bound method, inner modules that have it get theirs, as Hugging Face's composite models do it."""

    class Inner(nn.Linear):
        def init_me(self, module: nn.Module) -> None:
            nn.init.constant_(module.weight, 2.0)  # type: ignore[arg-type]

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(3, 3, bias=False), Inner(3, 3, bias=False)

        def init_me(self, module: nn.Module) -> None:
            if isinstance(module, nn.Linear):
                nn.init.constant_(module.weight, 1.0)

    with torch.device("meta"):
        model = Outer()
    with tiered(model, tiers_for(model, "nvme", tmp_path)):
        tz.initialize(model, model.init_me)
        assert [float(param.read().mean()) for param in model.parameters()] == [1.0, 2.0]  # type: ignore[operator]


def test_without_a_way_to_initialise(tmp_path: Path) -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

    with torch.device("meta"):
        model = nn.Sequential(Bare())
    with tiered(model, tiers_for(model, "nvme", tmp_path)):
        with pytest.raises(tz.TierzeroError, match=r"module 0 \(Bare\).*pass init="):
            tz.initialize(model)
        tz.initialize(model, lambda module: module.weight.fill_(1) if isinstance(module, Bare) else None)
    with pytest.raises(tz.TierzeroError, match="not an offloaded model"):
        tz.initialize(models.Net())


class Odd(nn.Module):
    """Values from every corner of torch's initialisation."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(3, 4))
        self.scale = nn.Parameter(torch.full((4,), 0.5))
        self.plain = nn.Linear(4, 4)
        self.embed = nn.Embedding(7, 4, padding_idx=2)
        self.attention = nn.MultiheadAttention(4, 2)
        self.recurrent = nn.LSTM(4, 3)
        self.conv = nn.Conv1d(4, 2, 3)
        self.norm = nn.BatchNorm1d(4)
        shared = nn.Parameter(torch.empty(2, 2))
        self.one, self.two = nn.Module(), nn.Module()
        self.one.weight = self.two.weight = shared
        nn.init.normal_(shared, std=3.0)
        nn.init.orthogonal_(self.plain.weight)
        nn.init.trunc_normal_(self.conv.weight, std=0.1)
        self.plain.bias.data.uniform_(1, 2)
        with torch.no_grad():
            self.conv.bias[0] = 5.0
            self.conv.bias.mul_(2)
            self.recurrent.weight_ih_l0[:3].zero_()
            self.embed.weight[1].normal_()
            self.plain.weight.copy_(self.plain.weight / self.plain.weight.norm() + self.embed.weight[:4])
            self.embed.weight[self.embed.weight > 1] = 0.25
            self.token.copy_(torch.arange(12.0).view(3, 4) * torch.rand(1))
        self.register_buffer("table", torch.rand(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.plain(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_deferred(dtype: torch.dtype, tmp_path: Path) -> None:
    """Built deferred under a seed, the model has the plain model's values, ties and buffers."""

    def build() -> Any:
        return nn.Sequential(Odd(), nn.Linear(4, 300)).to(dtype)

    torch.manual_seed(6)
    plain = build()
    after = torch.rand(1)
    torch.manual_seed(6)
    with tz.deferred_init():
        model = build()
    assert torch.equal(torch.rand(1), after)
    assert model[0].one.weight is model[0].two.weight
    with tiered(model, tiers_for(model, "nvme", tmp_path)):
        before = torch.get_rng_state()
        tz.initialize(model)
        assert torch.equal(before, torch.get_rng_state())
        named = dict(plain.named_parameters())
        assert named.keys() == dict(model.named_parameters()).keys()
        for name, param in model.named_parameters():
            assert same(param.read(), named[name]), name
        assert all(same(a, b) for a, b in zip(model.buffers(), plain.buffers(), strict=True))


def test_deferred_refuses_what_it_cannot_repeat() -> None:
    class Computed(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            with torch.no_grad():
                self.weight.copy_(self.weight.double() * 2)

    with (
        pytest.raises(tz.TierzeroError, match="copy_ gives a parameter values from a tensor on the meta"),
        tz.deferred_init(),
    ):
        Computed()
