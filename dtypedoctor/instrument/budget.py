"""Thins the watch so that it costs no more than a share of the program's time.

The first steps are measured whole. Then the seconds of such steps are compared with those of steps in which only the residual stream and
the loss are measured, and each layer takes its turn in every Nth step, so that the differences, those of the first steps included, stay within the
budget. At the first sign of trouble a few steps are measured whole again. Time decides nothing else, and nothing at all where the schedule is fixed.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator
from math import ceil, inf, isfinite

import torch

from dtypedoctor.errors import UsageError
from dtypedoctor.instrument.statistics import median
from dtypedoctor.trace.events import NotWatched
from dtypedoctor.unpatched import monotonic

WHOLE = 32
"""Steps at the beginning that are measured whole."""
HORIZON = 160
"""Steps within which what has been spent so far is to be brought back into the budget."""
LEAST = 4
"""At least one part in so many of the budget is spent, whatever has been spent before."""
COMPARED = 6
"""Steps of each kind whose seconds are compared."""
MOST = 64
"""Every layer has its turn in one of so many steps at least."""
AGAIN = 512
"""Steps after which the seconds are compared anew."""
AFTER_SIGN = 8
"""Steps that are measured whole after a sign of trouble."""
WINDOW = 32
"""Steps within which a magnitude is compared with an earlier one."""
GROWTH = {"output": 4.0, "grad_output": 16.0, "loss": 4.0, "grad": 16.0}
"""By the kind of the site, how many times as large it may become within a window. Gradients vary more from batch to batch."""
HEADROOM = 8.0
"""A magnitude that is less than so many times below the largest of its dtype is a sign."""


def budget_of(value: str | float | None) -> "Budget | None":
    """The budget that ``"5%"`` or 0.05 (a share of the program's time) or ``"1/16"`` (a fixed schedule) stands for; None for ``"off"`` and None.

    Raises:
        UsageError: it is none of these.
    """
    if value is None or value == "off":
        return None
    text = str(value)
    try:
        if text.startswith("1/") and int(text[2:]) > 0:
            return Budget(fixed=int(text[2:]))
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = 0.0
    if not 0.0 < share < 1.0:
        raise UsageError(f"overhead_budget: must be a share of the time, got {text}", 'Examples: "5%", 0.05, "1/16".')
    return Budget(share=share)


class Budget:
    """Decides how much of each step is measured.

    Args:
        share: of the program's own time that measuring may take.
        fixed: every layer is measured in one of so many steps from the second on, whatever that takes; 0 for a schedule by time.
        clock: seconds.
    """

    def __init__(self, share: float = 0.0, *, fixed: int = 0, clock: Callable[[], float] = monotonic) -> None:
        self._share, self._fixed, self._clock = share, fixed, clock
        self._step, self._began = 0, inf
        self._period = 1
        self._seconds: dict[int, deque[float]] = {1: deque(maxlen=COMPARED), 0: deque(maxlen=COMPARED)}
        self._compare_from = 1 if fixed else WHOLE - COMPARED
        self._each = fixed or 1
        self._whole_until = 1 if fixed else WHOLE
        self._magnitudes: dict[int, tuple[int, float]] = {}
        self._close: set[int] = set()
        self.steps: Counter[int] = Counter()
        """Finished steps by how they were measured: 1 whole, 0 the residual stream alone, N one of N layers."""
        self.signs: list[tuple[int, str]] = []
        """Steps in which something made the watch measure whole steps again, and what."""

    def period(self, step: int) -> int:
        """How ``step``, which begins, is measured: 1 whole, 0 in outline (the residual stream and the loss), N one of N layers and the outline."""
        now = self._clock()
        before = self._period
        if self._step:
            self.steps[before] += 1
        if step == self._step + 1 and before in self._seconds and step > self._compare_from:
            self._seconds[before].append(now - self._began)
        self._period = self._plan(step)
        # the first step after a change has the end of what went before in it
        self._step, self._began = step, now if self._period == before else inf
        return self._period

    def _plan(self, step: int) -> int:
        if step <= self._whole_until:
            return 1
        if self._fixed:
            return self._fixed
        if step > self._compare_from + AGAIN:  # compares anew: whole steps first
            self._compare_from = step - 1
            self._seconds[1].clear()
            self._seconds[0].clear()
            self._whole_until = step + COMPARED
            return 1
        if len(self._seconds[0]) < COMPARED:
            return 0
        if self._each == 1 or self._period == 0 or step % COMPARED == 0:
            self._each = self._turns()
        return self._each

    def _turns(self) -> int:
        """In one of how many steps each layer has its turn, for the time of measuring to stay within the budget."""
        whole, outline = (list(filter(isfinite, self._seconds[period])) for period in (1, 0))
        if not whole or not outline:
            return self._each
        extra = median(whole) / median(outline) - 1
        spent = extra * sum(steps / period for period, steps in self.steps.items() if period)
        left = self._share * (self.steps.total() + HORIZON) - spent
        share = min(self._share, max(self._share / LEAST, left / HORIZON))
        return min(MOST, max(1, ceil(extra / share)))

    def measured(self, step: int, site: int, kind: str, dtype: torch.dtype, magnitude: float) -> None:
        """A sample has become known: looks for signs that something is about to go wrong.

        Args:
            step: of the sample.
            site: its number.
            kind: of the site.
            dtype: of the tensor.
            magnitude: its largest finite one.
        """
        if magnitude * HEADROOM > torch.finfo(dtype).max and site not in self._close:
            self._close.add(site)
            self.sign(f"a magnitude came within {HEADROOM:.0f}x of {str(dtype).removeprefix('torch.')} max")
        most = GROWTH.get(kind)
        if most is None:
            return
        since, before = self._magnitudes.get(site, (0, 0.0))
        if before and magnitude > most * before:
            self.sign(f"a magnitude grew {most:.0f}x within {WINDOW} steps")
        elif before and step < since + WINDOW:
            return
        self._magnitudes[site] = (step, magnitude)

    def sign(self, what: str) -> None:
        """Something is not as it was: the next steps are measured whole."""
        if self._step > self._whole_until:
            self.signs.append((self._step, what))
        self._whole_until = max(self._whole_until, self._step + AFTER_SIGN)

    def left_out(self) -> Iterator[NotWatched]:
        """What was not measured, in words."""
        thinned = {period: steps for period, steps in self.steps.items() if period != 1}
        if not thinned:
            return
        total = sum(self.steps.values())
        what = f"some layers, and operators outside of modules, in {sum(thinned.values()):,} of {_steps(total)}"
        how = [
            f"{_steps(steps)} with each layer measured in 1 of {period} steps"
            if period
            else f"{_steps(steps)} with the residual stream and the loss alone"
            for period, steps in sorted(thinned.items())
        ]
        limit = f"1/{self._fixed}" if self._fixed else f"{self._share * 100:g}%"
        why = f"the overhead budget ({limit}): {_steps(self.steps[1])} measured whole, {', '.join(how)}"
        if self.signs:
            step, sign = self.signs[0]
            times = "once" if len(self.signs) == 1 else f"{len(self.signs):,} times"
            why += f"; {times} whole steps again, first in step {step} ({sign})"
        yield NotWatched(what=what, why=f"{why}. Without a budget (--overhead-budget off) all are measured")


def _steps(number: int) -> str:
    return f"{number:,} step{'' if number == 1 else 's'}"
