"""Does every model class of the installed transformers that trains in plain PyTorch train under tierzero, bit for bit?

    python tests/hf_sweep.py [--only NAME] [--kind base,heads] [--json FILE] [--table FILE]

Each class is built from its default configuration with every size divided (hf_shrink.py), fed random inputs
(hf_inputs.py), trained for three steps in plain PyTorch and offloaded, everything on NVMe at the smallest budgets, with
one step that clips. A run that was interrupted goes on where --json FILE ends; a class that ended the process is
counted as a crash.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from hf_inputs import candidates, loss_of
from hf_models import Case, seed
from hf_shrink import LEVELS, small
from hf_training import losses_of, train_equal
from oracle import Plain, tiered, tiers_for
from torch import nn
from transformers.models.auto import configuration_auto, modeling_auto

import tierzero as tz

LARGEST = 30_000_000  # parameters
STEPS = 3
MARK = "<!-- from here on written by tests/hf_sweep.py -->\n\n"
SECONDS = 60.0
EQUAL, MORE, REFUSED, NOT_PLAIN = "equal", "equal with more", "refused", "not in plain"
MEANING = {
    EQUAL: "losses, norms, weights, masters, moments and buffers are those of plain PyTorch, bit for bit",
    MORE: "the same, but only above the smallest budget that was planned: weights that a module reads from others stay",
    REFUSED: "tierzero says in a sentence why not",
    "plain differs": "two runs in plain PyTorch differ, so there is nothing to be equal to",
    "differs": "the values are not those of plain PyTorch",
    "fails": "an exception that plain PyTorch does not raise",
    "crash": "the process ended",
    NOT_PLAIN: "the generic inputs or sizes do not suit it, or it has no gradient",
    "too large": f"no division of its sizes gets it below {LARGEST // 1_000_000} M parameters",
    "not finite": "plain PyTorch gives losses or gradients that are not finite",
}


class TooLongError(BaseException):
    """A class took longer than it may."""


def classes(kinds: set[str] | None = None) -> dict[str, tuple[str, str]]:
    """Model class names, each with its configuration's type and the mapping it comes from, base models first."""
    found: dict[str, tuple[str, str]] = {}
    mappings = [name for name in vars(modeling_auto) if name.startswith("MODEL_") and name.endswith("_NAMES")]
    mappings.sort(key=lambda name: (name != "MODEL_MAPPING_NAMES", name))
    for mapping in mappings:
        kind = "base" if mapping == "MODEL_MAPPING_NAMES" else mapping.removeprefix("MODEL_").removesuffix("_NAMES")
        kind = kind.removeprefix("FOR_").removesuffix("_MAPPING").lower().replace("_", " ")
        if kinds is not None and kind not in kinds and not ("heads" in kinds and kind != "base"):
            continue
        for model_type, names in getattr(modeling_auto, mapping).items():
            for name in [names] if isinstance(names, str) else names:
                found.setdefault(name, (model_type, kind))
    return found


def config_class(model_type: str) -> type[transformers.PreTrainedConfig]:
    """The configuration class of a model type."""
    kind: type[transformers.PreTrainedConfig] = configuration_auto.CONFIG_MAPPING[model_type]
    return kind


def trial(kind: type[nn.Module], config: type[transformers.PreTrainedConfig]) -> tuple[Case, str] | str:
    """How to build and feed a small model of the class, and in words; or what went wrong last."""
    problem, seen = "nothing was tried", set()
    for level in LEVELS:
        try:
            settings = small(config, level)
            with torch.device("meta"):
                count = sum(param.numel() for param in kind(settings).parameters())
        except Exception as error:
            problem = problem if level is not LEVELS[0] and "inputs" in problem else _said(error)
            continue
        if count > LARGEST or (count, str(level.image)) in seen:
            problem = "too large" if count > LARGEST and not seen else problem
            continue
        seen.add((count, str(level.image)))
        try:
            model = _built(kind, settings)
            for name, batch in candidates(model):
                case = Case(lambda settings=settings: _built(kind, settings), batch, loss_of)  # type: ignore[misc]
                try:
                    seed(0)
                    model.zero_grad(set_to_none=True)
                    case.loss(model(**batch(torch.Generator().manual_seed(1)))).backward()
                except Exception as error:
                    problem = f"{name}: {_said(error)}"
                    continue
                return case, f"{name}; {level}; {count:,} parameters"
        except Exception as error:
            problem = _said(error)
    return problem


def _built(kind: type[nn.Module], settings: transformers.PreTrainedConfig) -> nn.Module:
    seed(0)
    model = kind(settings)
    with torch.no_grad():
        for param in model.parameters():
            if param.numel() and param.is_floating_point() and not bool(param.isfinite().all()):
                param.zero_()  # uninitialised: the checkpoint would have given it its values
    return model.float().train()


def judge(name: str, model_type: str, directory: Path) -> dict[str, Any]:
    """What became of one class: its `result` (a key of MEANING) and the `detail`."""
    try:
        kind, config = getattr(transformers, name), config_class(model_type)
        found = trial(kind, config)
    except Exception as error:
        found = _said(error)
    if isinstance(found, str):
        return {"result": "too large" if found == "too large" else NOT_PLAIN, "detail": found}
    case, how = found
    answer = {"result": EQUAL, "detail": "", "how": how}
    for result, spare in ((EQUAL, 0), (MORE, 64 << 20)):
        try:
            model = case.build()
            with tiered(model, tiers_for(model, "nvme", directory, spare=spare)) as run:
                train_equal([("nvme", run)], Plain(case.build()), case, torch.float32, steps=STEPS, accumulate=1)
            return {**answer, "result": result}
        except tz.BudgetError as error:
            answer = {**answer, "result": REFUSED, "detail": _said(error)}
        except tz.TierzeroError as error:
            return {**answer, **_plain_too(case, REFUSED), "detail": _said(error)}
        except Exception as error:
            kind_of = "differs" if isinstance(error, AssertionError) else "fails"
            return {**answer, **_plain_too(case, kind_of), "detail": _said(error)}
    return answer


def _plain_too(case: Case, result: str) -> dict[str, Any]:
    """`result`, unless plain PyTorch cannot do it either."""
    try:
        first, again = (losses_of(Plain(case.build()), case, steps=STEPS) for _ in range(2))
    except Exception:
        return {"result": NOT_PLAIN}
    if not all(map(math.isfinite, first)):
        return {"result": "not finite"}
    return {"result": result if first == again else "plain differs"}


def _said(error: BaseException) -> str:
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words[:300]}"


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise TooLongError inside after `seconds`."""

    def late(*_: Any) -> None:
        raise TooLongError(f"it takes more than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def sweep(
    wanted: dict[str, tuple[str, str]],
    record: Path | None,
    say: Callable[[str], None] = print,
    until: float = math.inf,
) -> dict[str, Any]:
    """Judge every class of `wanted`; results are appended to `record`, and those in it are not repeated."""
    results: dict[str, Any] = {}
    if record is not None and record.exists():
        for line in record.read_text().splitlines():
            entry = json.loads(line)
            name = entry.pop("name")
            if entry:
                results[name] = entry
            else:
                results[name] = {"result": "crash", "detail": "the process ended"}
    for number, (name, (model_type, kind)) in enumerate(wanted.items()):
        if name in results:
            continue
        if time.monotonic() > until:
            break
        _note(record, {"name": name})
        started = time.monotonic()
        with tempfile.TemporaryDirectory(dir=None) as directory:
            try:
                with at_most(SECONDS):
                    result = judge(name, model_type, Path(directory))
            except TooLongError as error:
                result = {"result": NOT_PLAIN, "detail": str(error)}
        result = {**result, "type": model_type, "kind": kind, "seconds": round(time.monotonic() - started, 1)}
        results[name] = result
        _note(record, {"name": name, **result})
        say(f"{number + 1}/{len(wanted)} {name}: {result['result']} {result['detail']}"[:220])
        gc.collect()
    return {name: results[name] for name in wanted if name in results}


def _note(record: Path | None, entry: dict[str, Any]) -> None:
    if record is not None:
        with record.open("a") as file:
            file.write(json.dumps(entry) + "\n")


def table(results: dict[str, Any]) -> str:
    """The results in Markdown: totals, what is not equal, and the classes that are."""
    counts = Counter(result["result"] for result in results.values())
    types = {result["type"] for result in results.values() if "type" in result}
    equal = {result["type"] for result in results.values() if result["result"] == EQUAL}
    in_plain = sum(count for kind, count in counts.items() if kind not in (NOT_PLAIN, "too large", "not finite"))
    tried = f"transformers {transformers.__version__}, torch {torch.__version__}: {len(results)} of {len(classes())} "
    tried += (
        f"classes ({len(types)} model types) tried, {in_plain} train in plain PyTorch here, {counts[EQUAL]} of them "
    )
    lines = [
        tried + f"({len(equal)} model types) are equal under tierzero.",
        "",
        "| result | classes | meaning |",
        "|---|---|---|",
        *(f"| {kind} | {counts[kind]} | {meaning} |" for kind, meaning in MEANING.items() if counts[kind]),
        "",
    ]
    odd = [name for name, result in results.items() if result["result"] not in (EQUAL, NOT_PLAIN, "too large")]
    if odd:
        lines += ["| class | result | what was said |", "|---|---|---|"]
        lines += [
            f"| {n} | {results[n]['result']} | {results[n]['detail'][:160].replace('|', '/')} |" for n in sorted(odd)
        ]
        lines.append("")
    by_kind: dict[str, list[str]] = {}
    for name, result in results.items():
        if result["result"] == EQUAL:
            by_kind.setdefault(result["kind"], []).append(name)
    lines += ["| what for | equal under tierzero |", "|---|---|"]
    lines += [f"| {kind} ({len(names)}) | {', '.join(sorted(names))} |" for kind, names in sorted(by_kind.items())]
    return "\n".join(lines) + "\n"


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="classes whose names contain this, or this list with commas")
    parser.add_argument("--kind", help="mappings, separated by commas: base, heads (all others), causal lm, ...")
    parser.add_argument("--json", type=Path, help="append each result to this file, and go on where it ends")
    parser.add_argument("--table", type=Path, help="write the table into this file, after its mark")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no class after this time")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    wanted = classes({kind.strip() for kind in options.kind.split(",")} if options.kind else None)
    if options.only and "," in options.only:
        wanted = {name: wanted[name] for name in options.only.split(",") if name in wanted}
    elif options.only:
        wanted = {name: value for name, value in wanted.items() if options.only.lower() in name.lower()}
    if not wanted:
        print("no model class of the installed transformers is meant", file=sys.stderr)
        return 2
    results = sweep(wanted, options.json, until=time.monotonic() + 60 * options.minutes)
    text = table(results)
    if options.table is not None:
        before = options.table.read_text().partition(MARK)[0] if options.table.exists() else ""
        options.table.write_text(before + MARK + text)
    else:
        print(text)
    return 0 if all(result["result"] not in ("differs", "fails", "crash") for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
