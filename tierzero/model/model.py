"""The user's model before and after: what can be offloaded, what a snapshot fits, and giving parameters back."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tierzero.errors import StoreError, TierzeroError
from tierzero.model.references import References
from tierzero.paging.loop import LoopThread
from tierzero.units.layout import VERSION
from tierzero.units.partition import Part
from tierzero.units.unit import Unit


def check_lazy(model: nn.Module) -> None:
    """TierzeroError for parameters that have no shape yet."""
    for name, param in model.named_parameters():
        if isinstance(param, nn.UninitializedParameter):
            raise TierzeroError(
                f"parameter {name} is an UninitializedParameter: a lazily initialised module gets its shape in its "
                "first forward, so run one before offload()"
            )


def check_model(model: nn.Module, parts: list[Part]) -> None:
    """TierzeroError for what cannot be offloaded."""
    if not parts:
        raise TierzeroError(f"{type(model).__name__} has no parameters to offload")
    for part in parts:
        for name, param in zip(part.names, part.params, strict=True):
            if type(param) is not nn.Parameter or type(param.data) is not torch.Tensor:
                raise TierzeroError(
                    f"parameter {name} is a {type(param.data if type(param) is nn.Parameter else param).__name__}, "
                    "not a plain nn.Parameter: "
                    "offload() takes models before they are offloaded, sharded or quantised"
                )
            if param.layout is not torch.strided:
                raise TierzeroError(
                    f"parameter {name} is {param.layout}; tierzero moves dense (strided) parameters only"
                )
    _check_aliases([pair for part in parts for pair in zip(part.names, part.params, strict=True)])
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise TierzeroError(
                f"buffer {name} is on the meta device: buffers stay on the compute device, so give it its value "
                "before offload()"
            )


def _check_aliases(named: list[tuple[str, nn.Parameter]]) -> None:
    """TierzeroError for different parameters over the same memory, of which one is trained: each would get bytes of its
    own.
    """
    storages: dict[int, list[tuple[int, int, str, nn.Parameter]]] = {}
    for name, param in named:
        if param.numel() and not param.is_meta:
            reach = sum((int(size) - 1) * int(stride) for size, stride in zip(param.shape, param.stride(), strict=True))
            first = int(param.storage_offset()) * param.element_size()
            span = (first, first + (reach + 1) * param.element_size(), name, param)
            storages.setdefault(param.untyped_storage().data_ptr(), []).append(span)
    for spans in storages.values():
        spans.sort(key=lambda span: span[:2])
        end, before = -1, None
        for first, last, name, param in spans:
            shared = before is not None and first < end and (param.requires_grad or before[1].requires_grad)
            if shared and before is not None and _overlap(before[1], param):
                raise TierzeroError(
                    f"parameters {before[0]} and {name} are different parameters over the same memory: training one "
                    "would change the other in plain PyTorch. Use one parameter in both places (tie them), or give one "
                    "a copy of its own (nn.Parameter(p.detach().clone()))"
                )
            if last > end:
                end, before = last, (name, param)


def _overlap(one: nn.Parameter, other: nn.Parameter) -> bool:
    """Whether two tensors over one storage have a byte in common."""
    seen = torch.zeros(one.untyped_storage().nbytes(), dtype=torch.bool)
    for param, marks in ((one, True), (other, False)):
        size = param.element_size()
        strides = [stride * size for stride in param.stride()]
        mine = seen.as_strided((*param.shape, size), (*strides, 1), param.storage_offset() * size)
        if marks:
            mine.fill_(True)
        elif bool(mine.any()):
            return True
    return False


def describe(units: list[Unit], chunk: int) -> dict[str, Any]:
    """What a snapshot must agree with to be opened under a model with these units; `chunk` in elements."""
    return {
        "layout": VERSION,
        "chunk": chunk,
        "units": [
            [unit.name, [[p.spec.name, list(p.spec.shape), p.spec.dtype, p.spec.trainable] for p in unit.layout.places]]
            for unit in units
        ],
    }


def check_same_model(meta: dict[str, Any], now: dict[str, Any]) -> None:
    """StoreError unless the snapshot with `meta` was written by a model that describes itself as `now`."""
    then = meta.get("engine", {})
    if then.get("layout") != now["layout"]:
        raise StoreError(
            "the snapshot was written by another version of tierzero, which laid the records out in another way: "
            "resume with that version, export the parameters there and start from them"
        )
    if then.get("units") == now["units"] and then.get("chunk") == now["chunk"]:
        return
    before = {name: spec for _, specs in then.get("units", []) for name, *spec in specs}
    after = {name: spec for _, specs in now["units"] for name, *spec in specs}
    differing = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    what = (
        f"first difference: {differing[0]}, {before.get(differing[0])} there and {after.get(differing[0])} here"
        if differing
        else "the units are cut differently"
    )
    raise StoreError(
        f"the snapshot was written by another model ({what}); resume with the model and units= that wrote it"
    )


def give_back(unit: Unit, loop: LoopThread, references: References) -> None:
    """Put plain parameters with the unit's values back into the modules."""
    given = []
    for index, (rest, slots) in enumerate(zip(unit.rest, unit.slots, strict=True)):
        blank = index in unit.blank
        value = torch.empty(rest.shape, dtype=rest.dtype, device="meta") if blank else loop.run(unit.read_param(index))
        param = nn.Parameter(value, requires_grad=rest.requires_grad)
        param.__dict__.update(unit.live[index].__dict__)
        given.append(param)
        for module, name in slots:
            module._parameters[name] = param
    references.replace(unit.rest, given)


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Put the model's buffers on the compute device."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
