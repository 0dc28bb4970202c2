"""Thins the watch so that it costs no more than a share of the program's time.

The first steps are measured whole, and what measuring takes is measured with them: the host's seconds in hooks and the device's seconds for reading.
From then on each layer takes its turn in every Nth step, so that all that has been spent, that of the first steps included, comes back into the
budget. At the first sign of trouble a few steps are measured whole again. Time decides nothing else, and nothing at all where the schedule is fixed.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator
from math import ceil, inf

import torch

from dtypedoctor.errors import UsageError
from dtypedoctor.instrument.meter import Meter
from dtypedoctor.instrument.statistics import median
from dtypedoctor.trace.events import NotWatched
from dtypedoctor.unpatched import perf_counter

WHOLE = 8
"""Steps at the beginning that are measured whole."""
HORIZON = 160
"""Steps within which what has been spent so far is to be brought back into the budget."""
LEAST = 4
"""At least one part in so many of the budget is spent, whatever has been spent before."""
MORE = 1.5
"""At most so many times the budget is spent, whatever has not been spent before."""
PLANNED = 16
"""Steps after which it is planned anew how many layers are measured."""
LATEST = 16
"""Steps whose seconds are known."""
MOST = 64
"""Every layer has its turn in one of so many steps at least."""
LOSS_ALONE = -1
"""The period of a step in which not even the residual stream is measured: where that alone would take more than the budget."""
APART = 16
"""The residual stream is measured in one of so many steps at least."""
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

    def __init__(self, share: float = 0.0, *, fixed: int = 0, clock: Callable[[], float] = perf_counter) -> None:
        self._share, self._fixed, self._clock = share, fixed, clock
        self.meter = None if fixed else Meter()
        """Counts what measuring takes; None where that decides nothing."""
        self._step, self._began, self._metered = 0, inf, (0.0, 0.0, 0.0)
        self.spent = 0.0
        """Seconds that measuring has added to the program's, the first step aside, as far as they are known."""
        self._period = 1
        self._program = 0.0
        self._seconds: deque[float] = deque(maxlen=LATEST)
        self._whole: deque[float] = deque(maxlen=LATEST)
        self._outline: deque[float] = deque(maxlen=LATEST)
        self._loss: deque[float] = deque(maxlen=LATEST)
        self._each, self._apart, self._plan_at = fixed or 1, 1, 0
        self._whole_until = 1 if fixed else WHOLE
        self._magnitudes: dict[int, tuple[int, float]] = {}
        self._close: set[int] = set()
        self.steps: Counter[int] = Counter()
        """Finished steps by how they were measured: 1 whole, N one of N layers, :data:`LOSS_ALONE`."""
        self.signs: list[tuple[int, str]] = []
        """Steps in which something made the watch measure whole steps again, and what."""

    def period(self, step: int) -> int:
        """How ``step``, which begins, is measured: 1 whole, N one of N layers and the outline (the residual stream and the loss), :data:`LOSS_ALONE`."""
        if self._step:
            self.steps[self._period] += 1
        if self.meter is not None:
            self._account(step, self.meter)
        self._step = step
        if step <= self._whole_until:
            self._period = 1
        elif self._fixed:
            self._period = self._fixed
        else:
            if step >= self._plan_at:
                self._plan_at = step + PLANNED
                self._each, self._apart = self._turns()
            self._period = self._each if step % self._apart == 0 else LOSS_ALONE
        return self._period

    def _account(self, step: int, meter: Meter) -> None:
        """A step has ended: what it took, and what measuring took of that."""
        now, metered = self._clock(), (meter.host, meter.device, meter.waited)
        host, device, waited = (after - before for after, before in zip(metered, self._metered, strict=True))
        cost = waited + device + (0.0 if meter.behind else host)
        meter.behind = False
        # the first step builds what all others use: its seconds are not brought back
        if step == self._step + 1 and self._step > 1:
            program = max(0.0, now - self._began - cost)
            self._program += program
            self.spent += cost
            self._seconds.append(program)
            if self._period == 1:
                self._whole.append(cost)
            elif self._period == LOSS_ALONE:
                self._loss.append(cost)
            elif self._whole:
                whole = median(self._whole)
                self._outline.append(max(0.0, cost - whole / self._period) / (1 - 1 / self._period))
        self._began, self._metered = now, metered

    def _turns(self) -> tuple[int, int]:
        """In one of how many steps each layer has its turn, and in one of how many there is an outline, for the seconds of measuring to
        come back into the budget."""
        if not self._whole:
            return self._each, 1
        whole, outline, loss = (
            median(seconds) if seconds else 0.0 for seconds in (self._whole, self._outline, self._loss)
        )
        step = median(self._seconds)
        share = self._share * step
        left = self._share * self._program - self.spent
        allowed = min(MORE * share, max(share / LEAST, share + left / HORIZON))
        if whole <= allowed:
            return 1, 1
        if allowed > outline and (each := ceil((whole - outline) / (allowed - outline))) <= MOST:
            return each, 1
        outline += (whole - outline) / MOST
        return MOST, min(APART, ceil((outline - loss) / (allowed - loss))) if allowed > loss else APART

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
            f"{_steps(steps)} with the loss alone"
            if period == LOSS_ALONE
            else f"{_steps(steps)} with each layer measured in 1 of {period} of them"
            for period, steps in sorted(thinned.items(), reverse=True)
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
