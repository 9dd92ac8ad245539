"""Weights from files into the tiers of an offloaded model: checked as a whole first, then streamed a part at a time."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from tierzero.checkpoint.by_region import ByRegion
from tierzero.checkpoint.names import ignored, match
from tierzero.checkpoint.safetensors import find_safetensors
from tierzero.checkpoint.stored import OpenFiles, Stored
from tierzero.errors import TierzeroError
from tierzero.units.borrowed import Borrowed, FrozenRecord, Span
from tierzero.units.live import LiveParameter
from tierzero.units.parts import unit_of, write_part
from tierzero.units.records import HostRecord
from tierzero.units.unit import Unit

log = logging.getLogger("tierzero")
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class Loaded(NamedTuple):
    """Names of the model for which the files had nothing, and names in the files that the model does not have."""

    missing: list[str]
    unexpected: list[str]


@dataclass
class _Given:
    """A tensor of the model with all its names, and what the files have for it."""

    names: list[str]
    target: torch.Tensor
    stored: Stored


def load_weights(
    model: nn.Module, path: str | os.PathLike[str], *, strict: bool = True, in_place: bool = False
) -> Loaded:
    """Fill an offloaded model, or a part of it, with the weights in `path`: a .safetensors file, a directory of them
    with or without an index, or a directory that torch.distributed.checkpoint wrote (sharded or not).

    Names are those of the model's state dict; a prefix "model." around all of them, the name of the inner model of a
    Hugging Face model (there or not), PEFT's wrapping and a few old spellings are understood. Of names of one shared
    parameter, one is enough. Values are cast to the model's dtypes as load_state_dict does. `strict=False` leaves alone
    what is missing and skips what is unexpected; both are returned.

    in_place: leave frozen units of a model that was built on the meta device in their safetensors files (on a local
    drive) and read them from there: nothing of them is written, and snapshots name the files. They must stay. A unit
    with a parameter that has another dtype there is copied.

    A part of at most 4 MiB is in memory at a time, of a torch.distributed.checkpoint one chunk. Everything that can be
    told from headers is checked before anything is changed. Raises TierzeroError for what does not fit the model,
    FileNotFoundError for missing files, StoreCorruptError for damaged ones; each names the file and the tensor. After a
    failure half way, load again: the model has some of the new values.
    """
    path = Path(path)
    state = {name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, torch.Tensor)}
    _check_ready(model, state)
    stored = _find(path)
    matched = match(list(stored), list(state), _inner(model))
    if matched.twice:
        name, one, other = matched.twice[0]
        raise TierzeroError(
            f"{stored[one].file} holds {name} as {one}, and {stored[other].file} as {other}: remove one of them"
        )
    given: dict[Any, _Given] = {}
    for name, target in state.items():
        entry = given.setdefault(_key(target), _Given([], target, None))  # type: ignore[arg-type]
        entry.names.append(name)
        if name in matched.found:
            entry.stored = stored[matched.found[name]]  # of names of one tensor the last, as load_state_dict
    every, given = given, {key: entry for key, entry in given.items() if entry.stored is not None}
    missing = [name for key, entry in every.items() if key not in given for name in entry.names]
    own = {name for name, _ in model.named_buffers()} - state.keys()
    missing = sorted(set(missing) - ignored(missing, _patterns(model, "_keys_to_ignore_on_load_missing"), ()))
    unexpected = sorted(
        set(matched.unexpected)
        - ignored(matched.unexpected, _patterns(model, "_keys_to_ignore_on_load_unexpected"), own)
    )
    if strict and (missing or unexpected):
        raise _misfit(path, missing, unexpected, stored)
    for entry in given.values():
        _check_fit(entry)
    borrowed = list(_borrowable(given)) if in_place else []
    with OpenFiles() as files:
        for unit, spans in borrowed:
            _borrow(unit, spans)
        left = {unit for unit, _ in borrowed if isinstance(unit.records["frozen"], FrozenRecord)}
        rest = []
        units: dict[Unit, dict[int, _Given]] = {}
        for entry in sorted(given.values(), key=lambda entry: _place(entry.stored)):
            found = unit_of(entry.target)
            if found is None:
                rest.append(entry)
            elif found[0] not in left or found[0].layout.places[found[1]].region != "frozen":
                units.setdefault(found[0], {})[found[1]] = entry
        with ByRegion() as whole:
            for unit, entries in units.items():
                done = whole.fill(unit, {index: entry.stored for index, entry in entries.items()})
                rest += [entry for index, entry in entries.items() if index not in done]
        for entry in rest:
            _copy(entry, files)
        for unit, spans in borrowed:
            _note_origin(unit, spans)
    return Loaded(missing, unexpected)


def _find(path: Path) -> dict[str, Stored]:
    if not (path / ".metadata").is_file():
        return find_safetensors(path)
    from tierzero.checkpoint.distributed import find_distributed  # takes 50 MB of memory to import

    return find_distributed(path)


def _key(target: torch.Tensor) -> Any:
    """Equal for the names of one tensor."""
    return unit_of(target) or id(target)


def _place(stored: Stored) -> tuple[str, int]:
    return (str(stored.whole[0]), stored.whole[1]) if stored.whole is not None else (stored.file, 0)


def _check_ready(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    for name, value in state.items():
        if isinstance(value, LiveParameter):
            raise TierzeroError(
                f"{name} is in use by a forward or an `unsharded` block: load weights after it, not inside"
            )
    if not any(unit_of(value) for value in state.values()):
        raise TierzeroError(
            f"{type(model).__name__} is not an offloaded model; call tierzero.offload(model, tierzero.Tiers(...)) "
            "first, or load it as plain PyTorch does"
        )


def _inner(model: nn.Module) -> str:
    name = getattr(model, "base_model_prefix", "")
    return name if isinstance(name, str) else ""


def _patterns(model: nn.Module, attribute: str) -> list[str]:
    """Regular expressions of names that the model itself says may be left over."""
    found: list[str] = []
    for module in model.modules():
        found += getattr(module, attribute, None) or []
    return found


def _misfit(path: Path, missing: list[str], unexpected: list[str], stored: dict[str, Stored]) -> TierzeroError:
    parts = []
    if missing:
        parts.append(f"missing {_some(missing)}")
    if unexpected:
        parts.append(f"unexpected {_some(unexpected)} (in {stored[unexpected[0]].file})")
    return TierzeroError(
        f"{path} does not fit the model: {'; '.join(parts)}. Use the weights that belong to it, or strict=False to "
        "leave what is missing as it is and skip the rest"
    )


def _some(names: list[str]) -> str:
    return f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"


def _check_fit(entry: _Given) -> None:
    """TierzeroError if the stored tensor has another shape, or a dtype that a cast would make nonsense of."""
    target, stored = entry.target, entry.stored
    if stored.shape != tuple(target.shape):
        raise TierzeroError(
            f"{entry.names[0]} has shape {list(stored.shape)} in {stored.file} ({stored.name}) and "
            f"{list(target.shape)} in the model: use the config that belongs to these weights"
        )
    have, want = stored.dtype, target.dtype
    floats = have.is_floating_point and want.is_floating_point and not {have, want} & set(_FLOAT8)
    whole = not any(dtype.is_floating_point or dtype.is_complex or dtype == torch.bool for dtype in (have, want))
    if have != want and not floats and not whole:
        raise TierzeroError(
            f"{entry.names[0]} is {have} in {stored.file} ({stored.name}) and {want} in the model: such values are "
            "quantised or mean something else; dequantise the checkpoint first"
        )


# -- values ------------------------------------------------------------------------------------------------------------


def _copy(entry: _Given, files: OpenFiles) -> None:
    target, stored = entry.target, entry.stored
    found = unit_of(target)
    if found is not None and found[0].generic is None and not stored.scattered:
        unit, index = found
        for first, values in stored.runs(files):
            unit.at_rest(write_part(unit, index, first, values), changes=True)
        unit.blank.discard(index)
        return
    whole = torch.empty(stored.numel, dtype=stored.dtype)
    for first, values in stored.runs(files):
        whole[first : first + values.numel()] = values
    with torch.no_grad():
        target.copy_(whole.view(stored.shape))


# -- left in their files -----------------------------------------------------------------------------------------------


def _borrowable(given: dict[Any, _Given]) -> Iterator[tuple[Unit, list[tuple[int, int, str, int]]]]:
    """The units whose frozen regions may stay where they are, with (offset, bytes, path, place in the file) of each
    parameter.
    """
    units = {id(key[0]): key[0] for key in given if isinstance(key, tuple)}
    for unit in units.values():
        frozen = [index for index, place in enumerate(unit.layout.places) if place.region == "frozen"]
        there = {index: given[unit, index].stored for index in frozen if (unit, index) in given}
        record = unit.records.get("frozen")
        fresh = isinstance(record, FrozenRecord) or (isinstance(record, HostRecord) and unit.blank >= set(frozen))
        exact = [one.whole is not None and one.dtype == unit.live[index].dtype for index, one in there.items()]
        if not frozen or not fresh or len(there) != len(frozen):
            continue
        if not all(exact):
            log.info("unit %s has frozen parameters of another dtype in its file: it is copied", unit.name)
            continue
        places = [unit.layout.places[index] for index in frozen]
        ends = [there[index].whole or (Path(), 0) for index in frozen]
        yield (
            unit,
            [
                (place.offset, place.spec.nbytes, str(path.absolute()), at)
                for place, (path, at) in zip(places, ends, strict=True)
                if place.spec.nbytes
            ],
        )


def _spans(unit: Unit, spans: list[tuple[int, int, str, int]]) -> Borrowed:
    files = unit.owner.homes.files
    return Borrowed([Span(offset, nbytes, files.of(path), at) for offset, nbytes, path, at in spans])


def _borrow(unit: Unit, spans: list[tuple[int, int, str, int]]) -> None:
    record = unit.records["frozen"]
    if not isinstance(record, FrozenRecord):
        return  # in host memory: the values are copied there like all others

    async def borrow() -> None:
        record.borrow(_spans(unit, spans))

    unit.at_rest(borrow(), changes=True)
    for index, place in enumerate(unit.layout.places):
        if place.region == "frozen":
            unit.blank.discard(index)


def _note_origin(unit: Unit, spans: list[tuple[int, int, str, int]]) -> None:
    record = unit.records["frozen"]
    if isinstance(record, HostRecord):
        record.origin = (record.version, _spans(unit, spans))
