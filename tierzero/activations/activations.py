"""Activations that leave the device until backward: what stands in autograd's graph for a saved tensor.

Note [what moves]
What forward saves for backward and nobody else packs: with activation checkpointing the inputs of the recomputed
parts, without it everything. A storage moves once, however many views of it are saved while its version stays the same;
a small view of a large storage moves alone, so that a batch does not take the whole data set along. What a backward
recomputes stays, it is used at once. So does what somebody else keeps in any case (buffers, the arguments of the model,
parameters), and what is small.

Note [moving back]
As long as anybody has the storage, backward gets that, and nothing is copied. What was brought back for the first of
several saved views stays on the device for the others, as it would in plain PyTorch.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from tierzero.activations.activation_pool import ActivationPool
from tierzero.activations.activation_slots import Slot
from tierzero.autograd.backward import in_backward
from tierzero.autograd.saved import Kept, WeakStorage, storage_id, values_id
from tierzero.monitoring.metrics import Metrics
from tierzero.paging.loop import LoopThread
from tierzero.paging.transfer import Transfer
from tierzero.sizes import format_size

log = logging.getLogger("tierzero")

LEAST = 16 << 10  # bytes of a storage that is worth moving
IN_FLIGHT = 32 << 20  # bytes that may wait for their copy before forward waits for them
WHOLE = 8  # a view of at least this part of its storage takes all of it along
ALIGN = 512  # bytes: a view that moves alone keeps its alignment, which kernels may look at


class _Piece:
    """A run of bytes of one storage at one version. `left` counts the saved views that were not unpacked yet."""

    __slots__ = ("__weakref__", "brought", "held", "left", "nbytes", "slot", "source", "start")

    slot: Slot

    def __init__(self, storage: torch.UntypedStorage, start: int) -> None:
        self.source = WeakStorage(storage)
        self.nbytes = storage.nbytes()
        self.start = start
        self.brought: WeakStorage | None = None
        self.held: torch.UntypedStorage | None = None  # for the other views
        self.left = 0

    @property
    def alive(self) -> bool:
        """Whether its bytes are on the device in any case."""
        brought = self.brought
        return not self.source.expired() or (brought is not None and not brought.expired())

    def found(self) -> tuple[torch.UntypedStorage, int] | None:
        """(the storage that has its bytes now, where in the original one it starts), or None."""
        original = self.source.get()
        if original is not None and original.nbytes() == self.nbytes:
            return original, 0
        brought = self.brought.get() if self.brought is not None else None
        return None if brought is None else (brought, self.start)


class Moved(Kept):
    """A saved tensor whose bytes lie elsewhere."""

    __slots__ = ("offset", "owner", "piece", "stride", "unpacked")

    def __init__(self, tensor: torch.Tensor, piece: _Piece, owner: Activations) -> None:
        super().__init__(tensor)
        self.let_go()
        self.offset = tensor.storage_offset() * tensor.element_size()
        self.stride = tensor.stride()
        self.piece = piece
        self.owner = owner
        self.unpacked = False
        piece.left += 1

    def unpack(self) -> torch.Tensor:
        """The tensor, with its bytes on the device."""
        self.check()
        piece, like = self.piece, self.tensor
        storage, start = piece.found() or self.owner.bring(piece)
        if not self.unpacked:
            self.unpacked = True
            piece.left -= 1
        piece.held = storage if piece.left > 0 else None
        first = (self.offset - start) // like.element_size()
        return torch.empty(0, dtype=like.dtype, device=like.device).set_(storage, first, self.shape, self.stride)


class Activations:
    """Moves what is saved in forward into `pool`. See the notes."""

    def __init__(self, pool: ActivationPool, loop: LoopThread, transfer: Transfer, metrics: Metrics) -> None:
        self.pool = pool
        self._loop = loop
        self._transfer = transfer
        self._metrics = metrics
        self._numbers = itertools.count()
        self._pieces: weakref.WeakValueDictionary[tuple[int, int, int, int], _Piece] = weakref.WeakValueDictionary()
        self._theirs: set[int] = set()  # storages that somebody else keeps
        self._posted = 0  # bytes, since forward last looked what is behind
        self._told = False

    def begin(self, root: nn.Module, inputs: Any) -> None:
        """A forward of `root` with `inputs` begins."""
        self._theirs = set(_storages(itertools.chain(root.buffers(), tree_leaves(inputs))))
        self.pool.failure = None

    def keep(self, tensor: torch.Tensor) -> Kept:
        """What stands for a saved tensor. OSError if the drives have failed, or are full."""
        if in_backward() or not self._moves(tensor):
            return Kept(tensor)
        if self.pool.failure is not None:
            self.pool.fail()
        storage = tensor.untyped_storage()
        key = values_id(tensor)
        first, last = _span(tensor)
        whole = (*key, 0, storage.nbytes())
        piece = self._pieces.get(whole)
        if piece is None and (last - first) * WHOLE < storage.nbytes():
            first -= first % ALIGN
            piece = self._pieces.get((*key, first, last))
        else:
            first, last = 0, storage.nbytes()
        if piece is not None:
            slot, index = piece.slot, next(self._numbers)
            self._loop.call(lambda: self.pool.touch(slot, index))
            return Moved(tensor, piece, self)
        if last - first > self.pool.capacity:
            self._too_large(last - first)
            return Kept(tensor)
        return Moved(tensor, self._new(storage, (*key, first, last)), self)

    def _moves(self, tensor: torch.Tensor) -> bool:
        return (
            type(tensor) is torch.Tensor
            and tensor.layout is torch.strided
            and tensor.device == self._transfer.device
            and tensor.numel() > 0
            and not (tensor.is_inference() or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
            and tensor.untyped_storage().nbytes() >= LEAST
            and storage_id(tensor) not in self._theirs
            and not self.pool.closed
        )

    def _new(self, storage: torch.UntypedStorage, key: tuple[int, int, int, int]) -> _Piece:
        if self._posted > IN_FLIGHT:
            with self._metrics.timed("stall_activation_s"):
                self._loop.run(self.pool.settle(IN_FLIGHT))
            self._posted = 0
        first, last = key[2:]
        piece = _Piece(storage, first)
        data = torch.empty(0, dtype=torch.uint8, device=self._transfer.device).set_(
            storage, first, (last - first,), (1,)
        )
        slot = Slot(piece, data, self._transfer.mark(), next(self._numbers), self.pool.dead)
        piece.slot = slot
        del data
        self._pieces[key] = piece
        self._posted += last - first
        self._loop.call(lambda: self.pool.admit(slot))
        return piece

    def _too_large(self, nbytes: int) -> None:
        self._metrics.add("activations_kept", nbytes)
        if not self._told:
            self._told = True
            log.warning(
                "an activation of %s stays on the device: it is larger than all the host memory for activations, %s. "
                "Give Tiers(activations=...) more, or the model smaller batches",
                format_size(nbytes),
                format_size(self.pool.capacity),
            )

    def bring(self, piece: _Piece) -> tuple[torch.UntypedStorage, int]:
        """(a storage on the device with the piece's bytes, where in the original one it starts)."""
        slot = piece.slot
        if slot.ready:
            self._metrics.add("activation_hits")
            data, event = self._loop.run(self.pool.bring(slot))
        else:
            self._metrics.add("activation_misses")
            with self._metrics.timed("stall_activation_s"):
                data, event = self._loop.run(self.pool.bring(slot))
        if event is not None:
            self._transfer.use(data, event)
        storage = data.untyped_storage()
        piece.brought = WeakStorage(storage)
        return storage, piece.start

    def usage(self) -> dict[str, int]:
        """See ActivationPool.usage."""
        return self.pool.usage() if self.pool.closed else self._loop.do(self.pool.usage)

    def close(self) -> None:
        """Wait for what is on its way and give everything up; also from a finalizer on the loop thread, which cannot
        wait.
        """
        if self._loop.inside:
            self.pool.abandon()
        elif not self.pool.closed:
            self._loop.run(self.pool.stop())


def _storages(tensors: Iterable[Any]) -> Iterator[int]:
    for tensor in tensors:
        if type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided:
            yield storage_id(tensor)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """(the first byte of its storage that `tensor` views, the one behind the last)."""
    first = int(tensor.storage_offset())
    last = first + sum(int((size - 1) * stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first * tensor.element_size(), (last + 1) * tensor.element_size()
