"""What a state record is made of: the dtypes of masters and moments, and the sizes that follow. Mirrors the native
extension's state_format.hpp, which says what the bytes mean.

Note [split masters]
A split master keeps its high half in the bfloat16 parameter, which must lie in host memory, and its low half in the
state record. Only units whose trainable parameters are all bfloat16 and cached in host memory have one; the others of
the model keep float32 masters. An update of such a unit overwrites the only copy of the high halves, so it writes a
shadow first, which becomes the parameters when the new state is whole; it is never a guess.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from tierzero.errors import TierzeroError
from tierzero.units.layout import PAGE, UnitLayout, round_up

BLOCK = 256  # elements that share a scale in 8-bit moments
_MOMENT_BYTES = {"f32": 4, "bf16": 2, "u8": 1}


@dataclass(frozen=True)
class StateFormat:
    """`master`: "f32" or "split"; `moments`: "f32", "bf16" or "u8"; `amsgrad`: with max_exp_avg_sq, as `moments`.
    Chunks and records are counted in elements, sizes in bytes.
    """

    master: Literal["f32", "split"] = "f32"
    moments: Literal["f32", "bf16", "u8"] = "f32"
    amsgrad: bool = False

    @property
    def plain(self) -> bool:
        """Everything is float32, so that each part of a chunk is a run of its own."""
        return self.master == "f32" and self.moments == "f32"

    @property
    def parts(self) -> int:
        """master, exp_avg, exp_avg_sq and perhaps max_exp_avg_sq."""
        return 4 if self.amsgrad else 3

    @property
    def native(self) -> tuple[str, str, str, bool]:
        """As the native extension takes it."""
        return self.master, self.moments, self.moments, self.amsgrad

    def chunk_bytes(self, elements: int) -> int:
        """Bytes of a chunk."""
        moment = elements * _MOMENT_BYTES[self.moments]
        if self.moments == "u8":
            moment += round_up(elements, BLOCK) // BLOCK * 4
        used = elements * (4 if self.master == "f32" else 2) + moment * (self.parts - 1)
        if self.master == "split" and self.moments == "u8":
            used += round_up(elements, 8) // 8
        return round_up(used, PAGE)

    def record_bytes(self, elements: int, chunk: int) -> int:
        """Bytes of a record that is cut into chunks of `chunk` and what is left."""
        rest = elements % chunk
        return elements // chunk * self.chunk_bytes(chunk) + (self.chunk_bytes(rest) if rest else 0)

    def of_unit(self, layout: UnitLayout, cached: bool) -> StateFormat:
        """The format of one unit of a model with this one. `cached`: its parameters lie in host memory. See Note [split
        masters].
        """
        trained = [place.spec.dtype for place in layout.places if place.elem >= 0]
        if self.master == "split" and not (cached and all(dtype == "bf16" for dtype in trained)):
            return replace(self, master="f32")
        return self

    def __str__(self) -> str:
        master = {"f32": "float32", "split": "split"}[self.master]
        moments = {"f32": "float32", "bf16": "bfloat16", "u8": "8-bit"}[self.moments]
        return f"{master} masters and {moments} moments{' with amsgrad' if self.amsgrad else ''}"

    def to_json(self) -> dict[str, Any]:
        """What a snapshot keeps."""
        return {"master": self.master, "moments": self.moments, "amsgrad": self.amsgrad}


PLAIN = StateFormat()


def choose_format(state_dtype: Any, master: str, amsgrad: bool, *, native: bool) -> StateFormat:
    """The format that an optimizer's options ask for. ValueError for unknown ones, TierzeroError for what the missing
    `native` extension would be needed for.
    """
    names = {"torch.float32": "f32", "torch.bfloat16": "bf16", "torch.uint8": "u8", "8bit": "u8"}
    moments: Any = names.get(str(state_dtype))
    if moments is None:
        raise ValueError(f'state_dtype={state_dtype!r}: use torch.float32, torch.bfloat16 or "8bit"')
    if master not in ("float32", "split"):
        raise ValueError(f'master={master!r}: use "float32" or "split"')
    chosen = StateFormat("split" if master == "split" else "f32", moments, bool(amsgrad))
    if not chosen.plain and not native:
        raise TierzeroError(
            f"optimizer states with {chosen} need the native extension, which is not there: install a compiler and "
            'build it, or use state_dtype=torch.float32 and master="float32"'
        )
    return chosen
