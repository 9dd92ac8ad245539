"""Which tensor of a checkpoint is which of the model: pure, on names alone.

Note [renaming]
A checkpoint may call everything as the model does, or be off by a prefix: "model." around all names (a training script
saved {"model": model.state_dict()}), or the name of the inner model (`base_model_prefix` of Hugging Face models, there
in the file and not in the model, or the other way round). One such rule is chosen for all names: the one that fits
most, the plainest of equals. Wrapped layers (PEFT's `base_layer`) are found under the name that they had unwrapped.
Parts of names that libraries have renamed since are tried last, name by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

Rule = Callable[[str], str | None]
_RENAMED = (  # (as files have it, as models have it now), at the end of names
    (".gamma", ".weight"),
    (".beta", ".bias"),
    (".weight_g", ".parametrizations.weight.original0"),
    (".weight_v", ".parametrizations.weight.original1"),
)


@dataclass
class Matched:
    """`found` has the checkpoint's name for each of the model's; `twice` names of the checkpoint for one of the model's
    that has another already; `beside`: names outside the part of the checkpoint that is the model.
    """

    found: dict[str, str] = field(default_factory=dict)
    unexpected: list[str] = field(default_factory=list)
    twice: list[tuple[str, str, str]] = field(default_factory=list)
    beside: list[str] = field(default_factory=list)


def unwrapped(name: str) -> str:
    """The name that a parameter had before PEFT wrapped its model and its layer; others as they are."""
    plain = name.removeprefix("base_model.model.") if name.startswith("base_model.model.") else name
    return plain.replace(".base_layer.", ".").replace(".original_module.", ".")


def match(stored: Collection[str], wanted: Iterable[str], inner: str = "") -> Matched:
    """Find the `wanted` names of the model among the `stored` ones; see Note [renaming]. `inner`: the name of the inner
    model within the model, "" if there is none.
    """
    targets: dict[str, str] = {}
    for name in wanted:
        targets.setdefault(name, name)
    for name in list(targets):
        targets.setdefault(unwrapped(name), name)
    rules: list[tuple[str, Rule]] = [("", lambda name: name), ("model.", _without("model."))]
    if inner:
        rules += [("", _with(f"{inner}.")), (f"{inner}.", _without(f"{inner}."))]
        rules += [("model.", lambda name: _then(_without("model."), _with(f"{inner}."), name))]
    best = max(rules, key=lambda rule: len({_find(rule[1](name), targets) for name in stored} - {None}))
    result = Matched()
    taken: dict[str, str] = {}
    for name in stored:
        to = _target(name, best[1], targets)
        if to is None:
            outside = best[0] == "model." and not name.startswith("model.")
            (result.beside if outside else result.unexpected).append(name)
        elif to in taken:
            result.twice.append((to, taken[to], name))
        else:
            taken[to] = result.found[to] = name
    return result


def _target(name: str, rule: Rule, targets: dict[str, str]) -> str | None:
    """The model's name for one of the checkpoint's, by `rule`, or as it is (parts outside the inner model)."""
    return _find(rule(name), targets) or _find(name, targets)


def _find(name: str | None, targets: dict[str, str]) -> str | None:
    if name is None or name in targets:
        return None if name is None else targets[name]
    for old, new in _RENAMED:
        if name.endswith(old) and name.removesuffix(old) + new in targets:
            return targets[name.removesuffix(old) + new]
    return None


def _without(prefix: str) -> Rule:
    return lambda name: name.removeprefix(prefix) if name.startswith(prefix) else None


def _with(prefix: str) -> Rule:
    return lambda name: prefix + name


def _then(first: Rule, second: Rule, name: str) -> str | None:
    inner = first(name)
    return None if inner is None else second(inner)


def ignored(names: Iterable[str], patterns: Iterable[str], buffers: Collection[str]) -> set[str]:
    """Which of `names` may be left over: those that the model's own `patterns` (regular expressions) name, and values
    of `buffers`, which the model computes itself.
    """
    searches = [re.compile(pattern) for pattern in patterns]
    tails = {".".join(name.rsplit(".", 2)[-2:]) for name in buffers}  # a table may have moved to another module
    return {
        name
        for name in names
        if any(search.search(name) for search in searches) or ".".join(name.rsplit(".", 2)[-2:]) in tails
    }
