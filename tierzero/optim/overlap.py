"""When updates may begin: at the step (deferred), or while backward still goes on (eager), as guesses at the step.

Note [when to guess]
A guess is right if no other backward comes before the step, the norm needs no clipping, everything is finite, and
neither gradients nor hyper-parameters change in between. Whether a loop is like that shows from its last steps: how
many backwards it does per step tells which one is the last, and a step that a guess would have foreseen counts as held
even if nothing was guessed. With "auto", guessing begins when a step has held; each wrong step doubles the number of
steps that must hold before the next try, up to _PATIENCE, and a right one halves it.
"""

from __future__ import annotations

from typing import Any, Literal

Mode = Literal["auto", "eager", "deferred"]

_PATIENCE = 16  # steps


class Overlap:
    """What one optimizer knows about its own steps; pure bookkeeping."""

    def __init__(self, mode: Mode) -> None:
        if mode not in ("auto", "eager", "deferred"):
            raise ValueError(f'overlap={mode!r}: use "auto", "eager" (updates begin in backward) or "deferred"')
        self.mode = mode
        self.backwards = 0  # finished since the last step
        self.expected: int | None = None  # of the step before
        self.foreseen: Any = None  # the hyper-parameters when the last backward ended
        self.held = 0  # steps in a row that a guess would have got right
        self.needed = 1  # how many there must be before the next guess
        self.guessing = False  # in this step

    @property
    def last(self) -> bool:
        """Whether the backward that goes on is the step's last one, as far as anybody can tell."""
        return self.expected is None or self.backwards + 1 == self.expected

    def wanted(self) -> bool:
        """Whether to guess at an update now."""
        if self.mode == "deferred" or not self.last:
            return False
        wanted = self.mode == "eager" or (self.expected is not None and self.held >= self.needed)
        self.guessing |= wanted
        return wanted

    def forget(self) -> None:
        """The backwards since the last step count no more."""
        self.backwards, self.guessing = 0, False

    def backward_over(self, hypers: Any) -> None:
        """A backward has ended; `hypers`: the hyper-parameters now."""
        self.backwards += 1
        self.foreseen = hypers

    def stepped(self, hypers: Any, *, as_is: bool) -> None:
        """A step was taken with `hypers`; `as_is`: with finite, unclipped and untouched gradients."""
        if not self.backwards:
            return  # a step without a backward tells nothing
        held = as_is and hypers == self.foreseen and self.expected in (None, self.backwards)
        self.held = self.held + 1 if held else 0
        if self.guessing:
            self.needed = max(self.needed // 2, 1) if held else min(2 * self.needed, _PATIENCE)
        self.expected, self.backwards, self.guessing = self.backwards, 0, False
