"""`tierzero train`: from a configuration to a finished run."""

from __future__ import annotations

import gc
import math
import statistics
import time
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from torch import nn

import tierzero as tz
from tierzero.cli import memory
from tierzero.cli.config import Config
from tierzero.cli.files import write_atomically, write_json
from tierzero.cli.origin import Origin, Wanted, find_origin, with_advice
from tierzero.cli.placement import check_disk, choose_tiers, print_placement
from tierzero.cli.progress import View, choose_view
from tierzero.cli.runabout import describe_run
from tierzero.cli.rundir import clear_rundir, make_directory
from tierzero.cli.runlog import RunLog, read_metrics
from tierzero.cli.sample import generate
from tierzero.cli.saver import check_room
from tierzero.cli.steptrace import StepTrace, check_steps, parse_address
from tierzero.cli.stopping import StopSignal
from tierzero.cli.summary import print_summary
from tierzero.cli.task import Task, open_task
from tierzero.cli.trainer import Trainer, seed_everything, state_options
from tierzero.errors import ConfigError, TierzeroError
from tierzero.monitoring import prometheus
from tierzero.sizes import format_size

CONTEXT = 64  # tokens that the sample at the end sees back


@dataclass(frozen=True)
class Watching:
    """Who is to see the run: `trace` names the steps to record, `prometheus` is the port (or ADDRESS:PORT) to serve."""

    trace: str | None = None
    prometheus: str | None = None


def run(config: Config, wanted: Wanted, *, dry_run: bool, quiet: bool, watching: Watching = Watching()) -> None:
    """The whole command. Raises ConfigError, other TierzeroError or OSError with a sentence."""
    check_steps(watching.trace, config.train.steps)
    address = parse_address(watching.prometheus)
    console = Console(quiet=quiet)
    view = choose_view(console, quiet, config.train.log_every)
    if config.tiers.gds == "on" and not torch.cuda.is_available():
        raise ConfigError('tiers.gds = "on" has no effect without a CUDA device: set it to "auto" or "off"')
    origin = None
    if not dry_run:
        origin = find_origin(config, wanted)
        if address is not None:
            prometheus.check(address[1], address[0])  # before a run is made, or an older one removed
        for problem in origin.skipped if origin is not None else ():
            view.warn(problem)
    task = open_task(config)
    model = task.build()
    tiers = choose_tiers(config, model)
    plan = tz.plan(model, tiers, micro_batches=config.train.micro_batches, **state_options(config))
    print_placement(console, config, task, plan)
    if dry_run and plan.warning:  # otherwise offload says it
        view.warn(plan.warning)
    check_disk(config, plan, overwrite=wanted.overwrite)
    saves = check_room(config, model)
    if saves:
        console.print(Text(saves), soft_wrap=True)
    if dry_run:
        return
    Session(config, task, model, tiers, plan, view, console, watching.trace, address).run(origin, wanted.overwrite)


class Session:
    """One process's part of a run."""

    def __init__(
        self,
        config: Config,
        task: Task,
        model: nn.Module,
        tiers: Any,
        plan: Any,
        view: View,
        console: Console,
        trace: str | None,
        address: tuple[str, int] | None,
    ) -> None:
        self.config = config
        self.task = task
        self.model = model
        self.tiers = tiers
        self.plan = plan
        self.view = view
        self.console = console
        self.trace = trace
        self.address = address

    def run(self, origin: Origin | None, overwrite: bool) -> None:
        config, out = self.config, self.config.train.out
        if origin is not None and origin.checkpoint is not None:
            size = format_size(origin.checkpoint.nbytes)
            self.view.phase(f"comparing {origin.checkpoint.path}, {size}, with its checksums")
            origin.verify()
        make_directory(out)
        with StopSignal() as stop:
            gc.collect()
            memory.return_free_memory()
            memory.reset_peak()
            self.rss_before, self.disk_before, self.started = (
                memory.resident(),
                memory.disk_bytes(),
                time.perf_counter(),
            )
            self._offload(origin, overwrite)
            try:
                if overwrite and (origin is None or origin.anew):  # only now that the store is ours
                    clear_rundir(config)
                trainer = self._train(origin, stop)
            except BaseException as error:
                if any(isinstance(one, BrokenPipeError) for one in (error, error.__context__)):  # rich makes it an exit
                    self.view.warn("nobody reads the output any more, so the run ends: go on with it by --resume")
                with suppress(Exception):  # the first error is the one to tell
                    tz.close(self.model)
                raise
            tz.close(self.model)
        trainer.saver.check()

    def _offload(self, origin: Origin | None, overwrite: bool) -> None:
        """Into the store: what its snapshot holds, or nothing yet."""
        resume = origin is not None and origin.checkpoint is None
        try:
            self.model = tz.offload(
                self.model,
                self.tiers,
                micro_batches=self.config.train.micro_batches,
                resume=resume,
                overwrite=overwrite or (origin is not None and not resume),
            )
        except TierzeroError as error:
            raise with_advice(error, self.config) from None

    def _train(self, origin: Origin | None, stop: StopSignal) -> Trainer:
        config = self.config
        trainer = self._trainer(origin)
        write_json(config.train.out / "run.json", describe_run(config, self.task, self.plan, self.tiers, trainer.id))
        trace = StepTrace(config.train.out / "trace.json", self.trace, trainer.step, config.train.steps)
        with ExitStack() as stack:
            traced = stack.enter_context(closing(trace))
            if self.address is not None:
                endpoint = stack.enter_context(closing(tz.serve_metrics(self.model, self.address[1], self.address[0])))
                self.view.say(f"metrics for Prometheus at http://{self.address[0]}:{endpoint.port}/metrics")
            log = stack.enter_context(closing(RunLog(config.train.out, after=trainer.step)))
            trainer.run(log, stop=lambda: stop.asked, traced=traced)
        if trainer.step < config.train.steps:
            self.view.say(
                f"stopped after step {trainer.step} of {config.train.steps}, saved in {trainer.places()}; "
                "go on with the same command and --resume"
            )
        else:
            self._finish(trainer)
        return trainer

    def _trainer(self, origin: Origin | None) -> Trainer:
        if origin is not None:
            trainer = Trainer(self.config, self.task, self.model, self.view)
            trainer.restore(origin)
            return trainer
        seed_everything(self.config.train.seed)
        self.view.phase(f"{'loading' if self.config.model.path else 'initialising'} {self.plan.params:,} parameters")
        self.task.fill(self.model)
        return Trainer(self.config, self.task, self.model, self.view)

    def _finish(self, trainer: Trainer) -> None:
        """Measures, then sample, export and summary."""
        stats, rss_peak, disk = tz.stats(self.model), memory.resident_peak(), memory.disk_bytes()
        summary = self._summary(trainer, stats, rss_peak, disk)
        out, train = self.config.train.out, self.config.train
        text = ""
        if train.sample:
            self.view.phase(f"generating {train.sample} tokens")
            text = self.task.text(
                generate(self.task, self.model, train.sample, min(self.config.data.sequence, CONTEXT), train.seed)
            )
            write_atomically(out / "sample.txt", text + "\n")
        write_json(out / "summary.json", summary)
        self.view.phase(f"exporting to {out / 'export'}")
        try:
            make_directory(out / "export")
            tz.export(self.model, out / "export")
            self.task.export_files(out / "export")
        except (TierzeroError, OSError):
            self.view.warn("the run is done and saved, and its weights are not exported: --resume does only that")
            raise
        summary["rss_peak"] = memory.resident_peak()  # sampling and export included
        write_json(out / "summary.json", summary)
        print_summary(self.console, summary, text, out)

    def _summary(
        self, trainer: Trainer, stats: dict[str, Any], rss_peak: int, disk: tuple[int, int] | None
    ) -> dict[str, Any]:
        lines = read_metrics(self.config.train.out / "metrics.jsonl")
        settled = [line for line in lines if line["step"] > 2] or lines  # the first steps learn the order of use
        moved = (disk[0] - self.disk_before[0], disk[1] - self.disk_before[1]) if disk and self.disk_before else None
        return {
            "steps": trainer.step,
            "first_loss": lines[0]["loss"] if lines else None,
            "last_loss": lines[-1]["loss"] if lines else None,
            "params": self.plan.params,
            "param_bytes": self.plan.param_bytes,
            "state_bytes": self.plan.state_bytes,
            "device_budget": stats["device_budget"],
            "device_peak": stats["device_peak"],
            "host_budget": stats["host_budget"],
            "host_peak": stats["host_peak"],
            "activation_bytes": self.task.activation_bytes,
            "rss_before": self.rss_before,
            "rss_peak": rss_peak,
            "nvme_read": stats["nvme_read"],
            "nvme_written": stats["nvme_written"],
            "nvme_read_expected": stats["nvme_read_expected"],
            "nvme_written_expected": stats["nvme_written_expected"],
            "nvme_written_per_day": stats["nvme_written_per_day"],
            "nvme_tbw": self.tiers.rated_bytes(),
            "drive_days_left": _finite(stats["drive_days_left"]),
            "proc_io_read": moved[0] if moved else None,
            "proc_io_written": moved[1] if moved else None,
            "h2d": stats["h2d"],
            "d2h": stats["d2h"],
            "step_s": statistics.median(line["step_s"] for line in settled) if settled else None,
            "tokens_per_s": statistics.median(line["tokens_per_s"] for line in settled) if settled else None,
            "stall_s": {
                "fetch": stats["stall_fetch_s"],
                "update": stats["stall_update_s"],
                "gradient": stats["stall_grad_s"],
                "activation": stats["stall_activation_s"],
            },
            "checkpoints": trainer.saver.summary(stats["stall_save_s"]),
            "hits": stats["hits"],
            "misses": stats["misses"],
            "skipped_steps": stats["skipped_steps"],
            "guesses": stats["guesses"],
            "guesses_right": stats["guesses_right"],
            "seconds": time.perf_counter() - self.started,
        }


def _finite(days: float | None) -> float | None:
    """JSON has no infinity: a run that writes nothing has no number of days."""
    return None if days is None or math.isinf(days) else days
