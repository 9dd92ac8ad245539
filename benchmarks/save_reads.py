"""What save.py holds others against, and its cases that read: load and verify of a checkpoint, weights in and out.

Each against what the drive does by itself in the same run, with as many bytes as the file has, by the native engine
with a few requests in flight: a sequential read where bytes go to host memory, a sequential write where they come from
there, a copy where they come from and go to the drive. States beside weights that are loaded are not counted.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from turns import case, in_turns

import tierzero as tz
from tierzero.checkpoint.reader import Reader
from tierzero.tiers.base import aligned_empty, open_block_file
from tierzero.tiers.nvme import NativeEngine
from tierzero.units.layout import round_up

BUFFER, DEPTH = 4 << 20, 4  # bytes, and how many at a time, of what is sequential
Sample = dict[str, float]


def timed(nbytes: int, work: Callable[[], Any]) -> Sample:
    """`work`, which is about so many bytes."""
    start = time.perf_counter()
    work()
    return {"bytes": nbytes, "seconds": time.perf_counter() - start}


def sequential_read(path: Path) -> Sample:
    """Read a file from its beginning to its end."""
    io = NativeEngine(depth=DEPTH)

    async def read() -> int:
        file = open_block_file(str(path), io)
        nbytes = file.size() // 4096 * 4096
        buffers = [aligned_empty(BUFFER) for _ in range(DEPTH)]

        async def lane(number: int) -> None:
            for at in range(number * BUFFER, nbytes, DEPTH * BUFFER):
                await file.read(at, buffers[number][: min(BUFFER, nbytes - at)])

        try:
            await asyncio.gather(*map(lane, range(DEPTH)))
        finally:
            file.close()
        return nbytes

    start = time.perf_counter()
    try:
        nbytes = asyncio.run(read())
        return {"bytes": nbytes, "seconds": time.perf_counter() - start}
    finally:
        io.close()


def sequential(directory: str, nbytes: int, source: str | None = None) -> Sample:
    """Write as much to a new file, in order, and make it durable; with `source`, what is read from that file."""
    path, io = Path(directory) / "sequential", NativeEngine(depth=DEPTH)
    nbytes = round_up(nbytes, BUFFER)

    async def write() -> None:
        lanes = DEPTH if source is None else 2 * DEPTH  # half of them read
        buffers = [aligned_empty(BUFFER).fill_(7) for _ in range(lanes)]
        file = open_block_file(str(path), io)
        other = open_block_file(source, io) if source is not None else None
        try:
            file.preallocate(nbytes)

            async def lane(number: int) -> None:
                for at in range(number * BUFFER, nbytes, lanes * BUFFER):
                    if other is not None:
                        await other.read(at, buffers[number])
                    await file.write(at, buffers[number])

            await asyncio.gather(*map(lane, range(lanes)))
            await file.sync()
        finally:
            file.close()
            if other is not None:
                other.close()

    start = time.perf_counter()
    try:
        asyncio.run(write())
        return {"bytes": nbytes, "seconds": time.perf_counter() - start}
    finally:
        io.close()
        path.unlink()


def copied(directory: str, nbytes: int) -> Sample:
    """As `sequential`, the bytes from a file on the same drive."""
    source = Path(directory) / "source"
    if not source.exists():
        with source.open("wb") as file:
            for _ in range(0, nbytes, BUFFER):
                file.write(b"\7" * BUFFER)
    return sequential(directory, nbytes, str(source))


def verified(path: Path) -> None:
    """Every byte of a checkpoint against its checksum, as `tierzero ckpt verify`."""
    with Reader(path) as reader:
        for _ in reader.verify():
            pass


def exported(model: Any, path: Path, nbytes: int) -> Sample:
    """One export to a new file."""
    try:
        return timed(nbytes, partial(tz.export, model, path))
    finally:
        path.unlink()


def loaded(make: Callable[[], tuple[Any, Any]], path: Path, nbytes: int) -> Sample:
    """A load into a new model."""
    model, optimizer = make()
    try:
        return timed(nbytes, partial(tz.load, model, path, optimizer))
    finally:
        tz.close(model)


def reads(
    rounds: int,
    models: dict[str, tuple[Any, Any]],
    bare: dict[str, Any],
    stepped: dict[str, Any],
    fresh: Callable[[], tuple[Any, Any]],
    directory: Path,
) -> list[dict[str, Any]]:
    """`models`: (model, optimizer) after a step, by where their states are, first in host memory and then on the drive;
    `bare`: models without optimizer by where their parameters are; `stepped`: with states; `fresh`: makes (model,
    optimizer) before the first step, in host memory.
    """
    saved, weights = directory / "read", directory / "weights.safetensors"
    model, optimizer = next(iter(models.values()))
    tz.save(model, saved, optimizer, wait=True)
    tz.export(model, weights)
    data = max(saved.iterdir(), key=lambda file: file.stat().st_size)
    size, small = data.stat().st_size, weights.stat().st_size
    read, write, copy = "sequential read", "sequential write", "copy"
    measures: dict[str, Callable[[], Sample]] = {
        read: partial(sequential_read, data),
        write: partial(sequential, str(directory), small),
        copy: partial(copied, str(directory), small),
        "verify": partial(timed, size, partial(verified, saved)),
        "load, in host memory before the first step": partial(loaded, fresh, saved, size),
    }
    others = dict.fromkeys(measures, read)
    for (name, (model, optimizer)), other in zip(models.items(), (read, copy), strict=True):
        measures[f"load, {name}"] = partial(timed, size, partial(tz.load, model, saved, optimizer))
        others[f"load, {name}"] = other
    for (name, model), other in zip(bare.items(), (read, copy), strict=True):
        measures[f"load of weights, {name}"] = partial(timed, small, partial(tz.load, model, weights))
        measures[f"export, {name}"] = partial(exported, model, directory / "new.safetensors", small)
        others |= {f"load of weights, {name}": other, f"export, {name}": write if other == read else copy}
    for (name, model), other in zip(stepped.items(), (read, copy), strict=True):
        measures[f"load of weights beside states, {name}"] = partial(timed, small, partial(tz.load, model, weights))
        others[f"load of weights beside states, {name}"] = other
    copied(str(directory), small)  # its source is written first
    samples = in_turns(measures, rounds, lambda sample: f"{sample['bytes'] / sample['seconds'] / 1e9:.2f} GB/s")
    rates = {name: [one["bytes"] / one["seconds"] / 1e9 for one in many] for name, many in samples.items()}
    shutil.rmtree(saved)
    weights.unlink()
    return [
        case(
            f"{name} / {others[name]}",
            own,
            rates[others[name]],
            None,
            unit="GB/s",
            bytes=samples[name][0]["bytes"],
            least=0.8 if name.startswith("export") else None,
        )
        for name, own in rates.items()
        if name not in (read, write, copy)
    ]
