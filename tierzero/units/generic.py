"""The states of optimizers other than AdamW: one record per unit, of whatever tensors they keep.

Note [generic state]
What a torch optimizer keeps for a parameter is known after its first step: tensors of any shape and dtype, and plain
values. The tensors of one unit, and the float32 masters of its 16-bit parameters, lie in one record, each at a multiple
of 64 bytes. Scalars, plain values and the places of the tensors are in memory, and in the meta of snapshots. Where the
unit has a state record of AdamW too, the masters are there and only there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from tierzero.units.layout import round_up
from tierzero.units.records import DiskRecord, HostRecord

ALIGN = 64  # bytes: what a vector load likes, and more than any element


@dataclass(frozen=True)
class Slot:
    """Where a tensor lies in the record; `offset` in bytes."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        count = self.dtype.itemsize
        for size in self.shape:
            count *= size
        return count

    def view(self, raw: torch.Tensor) -> torch.Tensor:
        """The tensor itself, in the bytes of a whole record."""
        return raw[self.offset : self.offset + self.nbytes].view(self.dtype).view(self.shape)


@dataclass
class Kept:
    """What is kept for one parameter: the optimizer class that made it, the float32 master (where it is kept here) and
    its values by name. Either all tensors in it are real or all are Slots, scalar values apart.
    """

    made_by: str
    master: Any = None
    values: dict[str, Any] = field(default_factory=dict)
    resumed: bool = False  # from a snapshot, for an optimizer that has not been built yet

    def tensors(self) -> Iterator[Any]:
        """Everything that lies in the record, in the order in which it lies there."""
        if self.master is not None:
            yield self.master
        yield from (value for value in self.values.values() if _in_record(value))


def _in_record(value: Any) -> bool:
    return isinstance(value, Slot) or (isinstance(value, torch.Tensor) and value.dim() > 0)


class GenericState:
    """One unit's record (None: no tensors), the memory that it has if it lies on the host, and an entry for each
    parameter, by its index, with Slots for tensors.
    """

    def __init__(self, record: HostRecord | DiskRecord | None, block: Any, kept: dict[int, Kept]) -> None:
        self.record = record
        self.block = block
        self.kept = kept

    async def read(self, slot: Slot) -> torch.Tensor:
        """One tensor, as a new one."""
        out = torch.empty(slot.shape, dtype=slot.dtype)
        if slot.nbytes:
            assert self.record is not None
            await self.record.read(slot.offset, out.view(-1).view(torch.uint8))
        return out

    async def write(self, slot: Slot, value: torch.Tensor) -> None:
        """Replace one tensor."""
        if slot.nbytes:
            assert self.record is not None
            flat = value.detach().to(device="cpu", dtype=slot.dtype).expand(slot.shape).contiguous().view(-1)
            await self.record.write(slot.offset, flat.view(torch.uint8))

    async def write_master(self, index: int, value: torch.Tensor) -> None:
        """Replace the master of a parameter, where it is kept here."""
        kept = self.kept.get(index)
        if kept is not None and kept.master is not None:
            await self.write(kept.master, value.view(kept.master.shape))

    def describe(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "nbytes": 0 if self.record is None else self.record.nbytes,
            "kept": {
                str(index): {
                    "made_by": kept.made_by,
                    "master": None if kept.master is None else _to_json(kept.master),
                    "values": {name: _to_json(value) for name, value in kept.values.items()},
                }
                for index, kept in self.kept.items()
            },
        }


def kept_from(described: dict[str, Any]) -> dict[int, Kept]:
    """The `kept` that `describe` has described."""
    return {
        int(index): Kept(
            one["made_by"],
            None if one["master"] is None else _from_json(one["master"]),
            {name: _from_json(value) for name, value in one["values"].items()},
            resumed=True,
        )
        for index, one in described["kept"].items()
    }


def lay_out(drafts: dict[int, Kept]) -> tuple[dict[int, Kept], int]:
    """Slots for the tensors of `drafts`, and the bytes of the record; scalars are copied."""
    end = 0

    def slot(value: Any, master: bool = False) -> Any:
        nonlocal end
        if not master and not _in_record(value):
            return value.detach().clone() if isinstance(value, torch.Tensor) else value
        place = Slot(end, tuple(value.shape), value.dtype)
        end = round_up(end + place.nbytes, ALIGN)
        return place

    kept = {
        index: Kept(
            draft.made_by,
            None if draft.master is None else slot(draft.master, master=True),
            {name: slot(value) for name, value in draft.values.items()},
            draft.resumed,
        )
        for index, draft in sorted(drafts.items())
    }
    return kept, end


def fill(raw: torch.Tensor, kept: dict[int, Kept], drafts: dict[int, Kept]) -> None:
    """Copy the tensors of `drafts` to their slots in `raw`, a new record's bytes."""
    for index, draft in drafts.items():
        for slot, value in zip(kept[index].tensors(), draft.tensors(), strict=True):
            slot.view(raw).copy_(value)


def in_place(raw: torch.Tensor, kept: dict[int, Kept], drafts: dict[int, Kept]) -> bool:
    """Whether all tensors of `drafts` lie in their slots in `raw` already."""
    return all(
        value.is_contiguous() and value.data_ptr() == raw.data_ptr() + slot.offset
        for index, draft in drafts.items()
        for slot, value in zip(kept[index].tensors(), draft.tensors(), strict=True)
        if slot.nbytes
    )


def drafts_of(raw: torch.Tensor, kept: dict[int, Kept]) -> dict[int, Kept]:
    """`kept` with views of `raw` for its Slots, and copies of its scalars."""

    def real(value: Any) -> Any:
        if isinstance(value, Slot):
            return value.view(raw)
        return value.clone() if isinstance(value, torch.Tensor) else value

    return {
        index: Kept(one.made_by, real(one.master), {n: real(value) for n, value in one.values.items()}, one.resumed)
        for index, one in kept.items()
    }


def _to_json(value: Any) -> Any:
    if isinstance(value, Slot):
        return {"at": value.offset, "shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, torch.Tensor):
        return {"scalar": value.item(), "dtype": str(value.dtype).removeprefix("torch.")}
    return {"value": value}


def _from_json(coded: dict[str, Any]) -> Any:
    if "value" in coded:
        return coded["value"]
    dtype = getattr(torch, coded["dtype"])
    if "scalar" in coded:
        return torch.tensor(coded["scalar"], dtype=dtype)
    return Slot(coded["at"], tuple(coded["shape"]), dtype)
