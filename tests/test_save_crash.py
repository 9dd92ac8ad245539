"""A save that is killed at any moment leaves what was there, and what it leaves itself is cleaned up; fifty saves cost
no memory.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from models import Net
from oracle import batches, make, same, tiered, tiers_for
from saves import files_of, step, weights

import tierzero as tz
from tierzero.checkpoint.place import Place, checkpoints_in, sweep
from tierzero.checkpoint.reader import Reader

pytestmark = pytest.mark.usefixtures("one_thread", "no_leaks")

CHILD = """
import sys
sys.path.insert(0, {tests!r})
import torch
from models import Net
from oracle import HYPER, batches, make
from saves import step
import tierzero as tz
from oracle import tiers_for, Tiered
from pathlib import Path
torch.set_num_threads(1)
model = make(Net)
run = Tiered(model, tiers_for(model, "mixed", Path({folder!r}) / "store"))
data = batches(4000)
for number in range(1, 1000):
    step(run, data)
    tz.save(run.model, Path({folder!r}) / "saves" / f"step-{{number}}", run.optimizer, meta={{"step": number}}, keep=2)
    print(number, flush=True)
"""


def test_killed_at_any_moment(tmp_path: Path) -> None:
    """Whatever is there after a kill -9 is whole, among it the last save that was done; a run goes on from it as the
    plain one, and its next save leaves nothing of the killed one's.
    """
    folder, chosen = tmp_path / "run", random.Random(5)
    saves = folder / "saves"
    code = CHILD.format(tests=str(Path(__file__).parent), folder=str(folder))
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        for _ in range(3):
            child.stdout.readline()
        stopped = []
        for _ in range(6):  # a copy of the directory at a random moment is what a kill there would leave
            time.sleep(chosen.random() * 0.05)
            os.kill(child.pid, signal.SIGSTOP)
            copy = tmp_path / f"copy-{len(stopped)}"
            subprocess.run(["cp", "-a", str(saves), str(copy)], check=True)
            os.kill(child.pid, signal.SIGCONT)
            stopped.append(copy)
        time.sleep(chosen.random() * 0.05)
    finally:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()
    for copy in [*stopped, saves]:
        there = [path for _, path in checkpoints_in(copy)]
        assert there
        for path in there:
            with Reader(path) as reader:
                assert sum(nbytes for _, nbytes in reader.verify()) > 0
                assert path.name == f"step-{reader.index.meta['step']}"
        last = there[-1]
    plain = make(Net, seed=3)
    with tiered(plain, tiers_for(plain, "host", tmp_path / "other")) as run:
        done = tz.load(run.model, last, run.optimizer)["step"]
        data = batches(4000)
        for _ in range(2 * done):
            next(data)
        step(run, data)
        tz.save(run.model, saves / "more", run.optimizer, keep=1, wait=True)
        assert files_of(saves) == ["more"]
        resumed = weights(run.model)
    model = make(Net)
    with tiered(model, tiers_for(model, "host", tmp_path / "whole")) as run:
        data = batches(4000)
        for _ in range(done + 1):
            step(run, data)
        assert all(same(value, resumed[name]) for name, value in weights(run.model).items())


def test_the_end_of_a_script_waits(tmp_path: Path) -> None:
    """A process that ends without asking how its save went has written it."""
    code = CHILD.format(tests=str(Path(__file__).parent), folder=str(tmp_path)).replace("range(1, 1000)", "range(1, 2)")
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
    assert files_of(tmp_path / "saves") == ["step-1"]
    with Reader(tmp_path / "saves" / "step-1") as reader:
        assert len(list(reader.verify())) > 10


def test_only_what_is_ours_is_swept(tmp_path: Path) -> None:
    """Names like ours with something else in them, and directories that are in use, stay."""
    odd = tmp_path / ".one.tierzero-0123456789abcdef"
    odd.mkdir()
    (odd / "file").write_text("x")
    link = tmp_path / ".two.tierzero-0123456789abcdef"
    link.symlink_to(odd)
    left = tmp_path / ".three.tierzero-0123456789abcdef"
    left.mkdir()
    (left / "__0_0.distcp").write_bytes(b"half")
    place = Place(tmp_path / "four", overwrite=False)
    assert not left.exists()
    sweep(tmp_path)
    assert place.path.exists()
    place.close()
    assert files_of(tmp_path) == sorted([odd.name, link.name])
    assert files_of(odd) == ["file"]


def test_fifty_saves(tmp_path: Path) -> None:
    """Resident memory does not grow with the number of saves, nor do threads and open files."""
    model = make(lambda: Net(blocks=6))
    with tiered(model, tiers_for(model, "mixed", tmp_path / "store")) as run:
        step(run, batches(2))
        sizes = []
        for number in range(50):
            tz.save(run.model, tmp_path / "saves" / str(number), run.optimizer, keep=2, wait=True)
            if number in (9, 49):
                sizes.append((_resident(), len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
        assert sizes[1][0] - sizes[0][0] < 4 << 20  # 40 saves of 1 MB each
        assert sizes[1][1] <= sizes[0][1]
        assert sizes[1][2] - sizes[0][2] < 8  # the loop's pool grows up to its size; a thread a save would be 40
        assert files_of(tmp_path / "saves") == ["48", "49"]
    torch.set_num_threads(1)


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
