"""Where every parameter, gradient and optimizer state lies: pure arithmetic, no torch.

Note [unit layout]
A unit's device buffer is one flat run of bytes with three regions, each starting at a multiple of 4 KiB:

    [param: trainable, 16-bit] [frozen: requires_grad=False, any dtype] [fp32: trainable, float32]

The trainable parameters also have a place in *state space*, counted in elements: first the float32 ones, then the
16-bit ones. All three kinds of bytes follow from that one number: a float32 parameter lies at 4*elem in the fp32
region, a 16-bit one at 2*(elem - low_first) in the param region, and gradients use the same spacing. So a contiguous
range of state elements is a contiguous range of parameter bytes, which is what lets a streamed chunk of state produce
its slice of the parameters.

The state record holds [master C][exp_avg C][exp_avg_sq C] per chunk of C elements, in float32 unless the optimizer
asked for another format (state_format.py). A float32 parameter *is* its master:
once there is a state record the fp32 region is read from the master parts of its chunks and has no bytes of its own on
disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

PAGE = 4096
VERSION = 2  # of the layout, as snapshots know it
PARAM_ALIGN = 256  # elements: the blocks of 8-bit moments; 512-byte offsets for 16-bit parameters, 1024 for float32
STATE_ALIGN = 1024  # elements: every float32 part of every chunk is a whole number of pages
CHUNK_ALIGN = 2048  # elements: the 16-bit copy of a chunk is a whole number of pages too
CHUNK_MAX = 256 * 1024  # elements: 3 MiB of state per request
STATE_BYTES = 12  # master, exp_avg, exp_avg_sq in float32: what placement counts with, see fit.py for other formats
SLOT_BYTES = 14  # one element of a chunk buffer: such a state and a 16-bit parameter copy


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class ParamSpec:
    """One parameter as the layout sees it. `dtype` is "f32", "bf16", "f16" or, for frozen parameters only, any other
    name.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    trainable: bool

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize


@dataclass(frozen=True)
class Place:
    """Where one parameter lies: `offset` bytes into `region`; `elem` in state space and `grad` bytes into the
    gradients, or -1.
    """

    spec: ParamSpec
    region: str
    offset: int
    elem: int
    grad: int


@dataclass(frozen=True)
class UnitLayout:
    """The layout of one unit; see Note [unit layout]. Sizes are bytes except `elements` and `low_first`."""

    places: tuple[Place, ...]
    regions: dict[str, tuple[int, int]]  # name -> (offset in the flat buffer, bytes); only regions that hold something
    flat_bytes: int
    elements: int  # state space, a multiple of STATE_ALIGN (0: nothing to train)
    low_first: int  # first element of the 16-bit part, a multiple of CHUNK_ALIGN
    grad_bytes: int

    @property
    def state_bytes(self) -> int:
        """Of a state record in float32 without amsgrad."""
        return self.elements * STATE_BYTES

    def region_bytes(self, region: str) -> int:
        """Bytes of `region`, zero where the unit has none."""
        return self.regions.get(region, (0, 0))[1]

    def flat_offset(self, place: Place) -> int:
        """Byte offset of a parameter in the flat buffer."""
        return self.regions[place.region][0] + place.offset if place.region in self.regions else 0


def unit_layout(specs: Sequence[ParamSpec]) -> UnitLayout:
    """Lay out the parameters of one unit in the given order.

    Raises ValueError for a trainable parameter that is not float32, bfloat16 or float16.
    """
    for spec in specs:
        if spec.trainable and spec.dtype not in ("f32", "bf16", "f16"):
            raise ValueError(
                f"parameter {spec.name} is trainable with dtype {spec.dtype}; tierzero trains float32, bfloat16 and "
                "float16 parameters: "
                "convert it or freeze it with requires_grad_(False)"
            )
    elem = 0
    elems: dict[int, int] = {}
    for index, spec in enumerate(specs):
        if spec.trainable and spec.dtype == "f32":
            elems[index] = elem
            elem = round_up(elem + spec.numel, PARAM_ALIGN)
    fp32_end = elem
    low_first = round_up(elem, CHUNK_ALIGN)
    elem = low_first
    for index, spec in enumerate(specs):
        if spec.trainable and spec.dtype != "f32":
            elems[index] = elem
            elem = round_up(elem + spec.numel, PARAM_ALIGN)
    elements = round_up(elem if elem > low_first else fp32_end, STATE_ALIGN)
    low_bytes = 2 * max(elements - low_first, 0) if elem > low_first else 0

    places: list[Place] = []
    frozen = 0
    for index, spec in enumerate(specs):
        if not spec.trainable:
            places.append(Place(spec, "frozen", frozen, -1, -1))
            frozen = round_up(frozen + spec.nbytes, 256)
        elif spec.dtype == "f32":
            places.append(Place(spec, "fp32", 4 * elems[index], elems[index], 4 * elems[index]))
        else:
            low = 2 * (elems[index] - low_first)
            places.append(Place(spec, "param", low, elems[index], 4 * low_first + low))

    regions: dict[str, tuple[int, int]] = {}
    offset = 0
    for region, nbytes in (("param", low_bytes), ("frozen", frozen), ("fp32", 4 * fp32_end)):
        if nbytes:
            regions[region] = (offset, nbytes)
            offset = round_up(offset + nbytes, PAGE)
    grad_bytes = 4 * low_first + low_bytes if low_bytes else 4 * fp32_end
    return UnitLayout(tuple(places), regions, offset, elements, low_first, grad_bytes)


def chunk_elements(layouts: Sequence[UnitLayout]) -> int:
    """Elements per state chunk: a function of the model alone, so that a store can be reopened under any budget."""
    largest = max((layout.elements for layout in layouts), default=0)
    return max(min(CHUNK_MAX, round_up(largest, CHUNK_ALIGN)), CHUNK_ALIGN)


@dataclass(frozen=True)
class StatePiece:
    """A run of one part of a state record: `offset` bytes into the record, `count` float32 elements from state element
    `elem` on.
    """

    offset: int
    elem: int
    count: int


def state_pieces(
    elements: int, chunk: int, part: int, first: int, last: int, chunk_bytes: int | None = None
) -> Iterator[StatePiece]:
    """The runs that hold elements [first, last) of `part` (0 master, 1 exp_avg, 2 exp_avg_sq, 3 max_exp_avg_sq) of a
    state record of `elements`. `chunk_bytes`: of a whole chunk.
    """
    chunk_bytes = STATE_BYTES * chunk if chunk_bytes is None else chunk_bytes
    while first < last:
        start = first // chunk * chunk
        size = min(chunk, elements - start)
        end = min(last, start + size)
        yield StatePiece(start // chunk * chunk_bytes + 4 * (part * size + first - start), first, end - first)
        first = end
