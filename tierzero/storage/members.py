"""The directories of a striped store: which member each of them is, and refusing any that does not belong.

Note [members]
Member 0 holds the manifest, which names the layout; it alone decides what can be resumed. Each directory says in
`member.json` which member of which store it is, so that the order in which they are listed does not matter and a drive
that is not mounted, or another one in its place, is seen before a byte is read or written. A new store writes these
files in order, member 0 first, and a store that goes removes them in reverse: without a snapshot, what a crash leaves
is always member 0 and some of those behind it. So a later member whose member 0 is elsewhere may be part of something
committed, and is refused. Member 0's file says `committed` from just before the first manifest on: one that says so and
has no manifest has lost it, and is refused too.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from tierzero.errors import StoreCorruptError, StoreError
from tierzero.storage import manifest as manifests
from tierzero.storage.manifest import Manifest
from tierzero.storage.stripes import STRIPE, Layout

NAME = "member.json"
TEMPORARY = "member.json.new"
FORMAT = 1


@dataclass(frozen=True)
class Member:
    """What a directory says it is: member `index` of the store of `layout`, which lay in `directories` when made.

    `committed`: a manifest was written, or about to be; only member 0 is told.
    """

    index: int
    layout: Layout
    directories: tuple[str, ...]
    committed: bool = False

    def to_text(self) -> str:
        """The text of the file."""
        layout = self.layout
        value = {
            "format": FORMAT,
            "store": layout.store,
            "index": self.index,
            "count": layout.count,
            "files": layout.files,
            "weights": layout.weights,
            "stripe": layout.stripe,
            "directories": self.directories,
            "committed": self.committed,
        }
        return json.dumps(value, indent=1) + "\n"

    @classmethod
    def from_text(cls, text: bytes, path: str) -> Member:
        """What `text`, read from `path`, says. StoreCorruptError if it is damaged or of another program."""
        try:
            value = json.loads(text)
            if value["format"] > FORMAT:
                raise StoreCorruptError(
                    f"{path} has format {value['format']}; this tierzero reads up to format {FORMAT}. Nothing was "
                    "deleted: use the version that wrote it, or a newer one"
                )
            where = tuple(map(str, value["directories"]))
            # a file that does not say is of a time when nobody was told
            member = cls(value["index"], manifests.layout_of(value), where, bool(value.get("committed", True)))
            if not isinstance(member.index, int) or not 0 <= member.index < member.layout.count == value["count"]:
                raise ValueError(f"member {member.index!r} of {value['count']!r}")
            if len(member.directories) != member.layout.count:
                raise ValueError(f"{len(member.directories)} directories")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise StoreCorruptError(
                f"{path}, which says what part of a striped store the directory is, is damaged or not tierzero's "
                f"({error!r}). Nothing was deleted: put a copy of it back, or remove it if the directory holds nothing "
                "of worth"
            ) from None
        return member


def read(directory: str) -> Member | None:
    """What `directory` says it is, None where it says nothing. StoreCorruptError for a damaged file."""
    path = os.path.join(directory, NAME)
    text = manifests.read_file(path)
    return None if text is None else Member.from_text(text, path)


def is_foreign(directory: str) -> bool:
    """Whether something that no store wrote has the file's name, and so must never be deleted."""
    return manifests.foreign(os.path.join(directory, NAME), _is_ours)


def _is_ours(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("format"), int) and {"store", "index"} <= value.keys()


def write(directories: Sequence[str], layout: Layout) -> None:
    """Tell every directory, durably and in order, which member it is. OSError naming the file on failure."""
    for index in range(len(directories)):
        _write(Member(index, layout, tuple(directories)))


def mark_committed(directories: Sequence[str], layout: Layout) -> None:
    """Tell member 0, durably, that from now on a manifest must lie beside it. OSError naming the file on failure."""
    _write(Member(0, layout, tuple(directories), committed=True))


def _write(member: Member) -> None:
    directory = member.directories[member.index]
    temporary, path = os.path.join(directory, TEMPORARY), os.path.join(directory, NAME)
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(member.to_text())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        manifests.sync_directory(directory)
    except OSError as error:
        raise OSError(
            error.errno, f"cannot write which member of the store this is ({error.strerror})", path
        ) from error


def remove(directory: str) -> None:
    """Forget, durably, which member `directory` was."""
    gone = False
    for name in (NAME, TEMPORARY):
        try:
            os.unlink(os.path.join(directory, name))
        except FileNotFoundError:
            continue
        gone = True
    if gone:
        manifests.sync_directory(directory)


def new_layout(count: int, file: str, weights: Sequence[int]) -> Layout | None:
    """The layout of a new store in `count` directories; None for one, which is not striped."""
    return None if count == 1 else Layout(uuid.uuid4().hex, (file,) * count, tuple(weights), STRIPE)


def arrange(directories: Sequence[str]) -> tuple[list[str], Manifest | None]:
    """(the directories by member, the manifest) of the store that lies in them; as listed, and None, if none does.

    Reads only. StoreError names the directory that is missing, swapped or foreign and says what to do;
    StoreCorruptError is for damaged files and for a manifest that is gone.
    """
    members = {directory: read(directory) for directory in directories}
    found = {directory: manifest for directory in directories if (manifest := manifests.load(directory)) is not None}
    if len(found) > 1:
        one, other = list(found)[:2]
        raise StoreError(
            f"{_store_in(one, found[one])} and {_store_in(other, found[other])} are two: resume one of them, with its "
            "directories alone, or give them up with overwrite=True"
        )
    for home, manifest in found.items():
        if manifest.layout is None:
            return [_alone(home, directories, members)], manifest
        return _by_index(home, manifest.layout, members), manifest
    _check_nothing_at_stake(members)
    return list(directories), None


def _store_in(home: str, manifest: Manifest) -> str:
    return f"the store in {home}" if manifest.layout is None else f"the store of {manifest.layout.count} in {home}"


def _alone(home: str, directories: Sequence[str], members: dict[str, Member | None]) -> str:
    """The directory of a store that is not striped."""
    if len(directories) > 1:
        raise StoreError(
            f"the store in {home} lies in that directory alone, not in {len(directories)}: resume it with "
            f"nvme={home!r}, or give it up with overwrite=True"
        )
    if members[home] is not None:
        raise StoreError(
            f"{home} holds a manifest of one directory and {NAME} of a striped store: give it up with overwrite=True"
        )
    return home


def _by_index(home: str, layout: Layout, members: dict[str, Member | None]) -> list[str]:
    """The directories of the store whose manifest lies in `home`, in its order."""
    own = members[home]
    was = own.directories if own is not None and own.layout.store == layout.store else ("",) * layout.count
    ordered: dict[int, str] = {}
    for directory, member in members.items():
        if member is None and directory == home:
            raise StoreCorruptError(
                f"{home} holds the manifest of a striped store, but {NAME}, which says what part of it lies there, is "
                "gone. Nothing was deleted: put a copy of it back, or give the store up with overwrite=True"
            )
        if member is None:
            raise StoreError(
                f"{directory} is no member of the striped store in {home}, which has {layout.count}{_places(was)}: "
                "mount its drive there and list the members"
            )
        if member.layout.store != layout.store:
            raise StoreError(
                f"{directory} is member {member.index} of another store ({member.layout.store[:8]}) than the one in "
                f"{home} ({layout.store[:8]}): list the directories of one store{_places(was)}, or give both up with "
                "overwrite=True"
            )
        if member.layout != layout:
            raise StoreCorruptError(
                f"{os.path.join(directory, NAME)} names other weights or files than the manifest in {home}: one of "
                "them was edited. Nothing was deleted: put back a copy of the file"
            )
        if member.index in ordered:
            raise StoreError(
                f"{directory} and {ordered[member.index]} both say that they are member {member.index} of the store in "
                f"{home}: one is a copy; leave it out"
            )
        ordered[member.index] = directory
    for index in range(layout.count):
        if index not in ordered:
            raise StoreError(
                f"member {index} of the {layout.count} of the striped store in {home} is missing"
                + (f"; it was {was[index]} when the store was made" if was[index] else "")
                + ": mount its drive and list all members"
            )
    if ordered[0] != home:
        raise StoreError(
            f"the manifest of the store lies in {home}, but {ordered[0]} says that it is member 0: the drives' "
            "contents were mixed; put the manifest back into the directory it came from"
        )
    return [ordered[index] for index in range(layout.count)]


def _check_nothing_at_stake(members: dict[str, Member | None]) -> None:
    """Where no directory has a manifest: an error for a member of a store that had one, there or elsewhere."""
    heads = {member.layout.store for member in members.values() if member is not None and member.index == 0}
    for directory, member in members.items():
        if member is not None and member.index == 0 and member.committed:
            raise StoreCorruptError(
                f"{directory} is member 0 of {member.layout.count} of a striped store with a snapshot, but its "
                f"manifest {os.path.join(directory, manifests.NAME)} is gone. Nothing was deleted: put a copy "
                "of it back, or give the store up with overwrite=True"
            )
    for directory, member in members.items():
        # never "overwrite" here: the snapshot is whole, on a drive that is not mounted
        if member is not None and (len(members) == 1 or member.layout.store not in heads):
            others = [place for index, place in enumerate(member.directories) if index != member.index]
            raise StoreError(
                f"{directory} is member {member.index} of {member.layout.count} of a striped store, and the "
                f"other{'s' if len(others) > 1 else ''}, which {'were' if len(others) > 1 else 'was'} "
                f"{', '.join(others)}, cannot be seen: mount them and list all members, or use another directory"
            )


def _places(directories: Sequence[str]) -> str:
    return f" (they were {', '.join(directories)})" if any(directories) else ""
