"""`tierzero doctor`: the findings and the self-test as tables, or as one JSON object."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tierzero.doctor.finding import Finding
from tierzero.doctor.report import Report, examine
from tierzero.doctor.selftest import BACKENDS, Trial, Verdict, selftest
from tierzero.errors import describe

_STYLES = {"ok": "green", "note": "cyan", "warn": "yellow", "fail": "bold red"}
_MB = 1e6


def run(paths: Sequence[Path], tested_path: Path | None, *, as_json: bool) -> int:
    """Print everything; returns the exit code."""
    asked = [*paths, *([tested_path] if tested_path is not None else [])] or [Path()]
    waiting = Console(stderr=True)  # what is being done, only on a terminal
    with _terminable(), waiting.status("looking at this machine") as status:
        report = examine(asked)
        if not as_json:
            status.stop()
            console = Console(soft_wrap=False)
            print_report(console, report)
            status.start()
        tested = None
        if tested_path is not None:
            try:
                _check_answers(report, asked, tested_path)
                tested = selftest(tested_path, heard=lambda backend: status.update(Text(f"self-test: {backend}")))
            except OSError as error:  # what was found out until here is still to be printed
                tested = Verdict(str(tested_path), (Trial("beginning", False, describe(error)),), 0.0)
    ok = not report.failed and (tested is None or tested.ok)
    if as_json:
        everything = report.as_dict()
        everything["selftest"] = None if tested is None else tested.as_dict()
        everything["ok"] = ok
        print(json.dumps(everything, indent=2))
    else:
        if tested is not None:
            print_tested(console, tested)
        print_summary(console, report, tested)
    return 0 if ok else 1


def _check_answers(report: Report, asked: Sequence[Path], path: Path) -> None:
    """OSError where looking at `path`, one of the paths `asked` about, came to no end: nor would the self-test."""
    where = report.paths[list(dict.fromkeys(map(os.fspath, asked))).index(os.fspath(path))]
    for finding in report.findings:
        if finding.path == where and finding.facts.get("silent"):
            raise OSError(errno.ETIMEDOUT, finding.value, where)


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind as Ctrl-C does, so that nothing stays behind."""

    def stop(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = {}
    with suppress(ValueError):  # not in the main thread: whoever called decides
        for number in (signal.SIGTERM, signal.SIGHUP):
            before[number] = signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def print_report(console: Console, report: Report) -> None:
    """Versions, then a table for the machine and one for each path."""
    versions = " ".join(f"{name} {version}" for name, version in report.versions.items() if name != "executable")
    console.print(Text(versions))
    console.print(Text(f"{report.versions['executable']} {report.when}"), soft_wrap=True)
    _print_findings(console, "this machine", [finding for finding in report.findings if not finding.path])
    for path in dict.fromkeys(report.paths):
        _print_findings(console, path, [finding for finding in report.findings if finding.path == path])


def _print_findings(console: Console, title: str, findings: Sequence[Finding]) -> None:
    console.print()
    console.print(Text(title, style="bold"), soft_wrap=True)
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(width=4, no_wrap=True)
    table.add_column(width=15, no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        status = Text(finding.status, style=_STYLES[finding.status])
        table.add_row(status, Text(finding.name), Text(finding.value))
        if finding.advice:
            table.add_row("", "", Text(f"> {finding.advice}", style=_STYLES[finding.status]))
    console.print(table)


def print_tested(console: Console, tested: Verdict) -> None:
    """A row for each backend."""
    console.print()
    title = f"self-test of {tested.path}, {tested.seconds:.1f} s"
    console.print(Text(title, style="bold"), soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("", "backend"):
        table.add_column(name, no_wrap=True)
    for name in ("read MB/s", "write MB/s", "verified MB"):
        table.add_column(name, justify="right")
    remarks = []
    for trial in tested.trials:
        rates = [f"{rate / _MB:.0f}" if rate else "-" for rate in (trial.read, trial.write, trial.verified)]
        word, style = _word(trial)
        name = BACKENDS.get(trial.backend, trial.backend)
        table.add_row(Text(word, style=style), name, *rates)
        remarks += [f"{name}: {text}" for text in (trial.error, *trial.notes) if text]
    console.print(table)
    for remark in remarks:
        console.print(Text(f"> {remark}"))


def _word(trial: Trial) -> tuple[str, str]:
    if trial.ok is None:
        return "none", _STYLES["note"]
    if trial.ok:
        return "ok", _STYLES["ok"]
    return ("fail", _STYLES["fail"]) if trial.failed else ("warn", _STYLES["warn"])


def print_summary(console: Console, report: Report, tested: Verdict | None) -> None:
    """The last lines: what prevents training, or that nothing does."""
    bad = [f"{finding.name}: {finding.value}" for finding in report.failed]
    bad += [f"self-test, {trial.backend}: {trial.error}" for trial in (tested.trials if tested else ()) if trial.failed]
    console.print()
    if bad:
        console.print("Training cannot work here:", style=_STYLES["fail"])
        for line in bad:
            console.print(Text(f"  {line}"), soft_wrap=True)
        return
    counts = {status: sum(f.status == status for f in report.findings) for status in ("warn", "note")}
    console.print(Text(f"Training works here. Warnings: {counts['warn']}, notes: {counts['note']}."), soft_wrap=True)
