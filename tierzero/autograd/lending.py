"""Lending: parameters that are used outside their unit while the model runs.

Note [lending]
A module may read a weight that belongs to another unit: `F.linear(x, other.weight)`. What it finds there is the rest
parameter, which brings the operation here. While a forward or backward of the model runs, the unit is made resident and
the operation gets the live parameter, so that autograd records that one, and its gradient goes the way of all others.
The use is written into the trace like every other: the next step fetches the unit ahead. The rest parameter stays
registered: whether a step has been foreseen must not change what a checkpoint's hooks see.

Note [how long]
The unit is pinned during the operation. It stays pinned until the forward around it ends if the operation returns a
view of it, and until the backward ends if it is used there outside of every module (a function that a checkpoint
recomputes): what autograd saves then may have no hooks to bring it back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from tierzero.autograd.saved import unit_of
from tierzero.autograd.tensors import tensors_in
from tierzero.errors import PagedOutError, TierzeroError
from tierzero.paging.pager import Pager
from tierzero.paging.pins import Pin
from tierzero.units.paged import Paged
from tierzero.units.source import ParamSource
from tierzero.units.unit import Unit


class Borrower(Pin):
    """A forward or a backward that runs, and the units that are lent to it until it ends."""

    __slots__ = ("lent", "train", "used", "whole")

    def __init__(self, train: bool, whole: bool = False) -> None:
        self.train = train  # whether gradients may come of it
        self.whole = whole  # everything it uses is lent until its end
        self.lent: dict[int, Unit] = {}  # by uid
        self.used: set[int] = set()  # uids of what the trace has of it

    def lends(self, uid: int) -> bool:
        return uid in self.lent


class Loan(Pin):
    """One operation that uses what is lent to it."""

    __slots__ = ()

    def lends(self, uid: int) -> bool:
        return True


class Lending:
    """Lends the parameters of one model's units. `borrower()` is the innermost forward or backward that runs, or None;
    `pieces()` whether it is that of a unit that runs its batch in pieces.
    """

    def __init__(
        self,
        by_storage: Mapping[int, Unit],
        pager: Pager,
        borrower: Callable[[], Borrower | None],
        pieces: Callable[[], bool],
    ) -> None:
        self.by_storage = by_storage
        self.pager = pager
        self.borrower = borrower
        self.pieces = pieces
        self._take = pager.metrics.engine(self._taken)
        self.call = torch.compiler.disable(self._call)  # opaque to the compiler, as the hooks are
        for unit in by_storage.values():
            unit.lending = self

    def is_open(self) -> bool:
        """Whether a forward or a backward of the model runs."""
        return self.borrower() is not None

    def lends(self, value: Any) -> bool:
        """Whether `value` is a parameter at rest of these units."""
        return isinstance(value, Paged) and getattr(getattr(value.source, "unit", None), "lending", None) is self

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`func` with live parameters in the place of those at rest."""
        borrower = self.borrower()
        assert borrower is not None
        pin, units = Loan(), {}

        def live(value: Any) -> Any:
            if not self.lends(value) or not isinstance(value.source, ParamSource):
                return value
            units[value.source.unit.uid] = value.source.unit
            return self._take(value, value.source, borrower, pin)

        self.pager.loans += 1
        try:
            args, kwargs = tree_map(live, (args, kwargs))
            result = func(*args, **kwargs)
            views = [unit_of(tensor, self.by_storage) for tensor in tensors_in([result])]
            for unit in units.values():
                if any(view is unit for view in views):
                    self._keep(unit, borrower)
            return result
        finally:
            self.pager.loans -= 1
            for unit in units.values():
                self.pager.release(unit, pin, register_rest=True)

    def _taken(self, value: Paged, source: ParamSource, borrower: Borrower, pin: Pin) -> torch.Tensor:
        unit, index = source.unit, source.index
        leaf = isinstance(value, nn.Parameter)
        if not leaf and value.requires_grad:
            raise PagedOutError(
                f"the gradient of a copy of {source.name} would be lost: another module's parameter cannot be an "
                "argument of a checkpoint; read it inside the function that is checkpointed"
            )
        unit.check_given()
        if not unit.live_registered or not unit.pins:
            record = unit.uid not in borrower.used and not unit.in_backward
            borrower.used.add(unit.uid)
            self.pager.acquire(unit, pin, train=borrower.train, record=record)
        if borrower.whole:
            self._keep(unit, borrower)  # now: a checkpoint stops the operation with an exception when it has enough
        live = unit.lend(index)
        if live.requires_grad and torch.is_grad_enabled() and self.pieces():
            raise TierzeroError(
                f"a unit that runs its batch in pieces uses {source.name}, which belongs to unit {unit.name}: its "
                "gradients would not be summed in the order of the pieces. Leave micro_batches at 1, or choose units= "
                "such that one unit contains both"
            )
        return live if leaf else live.detach()

    def _keep(self, unit: Unit, borrower: Borrower) -> None:
        self.pager.loans += unit.uid not in borrower.lent
        borrower.lent[unit.uid] = unit
        unit.pins.add(borrower)

    def give_back(self, borrower: Borrower) -> None:
        """The borrower's forward or backward is over."""
        while borrower.lent:
            _, unit = borrower.lent.popitem()
            self.pager.loans -= 1
            self.pager.release(unit, borrower, register_rest=True)
