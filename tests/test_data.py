"""Text as windows: lazily read, the same for the same (seed, step, micro-batch)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tierzero.cli.data import ByteCorpus, Sampler, TokenCorpus, open_text, open_tokens, standard_library
from tierzero.errors import ConfigError


def write_files(folder: Path, contents: list[bytes]) -> list[Path]:
    paths = [folder / f"{index:03d}.txt" for index in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    return paths


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(max_size=9), max_size=8), st.data())
def test_windows_are_slices_of_the_files_in_a_row(
    tmp_path_factory: pytest.TempPathFactory, contents: list[bytes], data: st.DataObject
) -> None:
    corpus = ByteCorpus(write_files(tmp_path_factory.mktemp("text"), contents), "text")
    whole = b"".join(contents)
    assert len(corpus) == len(whole)
    if whole:
        start = data.draw(st.integers(0, len(whole) - 1))
        length = data.draw(st.integers(0, len(whole) - start))
        assert corpus.window(start, length).tobytes() == whole[start : start + length]


def test_directories_are_walked_in_order_without_hidden_and_binary_files(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    for name, content in {
        "b/1.txt": b"one",
        "a.md": b"two",
        ".hidden": b"no",
        ".git/x": b"no",
        "c.bin": b"\0no",
    }.items():
        (tmp_path / name).write_bytes(content)
    assert [path.name for path in open_text(tmp_path).files] == ["a.md", "1.txt"]
    assert open_text(tmp_path / "c.bin").files == [tmp_path / "c.bin"]  # named by the user: taken as it is


def test_standard_library_is_there_on_every_machine() -> None:
    files = standard_library()
    assert len(files) > 100
    assert files == sorted(files) == standard_library()
    assert not any("site-packages" in path.parts or "test" in path.parts for path in files)
    assert len(open_text(None)) > 1_000_000


def test_batches_depend_on_seed_step_and_micro_batch_only(tmp_path: Path) -> None:
    """S14: resuming needs no position in the data."""
    corpus = ByteCorpus(write_files(tmp_path, [bytes(range(256)) * 20]), "text")
    first, again = Sampler(corpus, 16, 4, seed=3), Sampler(corpus, 16, 4, seed=3)
    expected = {(step, micro): first(step, micro) for step in range(5) for micro in range(3)}
    for step, micro in reversed(expected):
        assert torch.equal(again(step, micro), expected[step, micro])
    assert len({batch.numpy().tobytes() for batch in expected.values()}) == len(expected)
    assert not torch.equal(Sampler(corpus, 16, 4, seed=4)(0), expected[0, 0])


def test_batches_are_windows_and_their_draw_never_changes(tmp_path: Path) -> None:
    corpus = ByteCorpus(write_files(tmp_path, [bytes(range(100))]), "text")
    sampler = Sampler(corpus, 5, 3, seed=0)
    batch = sampler(7)
    assert batch.shape == (3, 6)
    assert batch.dtype == torch.int64
    assert torch.equal(batch - batch[:, :1], torch.arange(6).expand(3, 6))
    assert [sampler.start(7, 0, row) for row in range(3)] == [71, 67, 8]


def test_the_whole_text_can_be_drawn_and_too_little_text_is_said(tmp_path: Path) -> None:
    corpus = ByteCorpus(write_files(tmp_path, [b"abcd"]), "four.txt")
    assert Sampler(corpus, 3, 1, seed=0)(0).tolist() == [list(b"abcd")]
    with pytest.raises(ConfigError, match=r"four.txt has 4 tokens, fewer than data.sequence \+ 1 = 5"):
        Sampler(corpus, 4, 1, seed=0)


def test_a_file_that_shrinks_is_said(tmp_path: Path) -> None:
    files = write_files(tmp_path, [b"abcdefgh"])
    corpus = ByteCorpus(files, "text")
    files[0].write_bytes(b"ab")
    with pytest.raises(OSError, match="became shorter"):
        corpus.window(0, 8)


def test_fingerprints_follow_names_and_sizes(tmp_path: Path) -> None:
    files = write_files(tmp_path, [b"abc", b"de"])
    before = ByteCorpus(files, "text").fingerprint()
    assert ByteCorpus(files, "text").fingerprint() == before
    files[1].write_bytes(b"def")
    assert ByteCorpus(files, "text").fingerprint() != before


def test_token_files(tmp_path: Path) -> None:
    path = tmp_path / "ids.npy"
    np.save(path, np.arange(50, dtype=np.uint16))
    corpus = open_tokens(path, vocab=50)
    assert isinstance(corpus.tokens, np.memmap)
    assert corpus.window(3, 4).tolist() == [3, 4, 5, 6]
    assert corpus.fingerprint() == TokenCorpus(np.arange(50, dtype=np.uint16), "", 50).fingerprint()
    with pytest.raises(ConfigError, match=r"outside 0..48: set model.vocab higher"):
        open_tokens(path, vocab=49)


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (np.zeros((2, 3), dtype=np.int64), "1-D array of integers"),
        (np.zeros(4), "1-D array of integers"),
        (None, "readable .npy"),
    ],
)
def test_bad_token_files(tmp_path: Path, array: np.ndarray | None, said: str) -> None:
    path = tmp_path / "ids.npy"
    if array is None:
        path.write_bytes(b"something else")
    else:
        np.save(path, array)
    with pytest.raises(ConfigError, match=said):
        open_tokens(path, vocab=10)


def test_missing_text() -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        open_text(Path("/no/such/text"))
