"""Which modules become units, and that every parameter belongs to exactly one."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import models
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import DIM, Block, Net
from torch import nn

from tierzero.units.partition import Part, partition


def names(parts: list[Part]) -> list[str]:
    return [part.name for part in parts]


def check_cover(model: nn.Module, parts: list[Part]) -> None:
    """Every parameter in one part, under its first name, with all its places, in the innermost unit around them."""
    found = [id(param) for part in parts for param in part.params]
    assert sorted(found) == sorted(id(param) for param in model.parameters())
    named = dict(model.named_parameters())
    for part in parts:
        assert len(part.params) == len(part.names) == len(part.slots) > 0
        inside = {id(module) for module in part.module.modules()}
        for param, name, slots in zip(part.params, part.names, part.slots, strict=True):
            assert named[name] is param
            assert all(module._parameters[attribute] is param for module, attribute in slots)
            every = {
                (id(module), key)
                for module in model.modules()
                for key, value in module._parameters.items()
                if value is param
            }
            assert {(id(module), attribute) for module, attribute in slots} == every
            assert {id(module) for module, _ in slots} <= inside
            for other in parts:
                below = {id(module) for module in other.module.modules()}
                if other is not part and below < inside:
                    assert not {id(module) for module, _ in slots} <= below


@pytest.mark.parametrize("shape", models.SHAPES)
def test_every_parameter_once(shape: str) -> None:
    """For all shapes of the parity tests."""
    model = models.SHAPES[shape]()
    check_cover(model, partition(model))
    for units in (nn.Linear, (Block, nn.Linear), [model], lambda name, module: "1" in name or module is model):
        with suppress(ValueError):  # this shape has no such module
            check_cover(model, partition(model, units))  # type: ignore[arg-type]


def test_default_units() -> None:
    """The elements of the stack, and the large leaves outside it."""
    assert names(partition(Net())) == ["embed", "layers.0", "layers.1", "layers.2", "head"]
    tied = partition(models.Tied())
    assert names(tied) == ["Tied", "layers.0", "layers.1", "layers.2"]  # hoisted to the unit around both uses
    assert tied[0].names == ["embed.weight"]
    assert len(tied[0].slots[0]) == 2


def test_parameters_at_the_top() -> None:
    """Lists of parameters belong to whoever holds them; torch's attention is one piece."""

    class Top(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.items = nn.ParameterList([nn.Parameter(torch.zeros(DIM, DIM)) for _ in range(3)])
            self.table = nn.ParameterDict({"a": nn.Parameter(torch.zeros(DIM))})
            self.attention = nn.MultiheadAttention(DIM, 2)
            self.head = nn.Linear(DIM, DIM)

    model = Top()
    parts = partition(model)
    check_cover(model, parts)
    assert names(parts) == ["Top", "attention", "head"]
    assert parts[0].names == ["items.0", "items.1", "items.2", "table.a"]


def test_stacks_inside_stacks() -> None:
    """A large element that holds stacks itself is split; a list of lists is never called; a Sequential of layers is a
    stack.
    """

    class Tower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block() for _ in range(3)])
            self.bias = nn.Parameter(torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks[0](x) + self.bias.sum()

    class Holder(nn.Module):
        """Has no forward: its owner calls what is inside."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Block(), nn.Linear(2, 2)

    model = nn.Sequential(Tower(), Tower())
    parts = partition(model)
    check_cover(model, parts)
    assert names(parts) == [
        "0",
        "0.blocks.0",
        "0.blocks.1",
        "0.blocks.2",
        "1",
        "1.blocks.0",
        "1.blocks.1",
        "1.blocks.2",
    ]
    lists = nn.ModuleList([nn.ModuleList([Block(), Block()]), nn.ModuleList([Block()])])
    assert names(partition(lists)) == ["0.0", "0.1", "1.0"]
    dicts = nn.ModuleList([nn.ModuleDict({"a": Block(), "b": nn.Linear(2, 2)}), Holder()])
    assert names(partition(dicts)) == ["0.a", "0.b", "1.a", "1.b"]
    assert names(partition(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))) == ["0", "2"]


def test_shared_modules_and_parameters() -> None:
    """A block used in two places is one unit; a parameter shared by two units is hoisted."""
    model = Net()
    model.layers.append(model.layers[0])
    parts = partition(model)
    check_cover(model, parts)
    assert names(parts) == ["embed", "layers.0", "layers.1", "layers.2", "head"]
    model = Net()
    model.layers[2].up.weight = model.layers[0].up.weight
    parts = partition(model)
    check_cover(model, parts)
    assert parts[0].names == ["layers.0.up.weight"]
    assert names(parts)[0] == "Net"


def test_units_argument() -> None:
    """Modules, classes and functions; what chooses nothing or is not part of the model is refused."""
    model: Any = Net()
    assert names(partition(model, [model.layers[1]])) == ["Net", "layers.1"]
    assert names(partition(model, Block)) == ["Net", "layers.0", "layers.1", "layers.2"]
    assert names(partition(model, (nn.Embedding, nn.LayerNorm)))[:2] == ["Net", "embed"]
    assert names(partition(model, lambda name, module: name == "layers.0.up")) == ["Net", "layers.0.up"]
    with pytest.raises(ValueError, match="chooses no module"):
        partition(model, nn.Conv2d)
    with pytest.raises(ValueError, match="not a module of the model"):
        partition(model, [Block()])
    with pytest.raises(ValueError, match=r"layers, a ModuleList: it has no forward"):
        partition(model, [model.layers])
    with pytest.raises(ValueError, match="str"):
        partition(model, ["layers.0"])  # type: ignore[list-item]


@st.composite
def trees(draw: st.DrawFn, depth: int = 3) -> nn.Module:
    """Any tree of containers and leaves."""
    kind = draw(st.sampled_from(["leaf", "list", "sequential", "dict", "own"] if depth else ["leaf"]))
    if kind == "leaf":
        return draw(st.sampled_from([nn.Linear(3, 5), nn.ReLU(), nn.LayerNorm(4), nn.Embedding(9, 2)]).map(type_copy))
    children = draw(st.lists(trees(depth=depth - 1), min_size=1, max_size=3))
    if kind == "list":
        return nn.ModuleList(children)
    if kind == "sequential":
        return nn.Sequential(*children)
    if kind == "dict":
        return nn.ModuleDict({str(index): child for index, child in enumerate(children)})
    own = nn.Module()
    for index, child in enumerate(children):
        own.add_module(f"c{index}", child)
    own.weight = nn.Parameter(torch.zeros(draw(st.integers(0, 5))))
    return own


def type_copy(module: nn.Module) -> nn.Module:
    import copy

    return copy.deepcopy(module)


@settings(max_examples=150)
@given(trees(), st.randoms(use_true_random=False))
def test_any_tree(model: nn.Module, random: Any) -> None:
    """Whatever the containers and ties, each parameter is in one unit, and no container is called on to hold what it
    cannot page.
    """
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if len(linears) > 1 and random.random() < 0.5:
        one, two = random.sample(linears, 2)
        two.weight = one.weight
    parts = partition(model)
    check_cover(model, parts)
    chosen = [part.module for part in parts if part.module is not model]
    assert not any(isinstance(module, nn.ModuleList | nn.ModuleDict) for module in chosen)


def test_a_module_inside_two_units_is_hoisted() -> None:
    """Its parameters belong to what contains both."""
    shared = nn.Linear(3, 3)
    root = nn.Sequential(nn.Sequential(nn.Linear(3, 3), shared), nn.Sequential(shared, nn.Linear(3, 3)))
    parts = partition(root)
    (owner,) = [part for part in parts if any(param is shared.weight for param in part.params)]
    assert owner.module is root
