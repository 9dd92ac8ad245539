"""Room on the drives for what steps and snapshots write beside what is there."""

from __future__ import annotations

import logging

from tierzero.errors import NO_ROOM
from tierzero.storage.store import Store

log = logging.getLogger("tierzero")


class Room:
    """`working`: what the updates on their way write at most; `records`: (name, bytes) of all records in the store.
    Bytes.
    """

    def __init__(self, store: Store, working: int, records: list[tuple[str, int]]) -> None:
        self.store = store
        self.working = working
        self.shadows = True  # there is room for a second version of every record that a step changes
        self.changing = sum(nbytes for name, nbytes in records if name.endswith(("/state", "/param")))

    def beside(self) -> bool:
        """Have space for whatever training writes while all that is current now is kept; False if the drive is too
        small for that.
        """
        store = self.store
        live = sum(extent.capacity for extent in store.space.live())
        changing = sum(e.capacity for name, e in store.current.items() if not name.endswith("/frozen"))
        try:  # a new version of everything, and a guess at the next one
            store.reserve(live + (2 if self.shadows else 1) * changing + self.working)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            return False
        return True

    def reserve(self, least: int, held: int) -> None:
        """Have at least `least` bytes of space. Better is a second version of all that changes beside the `held` bytes;
        if the drive has no room for that, updates wait for their step from now on.
        """
        wanted = max(least, held + self.changing)
        if self.shadows and wanted > least:
            try:
                self.store.reserve(wanted)
                return
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
                self.shadows = False
                log.warning(
                    "%s has no room for two versions of all optimizer states (%s): updates begin at step(), not in "
                    "backward. Free some space to have both at once",
                    self.store.path,
                    error.strerror,
                )
        self.store.reserve(least)
