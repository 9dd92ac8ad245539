"""What is known of the drives: how to run the engine, how to stripe a new store, and where memory should lie."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from tierzero.storage.stripes import stripe_weights


def measured(directories: Sequence[str | os.PathLike[str]]) -> list[Any]:
    """The profile of the drive under each directory, None where it was never measured."""
    from tierzero.hardware import profiles

    return [profiles.load(os.fspath(directory)) for directory in directories]


def numa_node(directories: Sequence[str | os.PathLike[str]]) -> int:
    """The NUMA node that all the drives under the directories are attached to; -1 if they differ or none is known."""
    from tierzero.hardware import drives

    nodes = {disk.numa_node for directory in directories for disk in drives.drive_of(directory).disks}
    return nodes.pop() if len(nodes) == 1 else -1


def weights_of(profiles: Sequence[Any]) -> list[int]:
    """Stripe weights by mixed bandwidth, the traffic of an optimizer step."""
    return stripe_weights([None if profile is None else profile.mixed for profile in profiles])


def engine_options(profiles: Sequence[Any], block: int | None = None) -> dict[str, Any]:
    """Keyword arguments of the native engine, empty where nothing was measured. `block`: bytes, instead of the best.

    One engine serves all drives: it runs as the drive wants it that needs the most bytes in flight, and on the pool
    only where that was the fastest everywhere.
    """
    known = [profile for profile in profiles if profile is not None]
    chosen = {} if block is None else {"block": block}
    if not known:
        return chosen
    most = max(known, key=lambda profile: profile.block * profile.depth)
    kind = "pool" if all(profile.engine == "pool" for profile in known) else "auto"
    return {"kind": kind, "block": most.block, "depth": most.depth} | chosen
