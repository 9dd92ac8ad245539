"""How bytes reach the device and gradients leave it: memcpy on the CPU, streams and events on CUDA, behind one class.

Note [streams]
Three streams: the user's compute stream, one for host-to-device and one for device-to-host copies. A unit's storage is
allocated on the copy stream, so freed memory is reused there in order; before it is freed, the copy stream waits for
the event of its last use on the compute stream. Compute waits for a unit's ready event, never the host. A gradient is
copied out after an event on the compute stream, and whoever reads it on the host waits for its copy event first: the
step, and on other threads the norms and the updates that begin in backward. The thread that runs forward and backward
waits for no stream between two units; a unit that is not there yet it waits for, until its copy is queued (from host
memory) or done (from NVMe).

Activations go out like gradients, behind the event of the compute stream at which they were saved; the device bytes are
kept until the host has seen the copy's own event, so freeing them needs no stream. They come back into memory of the
copy-in stream; the compute stream waits for the copy's event, and the allocator is told of its use there, so that the
memory is not reused before that.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import torch

from tierzero.errors import TierzeroError
from tierzero.monitoring.metrics import Metrics
from tierzero.pace import Pacer
from tierzero.paging.malloc import advise_huge, mapped
from tierzero.tiers.host import Block
from tierzero.units.unit import Unit


class Transfer:
    """The CPU as the device: fetches read straight into the unit's flat storage."""

    def __init__(self, device: torch.device, metrics: Metrics, limit: int = 0) -> None:
        """`limit`: bytes per second to the device, 0 for none."""
        self.device = device
        self.metrics = metrics
        self.pacer = Pacer(limit) if limit else None

    def allocate(self, unit: Unit) -> None:
        """Give the unit its device bytes."""
        with mapped():
            unit.allocate()
        advise_huge(unit.flat.data_ptr(), unit.layout.flat_bytes)

    def free(self, unit: Unit) -> None:
        """Take them away."""
        unit.free()
        self._note_free(unit)

    def _note_free(self, unit: Unit) -> None:
        if self.metrics.recorder is not None:
            self.metrics.recorder.moment("evict", "evict", f"evict {unit.name}", bytes=unit.layout.flat_bytes)

    async def load(self, unit: Unit) -> None:
        """Fill the unit's flat storage from the tiers. Called on the loop thread."""
        nbytes = self.count(unit)
        start = time.perf_counter_ns()
        with self.metrics.h2d_busy, self.metrics.background:
            await self._paced(unit, nbytes)
        if self.metrics.recorder is not None:
            source = "host" if unit.host_flat is not None else "NVMe"
            self.metrics.recorder.add(
                "fetch", "fetch", f"fetch {unit.name}", start, time.perf_counter_ns(), bytes=nbytes, source=source
            )

    async def _paced(self, unit: Unit, nbytes: int) -> None:
        if self.pacer is None:
            await self._load(unit)
            return
        crossing = asyncio.ensure_future(self.pacer.pace(nbytes))  # bytes cross the link while more of them are read
        try:
            await self._load(unit)
            await crossing
        finally:
            crossing.cancel()

    async def _load(self, unit: Unit) -> None:
        await asyncio.gather(*(unit.read_region(name, 0, unit.region(name)) for name in unit.layout.regions))

    def before_use(self, unit: Unit) -> None:
        """Order the caller's work behind the arrival of `unit`."""

    def after_use(self, unit: Unit) -> None:
        """Note that the caller's work so far was the last to use `unit`."""

    def mark(self) -> Any:
        """The present point of the caller's work, as `used_event` takes it, or None."""
        return None

    def take_grad(self, unit: Unit, grad: torch.Tensor, view: torch.Tensor, accumulate: bool) -> None:
        """Copy (or add) one gradient to its place in host memory."""
        with self.metrics.d2h_busy:
            self._take_grad(unit, grad, view, accumulate)
        self.metrics.gradient(grad.nbytes)

    def _take_grad(self, unit: Unit, grad: torch.Tensor, view: torch.Tensor, accumulate: bool) -> None:
        if accumulate:
            view.add_(grad)
        else:
            view.copy_(grad)

    async def landed(self, unit: Unit) -> None:
        """Return when the gradients of `unit` are in host memory, and nothing is being copied from there any more."""

    def count(self, unit: Unit) -> int:
        """Account for one fetch; its bytes."""
        nbytes = sum(nbytes for _, nbytes in unit.layout.regions.values())
        self.metrics.add("h2d", nbytes)
        return nbytes

    def stow(self, data: torch.Tensor, host: torch.Tensor, mark: Any) -> Any:
        """Copy uint8[n] on the device to `host`, behind what `mark` marks. None if that is done, else what `arrived`
        takes.
        """
        host.copy_(data)
        return None

    def bring(self, host: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """(a new uint8[n] on the device with the bytes of `host`, None or what `arrived` and `use` take)."""
        data = torch.empty(host.numel(), dtype=torch.uint8, device=self.device)
        data.copy_(host)
        return data, None

    async def arrived(self, event: Any) -> None:
        """Return when a copy has been made."""

    def use(self, data: torch.Tensor, event: Any) -> None:
        """Order the caller's work with `data`, which `bring` returned, behind its arrival."""

    def close(self) -> None:
        """Wait for copies on their way."""


class CudaTransfer(Transfer):
    """A CUDA device; see Note [streams]. `staging` are pinned host blocks that fetches from disk pass through."""

    def __init__(self, device: torch.device, metrics: Metrics, staging: list[Block], limit: int = 0) -> None:
        super().__init__(device, metrics, limit)
        self.h2d = torch.cuda.Stream(device)
        self.d2h = torch.cuda.Stream(device)
        self._free_blocks = list(staging)
        self.block_bytes = min((block.tensor.numel() for block in staging), default=0)
        self._returned = asyncio.Condition()
        self._copied: dict[int, torch.cuda.Event] = {}  # unit -> behind the last copy of its gradients

    def allocate(self, unit: Unit) -> None:
        with torch.cuda.stream(self.h2d):
            unit.allocate()

    def free(self, unit: Unit) -> None:
        if unit.used_event is not None:
            self.h2d.wait_event(unit.used_event)
            unit.used_event = None
        with torch.cuda.stream(self.h2d):
            unit.free()
        self._note_free(unit)

    def before_use(self, unit: Unit) -> None:
        if unit.ready_event is not None:
            torch.cuda.current_stream(self.device).wait_event(unit.ready_event)

    def after_use(self, unit: Unit) -> None:
        unit.used_event = self.mark()

    def mark(self) -> Any:
        return torch.cuda.current_stream(self.device).record_event()

    async def _load(self, unit: Unit) -> None:
        if unit.host_flat is not None:
            with torch.cuda.stream(self.h2d):
                unit.flat.copy_(unit.host_flat.tensor[: unit.layout.flat_bytes], non_blocking=True)
        else:
            await asyncio.gather(*(self._load_region(unit, name) for name in unit.layout.regions))
        unit.ready_event = self.h2d.record_event()

    async def _load_region(self, unit: Unit, name: str) -> None:
        _, nbytes = unit.layout.regions[name]
        block_bytes = self.block_bytes
        await asyncio.gather(
            *(self._load_block(unit, name, at, min(block_bytes, nbytes - at)) for at in range(0, nbytes, block_bytes))
        )

    async def _load_block(self, unit: Unit, name: str, offset: int, nbytes: int) -> None:
        block = await self._take_block()
        try:
            host = block.tensor[:nbytes]
            await unit.read_region(name, offset, host)
            with torch.cuda.stream(self.h2d):
                unit.region(name)[offset : offset + nbytes].copy_(host, non_blocking=True)
                event = self.h2d.record_event(torch.cuda.Event(blocking=True))  # a wait that leaves the core alone
            await asyncio.get_running_loop().run_in_executor(None, event.synchronize)
        finally:
            await self._give_block(block)

    async def _take_block(self) -> Block:
        async with self._returned:
            await self._returned.wait_for(lambda: bool(self._free_blocks))
            return self._free_blocks.pop()

    async def _give_block(self, block: Block) -> None:
        async with self._returned:
            self._free_blocks.append(block)
            self._returned.notify()

    def _take_grad(self, unit: Unit, grad: torch.Tensor, view: torch.Tensor, accumulate: bool) -> None:
        compute = torch.cuda.current_stream(self.device)
        self.d2h.wait_event(compute.record_event())
        with torch.cuda.stream(self.d2h):
            if accumulate:  # on the device, as the plain loop does it: adding on the host would have to wait here
                held = view.to(self.device, non_blocking=True)
                self.metrics.add("h2d", grad.nbytes)
                self.metrics.device_passing(2 * grad.nbytes)
                view.copy_(held.add_(grad), non_blocking=True)
            else:
                view.copy_(grad, non_blocking=True)
            grad.record_stream(self.d2h)
            self._copied[unit.uid] = self.d2h.record_event(torch.cuda.Event(blocking=True))
        unit.finish_grads = lambda: self.finish(unit)

    def stow(self, data: torch.Tensor, host: torch.Tensor, mark: Any) -> Any:
        self.d2h.wait_event(mark)
        with torch.cuda.stream(self.d2h):
            host.copy_(data, non_blocking=True)
            return self.d2h.record_event()

    def bring(self, host: torch.Tensor) -> tuple[torch.Tensor, Any]:
        with torch.cuda.stream(self.h2d):
            data = torch.empty(host.numel(), dtype=torch.uint8, device=self.device)
            data.copy_(host, non_blocking=True)
            return data, self.h2d.record_event()

    async def arrived(self, event: Any) -> None:
        if event is not None:
            await asyncio.to_thread(event.synchronize)

    def use(self, data: torch.Tensor, event: Any) -> None:
        compute = torch.cuda.current_stream(self.device)
        compute.wait_event(event)
        data.record_stream(compute)

    def finish(self, unit: Unit) -> None:
        """Wait on the host for the gradient copies of `unit`. From any thread, as often as one likes."""
        copied = self._copied.get(unit.uid)
        if copied is not None:
            copied.synchronize()

    async def landed(self, unit: Unit) -> None:
        def wait() -> None:
            self.finish(unit)
            ready = unit.ready_event
            if ready is not None:
                ready.synchronize()

        await asyncio.get_running_loop().run_in_executor(None, wait)

    def close(self) -> None:
        torch.cuda.synchronize(self.device)


def make_transfer(device: torch.device, metrics: Metrics, staging: list[Block], limit: int = 0) -> Transfer:
    """The transfer class for `device`; `limit` is its link's, in bytes per second, 0 for none.

    Raises TierzeroError for a device kind that is not supported.
    """
    if device.type == "cpu":
        return Transfer(device, metrics, limit)
    if device.type == "cuda":
        return CudaTransfer(device, metrics, staging, limit)
    raise TierzeroError(
        f"tierzero computes on cpu or cuda devices, not on {device}; pass Tiers(compute='cpu') or a CUDA device"
    )
