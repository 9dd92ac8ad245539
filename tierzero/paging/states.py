"""The states that a unit's device bytes go through."""

from __future__ import annotations

import enum


class State(enum.Enum):
    """Where the device bytes of a unit stand; `LEGAL` lists the transitions."""

    REST = "rest"  # no bytes
    FETCHING = "fetching"  # bytes taken, on their way
    READY = "ready"  # bytes valid (on CUDA: once `ready_event` has passed)
    LEAVING = "leaving"  # READY again or REST in a moment


LEGAL = {
    (State.REST, State.FETCHING),
    (State.FETCHING, State.READY),
    (State.FETCHING, State.REST),
    (State.READY, State.LEAVING),
    (State.LEAVING, State.READY),
    (State.LEAVING, State.REST),
}
