"""Where the batch is in what a unit takes and returns: arguments cut into pieces of rows, results put together again.

Note [batch dimension]
The batch is the first dimension of the first floating-point tensor of at least two dimensions among the arguments, in
the order in which they are passed (the first tensor of any kind where there is none). A tensor is cut if its first
dimension has that size; every other one (rotary tables, masks of batch size 1, scalars) goes to each piece as it is.
Where the batch is as large as another dimension of that first tensor, a table of the other one would look the same, and
nothing is guessed. Pieces are as even as possible: their sizes differ by one row at most, larger ones first.

Note [results]
A tensor is put together along its first dimension if that is a multiple of the rows of its piece, the same one in every
piece (the tokens of a batch, flattened, are such a multiple). An argument that is passed through whole comes out whole.
Everything else must be equal in all pieces.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from tierzero.errors import TierzeroError

_PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, enum.Enum, type),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType),
)


def sizes_of(rows: int, pieces: int) -> list[int]:
    """How many rows each piece has: `pieces` of them, or one a row where there are fewer rows."""
    pieces = max(1, min(rows, pieces))
    return [rows // pieces + (index < rows % pieces) for index in range(pieces)]


class Arguments:
    """One call's arguments. `tensors` are its tensors in order, `cut` tells which have the batch dimension of size
    `rows`, `sizes` are the rows of each piece.
    """

    def __init__(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], pieces: int) -> None:
        """TierzeroError, naming unit `name`, if the batch dimension cannot be told."""
        self.leaves, self.spec = tree_flatten((args, kwargs))
        self.name = name
        self.places = [at for at, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor)]
        self.tensors: list[torch.Tensor] = [self.leaves[at] for at in self.places]
        first = self._first()
        self.rows = first.shape[0]
        self.sizes = sizes_of(self.rows, pieces)
        whole = len(self.sizes) == 1
        self.cut = [not whole and self._has_rows(tensor, first) for tensor in self.tensors]
        for leaf in self.leaves:
            if not isinstance(leaf, (torch.Tensor, *_PLAIN)):
                raise TierzeroError(
                    f"unit {name} takes a {type(leaf).__name__}, and micro_batches cannot tell what in it belongs to "
                    "which rows of the batch: pass tensors and plain values (a key-value cache is not needed in "
                    "training: call the model with use_cache=False), or leave micro_batches at 1"
                )
        for at in self.places:
            self.leaves[at] = None  # they are given back by whoever keeps them

    def _first(self) -> torch.Tensor:
        likely = [tensor for tensor in self.tensors if tensor.is_floating_point() and tensor.ndim > 1]
        found = likely or [tensor for tensor in self.tensors if tensor.ndim]
        if not found:
            raise TierzeroError(
                f"unit {self.name} takes no tensor with a batch dimension, so micro_batches has nothing to cut: pass "
                "its input as an argument, choose other units with offload(..., units=...), or leave micro_batches at 1"
            )
        return found[0]

    def _has_rows(self, tensor: torch.Tensor, first: torch.Tensor) -> bool:
        if not tensor.ndim or tensor.shape[0] != self.rows:
            return False
        if tensor.ndim < min(3, first.ndim) and self.rows in first.shape[1:]:
            raise TierzeroError(
                f"unit {self.name} takes a tensor of shape {list(tensor.shape)} beside one of shape {list(first.shape)}"
                f": {self.rows} is the batch and another dimension too, so micro_batches cannot tell whether it "
                "belongs to the rows of the batch; use another batch size, or leave micro_batches at 1"
            )
        return True

    @property
    def starts(self) -> list[int]:
        """The row at which each piece begins."""
        return [sum(self.sizes[:index]) for index in range(len(self.sizes))]

    def describe(self) -> str:
        """A sentence for an error in a piece."""
        return (
            f"unit {self.name} ran a piece of its batch of {self.rows} rows (micro_batches): of the {len(self.cut)} "
            f"tensors it takes, the {sum(self.cut)} with that first dimension were cut, the others passed whole"
        )

    def take(self, tensors: Sequence[torch.Tensor], start: int, rows: int) -> list[torch.Tensor]:
        """`tensors` (in the order of `self.tensors`) with `rows` rows from `start` on of those that are cut."""
        return [tensor.narrow(0, start, rows) if cut else tensor for tensor, cut in zip(tensors, self.cut, strict=True)]

    def call(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) with `tensors` in place of its own. Containers are new ones."""
        leaves = list(self.leaves)
        for at, tensor in zip(self.places, tensors, strict=True):
            leaves[at] = tensor
        args, kwargs = tree_unflatten(leaves, self.spec)
        return args, kwargs

    def check_untouched(self, called: tuple[tuple[Any, ...], dict[str, Any]], tensors: Sequence[torch.Tensor]) -> None:
        """TierzeroError if the unit put something into the containers it was `called` with."""
        leaves, spec = tree_flatten(called)
        now = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if spec != self.spec or any(own is not given for own, given in zip(now, tensors, strict=False)):
            raise TierzeroError(
                f"unit {self.name} changes a list or dict that it is called with, which micro_batches would make it do "
                "once a piece: return the values instead, or leave micro_batches at 1"
            )


class Results:
    """What the pieces of one call returned, and how it is put together."""

    def __init__(self, name: str, sizes: Sequence[int]) -> None:
        self.name = name
        self.sizes = sizes
        self.spec: TreeSpec | None = None
        self.leaves: list[Any] = []  # of the first piece, without the tensors that are put together
        self.per_row: list[int] = []  # of those: how many of their rows one row of the batch has
        self.through: dict[int, int] = {}  # leaf -> the argument that comes out as it went in
        self.places: list[int] = []  # leaves that are put together
        self.parts: list[list[torch.Tensor]] = []
        self.seen = 0

    def add(self, output: Any, whole: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """Take the output of the next piece apart; `whole` are its arguments, None for those that were cut. Returns
        the tensors that are put together.
        """
        leaves, spec = tree_flatten(output)
        rows = self.sizes[self.seen]
        through = {
            at: index
            for at, leaf in enumerate(leaves)
            for index, tensor in enumerate(whole)
            if tensor is not None and leaf is tensor
        }
        places = [at for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and at not in through]
        found: list[torch.Tensor] = [leaves[at] for at in places]
        if self.seen == 0:
            self.spec, self.through, self.places = spec, through, places
            self.leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            self.per_row = [self._per_row(tensor, rows) for tensor in found]
            self.parts = [[] for _ in found]
            if not found:
                raise TierzeroError(
                    f"unit {self.name} returns no tensor of its own, so micro_batches has nothing to put together; "
                    "leave micro_batches at 1"
                )
            for leaf in self.leaves:
                if not isinstance(leaf, _PLAIN):
                    raise TierzeroError(
                        f"unit {self.name} returns a {type(leaf).__name__}, which micro_batches cannot put together "
                        "from pieces: return tensors in tuples, lists or dicts, or leave micro_batches at 1"
                    )
        elif (spec, through, places) != (self.spec, self.through, self.places):
            raise self._differ("another structure")
        else:
            for own, leaf in zip(self.leaves, leaves, strict=True):
                if not isinstance(leaf, torch.Tensor) and (type(leaf) is not type(own) or leaf != own):
                    raise self._differ(f"{leaf!r} where the first returned {own!r}")
            for per_row, tensor in zip(self.per_row, found, strict=True):
                if self._per_row(tensor, rows) != per_row:
                    raise self._differ(f"a tensor of shape {list(tensor.shape)}, which does not follow its rows")
        self.seen += 1
        return found

    def again(self, output: Any, whole: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """The tensors to be put together of a piece that ran again."""
        leaves, spec = tree_flatten(output)
        if spec != self.spec or not all(isinstance(leaves[at], torch.Tensor) for at in self.places):
            raise TierzeroError(
                f"unit {self.name} returned another structure when a piece of its batch ran again for backward: what "
                "it does must follow from its arguments and torch's random generators alone; leave micro_batches at 1"
            )
        return [leaves[at] for at in self.places]

    def _per_row(self, tensor: torch.Tensor, rows: int) -> int:
        if len(self.sizes) == 1:
            return 1
        if not tensor.ndim or not rows or not tensor.shape[0] or tensor.shape[0] % rows:
            raise TierzeroError(
                f"unit {self.name} returns a tensor of shape {list(tensor.shape)} for {rows} rows of its batch: its "
                "first dimension is not the batch, and micro_batches cannot put it together from pieces (a loss or a "
                "mean would be another one); leave it out, or leave micro_batches at 1"
            )
        return tensor.shape[0] // rows

    def _differ(self, what: str) -> TierzeroError:
        return TierzeroError(
            f"unit {self.name} returned {what} for a later piece of its batch, so micro_batches cannot put the pieces "
            "together; leave micro_batches at 1"
        )

    def keep(self, found: Sequence[torch.Tensor]) -> None:
        """Keep the values of the piece just added."""
        for parts, tensor in zip(self.parts, found, strict=True):
            parts.append(tensor.detach())

    def together(self) -> list[torch.Tensor]:
        """The tensors of all pieces, each in one new tensor; the pieces are let go."""
        whole = [parts[0].clone() if len(parts) == 1 else torch.cat(parts) for parts in self.parts]
        self.parts = [[] for _ in self.parts]
        return whole

    def cut(self, grads: Sequence[torch.Tensor | None], piece: int) -> list[torch.Tensor | None]:
        """The rows of gradients of the whole that belong to one piece."""
        if len(self.sizes) == 1:
            return list(grads)
        start, rows = sum(self.sizes[:piece]), self.sizes[piece]
        return [
            None if grad is None else grad.narrow(0, start * each, rows * each)
            for grad, each in zip(grads, self.per_row, strict=True)
        ]

    def build(self, tensors: Sequence[torch.Tensor], arguments: Sequence[torch.Tensor]) -> Any:
        """The unit's output: `tensors` put together, and what passed through from `arguments`."""
        assert self.spec is not None
        leaves = list(self.leaves)
        for at, tensor in zip(self.places, tensors, strict=True):
            leaves[at] = tensor
        for at, index in self.through.items():
            leaves[at] = arguments[index]
        return tree_unflatten(leaves, self.spec)
