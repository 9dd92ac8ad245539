"""What a striped file is, said once more and plainly: every byte in a dictionary of pages, every stripe counted out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

PAGE = 4096


def owners_of(weights: Sequence[int]) -> list[int]:
    """Which member has each place of a cycle: always the one that is furthest behind its share."""
    total = sum(weights)
    given = [0] * len(weights)
    owners = []
    for place in range(1, total + 1):
        behind = [
            (place * weight - given[i] * total if given[i] < weight else -(total**2))
            for i, weight in enumerate(weights)
        ]
        owners.append(behind.index(max(behind)))
        given[owners[-1]] += 1
    return owners


class FileModel:
    """A file over members: its bytes, and how long each member is.

    `directs` says which members do direct I/O: there a short tail is padded with zeros to 4096 bytes.
    """

    def __init__(self, weights: Sequence[int], stripe: int, directs: Sequence[bool]) -> None:
        self.weights, self.stripe, self.directs = list(weights), stripe or PAGE, list(directs)
        self.owners = owners_of(weights)
        self.pages: dict[int, bytes] = {}
        self.lengths = [0] * len(weights)

    def locate(self, offset: int) -> tuple[int, int]:
        """The member of a logical byte and its offset there."""
        cycle, place = divmod(offset // self.stripe, len(self.owners))
        member = self.owners[place]
        before = cycle * self.weights[member] + self.owners[:place].count(member)
        return member, before * self.stripe + offset % self.stripe

    def member_bytes(self, member: int, nbytes: int) -> int:
        """How much of the first `nbytes` bytes the member holds."""
        stripes, rest = divmod(nbytes, self.stripe)
        cycle, place = divmod(stripes, len(self.owners))
        whole = cycle * self.weights[member] + self.owners[:place].count(member)
        return whole * self.stripe + (rest if self.owners[place] == member else 0)

    def parts(self, offset: int, nbytes: int) -> Iterator[tuple[int, int, int, int]]:
        """(page, bytes, member, offset there) of a range that starts at a page."""
        for at in range(offset, offset + nbytes, PAGE):
            member, there = self.locate(at)
            yield at // PAGE, min(PAGE, offset + nbytes - at), member, there

    def write(self, offset: int, data: bytes) -> None:
        """`offset` is a multiple of 4096."""
        for index, (page, count, member, there) in enumerate(self.parts(offset, len(data))):
            piece = data[index * PAGE : index * PAGE + count]
            if self.directs[member]:
                piece = piece.ljust(PAGE, b"\0")
            self.pages[page] = piece + self.pages.get(page, bytes(PAGE))[len(piece) :]
            self.lengths[member] = max(self.lengths[member], there + len(piece))

    def read(self, offset: int, nbytes: int) -> bytes | None:
        """None where a member ends before."""
        out = b""
        for page, count, member, there in self.parts(offset, nbytes):
            if there + count > self.lengths[member]:
                return None
            out += self.pages.get(page, bytes(PAGE))[:count]
        return out

    def preallocate(self, nbytes: int) -> None:
        """Grow."""
        self.lengths = [max(n, self.member_bytes(i, nbytes)) for i, n in enumerate(self.lengths)]

    def truncate(self, nbytes: int) -> None:
        """Cut or extend."""
        self.lengths = [self.member_bytes(i, nbytes) for i in range(len(self.weights))]
        for page, data in list(self.pages.items()):
            member, there = self.locate(page * PAGE)
            kept = max(0, self.lengths[member] - there)
            self.pages[page] = data[:kept].ljust(PAGE, b"\0")

    def size(self) -> int:
        """The first logical byte that its member does not hold, found stripe by stripe."""
        if len(self.weights) == 1:
            return self.lengths[0]
        at = 0
        while True:
            member, there = self.locate(at)
            if there + self.stripe > self.lengths[member]:
                return at + self.lengths[member] - there
            at += self.stripe
