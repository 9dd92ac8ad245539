"""One drive, or several as one: every engine over a grid of blocks and depths, and how long the winner's rates hold."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tierzero.bench import fio
from tierzero.bench.scratch import Scratch, native
from tierzero.bench.stream import KINDS, LEAST_REQUEST, Buffers, Sample, Setting, rates, request_for, run

MIB = 1 << 20
# block, depth: the engine's default first, and the state chunks of 256 Ki elements x 12 bytes
GRID = [(4, 32), (8, 16), (4, 8), (8, 32), (4, 16), (2, 32), (3, 16), (1, 32)]
_FINALISTS = 4
_NEAR = 0.98  # settings this close to the best are equal: the one that costs less CPU wins
# of the time: the first writing of the file, the grid, the finals, the comparison, and the long runs of each kind
_PLAIN = {"fill": 0.10, "grid": 0.28, "finals": 0.26, "fio": 0.0, "write": 0.20, "mixed": 0.08, "read": 0.06}
_WITH_FIO = {"fill": 0.08, "grid": 0.18, "finals": 0.14, "fio": 0.36, "write": 0.14, "mixed": 0.06, "read": 0.04}
_FIO_START = 0.4  # seconds a run of fio costs besides
LINE = 60  # points of the rate over time


@dataclass(frozen=True)
class Long:
    """A run as long as the time allows. burst: bytes/s of its best second; sustained: of its last third."""

    sample: Sample
    burst: float
    sustained: float
    line: list[float]


@dataclass
class Found:
    """What was measured on one target."""

    settings: list[Setting]
    size: int = 0
    direct: bool = True
    alignment: int = 0
    huge_pages: float = 0.0
    samples: dict[tuple[Setting, str], list[Sample]] = field(default_factory=dict)
    finalists: list[Setting] = field(default_factory=list)
    winner: Setting | None = None
    long: dict[str, Long] = field(default_factory=dict)
    against: dict[str, list[tuple[Sample, fio.Result]]] = field(default_factory=dict)
    fio_job: fio.Job | None = None
    fill: Sample | None = None

    def rate(self, setting: Setting, kind: str) -> float:
        """Bytes/s, the median; 0 where it was not measured."""
        return statistics.median([s.rate for s in self.samples.get((setting, kind), [])] or [0.0])

    def cpu(self, setting: Setting, kind: str) -> float:
        """CPU seconds per 10^9 bytes, the median."""
        return statistics.median([s.cpu_per_gb for s in self.samples.get((setting, kind), [])] or [0.0])

    def score(self, setting: Setting) -> float:
        """Of the best rate of each kind, the geometric mean: 1 for a setting that is best in all."""
        product = 1.0
        for kind in KINDS:
            best = max(self.rate(other, kind) for other in self.settings)
            product *= self.rate(setting, kind) / best if best else 0.0
        return float(product ** (1 / len(KINDS)))

    def ranking(self) -> list[Setting]:
        """Best first, among equals the cheaper one; those of the finals before those that were measured once."""
        order = sorted(self.settings, key=lambda s: (s in self.finalists, self.score(s)), reverse=True)
        final = [s for s in order if s in self.finalists] or order
        near = [s for s in final if self.score(s) >= _NEAR * self.score(final[0])]
        near.sort(key=lambda s: sum(self.cpu(s, kind) for kind in KINDS))
        return near + [s for s in order if s not in near]

    def totals(self) -> tuple[int, int]:
        """(read, written) bytes, fio's included, half of the mixed ones each."""
        every = [s for many in self.samples.values() for s in many] + [run.sample for run in self.long.values()]
        every += [own for pairs in self.against.values() for own, _ in pairs] + ([self.fill] if self.fill else [])
        read, written = sum(s.read for s in every), sum(s.written for s in every)
        for kind, pairs in self.against.items():
            other = sum(result.nbytes for _, result in pairs)
            read += {"read": other, "write": 0, "mixed": other // 2}[kind]
            written += {"read": 0, "write": other, "mixed": other // 2}[kind]
        return read, written


def engines() -> dict[str, str]:
    """Every native engine, and why it does not work here ("" where it does)."""
    return {"uring": str(native().probe_uring()), "pool": ""}


def settings_of(working: Sequence[str]) -> list[Setting]:
    """What is tried, the engines' defaults first."""
    return [Setting(engine, block * MIB, depth) for block, depth in GRID for engine in working]


class Search:
    """Measures one scratch file in about `seconds`. `progress` is called with a phase's name and the share done."""

    def __init__(
        self,
        scratch: Scratch,
        settings: Sequence[Setting],
        seconds: float,
        *,
        weights: Sequence[int] = (1,),
        compare: bool = False,
        progress: Callable[[str, float], None],
    ) -> None:
        self.scratch = scratch
        self.seconds = seconds
        self.drives = len(weights)
        self.member = min(weights) / sum(weights)  # of the bytes, what the least of the members holds
        self.compare = compare
        self.shares = _WITH_FIO if compare else _PLAIN
        self.found = Found(list(settings))
        self.request = LEAST_REQUEST
        self._progress = progress
        self._start = 0.0
        self._until = 0.0

    def run(self) -> Found:
        """Everything, stage by stage; a drive too slow for a stage has less of it measured."""
        found, scratch = self.found, self.scratch
        buffers = Buffers(found.settings, self.drives)
        self._start = time.perf_counter()
        self._stage("fill")
        # however slow the drive, the first requests are written: more than the least size
        patience = max(self._left(), 0.5)
        fill = self._phase(found.settings[0], buffers, "write", patience, nbytes=scratch.size, what="first writing")
        found.fill, found.size = fill, fill.written // (2 * MIB) * (2 * MIB)
        self.request = request_for(fill.rate)
        found.direct, found.alignment = bool(scratch.file.direct), int(scratch.file.alignment)
        found.huge_pages = buffers.huge_share
        self._stage("grid")
        self._grid(buffers)
        self._stage("finals")
        self._finals(buffers)
        found.winner = found.ranking()[0]
        if self.compare:
            self._stage("fio")
            self._against_fio(found.winner, buffers)
        for kind in ("write", "mixed", "read"):
            self._stage(kind)
            sample = self._phase(found.winner, buffers, kind, max(self._left(), 0.05), what=f"long {kind}")
            found.long[kind] = _long(sample)
        return found

    def _stage(self, name: str) -> None:
        """Time that an earlier stage left, or took too much of, is this one's."""
        self._until = (self._until or self._start) + self.shares[name] * self.seconds

    def _left(self) -> float:
        return self._until - time.perf_counter()

    def _phase(
        self,
        setting: Setting,
        buffers: Buffers,
        kind: str,
        seconds: float,
        *,
        what: str,
        nbytes: int | None = None,
    ) -> Sample:
        begun = time.perf_counter() - self._start
        self._progress(what, min(1.0, begun / self.seconds))
        shown = 0.0

        def tick(passed: float) -> None:
            nonlocal shown
            # seldom: drawing costs CPU time, which is measured
            if passed - shown > 0.5:
                shown = passed
                self._progress(what, min(1.0, (begun + passed) / self.seconds))

        return run(
            setting,
            self.scratch,
            buffers,
            kind,
            seconds=seconds,
            nbytes=nbytes,
            size=self.found.size or None,
            request=self.request,
            drives=self.drives,
            tick=tick,
        )

    def _measure(self, setting: Setting, buffers: Buffers, seconds: float) -> None:
        for kind in KINDS:
            what = f"{setting.engine} {setting.block // MIB} MiB x {setting.depth} {kind}"
            sample = self._phase(setting, buffers, kind, seconds, what=what)
            self.found.samples.setdefault((setting, kind), []).append(sample)

    def _grid(self, buffers: Buffers) -> None:
        found = self.found
        each = max(self._left() / (len(KINDS) * len(found.settings)), 0.02)
        measured = 0
        for setting in found.settings:
            if measured and self._left() < each:
                break  # a slow drive: what is left out stands at the end of the grid
            self._measure(setting, buffers, each)
            measured += 1
        found.settings = found.settings[:measured]

    def _finals(self, buffers: Buffers) -> None:
        """The best of the grid again, in turns, so that a drive's moods hit all of them."""
        best = sorted(self.found.settings, key=self.found.score, reverse=True)[:_FINALISTS]
        self.found.finalists = best
        each = max(self._left() / (3 * len(KINDS) * len(best)), 0.02)
        while len(best) > 1 and self._left() > each * len(KINDS):
            for setting in best:
                if self._left() > each:
                    self._measure(setting, buffers, each)

    def _against_fio(self, winner: Setting, buffers: Buffers) -> None:
        found = self.found
        engine = "io_uring" if engines()["uring"] == "" else "libaio"
        found.fio_job = job = fio.Job(engine, winner.block, winner.depth, direct=found.direct)
        each = max((self._left() / (3 * len(KINDS)) - _FIO_START) / 2, 0.05)
        rounds = 0
        while rounds < 1 or (rounds < 5 and self._left() > len(KINDS) * (2 * each + _FIO_START)):
            for kind in KINDS:
                own = self._phase(winner, buffers, kind, each, what=f"round {rounds + 1} against fio, {kind}")
                part = int(found.size * self.member) // (2 * MIB) * (2 * MIB)
                if not found.direct:
                    self.scratch.file.sync()
                    self.scratch.forget_cached()
                other = fio.run(job, kind, self.scratch.fd_paths, part, each)
                found.against.setdefault(kind, []).append((own, other))
            rounds += 1


def _long(sample: Sample) -> Long:
    second = rates(sample.timeline, max(1, round(sample.seconds)))
    thirds = rates(sample.timeline, 3)
    return Long(sample, max(second), thirds[-1], rates(sample.timeline, LINE))


def summary(found: Found, kind: str) -> dict[str, Any]:
    """One kind of transfer at the winning setting, as `--json` prints it."""
    winner = found.winner
    assert winner is not None
    row: dict[str, Any] = {
        "GBps": found.rate(winner, kind) / 1e9,
        "engine": winner.engine,
        "block": winner.block,
        "depth": winner.depth,
        "cpu_s_per_GB": found.cpu(winner, kind),
        "burst_GBps": found.long[kind].burst / 1e9,
        "sustained_GBps": found.long[kind].sustained / 1e9,
        "sustained_seconds": found.long[kind].sample.seconds,
        "samples": [s.rate / 1e9 for s in found.samples[winner, kind]],
    }
    if kind in found.against:
        own = statistics.median(sample.rate for sample, _ in found.against[kind])
        other = statistics.median(result.rate for _, result in found.against[kind])
        row |= {
            "fio_GBps": other / 1e9,
            "ratio": own / other,
            "fio_cpu_s_per_GB": statistics.median(result.cpu_per_gb for _, result in found.against[kind]),
            "fio_samples": [result.rate / 1e9 for _, result in found.against[kind]],
            "compared_samples": [sample.rate / 1e9 for sample, _ in found.against[kind]],
        }
    return row
