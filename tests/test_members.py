"""Which directory is which member of a striped store: matched by identity, refused in a sentence. No data moves."""

from __future__ import annotations

import json
import os
import subprocess
from itertools import permutations
from pathlib import Path

import pytest

from tierzero.errors import StoreCorruptError, StoreError
from tierzero.storage import manifest as manifests
from tierzero.storage import members
from tierzero.storage.directory import check_apart, reclaim_directories, survey
from tierzero.storage.manifest import Manifest, Snapshot
from tierzero.storage.stripes import Layout


def directories(tmp_path: Path, count: int = 3, prefix: str = "drive") -> list[str]:
    found = [tmp_path / f"{prefix}{index}" for index in range(count)]
    for path in found:
        path.mkdir(exist_ok=True)
    return [str(path) for path in found]


def layout_for(count: int) -> Layout:
    found = members.new_layout(count, "data.bin", list(range(1, count + 1)))
    assert found is not None
    return found


def make(where: list[str], *, committed: bool = True) -> Layout:
    """A store's files in the directories, without data."""
    layout = layout_for(len(where))
    members.write(where, layout)
    if committed:
        members.mark_committed(where, layout)
        snapshot = Snapshot("s", 1, {"step": 3}, {})
        manifests.save(where[0], Manifest("data.bin", {"s": snapshot}, layout))
    return layout


def says(where: list[str], error: type[Exception] = StoreError) -> str:
    with pytest.raises(error) as caught:
        members.arrange(where)
    return str(caught.value)


def test_any_order_is_put_right(tmp_path: Path) -> None:
    where = directories(tmp_path)
    layout = make(where)
    for order in permutations(where):
        arranged, manifest = members.arrange(list(order))
        assert arranged == where
        assert manifest is not None
        assert manifest.layout == layout


def test_identities_survive_the_way_to_the_drive(tmp_path: Path) -> None:
    where = directories(tmp_path)
    layout = make(where)
    for index, directory in enumerate(where):
        member = members.read(directory)
        assert member == members.Member(index, layout, tuple(where), committed=index == 0)
        assert sorted(os.listdir(directory)) == ["manifest.json", "member.json"][index > 0 :]
        members.remove(directory)
        members.remove(directory)  # harmless when done
        assert members.read(directory) is None


def test_stores_have_ids_of_their_own() -> None:
    assert layout_for(2).store != layout_for(2).store
    assert members.new_layout(1, "data.bin", [1]) is None


def test_a_drive_that_is_not_mounted(tmp_path: Path) -> None:
    where = directories(tmp_path)
    make(where)
    os.rename(where[1], tmp_path / "away")
    os.mkdir(where[1])
    text = says(where)
    assert text.startswith(f"{where[1]} is no member of the striped store in {where[0]}, which has 3")
    assert "mount its drive there" in text
    os.rmdir(where[1])
    os.rename(tmp_path / "away", where[1])
    os.rename(where[0], tmp_path / "away")
    os.mkdir(where[0])  # where the manifest was
    text = says(where)
    assert text.startswith(f"{where[1]} is member 1 of 3 of a striped store, and the others, which were ")
    assert f"which were {where[0]}, {where[2]}, cannot be seen: mount them" in text
    assert "overwrite" not in text


def test_a_member_that_is_not_listed(tmp_path: Path) -> None:
    where = directories(tmp_path)
    make(where)
    assert f"member 2 of the 3 of the striped store in {where[0]} is missing; it was {where[2]}" in says(where[:2])
    assert "is member 1 of 3 of a striped store, and the others" in says(where[1:])
    for index, one in enumerate(where[1:], 1):
        text = says([one])
        assert text.startswith(f"{one} is member {index} of 3")
        assert "mount them" in text
        assert "overwrite" not in text
    assert "member 1 of the 3" in says(where[:1])
    assert "overwrite" not in says(where[:1])


@pytest.mark.parametrize("gone", ["removed", "a link that leads nowhere", "a link to itself", "a directory", "a pipe"])
def test_a_manifest_that_went_missing_is_missed(tmp_path: Path, gone: str) -> None:
    where = directories(tmp_path)
    make(where)
    path = Path(where[0], "manifest.json")
    path.unlink()
    if "link" in gone:
        path.symlink_to(tmp_path / "nowhere" if "nowhere" in gone else path)
    elif gone == "a directory":
        path.mkdir()
    elif gone == "a pipe":
        os.mkfifo(path)
    for order in permutations(where):
        text = says(list(order), StoreCorruptError)
        assert str(path) in text
        assert "Nothing was deleted" in text
    if "link" in gone or gone == "removed":
        assert survey(where, overwrite=True) == (where, None)
        reclaim_directories(where, "data.bin", crashed=(), overwrite=True)
        assert not any(map(os.listdir, where))
    else:
        with pytest.raises(StoreCorruptError):
            survey(where, overwrite=True)


def test_without_a_first_commit_nothing_is_missed(tmp_path: Path) -> None:
    where = directories(tmp_path)
    make(where, committed=False)
    assert members.arrange(where) == (where, None)
    path = Path(where[0], "member.json")
    value = json.loads(path.read_text())
    del value["committed"]  # as it was written before anybody was told
    path.write_text(json.dumps(value))
    assert "give the store up with overwrite=True" in says(where, StoreCorruptError)


def test_a_manifest_without_the_identity_beside_it(tmp_path: Path) -> None:
    where = directories(tmp_path)
    make(where)
    os.unlink(Path(where[0], "member.json"))
    assert says(where, StoreCorruptError).startswith(
        f"{where[0]} holds the manifest of a striped store, but member.json"
    )


@pytest.mark.parametrize("name", ["member.json", "manifest.json"])
@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "\0", "[]", "1e999", "{}", '"x"'])
def test_texts_that_no_store_wrote_are_a_sentence(tmp_path: Path, name: str, text: str) -> None:
    where = directories(tmp_path)
    make(where)
    Path(where[1], name).write_text(text)
    said = says(where, StoreCorruptError)
    assert str(Path(where[1], name)) in said
    assert "Nothing was deleted" in said


def test_members_of_two_stores(tmp_path: Path) -> None:
    one, two = directories(tmp_path, 2, "a"), directories(tmp_path, 2, "b")
    make(one)
    make(two)
    text = says([one[0], two[1]])
    assert text.startswith(f"{two[1]} is member 1 of another store")
    assert one[1] in text
    both = f"the store of 2 in {one[0]} and the store of 2 in {two[0]} are two: resume one of them"
    assert both in says([one[0], two[0]])
    assert both in says(one + two)
    assert "is member 1 of 2" in says([one[1], two[1]])
    assert "is member 1 of another store" in says([*one, two[1]])


def test_a_copy_of_a_drive(tmp_path: Path) -> None:
    where = directories(tmp_path)
    make(where)
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "member.json").write_bytes(Path(where[1], "member.json").read_bytes())
    text = says([*where, str(copy)])
    assert "both say that they are member 1" in text
    assert "leave it out" in text


def test_a_manifest_that_was_moved(tmp_path: Path) -> None:
    where = directories(tmp_path)
    make(where)
    os.rename(Path(where[0], "manifest.json"), Path(where[1], "manifest.json"))
    assert f"the manifest of the store lies in {where[1]}, but {where[0]} says that it is member 0" in says(where)


def test_a_store_of_one_directory_is_not_striped(tmp_path: Path) -> None:
    where = directories(tmp_path, 2)
    manifests.save(where[0], Manifest("data.bin", {"s": Snapshot("s", 1, {}, {})}))
    text = says(where)
    assert f"the store in {where[0]} lies in that directory alone, not in 2" in text
    assert members.arrange(where[:1])[0] == where[:1]
    assert json.loads(Path(where[0], "manifest.json").read_bytes())["format"] == 1  # older versions read it
    make(where, committed=False)
    assert "holds a manifest of one directory" in says(where[:1])


def test_without_a_snapshot_nothing_is_at_stake(tmp_path: Path) -> None:
    """What a crash leaves of a store that was never committed: member 0, and some of those behind it."""
    where = directories(tmp_path)
    layout = layout_for(3)
    for count in range(4):
        for directory in where:
            members.remove(directory)
        for index, directory in enumerate(where[:count]):
            Path(directory, "member.json").write_text(members.Member(index, layout, tuple(where)).to_text())
        for order in permutations(where):
            assert members.arrange(list(order)) == (list(order), None)


def edit(path: Path, **values: object) -> None:
    value = json.loads(path.read_bytes())
    value.update(values)
    path.write_text(json.dumps(value))


@pytest.mark.parametrize(
    "values",
    [
        {"index": 3},
        {"index": -1},
        {"index": "1"},
        {"count": 2},
        {"weights": [1, 2]},
        {"weights": [1, 2, 0]},
        {"stripe": 0},
        {"stripe": 1000},
        {"files": ["data.bin"] * 2},
        {"files": ["data.bin", "../x", "data.bin"]},
        {"store": ""},
        {"store": None},
        {"directories": []},
        {"format": "1"},
    ],
)
def test_a_damaged_identity(tmp_path: Path, values: dict[str, object]) -> None:
    where = directories(tmp_path)
    make(where)
    path = Path(where[1], "member.json")
    edit(path, **values)
    assert str(path) in says(where, StoreCorruptError)
    assert path.exists()


def test_an_identity_that_is_cut_or_newer(tmp_path: Path) -> None:
    where = directories(tmp_path)
    make(where)
    path = Path(where[1], "member.json")
    text = path.read_bytes()
    for length in range(len(text) - 2):
        path.write_bytes(text[:length])
        assert "damaged or not tierzero's" in says(where, StoreCorruptError)
    path.write_bytes(text)
    edit(path, format=2)
    assert "reads up to format 1" in says(where, StoreCorruptError)
    path.write_bytes(text)
    edit(path, weights=[1, 2, 9])
    assert "names other weights or files than the manifest" in says(where, StoreCorruptError)


@pytest.mark.parametrize(
    ("key", "value"), [("stripe", 100), ("weights", []), ("files", ["a"]), ("store", 7), ("weights", [1, 1, True, 1])]
)
def test_a_manifest_with_a_layout_that_cannot_be(tmp_path: Path, key: str, value: object) -> None:
    import hashlib

    where = directories(tmp_path)
    make(where)
    path = Path(where[0], "manifest.json")
    payload = json.loads(path.read_bytes())["payload"]
    payload["layout"][key] = value
    text = json.dumps(payload, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    path.write_text(f'{{"format":2,"sha256":"{digest}","payload":{text}}}')
    assert "something odd" in says(where, StoreCorruptError)


def test_overwriting_gives_up_what_was_there_and_nothing_else(tmp_path: Path) -> None:
    one, two = directories(tmp_path, 2, "a"), directories(tmp_path, 2, "b")
    make(one)
    make(two)
    for directory in one + two:
        Path(directory, "data.bin").write_bytes(b"x")
        Path(directory, "mine").write_bytes(b"x")
    mixed = [two[1], one[0]]
    assert survey(mixed, overwrite=True) == (mixed, None)
    reclaim_directories(mixed, "data.bin", crashed=(), overwrite=True)
    for directory in mixed:
        assert os.listdir(directory) == ["mine"]
    assert set(os.listdir(one[1])) == {"data.bin", "member.json", "mine"}


def test_files_of_others_are_never_deleted(tmp_path: Path) -> None:
    where = directories(tmp_path, 2)
    Path(where[1], "member.json").write_text('{"name": "somebody"}')
    for overwrite in (False, True):
        with pytest.raises(StoreCorruptError, match=r"member\.json"):
            survey(where, overwrite)
    os.unlink(Path(where[1], "member.json"))
    Path(where[1], "data.bin").write_bytes(b"x")
    for overwrite in (False, True):
        with pytest.raises(StoreError, match="no store wrote it"):
            reclaim_directories(where, "data.bin", crashed=where[:1], overwrite=overwrite)
    assert Path(where[1], "data.bin").exists()
    reclaim_directories(where, "data.bin", crashed=where[1:], overwrite=False)
    assert not Path(where[1], "data.bin").exists()


def test_directories_that_are_not_apart(tmp_path: Path) -> None:
    where = directories(tmp_path, 2)
    check_apart(where)
    check_apart([tmp_path / "ab", tmp_path / "a"])
    link = tmp_path / "link"
    link.symlink_to(where[0])
    for pair in ([where[0], where[0]], [where[0], f"{where[0]}/../drive0/"], [link, where[0]]):
        with pytest.raises(StoreError, match=f"{where[0]} is given twice"):
            check_apart(pair)
    for pair in ([where[0], f"{where[0]}/in/side"], [f"{link}/inside", where[0]], [tmp_path, where[1]]):
        with pytest.raises(StoreError, match="lies inside"):
            check_apart(pair)


def test_one_directory_under_two_names(tmp_path: Path) -> None:
    one, two = directories(tmp_path, 2)
    try:
        mounted = subprocess.run(["mount", "--bind", one, two], capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("no mount command here")
    if mounted.returncode:
        pytest.skip("mounting is not permitted here")
    try:
        with pytest.raises(StoreError, match="given twice"):
            check_apart([one, two])
    finally:
        subprocess.run(["umount", "-l", two], check=True)
