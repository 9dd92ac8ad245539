"""What `tierzero train` is told: a TOML file and --set values, checked key by key, every problem one sentence.

Imports no torch: a wrong key is reported at once.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from tierzero.cli import values
from tierzero.cli.spelling import did_you_mean
from tierzero.errors import ConfigError

PRESETS: dict[str, dict[str, int]] = {
    "tiny": {"layers": 8, "hidden": 64, "heads": 4},
    "demo": {"layers": 32, "hidden": 512, "heads": 8},
    "400m": {"layers": 32, "hidden": 1024, "heads": 16},
    "1b": {"layers": 20, "hidden": 2048, "heads": 16},
    "7b": {"layers": 32, "hidden": 4096, "heads": 32},
}


PathValue = Annotated[Path, BeforeValidator(values.path)]
Positive = Annotated[int, Field(gt=0)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class ModelSection(Section):
    """Either the built-in decoder (preset, shape) or a Hugging Face directory (path)."""

    preset: str | None = None
    path: PathValue | None = None
    layers: Positive | None = None
    hidden: Positive | None = None
    heads: Positive | None = None
    vocab: Annotated[int, Field(gt=1)] | None = None


class DataSection(Section):
    """Which text, and how much of it a micro-batch holds: `batch` rows of `sequence` tokens."""

    path: PathValue | None = None
    sequence: Positive = 256
    batch: Positive = 4


class TrainSection(Section):
    """The loop. `sample` is the number of tokens generated at the end, `micro_batches` the number of pieces in which a
    layer runs its batch.
    """

    steps: Positive = 40
    lr: Annotated[float, Field(gt=0)] | None = None
    warmup: Annotated[int, Field(ge=0)] | None = None
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    clip: Annotated[float, Field(ge=0)] = 1.0
    overlap: Literal["auto", "eager", "deferred"] = "auto"
    state_dtype: Literal["float32", "bfloat16", "8bit"] = "float32"
    master: Literal["float32", "split"] = "float32"
    accumulate: Positive = 2
    micro_batches: Positive = 1
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    save_every: Positive = 20
    out: PathValue = Path("runs/demo")
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    recompute: bool = True
    sample: Annotated[int, Field(ge=0)] = 100
    log_every: Positive = 5


class TiersSection(Section):
    """Byte budgets. Unset: `device` a sixth of the parameters' bytes, `host` a quarter of the optimizer states' and
    what `activations` says.

    `nvme`: one directory, or a list of them, one per drive. `nvme_tbw`: bytes that all these drives together are rated
    to write. `nvme_limit`: bytes per second of each drive, `link_limit`: to the device, both at most.
    `nvme_block`: bytes of one piece of I/O; unset: the drive's best. `update_threads`: that compute the optimizer
    step, on `update_cores`.
    """

    nvme: Annotated[list[Path], BeforeValidator(values.paths)] | None = None
    nvme_tbw: Annotated[int | float | str, BeforeValidator(values.rating)] | None = None
    nvme_limit: Annotated[int | float | str, BeforeValidator(values.limit)] | None = None
    link_limit: Annotated[int | float | str, BeforeValidator(values.limit)] | None = None
    nvme_block: Annotated[int | str, BeforeValidator(values.block)] | None = None
    host: Annotated[int | float | str, BeforeValidator(values.size)] | None = None
    device: Annotated[int | float | str, BeforeValidator(values.size_or_auto)] | None = None
    activations: Annotated[int | float | str, BeforeValidator(values.size)] = 0
    prefetch: Annotated[int | str, BeforeValidator(values.depth)] = "auto"
    gds: Literal["auto", "on", "off"] = "auto"
    update_threads: Annotated[int | str, BeforeValidator(values.threads)] = "auto"
    update_cores: list[int] = []


class CheckpointSection(Section):
    """Portable checkpoints: none unless `every` says after how many steps one is to be begun. `path`: the directory in
    which they lie, `keep`: how many of them, 0 for all, `limit`: bytes per second to write at most.
    """

    every: Positive | None = None
    path: PathValue | None = None
    keep: Annotated[int, Field(ge=0)] | None = None
    limit: Annotated[int | float | str, BeforeValidator(values.limit)] | None = None


class Config(Section):
    """The whole configuration; `load` makes one."""

    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    train: TrainSection = TrainSection()
    tiers: TiersSection = TiersSection()
    checkpoint: CheckpointSection = CheckpointSection()

    @property
    def shape(self) -> dict[str, int]:
        """layers, hidden, heads of the built-in decoder: the preset's, with single values replaced."""
        own = {key: getattr(self.model, key) for key in ("layers", "hidden", "heads")}
        return PRESETS[self.model.preset or "demo"] | {key: value for key, value in own.items() if value is not None}

    @property
    def token_file(self) -> bool:
        """Whether data.path is a file of token ids rather than text."""
        return self.data.path is not None and self.data.path.suffix == ".npy"

    @property
    def lr(self) -> float:
        if self.train.lr is not None:
            return self.train.lr
        return 2e-5 if self.model.path else 6e-4

    @property
    def checkpoints_layers(self) -> bool:
        """Whether the model itself checkpoints its layers: where they run in pieces, the engine does."""
        return self.train.recompute and self.train.micro_batches == 1

    @property
    def warmup(self) -> int:
        return self.train.warmup if self.train.warmup is not None else min(100, self.train.steps // 12)

    @property
    def checkpoint_folder(self) -> Path:
        """The directory of portable checkpoints, whether there are to be any or not."""
        return self.checkpoint.path or self.train.out / "checkpoints"

    @property
    def checkpoints_kept(self) -> int | None:
        """How many portable checkpoints stay, None: all."""
        keep = 2 if self.checkpoint.keep is None else self.checkpoint.keep
        return keep or None

    @property
    def stores(self) -> list[Path]:
        """The directories on NVMe, one per drive."""
        return self.tiers.nvme or [self.train.out / "store"]

    @property
    def store(self) -> Path:
        """The directory on NVMe that holds the manifest, whatever the order; the first one where there is none yet."""
        return next((path for path in self.stores if (path / "manifest.json").exists()), self.stores[0])


SECTIONS: dict[str, type[Section]] = {
    "model": ModelSection,
    "data": DataSection,
    "train": TrainSection,
    "tiers": TiersSection,
    "checkpoint": CheckpointSection,
}
KEYS = [f"{section}.{key}" for section, cls in SECTIONS.items() for key in cls.model_fields]


def load(path: Path | None, settings: Iterable[str] = ()) -> Config:
    """The configuration from a TOML file (or none), `key=value` settings over it. ConfigError: a sentence a problem."""
    tables = _read(path) if path else {}
    for setting in settings:
        _apply(tables, setting)
    problems = list(_unknown(tables))
    if problems:
        raise ConfigError("\n".join(problems))
    try:
        config = Config.model_validate(tables)
    except ValidationError as error:
        raise ConfigError("\n".join(dict.fromkeys(map(_sentence, error.errors())))) from None
    _check(config)
    return config


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        raise ConfigError(f"there is no configuration file {path}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a directory: name a TOML file") from None
    except OSError as error:
        raise ConfigError(f"the configuration file {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply to be a configuration") from None


def _apply(tables: dict[str, Any], setting: str) -> None:
    """Put `section.key=value` into `tables`; the value is TOML, with quotes around text left out if you like."""
    name, equals, text = setting.partition("=")
    name = name.strip()
    if not equals:
        raise ConfigError(f"--set {setting}: write section.key=value, such as train.steps=100")
    section, dot, key = name.partition(".")
    if not dot or section not in SECTIONS or key not in SECTIONS[section].model_fields:
        raise ConfigError(f"--set {setting}: unknown key {name}{did_you_mean(name, KEYS)}")
    table = tables.setdefault(section, {})
    if isinstance(table, dict):  # otherwise the file's own mistake is reported
        try:
            table[key] = _value(text.strip())
        except (ValueError, KeyError, RecursionError) as error:
            why = "nested too deeply" if isinstance(error, RecursionError) else error
            raise ConfigError(f"--set {setting[:200]}: the list is not valid TOML ({why})") from None


def _value(text: str) -> Any:
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, KeyError):
        if text.startswith("["):  # never a path that somebody meant
            raise
        return text
    return value if isinstance(value, bool | int | float | str | list | dict) else text  # a date is text here


def _unknown(tables: dict[str, Any]) -> Iterable[str]:
    for section, table in tables.items():
        if section not in SECTIONS:
            kind = "section" if isinstance(table, dict) else "key"
            hint = did_you_mean(section, [*SECTIONS, *KEYS]) or f"; the sections are {', '.join(SECTIONS)}"
            yield f"unknown {kind} {section}{hint}"
        elif not isinstance(table, dict):
            yield f"{section} must be a table of keys ([{section}] on a line of its own), got {table!r}"
        else:
            for key in table:
                if key not in SECTIONS[section].model_fields:
                    yield f"unknown key {section}.{key}{did_you_mean(f'{section}.{key}', KEYS)}"


def _sentence(error: ErrorDetails) -> str:
    """A pydantic error as `train.lr must be > 0, got -1`."""
    name = ".".join(str(part) for part in error["loc"][:2])
    kind, context, value = error["type"], error.get("ctx", {}), error["input"]
    bounds = {"greater_than": (">", "gt"), "greater_than_equal": (">=", "ge"), "less_than": ("<", "lt")}
    if kind in bounds:
        sign, key = bounds[kind]
        return f"{name} must be {sign} {context[key]:g}, got {value!r}"
    if kind == "value_error":
        said = str(context["error"])
        return f"{name} {said.removeprefix('size ').removeprefix('rate ')}"
    expected = {
        "int_type": "a whole number",
        "float_type": "a number",
        "finite_number": "a finite number",
        "bool_type": "true or false",
        "string_type": "a text",
        "literal_error": f"one of {str(context.get('expected')).replace(' or ', ', ')}",
    }.get(kind)
    return f"{name} must be {expected}, got {value!r}" if expected else f"{name}: {error['msg']}, got {value!r}"


def _check(config: Config) -> None:
    """Keys that are fine alone and do nothing, or cannot be, together."""
    model, data, train = config.model, config.data, config.train
    if model.path is not None:
        for key in ("preset", "layers", "hidden", "heads", "vocab"):
            if getattr(model, key) is not None:
                raise ConfigError(
                    f"model.{key} has no effect together with model.path: the model's config.json says it; remove one"
                )
        if not model.path.is_dir():
            raise ConfigError(
                f"model.path {model.path} is not a directory with config.json and safetensors files; a name on the "
                "Hugging Face hub is not looked up: fetch it first, with hf download NAME --local-dir DIR"
            )
    else:
        _check_decoder(config)
    if data.path is not None and not data.path.exists():
        raise ConfigError(f"data.path {data.path} does not exist: name a text file or a directory of text files")
    if train.warmup is not None and train.warmup > train.steps:
        raise ConfigError(f"train.warmup is {train.warmup}, more than train.steps = {train.steps}: lower one of them")
    if train.micro_batches > data.batch:
        raise ConfigError(
            f"train.micro_batches is {train.micro_batches}, more than the data.batch = {data.batch} rows of a batch: a "
            "piece has at least one row; lower it, or raise data.batch"
        )
    if train.micro_batches > 1 and not train.recompute:
        raise ConfigError(
            f"train.recompute = false has no effect with train.micro_batches = {train.micro_batches}: pieces of a "
            "batch always run again in backward; remove one of them"
        )
    if train.out.exists() and not train.out.is_dir():
        raise ConfigError(f"train.out {train.out} is a file: name a directory")
    _check_checkpoint(config)


def _check_checkpoint(config: Config) -> None:
    own = config.checkpoint
    for key in ("path", "keep", "limit"):
        if own.every is None and getattr(own, key) is not None:
            raise ConfigError(
                f"checkpoint.{key} has no effect without checkpoint.every: say every how many steps, or remove it"
            )
    if own.path is None:
        return
    if own.path.exists() and not own.path.is_dir():
        raise ConfigError(f"checkpoint.path {own.path} is a file: name a directory")
    places = {path.resolve() for path in config.stores} | {config.train.out.resolve()}
    if own.path.resolve() in places:
        raise ConfigError(
            f"checkpoint.path {own.path} holds other files of the run: name a directory for checkpoints only"
        )


def _check_decoder(config: Config) -> None:
    preset, vocab, shape = config.model.preset, config.model.vocab, None
    if preset is not None and preset not in PRESETS:
        hint = did_you_mean(preset, list(PRESETS)) or f": there are {', '.join(PRESETS)}"
        raise ConfigError(f"model.preset {preset!r} is unknown{hint}")
    shape = config.shape
    if shape["hidden"] % (2 * shape["heads"]):
        raise ConfigError(
            f"model.hidden = {shape['hidden']} must be a multiple of 2 * model.heads = {2 * shape['heads']}: "
            "each head takes an even number of features"
        )
    if config.token_file and vocab is None:
        raise ConfigError(f"model.vocab is needed with the token ids in {config.data.path}: how many ids are there?")
    if not config.token_file and vocab is not None:
        raise ConfigError(
            "model.vocab has no effect on byte-level text, whose vocabulary is the 256 bytes: remove it, "
            "or give token ids in a .npy file as data.path"
        )
