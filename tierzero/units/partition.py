"""Which modules are units, and which unit each parameter belongs to.

Note [unit choice]
By default every element of the model's outermost ModuleList and Sequential stacks is a unit; a large leaf module
outside them (an embedding, an output head) is its own unit; the root takes what is left. An element that holds a third
of the model or more and contains stacks itself (an encoder in a Sequential, say) is split further. A parameter belongs
to the innermost unit whose module contains *all* its uses, so shared parameters are hoisted, never an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import nn

LARGE_SHARE = 1 / 3  # of the model's bytes: split an element further
LEAF_SHARE = 1 / 64  # of the model's bytes: a leaf outside the stacks is worth a unit of its own

Units = Iterable[nn.Module] | type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[str, nn.Module], bool]


@dataclass
class Part:
    """One unit to be: its module, and its parameters with their names and every (module, attribute) that holds each."""

    name: str
    module: nn.Module
    params: list[nn.Parameter]
    names: list[str]
    slots: list[list[tuple[nn.Module, str]]]


def partition(root: nn.Module, units: Units | None = None) -> list[Part]:
    """The units of `root` in module order, the root's own first; units without parameters are left out.

    `units` overrides the choice: modules, module classes, or a function of (name, module). Raises ValueError if it
    names nothing.
    """
    chosen = _default(root) if units is None else _given(root, units)
    names: dict[int, str] = {}
    modules: dict[int, nn.Module] = {}
    for name, module in root.named_modules():
        if module is root or id(module) in chosen:
            names[id(module)] = name or type(root).__name__
            modules[id(module)] = module
    depth: dict[int, int] = {key: len(list(module.modules())) for key, module in modules.items()}
    uses: dict[int, list[tuple[nn.Module, str]]] = {}
    params: dict[int, tuple[str, nn.Parameter]] = {}
    common: dict[int, set[int]] = {}  # the units around every path to a parameter: a module may have several paths
    around: dict[str, set[int]] = {}
    for prefix, module in root.named_modules(remove_duplicate=False):
        around[prefix] = around[prefix.rpartition(".")[0]] | {id(module)} & modules.keys() if prefix else {id(root)}
        for attribute, param in module._parameters.items():
            if param is not None:
                if (module, attribute) not in uses.setdefault(id(param), []):
                    uses[id(param)].append((module, attribute))
                params.setdefault(id(param), (f"{prefix}.{attribute}" if prefix else attribute, param))
                common[id(param)] = common.get(id(param), around[prefix]) & around[prefix]
    parts = {key: Part(names[key], module, [], [], []) for key, module in modules.items()}
    for pid, (name, param) in params.items():
        part = parts[min(common[pid], key=lambda key: depth[key])]
        part.params.append(param)
        part.names.append(name)
        part.slots.append(uses[pid])
    chosen_parts = [part for part in parts.values() if part.params]
    for part in chosen_parts:
        if part.module is not root and not is_called(part.module):
            raise ValueError(
                f"units= chooses {part.name}, a {type(part.module).__name__}: it has no forward and is never called, "
                "so its parameters would never be fetched; choose the modules around or inside it"
            )
    return chosen_parts


def repeated(root: nn.Module, parts: Sequence[Part]) -> list[bool]:
    """Which of `parts` are repeated units: elements of a ModuleList or Sequential that contain no other unit."""
    elements: set[int] = set()

    def visit(element: nn.Module) -> None:
        if is_called(element):
            elements.add(id(element))
        else:
            for child in element.children():
                visit(child)

    for module in root.modules():
        for child in module.children() if isinstance(module, nn.ModuleList | nn.Sequential) else ():
            visit(child)
    containing = set().union(*enclosing([part.module for part in parts]))
    return [id(part.module) in elements and index not in containing for index, part in enumerate(parts)]


def _given(root: nn.Module, units: Units) -> set[int]:
    found: list[nn.Module]
    if isinstance(units, type) or (isinstance(units, tuple) and all(isinstance(kind, type) for kind in units)):
        found = [module for module in root.modules() if isinstance(module, units)]
    elif callable(units) and not isinstance(units, nn.Module):
        found = [module for name, module in root.named_modules() if units(name, module)]
    else:
        inside = {id(module) for module in root.modules()}
        found = list(units)  # type: ignore[arg-type]
        for module in found:
            if not isinstance(module, nn.Module) or id(module) not in inside:
                raise ValueError(
                    f"units= holds {type(module).__name__}, which is not a module of the model; "
                    "pass modules found in model.modules()"
                )
    if not found:
        raise ValueError(
            f"units={units!r} chooses no module of {type(root).__name__}; "
            "leave it out, or pass modules, classes or a function of (name, module)"
        )
    return {id(module) for module in found}


def _default(root: nn.Module) -> set[int]:
    total = max(_bytes(root), 1)
    chosen: set[int] = set()
    _visit(root, total, chosen)
    return chosen


def _visit(module: nn.Module, total: int, chosen: set[int]) -> None:
    """Choose units below `module`. torch's attention counts as a leaf: it uses its projection's weight without calling
    it.
    """
    for child in module.children():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            _element(child, total, chosen)
        elif isinstance(child, nn.ModuleList | nn.Sequential):
            _visit(child, total, chosen)
        elif next(child.children(), None) is None or isinstance(child, nn.MultiheadAttention):
            if _bytes(child) >= total * LEAF_SHARE and is_called(child):
                chosen.add(id(child))
        else:
            _visit(child, total, chosen)


def _element(element: nn.Module, total: int, chosen: set[int]) -> None:
    """Choose one element of a stack, or what it consists of."""
    nbytes = _bytes(element)
    if nbytes == 0:
        return
    if not is_called(element):
        for child in element.children():
            _element(child, total, chosen)
        return
    if nbytes >= total * LARGE_SHARE and any(_is_stack(inner) for inner in element.modules()):
        _visit(element, total, chosen)
    chosen.add(id(element))


def is_called(module: nn.Module) -> bool:
    """Whether the module has a forward of its own. Containers (ModuleDict, ParameterList) have none: whoever holds them
    uses what is inside.
    """
    return type(module).forward is not nn.Module.forward or "forward" in module.__dict__


def _is_stack(module: nn.Module) -> bool:
    """A list or sequence of at least two modules that hold parameters themselves as blocks do."""
    if not isinstance(module, nn.ModuleList | nn.Sequential):
        return False
    return sum(1 for child in module.children() if next(child.children(), None) is not None and _bytes(child)) >= 2


def _bytes(module: nn.Module) -> int:
    return sum(param.numel() * param.element_size() for param in module.parameters())


def enclosing(modules: Sequence[nn.Module]) -> list[set[int]]:
    """For each of `modules`, the positions of the others that contain it."""
    containing: dict[int, set[int]] = {}
    for index, module in enumerate(modules):
        for inner in module.modules():
            containing.setdefault(id(inner), set()).add(index)
    return [containing[id(module)] - {index} for index, module in enumerate(modules)]
