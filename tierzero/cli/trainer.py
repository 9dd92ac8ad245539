"""The training loop of the command: a plain PyTorch loop around an offloaded model, and its checkpoints."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

import tierzero as tz
from tierzero.api import engine_of
from tierzero.checkpoint import randomness
from tierzero.cli import checkpoints
from tierzero.cli.config import Config
from tierzero.cli.data import Sampler
from tierzero.cli.origin import Origin
from tierzero.cli.portable import of_run
from tierzero.cli.progress import View
from tierzero.cli.report import Meter, StepReport, clipped_norm
from tierzero.cli.runid import new_id, same_place
from tierzero.cli.runlog import RunLog
from tierzero.cli.saver import Saver
from tierzero.cli.steptrace import StepTrace
from tierzero.cli.task import Task


def schedule(config: Config) -> Callable[[int], float]:
    """The factor on the learning rate at optimizer step 0, 1, ...: linear warmup, then a cosine down to a tenth."""
    warmup, steps = config.warmup, config.train.steps

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        part = min(1.0, (step - warmup) / max(1, steps - warmup))
        return 0.1 + 0.45 * (1 + math.cos(math.pi * part))

    return factor


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices are decayed; vectors and scalars (norms, biases) are not."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.ndim >= 2]
    vectors = [parameter for parameter in trained if parameter.ndim < 2]
    groups = [(matrices, weight_decay), (vectors, 0.0)]
    return [{"params": params, "weight_decay": decay} for params, decay in groups if params]


def state_options(config: Config) -> dict[str, Any]:
    """What states the optimizer keeps, as AdamW and plan take it."""
    dtypes: dict[str, Any] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    return {
        "state_dtype": dtypes.get(config.train.state_dtype, config.train.state_dtype),
        "master": config.train.master,
    }


def seed_everything(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % (1 << 32))


class Trainer:
    """An offloaded model with its optimizer, scheduler and position; `step` counts the steps done."""

    def __init__(self, config: Config, task: Task, model: nn.Module, view: View) -> None:
        """`model` is offloaded and holds values, or is about to get them by `restore`."""
        self.config = config
        self.task = task
        self.model = model
        self.view = view
        self.sampler = Sampler(task.corpus, config.data.sequence, config.data.batch, config.train.seed)
        self.params = [parameter for parameter in model.parameters() if parameter.requires_grad]
        groups = parameter_groups(model, config.train.weight_decay)
        self.optimizer = tz.AdamW(
            groups, lr=config.lr, overlap=config.train.overlap, seed=config.train.seed, **state_options(config)
        )
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, schedule(config))
        self.step = 0
        self.saved: int | None = None
        self.saves = 0  # see _meta
        self._counted: int | None = None
        self.saver = Saver(config, model, self.optimizer, view)
        self._named(new_id())

    def _named(self, run_id: str) -> None:
        self.id = run_id
        engine_of(self.model).lineage = run_id  # the checkpoints of the run know each other by it too

    def restore(self, origin: Origin) -> None:
        """Take parameters, states, position, scheduler and random generators from the snapshot that the store was
        opened at, or from a portable checkpoint.
        """
        source = origin.checkpoint
        if source is None:
            meta = tz.restore(self.model, self.optimizer)
            randomness.set_random_state(meta["random"])
        else:
            meta = tz.load(self.model, source.path, self.optimizer, verify=False)  # its bytes have been compared before
        self.scheduler.load_state_dict(meta["scheduler"])
        self._follow_configured_lr()
        self._named(new_id() if origin.anew else meta["run"])
        self.step, self.saves = int(meta["step"]), origin.newest
        if meta["saves"] == origin.newest:
            self._counted = self.step
        if source is None:
            self.saved = self.step
            there = of_run(self.config.checkpoint_folder, self.id, self.config.train.out)[0]
            if there and there[-1].saves == meta["saves"]:
                self.saver.last = self.step
        else:
            if same_place(source.path.parent, self.config.checkpoint_folder):
                self.saver.last = self.step
            self.save(meta["loss"])  # so that --resume goes on from here
        where = self.config.store if source is None else source.path
        self.view.say(
            f"resumed after step {self.step} of {self.config.train.steps} from {where}: parameters, "
            "optimizer states, scheduler and random generators restored"
        )
        if self.step >= self.config.train.steps:
            self.view.say("  no steps are left to train: a larger train.steps goes on")
        for change in checkpoints.changes(meta["settings"], self.config):
            self.view.say(f"  set otherwise than before: {change}")
        if meta["text"] != self.task.corpus.fingerprint():
            self.view.say("  the text is not the one of the checkpoint: the losses go on from other data")

    def _follow_configured_lr(self) -> None:
        """Rate and schedule come from the configuration, the position from the checkpoint."""
        rate = self.config.lr * schedule(self.config)(self.scheduler.last_epoch)
        self.scheduler.base_lrs = [self.config.lr] * len(self.optimizer.param_groups)
        self.scheduler._last_lr = [rate] * len(self.optimizer.param_groups)
        for group in self.optimizer.param_groups:
            group["lr"], group["initial_lr"] = rate, self.config.lr

    def run(self, log: RunLog, stop: Callable[[], bool], traced: StepTrace) -> None:
        """Steps until train.steps or until `stop()`, with checkpoints on the way and one at the end. `traced` records
        some of them.
        """
        try:
            self._run(log, stop, traced)
        except (KeyboardInterrupt, SystemExit):  # at once, then: close() would wait for it
            self.saver.cancel()
            raise

    def _run(self, log: RunLog, stop: Callable[[], bool], traced: StepTrace) -> None:
        train = self.config.train
        if self.saved is None:
            self.save(None)  # from here on a crash at any moment can be resumed
        meter = Meter(tz.stats(self.model))
        with self.view.running(self.step, train.steps):
            while self.step < train.steps and not stop():
                with traced.around(self.model, self.step + 1):
                    report = self.one_step(meter)
                log.write(report.line())
                self.saver.look()
                self.view.step(report, self.saver.progress())
                if self.step % train.save_every == 0:
                    self.save(report.loss)
                if self.saver.due(self.step):
                    self.saver.begin(self.step, self._meta(report.loss))
        tz.synchronize(self.model)
        loss = log.last["loss"] if log.last else None
        if self.saved != self.step:
            self.save(loss)
        if self.saver.wanted and self.saver.last != self.step:
            self.saver.begin(self.step, self._meta(loss))
        self.saver.settle()

    def one_step(self, meter: Meter) -> StepReport:
        """`accumulate` micro-batches, clip, update."""
        train, data = self.config.train, self.config.data
        start = time.perf_counter()
        losses = []
        for micro in range(train.accumulate):
            loss = self.task.loss(self.model, self.sampler(self.step, micro)) / train.accumulate
            loss.backward()
            losses.append(loss.detach())
        norm = tz.clip_grad_norm_(self.params, train.clip or math.inf)
        rate = float(self.optimizer.param_groups[0]["lr"])
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.step += 1
        total, before = float(torch.stack(losses).sum()), float(norm)
        seconds = time.perf_counter() - start
        stats = tz.stats(self.model)
        stalls, moved = meter(stats)
        return StepReport(
            step=self.step,
            loss=total,
            grad_norm=before,
            grad_norm_clipped=clipped_norm(before, train.clip),
            lr=rate,
            tokens_per_s=train.accumulate * data.batch * data.sequence / seconds,
            step_s=seconds,
            stalls=stalls,
            bytes=moved,
            engine=stats["last_step"],
        )

    def save(self, loss: float | None) -> None:
        """Commit a snapshot of model, optimizer, scheduler, random generators and position."""
        meta = {**self._meta(loss), "random": randomness.random_state()}
        tz.snapshot(self.model, self.optimizer, name=checkpoints.name_of(self.step), meta=meta)
        checkpoints.write_note(self.config, self.id, self.step, loss)
        self.saved = self.step

    def places(self) -> str:
        """Where the run, as it is, has been saved."""
        path = self.saver.path_of(self.step)
        return f"{self.config.store}" + (f" and {path}" if path is not None else "")

    def _meta(self, loss: float | None) -> dict[str, Any]:
        """What is saved beside tensors and random generators. `saves` orders what one run saves, also after it has gone
        back; a snapshot and a portable checkpoint of the same moment have the same.
        """
        if self._counted != self.step:
            self.saves, self._counted = self.saves + 1, self.step
        return {
            "run": self.id,
            "out": str(self.config.train.out.resolve()),
            "saves": self.saves,
            "step": self.step,
            "loss": loss,
            "scheduler": _plain_scheduler(self.scheduler),
            "model": checkpoints.model_identity(self.config),
            "settings": checkpoints.loop_settings(self.config),
            "text": self.task.corpus.fingerprint(),
        }


def _plain_scheduler(scheduler: torch.optim.lr_scheduler.LRScheduler) -> dict[str, Any]:
    """The scheduler's state as JSON values; its lambdas are in the code."""
    state: dict[str, Any] = scheduler.state_dict()
    return {key: value for key, value in state.items() if isinstance(value, bool | int | float | list | str | None)}
