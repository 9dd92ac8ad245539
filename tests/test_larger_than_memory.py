"""A model whose parameters alone are four times the memory that its process may use.

The limit is that of a control group that the test makes (version 1 or 2); where none can be made, RLIMIT_DATA stands in
for it, which counts what is allocated and not what is resident, so that limit is higher and the model larger.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import larger_than_memory as script
import pytest
import torch
from oracle import Plain, same
from safetensors.torch import load_file

from tierzero.hardware.cgroup import groups

MIB = 1 << 20
GROUP_LIMIT = 512 * MIB
DATA_LIMIT = 768 * MIB
NAMES = (("memory.limit_in_bytes", "memory.max_usage_in_bytes"), ("memory.max", "memory.peak"))


@contextmanager
def limited(limit: int) -> Iterator[tuple[Path, Path] | None]:
    """A control group with `limit` bytes of memory, and its file that tells the peak; None if there can be none."""
    for parent in groups("memory"):
        group = parent / f"tierzero-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            for bound, peak in NAMES:
                with suppress(OSError):
                    (group / bound).write_text(str(limit))
                    for swap in ("memory.memsw.limit_in_bytes", "memory.swap.max"):
                        with suppress(OSError):
                            (group / swap).write_text("0" if swap == "memory.swap.max" else str(limit))
                    yield group, group / peak
                    return
        finally:
            group.rmdir()
    yield None


@pytest.mark.slow
def test_four_times_the_limit(tmp_path: Path) -> None:
    """Built on meta, loaded, trained, saved, resumed, exported under the limit; outside it the export loads
    strictly into the plain model, and is what the plain loop gives, to the bit.
    """
    with limited(GROUP_LIMIT) as group:
        limit = DATA_LIMIT if group is None else GROUP_LIMIT
        layers = script.layers_for(limit, 4.0)
        script.write_base(tmp_path / "base", layers)
        how = ["--rlimit"] if group is None else ["--group", str(group[0])]
        command = [sys.executable, script.__file__, str(tmp_path), str(limit), *how]
        done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        found: dict[str, Any] = json.loads(done.stdout)
        assert found["parameter_bytes"] >= 4 * limit
        if group is not None and group[1].exists():
            assert int(group[1].read_text()) <= limit
    with torch.device("meta"):  # the values that it is born with are not used
        plain = script.build(layers)
    state: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "base").glob("*.safetensors"):
        state |= load_file(file)
    plain.load_state_dict(state, strict=True, assign=True)
    oracle = Plain(plain, **script.HYPER, betas=(0.9, 0.999))
    for step, expected in enumerate(found["losses"]):
        loss = script.loss_of(plain, step)
        loss.backward()
        assert float(loss.detach()) == expected
        oracle.step()
        oracle.zero_grad()
    out: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        out |= load_file(file)
    fresh = script.build(1).state_dict().keys()
    assert {name.replace("layers.0", "layers.1") for name in fresh} <= out.keys()
    assert out.keys() == state.keys()
    assert all(same(out[name], value) for name, value in plain.state_dict().items())
    plain.load_state_dict(out, strict=True)
