"""States that do not fit, saves at the wrong moment and several at once."""

from __future__ import annotations

import errno
import json
import os
import signal
import threading
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import Net
from oracle import Tiered, batches, loss_of, make, same, tiered, tiers_for
from saves import files_of, saved_once, step, weights

import tierzero as tz
from tierzero.checkpoint.place import Place, checkpoints_in, prune

pytestmark = pytest.mark.usefixtures("one_thread", "no_leaks")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Tiered]:
    with saved_once(tmp_path) as found:
        yield weakref.proxy(found)  # pytest keeps what it gives longer than no_leaks looks


class Average:
    """Keeps a tensor, and gives copies of it away."""

    def __init__(self, value: float) -> None:
        self.shadow = torch.full((3,), value)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"shadow": self.shadow.clone()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.shadow = state["shadow"]


def test_states_of_every_kind_come_back(run: Tiered, tmp_path: Path) -> None:
    """Objects that give copies, dicts and lists; one that cannot take anything is refused before anything changes."""
    states = {"average": Average(2.0), "dict": {"a": [1, 2]}, "list": [3, torch.ones(2)], "number": 7}
    two = tmp_path / "saves" / "two"
    tz.save(run.model, two, run.optimizer, states=states, wait=True)
    average, filled, items = Average(0.0), {"b": 1}, [0]
    tz.load(run.model, two, run.optimizer, states={"average": average, "dict": filled, "list": items})
    assert torch.equal(average.shadow, torch.full((3,), 2.0))
    assert filled == {"a": [1, 2]}
    assert items[0] == 3
    step(run, batches(2, seed=3))
    before = weights(run.model)
    for states, kind, match in (
        ({"number": 7}, TypeError, "'number' cannot be put into a int, which has no load_state_dict"),
        ({"list": {}}, tz.TierzeroError, "'list' is a list there, not a dict"),
    ):
        with pytest.raises(kind, match=match):
            tz.load(run.model, two, run.optimizer, states=states)
    for other in (torch.nn.Linear(2, 3), torch.nn.Linear(2, 2, bias=False), torch.nn.Bilinear(2, 2, 2)):
        with pytest.raises(tz.TierzeroError, match="the state 'module' has"):
            tz.load(run.model, tmp_path / "saves" / "one", run.optimizer, states={"module": other})
    assert all(same(one, before[name]) for name, one in weights(run.model).items())
    with pytest.raises(tz.TierzeroError, match="the Linear does not take the state 'number'"):
        tz.load(run.model, two, run.optimizer, states={"number": torch.nn.Linear(2, 2)})


def test_values_that_cannot_be_saved(run: Tiered, tmp_path: Path) -> None:
    """Refused at once; the meta values are those of the call, whatever becomes of them."""
    two = tmp_path / "saves" / "two"
    for options, kind, match in (
        ({"keep": 1.5}, TypeError, "keep is a number"),
        ({"keep": "3"}, TypeError, "keep is a number"),
        ({"keep": -1}, ValueError, "keep must be 1 or more"),
        ({"limit": -1}, ValueError, "limit is bytes per second"),
        ({"limit": 10}, ValueError, "limit is bytes per second"),
        ({"limit": float("nan")}, ValueError, "limit is bytes per second"),
        ({"states": {1: Average(1.0)}}, TypeError, "states are objects by name"),
        ({"states": [Average(1.0)]}, TypeError, "states are objects by name"),
        ({"meta": [1]}, TypeError, "the meta values of a checkpoint are a dict"),
        ({"meta": {"a": {1, 2}}}, TypeError, "must be JSON"),
    ):
        with pytest.raises(kind, match=match):
            tz.save(run.model, two, run.optimizer, **options)
    assert files_of(tmp_path / "saves") == ["one"]
    meta: dict[str, Any] = {"seen": [1], "inner": {}}
    saving = tz.save(run.model, two, run.optimizer, meta=meta, keep=10**9, limit=1 << 20)
    meta["seen"].append(2)
    meta["inner"].update({str(number): set() for number in range(100)})
    saving.result()
    assert tz.load(run.model, two) == {"seen": [1], "inner": {}}
    with pytest.raises(OSError, match="the name is too long") as caught:
        tz.save(run.model, tmp_path / "saves" / ("n" * 240), run.optimizer)
    assert caught.value.errno == errno.ENAMETOOLONG
    for name in ("ünï ✓\n", "n" * 220, "..x", ".hidden"):
        tz.save(run.model, tmp_path / "saves" / name, run.optimizer, wait=True)
        tz.load(run.model, tmp_path / "saves" / name, run.optimizer)


def test_a_parameter_that_came_late(run: Tiered, tmp_path: Path) -> None:
    """It would not be in the checkpoint: named."""
    run.model.extra = torch.nn.Linear(2, 2)
    with pytest.raises(tz.TierzeroError, match=r"extra\.weight.* came into the Tied after offload"):
        tz.save(run.model, tmp_path / "saves" / "two", run.optimizer)
    del run.model.extra
    assert files_of(tmp_path / "saves") == ["one"]


def test_at_any_moment(tmp_path: Path) -> None:
    """Inside forward, backward and `unsharded` it is refused; what it is called in goes on as if it had not been."""
    losses: dict[bool, list[torch.Tensor]] = {}
    for disturbed in (False, True):
        model = make(Net)
        with tiered(model, tiers_for(model, "nvme", tmp_path / f"store{disturbed}", spare=1 << 20)) as run:
            said: list[str] = []

            def attempt(*_: Any, run: Any = run, said: list[str] = said, disturbed: bool = disturbed) -> None:
                for action in (tz.save, tz.load) if disturbed else ():
                    with pytest.raises(tz.TierzeroError) as caught:
                        action(run.model, tmp_path / ("new" if action is tz.save else "good"), run.optimizer)
                    said.append(str(caught.value))

            if disturbed:
                tz.save(model, tmp_path / "good", run.optimizer, wait=True)
            handles = [model.layers[1].register_forward_hook(attempt)]
            handles += [model.layers[0].register_full_backward_hook(attempt)]
            losses[disturbed] = step(run, batches(2))
            with tz.unsharded(model):
                attempt()
            for handle in handles:
                handle.remove()
            with tz.no_sync(model):
                loss_of(model, next(batches(1))).backward()
                if disturbed:
                    tz.save(model, tmp_path / "inside", run.optimizer, wait=True)
            losses[disturbed] += step(run, batches(4))
            losses[disturbed] += list(weights(model).values())
            assert [one for one in said if "outside" not in one] == []
            assert len(said) == (10 if disturbed else 0), said
            del attempt, run
    assert all(same(one, other) for one, other in zip(losses[True], losses[False], strict=True))
    assert files_of(tmp_path) == ["good", "inside", "storeFalse", "storeTrue"]


def test_an_interrupt_and_a_fork_while_saving(run: Tiered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends the wait and not the save; a child ends without touching it."""
    two, go_on, publish = tmp_path / "saves" / "two", threading.Event(), Place.publish

    def slowly(self: Place) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        go_on.wait(60)
        publish(self)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with monkeypatch.context() as slow:
            slow.setattr(Place, "publish", slowly)
            with pytest.raises(KeyboardInterrupt):
                tz.save(run.model, two, run.optimizer, wait=True)
        child = os.fork()
        if not child:
            with suppress(tz.TierzeroError):
                tz.save(run.model, tmp_path / "child", run.optimizer, wait=True)
            os._exit(int((tmp_path / "child").exists() or not any(".two." in one for one in files_of(two.parent))))
        assert os.waitpid(child, 0)[1] == 0
    finally:
        go_on.set()
        signal.signal(signal.SIGINT, before)
    step(run, batches(2))
    tz.save(run.model, tmp_path / "saves" / "three", run.optimizer, wait=True)
    assert files_of(tmp_path / "saves") == ["one", "three", "two"]
    tz.load(run.model, two, run.optimizer)


def test_many_processes_in_one_place(tmp_path: Path) -> None:
    """Saves, sweeps and deletions of several at once: no error, nothing left, the last ones there."""
    failed: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            for number in range(30):
                place = Place(tmp_path / f"{rank}-{number}", overwrite=False)
                head = {"format": "tierzero checkpoint", "sequence": number, "run": "a"}
                (place.path / "tierzero.json").write_text(json.dumps(head))
                if number % 3:
                    place.publish()
                    prune(tmp_path, 3, "a")
                place.close()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert not [name for name in files_of(tmp_path) if name.startswith(".")]
    assert 1 <= len(checkpoints_in(tmp_path)) <= 3


def test_one_name_for_two_saves(tmp_path: Path) -> None:
    """The second one is refused when the first has its name, and leaves nothing."""
    target, runs = tmp_path / "saves" / "one", []
    for seed in (1, 2):
        model = make(Net, seed=seed)
        runs.append(Tiered(model, tiers_for(model, "host", tmp_path)))
    savings = [tz.save(run.model, target, run.optimizer, limit=1 << 20) for run in runs]
    errors = [error for error in (saving.exception() for saving in savings) if error is not None]
    assert len(errors) == 1
    assert "there is a checkpoint in" in str(errors[0])
    assert files_of(tmp_path / "saves") == ["one"]
    for run in runs:
        tz.load(run.model, target, run.optimizer)
        tz.close(run.model)


def test_optimizers_of_others(run: Tiered, tmp_path: Path) -> None:
    """One of another model would leave this one's states out without a word; one given twice is refused too."""
    model = make(Net)
    with tiered(model, tiers_for(model, "host", tmp_path)) as other:
        for action in (tz.save, tz.load):
            path = tmp_path / "saves" / ("two" if action is tz.save else "one")
            with pytest.raises(tz.TierzeroError, match=r"steps embed\.weight of another offloaded model"):
                action(run.model, path, [run.optimizer, other.optimizer])
            with pytest.raises(tz.TierzeroError, match="an optimizer is given twice"):
                action(run.model, path, [run.optimizer, run.optimizer])
        del action
    assert files_of(tmp_path / "saves") == ["one"]


def test_another_generator_of_numpy(run: Tiered, tmp_path: Path) -> None:
    """A process that has replaced numpy's global generator can save, and its generator stays; the usual one comes
    back.
    """
    saves = tmp_path / "saves"
    before = np.random.get_state()
    try:
        tz.save(run.model, saves / "usual", run.optimizer, wait=True)
        expected = np.random.standard_normal()
        np.random.set_bit_generator(np.random.PCG64(1))
        tz.save(run.model, saves / "other", run.optimizer, wait=True)
        tz.load(run.model, saves / "other", run.optimizer)
        assert np.random.get_state(legacy=False)["bit_generator"] == "PCG64"
        tz.load(run.model, saves / "usual", run.optimizer)
        assert np.random.standard_normal() == expected
    finally:
        np.random.set_bit_generator(np.random.MT19937())
        np.random.set_state(before)
