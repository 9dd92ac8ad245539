"""One safetensors file to be written: its header, and its bytes a block at a time, wherever its tensors lie.

Note [whole pages]
The header of a file of some size is filled with blanks, as the format allows, up to a whole page. Tensors of whole
pages, which large ones are, then lie at whole pages in the file as they do in the tiers, and are read from the drive
straight into the memory that is written.
"""

from __future__ import annotations

import asyncio
import json
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tierzero.checkpoint.safetensors import DTYPES
from tierzero.units.layout import PAGE
from tierzero.units.paged import Paged
from tierzero.units.parts import unit_of

_SMALL = 1 << 20  # bytes of a file that is not worth a page of blanks


@dataclass
class Shard:
    """The tensors of one file, with the names that each has besides."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    nbytes: int = 0

    def header(self, marks: Mapping[str, str]) -> bytes:
        """What comes before the tensors; `marks` go into the metadata. See Note [whole pages]."""
        header: dict[str, object] = {"__metadata__": {**marks, **self.ties}}
        offset = 0
        for name, tensor in self.tensors.items():
            end = offset + tensor.numel() * tensor.element_size()
            header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
            offset = end
        raw = json.dumps(header, separators=(",", ":")).encode()
        raw += b" " * (-(8 + len(raw)) % (PAGE if self.nbytes >= _SMALL else 8))
        return len(raw).to_bytes(8, "little") + raw


class Bytes:
    """The bytes of a file: `header`, then `tensors` one behind the other.

    `owner`: of the units that are read on the loop on which `fill` runs; they are at rest. Whatever else there is gives
    its values as a whole, once, and they are held until all of them have been read.
    """

    def __init__(self, header: bytes, tensors: Mapping[str, torch.Tensor], owner: Any) -> None:
        self.owner = owner
        self.stopped = False
        self._items: list[torch.Tensor | bytes] = [header]
        self._starts, self.nbytes = [0], len(header)
        for tensor in tensors.values():
            if tensor.numel():
                self._items.append(tensor)
                self._starts.append(self.nbytes)
                self.nbytes += tensor.numel() * tensor.element_size()
        self._held: dict[int, _Held] = {}

    async def fill(self, at: int, out: torch.Tensor) -> None:
        """Fill `out` (uint8[n]) with the bytes from `at` on, each once. See writer.Fill."""
        if self.stopped:
            raise asyncio.CancelledError
        end, number = at + out.numel(), bisect_right(self._starts, at) - 1
        while at < end:
            start = self._starts[number]
            last = min(end, self._starts[number + 1] if number + 1 < len(self._starts) else self.nbytes)
            await self._read(number, at - start, out[at - (end - out.numel()) : last - (end - out.numel())])
            at, number = last, number + 1

    async def _read(self, number: int, first: int, out: torch.Tensor) -> None:
        """Fill `out` with the item's bytes from `first` on."""
        item = self._items[number]
        if isinstance(item, bytes):
            out.copy_(torch.frombuffer(bytearray(item[first : first + out.numel()]), dtype=torch.uint8))
            return
        found = unit_of(item)
        if found is None or found[0].owner is not self.owner:
            held = self._held.setdefault(number, _Held(item))
            if await held.read(first, out):
                del self._held[number]
            return
        unit, index = found
        place = unit.layout.places[index]
        size = place.spec.itemsize
        low, high = first // size * size, -(-(first + out.numel()) // size) * size
        whole = (low, high) == (first, first + out.numel()) and out.data_ptr() % size == 0
        into = out if whole else torch.empty(high - low, dtype=torch.uint8)
        await unit.read_region(place.region, place.offset + low, into)
        if not whole:  # a block ends inside an element, or one begins at an odd byte
            out.copy_(into[first - low : first - low + out.numel()])


class _Held:
    """The values of a tensor that is no parameter of the engine's at rest."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._left = tensor.numel() * tensor.element_size()
        self._values = asyncio.ensure_future(asyncio.to_thread(_plain, tensor))

    async def read(self, first: int, out: torch.Tensor) -> bool:
        """Fill `out` with its bytes from `first` on; whether these were the last."""
        out.copy_((await self._values)[first : first + out.numel()])
        self._left -= out.numel()
        return not self._left


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, flat."""
    value = tensor.read() if isinstance(tensor, Paged) else tensor
    return value.detach().contiguous().view(-1).view(torch.uint8)
