"""`tierzero plan`: whether a model can be trained on a machine, what it takes there, and how fast it would be."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from tierzero.cli.placement import choose_tiers
from tierzero.cli.plan_model import VOCAB, Subject, from_hugging_face, from_numbers, from_toml
from tierzero.errors import BudgetError, ConfigError
from tierzero.hardware.machine import MEMORY, UTILISATION, Gpu, Machine, parse_drives, preset, together
from tierzero.hardware.measure import this_machine
from tierzero.native import NATIVE
from tierzero.planning.forecast import Load
from tierzero.planning.placement import place
from tierzero.planning.planned import Plan
from tierzero.planning.planner import Budgets, budgets_of, forward_flops, plan_units
from tierzero.sim.links import DriveRates
from tierzero.sizes import format_size, parse_size
from tierzero.storage.stripes import stripe_weights
from tierzero.tiers.config import AUTO_DEVICE_SHARE, Tiers, memory_limit
from tierzero.units.partition import partition
from tierzero.units.state_format import choose_format
from tierzero.units.unit_sizes import unit_sizes

TOKENS = 2048  # of a micro-batch, where nothing says how many
_BOUNDLESS = 1 << 62
_RATE = re.compile(r"(\d+\s*[x×*]\s*)?[\d.]+(/[\d.]+)?\s*([kMGT]i?B?(ps)?)?", re.IGNORECASE)  # but for its /s
_SCALES = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


@dataclass
class Options:
    """What the command was told; None: nothing."""

    source: Path | None = None
    settings: list[str] = field(default_factory=list)
    params: str | None = None
    layers: int | None = None
    hidden: int | None = None
    vocab: int | None = None
    gpu: str | None = None
    flops: float | None = None
    utilisation: float = UTILISATION
    nvme: list[str] = field(default_factory=list)
    tbw: str | None = None
    ram: str | None = None
    host: str | None = None
    device: str | None = None
    memory: str | None = None
    tokens: int | None = None
    accumulate: int | None = None
    micro_batches: int | None = None
    activations: str | None = None
    dtype: str | None = None
    snapshots: bool = True


@dataclass(frozen=True)
class Answer:
    """plan: None where budgets are too small. smallest: budgets and drive space that work, bytes. why: what does not
    work, in sentences; none when it does. notes: what was assumed.
    """

    subject: Subject
    plan: Plan | None
    budgets: Budgets
    smallest: dict[str, int]
    machine: Machine | None
    gpu_memory: int | None
    why: list[str]
    notes: list[str]

    def as_json(self) -> dict[str, Any]:
        """The object that --json prints."""
        found = self.plan
        forecast = found.forecast if found is not None else None
        return {
            "fits": not self.why,
            "why": self.why,
            "warnings": [found.warning] if found is not None and found.warning else [],
            "model": self.subject.what,
            "params": found.params if found is not None else None,
            "smallest": self.smallest,
            "budgets": {"host": self.budgets.host, "device": self.budgets.device},
            "activations": self.subject.activations,
            "placement": None
            if found is None
            else {key: value for key, value in vars(found).items() if key not in ("phases", "forecast", "warning")},
            "phases": [] if found is None else [vars(phase) for phase in found.phases],
            "forecast": None
            if forecast is None
            else {
                "seconds": forecast.seconds,
                "seconds_clipped": forecast.deferred.seconds,
                "compute_seconds": forecast.compute,
                "bottleneck": forecast.bottleneck,
                "tokens": forecast.tokens,
                "tokens_per_second": forecast.tokens_per_second,
                "hidden_tokens": forecast.hidden_tokens,
                "stalls": forecast.step.stalls,
                "busy": forecast.step.busy,
                "moved": forecast.step.moved,
            },
            "sources": self.machine.sources if self.machine is not None else {},
            "notes": self.notes,
        }


def run(options: Options, *, as_json: bool) -> int:
    """Plan, print, and return the exit code: 0 if it works, else 1. ConfigError for options that cannot be."""
    found = answer(options)
    if as_json:
        print(json.dumps(found.as_json()))
    else:
        from tierzero.cli.plan_show import show

        show(found)
    return 1 if found.why else 0


def answer(options: Options) -> Answer:
    """The whole plan."""
    subject = _subject(options)
    if options.accumulate is not None:
        subject.accumulate = options.accumulate
    if options.micro_batches is not None:
        subject.cut(options.micro_batches)
    if subject.tokens < 1 or subject.accumulate < 1:
        raise ConfigError("--tokens and --accumulate must be 1 or more")
    drives, directories, words = _drives(options, subject)
    notes: list[str] = []
    gpu, machine = _machine(options, subject, drives, directories, notes)
    if machine is not None and words:
        machine = replace(machine, sources={**machine.sources, "drives": words})
    budgets = _budgets(options, subject, gpu, drives, directories)
    if machine is not None and subject.config is not None:
        limits = Tiers(nvme_limit=subject.config.tiers.nvme_limit, link_limit=subject.config.tiers.link_limit)
        machine = machine.under(limits.drive_limit() * len(budgets.weights), limits.device_limit())
    parts = partition(subject.model)
    sizes = unit_sizes(subject.model, parts, subject.micro_batches)
    format = choose_format(
        **(subject.states or {"state_dtype": torch.float32, "master": "float32"}),
        amsgrad=False,
        native=NATIVE is not None,
    )
    load = Load(
        [forward_flops(part) for part in parts],
        subject.tokens,
        subject.accumulate,
        subject.recompute or subject.micro_batches > 1,
        subject.clip,
    )
    ample = replace(budgets, host=_BOUNDLESS, device=_BOUNDLESS)
    least = place(
        sizes,
        host=ample.host,
        device=ample.device,
        drives=len(budgets.weights),
        native=NATIVE is not None,
        cuda=budgets.cuda,
        activations=budgets.activations,
    )
    smallest = {"host": least.host_min, "device": least.device_min}
    why: list[str] = []
    plan: Plan | None = None
    try:
        plan = plan_units(
            sizes,
            budgets,
            load,
            machine=machine,
            snapshots=options.snapshots,
            overlap=subject.overlap,  # type: ignore[arg-type]
            format=format,
        )
        smallest["nvme"] = plan.nvme_min
        why += [plan.why] if plan.why else []
    except BudgetError as error:
        why.append(str(error))
    why += _memory(options, subject, budgets, gpu)
    return Answer(subject, plan, budgets, smallest, machine, gpu.memory if gpu is not None else None, why, notes)


def _subject(options: Options) -> Subject:
    numbers = {"--params": options.params, "--layers": options.layers, "--hidden": options.hidden}
    given = [name for name, value in numbers.items() if value is not None]
    chosen = _dtype(options.dtype)
    dtype, tokens, source = chosen or "bfloat16", options.tokens or TOKENS, options.source
    if source is not None and (given or options.vocab):
        raise ConfigError(f"{source} says what the model is: leave out {', '.join(given) or '--vocab'}, or the file")
    if source is not None and source.suffix == ".toml":
        return from_toml(source, options.settings, chosen, options.tokens)
    if options.settings:
        raise ConfigError("--set changes keys of a CONFIG.toml: name one")
    if source is not None:
        return from_hugging_face(source, dtype, tokens)
    if len(given) < len(numbers):
        missing = ", ".join(name for name in numbers if name not in given)
        raise ConfigError(
            f"{missing} missing: give a CONFIG.toml, a Hugging Face directory or config.json, or all of "
            "--params, --layers and --hidden"
            if given
            else "there is no model to plan for: give a CONFIG.toml, a Hugging Face directory or config.json, or "
            "--params 70e9 --layers 80 --hidden 8192"
        )
    assert options.params is not None
    assert options.layers is not None
    assert options.hidden is not None
    return from_numbers(count(options.params), options.layers, options.hidden, options.vocab or VOCAB, dtype, tokens)


def count(text: str) -> float:
    """Of parameters: 70e9, 7B, 350M. ConfigError for anything else."""
    found = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([KMBT]?)\s*", text, re.IGNORECASE)
    try:
        number = float(found[1]) * _SCALES[found[2].upper()] if found else math.nan
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"--params {text}: give a number such as 7e9, 7B or 350M")
    return number


def _dtype(name: str | None) -> str | None:
    names = {None: None, "bf16": "bfloat16", "fp32": "float32", "bfloat16": "bfloat16", "float32": "float32"}
    if name not in names:
        raise ConfigError(f"--dtype {name}: use bfloat16 (bf16) or float32 (fp32)")
    return names[name]


def _drives(options: Options, subject: Subject) -> tuple[list[DriveRates] | None, list[Path], str]:
    """(drives as given, directories of the real ones, the former in words)."""
    if options.nvme == ["none"]:
        return None, [], ""
    rates = [word for word in options.nvme if word.rstrip().endswith("/s")]
    places = [Path(word) for word in options.nvme if word not in rates]
    for folder in places:
        if _RATE.fullmatch(str(folder)) and not folder.exists():
            raise ConfigError(f"--nvme {folder}: rates end in /s, such as 4x7GB/s; there is no directory of that name")
    if rates and places:
        raise ConfigError("--nvme takes either rates such as 4x7GB/s or directories, not both at once")
    if rates:
        drives, words = parse_drives(",".join(rates))
        return drives, [], words
    if not places and subject.config is not None and options.gpu is not None:
        raise ConfigError(
            "the drives that the configuration names are of this machine: say what those beside the "
            "--gpu do, such as --nvme 7GB/s, name directories with --nvme, or give --nvme none"
        )
    if not places and subject.config is not None:
        places = list(subject.config.stores)
    return None, places, ""


def _machine(
    options: Options, subject: Subject, drives: list[DriveRates] | None, directories: list[Path], notes: list[str]
) -> tuple[Gpu | None, Machine | None]:
    drive = together(drives, stripe_weights([each.mixed for each in drives])) if drives else None
    memory = _size(options.memory, "--memory") if options.memory is not None else MEMORY
    try:
        if options.gpu is not None:
            if directories:
                from tierzero.hardware.measure import drive_rates

                drive = drive_rates(directories)
            return preset(options.gpu, drive, utilisation=options.utilisation, memory=memory, flops=options.flops)
        tiers = Tiers()
        if subject.config is not None:
            given = subject.config.tiers
            tiers = Tiers(update_threads=given.update_threads, update_cores=given.update_cores)
        device = tiers.compute_device()
        dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32}[subject.dtype]
        rows = subject.tokens
        measured: dict[str, Any] = {
            "hidden": subject.hidden,
            "tokens": rows,
            "dtype": dtype,
            "threads": tiers.crew()[0],
        }
        return None, this_machine(directories, device, drive=drive, flops=options.flops, **measured)
    except ConfigError as error:
        if not directories:
            raise
        notes.append(f"no time is predicted: {error}")
        return (None, None) if options.gpu is None else (preset(options.gpu, None)[0], None)


def _budgets(
    options: Options, subject: Subject, gpu: Gpu | None, drives: list[DriveRates] | None, directories: list[Path]
) -> Budgets:
    """The budgets: as given, as the configuration says, or the defaults of Tiers for the machine in question."""
    ram = _size(options.ram, "--ram") if options.ram is not None else memory_limit()
    chosen = Tiers()
    if subject.config is not None:
        chosen = choose_tiers(subject.config, subject.model)
    here = replace(
        chosen,
        nvme=directories or None,
        nvme_tbw=options.tbw or chosen.nvme_tbw,
        compute="cpu" if gpu is not None else chosen.compute,
    )
    if options.device is not None and gpu is None:
        here = replace(here, device=options.device)
    found = budgets_of(replace(here, device="auto") if gpu is not None else here)
    host = _size(options.host if options.host is not None else chosen.host, "--host", of=ram)
    kept = _size(chosen.activations if options.activations is None else options.activations, "--activations", of=host)
    found = replace(found, host=host, activations=kept, memory=ram)
    if drives is not None:
        weights = stripe_weights([each.mixed for each in drives])
        found = replace(found, weights=weights, rating=here.rated_bytes(), free=None)
    if gpu is not None:
        told = options.device or (chosen.device if subject.config is not None else "auto")
        left = max(0, gpu.memory - subject.activations)
        auto = min(int(gpu.memory * AUTO_DEVICE_SHARE), left)
        device = auto if told == "auto" else _size(told, "--device", of=gpu.memory)
        found = replace(found, device=device, cuda=True)
    return found


def _memory(options: Options, subject: Subject, budgets: Budgets, gpu: Gpu | None) -> list[str]:
    """Sentences about a GPU that has less memory than activations and parameters take."""
    why = []
    if gpu is not None and subject.activations > gpu.memory:
        why.append(
            f"activations of {subject.tokens} tokens alone take about {format_size(subject.activations)}, more than "
            f"the {format_size(gpu.memory)} of the {options.gpu}: give fewer --tokens (and --accumulate), or "
            "--micro-batches"
        )
    elif gpu is not None and budgets.device + subject.activations > gpu.memory:
        why.append(
            f"activations of {subject.tokens} tokens take about {format_size(subject.activations)}; with the device "
            f"budget of {format_size(budgets.device)} that is more than the {format_size(gpu.memory)} of the "
            f"{options.gpu}: give fewer --tokens (and --accumulate), or a smaller --device"
        )
    return why


def _size(value: Any, what: str, of: int | None = None) -> int:
    try:
        return parse_size(value, what=what, of=of)
    except ValueError as error:
        raise ConfigError(str(error)) from error
