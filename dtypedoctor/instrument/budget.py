"""Says which steps are looked at in full: the first ones, then as many as a share of the program's time pays for; and which tensors outside of modules are
read at once: on a CPU all, on a GPU, where a reading waits for the device, some (:class:`Readings`).

Between two looks only sentinels are on (:mod:`sentinel`, :mod:`gradients`): the loss, the gradients that an optimizer takes, the scaler,
exceptions, and what goes into outermost calls, by reference. What a look costs is what steps that are looked at take longer than others, in the
median; nothing else is timed. Calls without gradients are counted by themselves, and so are all calls of a program without optimizer steps: such
a program may be in its first step for days.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import inf

import torch
from torch import Tensor
from torch import distributed as dist

from dtypedoctor.errors import UsageError
from dtypedoctor.instrument.statistics import median
from dtypedoctor.trace.events import NotWatched
from dtypedoctor.unpatched import perf_counter, thread_time

FIRST = 3
"""Steps that are always looked at, and calls of each kind."""
CREDIT, IN_HALF = 2.0, 8.0
"""Seconds of the program's own thread, from its first call on, in which everything is looked at: a short program is seen whole. With half precision
they are more, since what rounding does to a sum or an average shows after many steps only; not on a GPU, where a look costs ten steps and more."""
ON_GPU, ON_CPU = 0.01, 0.05
"""Shares of the time that looks may take by default."""
KNOWN = 16
"""Steps whose seconds are known, of those that were looked at and of the others."""
ENOUGH = 3
"""Of the others, how many must be known before what a look costs is."""
IN_A_ROW = 4
"""Steps that are looked at one after the other when the time for a look has come: state has to be seen in several rounds to know that it stands still."""
AFTER_SIGN, SIGNS = 8, 4
"""Steps that are looked at after a sign of trouble, and how often that is done."""
OTHERS = 2
"""How often everything is looked at once more, for as long as at the beginning, because the program begins with something else."""


def budget_of(value: str | float | None) -> "Budget | None":
    """The budget that ``"5%"`` or 0.05 (a share of the program's time), ``"auto"`` (the default share) or ``"1/16"`` (a fixed schedule) stands for;
    None for ``"off"`` and None.

    Raises:
        UsageError: it is none of these.
    """
    if value is None or value == "off":
        return None
    if value == "auto":
        return Budget()
    text = str(value)
    try:
        if text.startswith("1/") and int(text[2:]) > 0:
            return Budget(every=int(text[2:]))
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = 0.0
    if not 0.0 < share < 1.0:
        raise UsageError(f"overhead_budget: must be a share of the time, got {text}", 'Examples: "5%", 0.05, "1/16".')
    return Budget(share=share)


@dataclass(slots=True)
class _Kind:
    """Steps, or calls that are counted by themselves."""

    began: float | None = None
    looks: bool = False
    """Whether the one that has begun last is looked at."""
    seconds: dict[bool, deque[float]] = field(default_factory=lambda: {k: deque(maxlen=KNOWN) for k in (False, True)})
    """What those have taken that were looked at, and the others."""
    due: float = inf
    """When the next one is looked at, as soon as that is known."""
    more: int = 0
    """How many are looked at because of a sign."""

    @property
    def cost(self) -> float:
        """Seconds that a look takes, as far as they are known."""
        looked, others = self.seconds[True], self.seconds[False]
        return max(0.0, median(looked) - median(others)) if looked and len(others) >= ENOUGH else 0.0


class Budget:
    """Decides which steps, and which calls, are looked at.

    Args:
        share: of the program's time that looks may take; None for the default.
        every: looks at every N-th step regardless of cost, at none with 0; None for a schedule by time.
        credit: see :data:`CREDIT`.
        clock: seconds.
        busy: seconds of this thread.
    """

    def __init__(self, share: float | None = None, *, every: int | None = None, credit: float = CREDIT,
                 clock: Callable[[], float] = perf_counter, busy: Callable[[], float] = thread_time) -> None:  # fmt: skip
        self._share, self._every, self._credit, self._clock, self._busy = share, every, credit, clock, busy
        self.is_fixed = every is not None
        """Whether time decides nothing."""
        self._steps, self._calls = _Kind(), _Kind()
        self._busy_from = -1.0
        self._since: float | None = None
        """When the credit was spent."""
        self.is_in_half: Callable[[], bool] = bool
        """Whether half precision has been seen at work."""
        self.spent = 0.0
        """Seconds that looks have taken since."""
        self._signs, self._others = SIGNS, OTHERS
        self.signs: list[tuple[int, str]] = []
        """Steps in which something made the watch look again, and what."""
        self._last: bool | None = None
        """Whether the step that has begun last is looked at."""
        self.looked: Counter[bool] = Counter()
        """Steps that were looked at and have ended, and the others."""

    @property
    def share(self) -> float:
        """Of the program's time, what looks may take."""
        return self._share or (ON_GPU if torch.cuda.is_initialized() else ON_CPU)

    def step_begins(self, step: int) -> bool:
        """Whether ``step``, which begins, is looked at."""
        self._calls.began = None
        if self._last is not None:
            self.looked[self._last] += 1
        if self._every is None:
            looks = self._begins(self._steps, is_first=step <= FIRST)
        else:
            self._steps.more = max(0, self._steps.more - 1)
            looks = self._steps.more > 0 or (self._every > 0 and step % self._every == 1 % self._every)
        self._last = looks
        return looks

    def call_begins(self, number: int, skipped: int = 0) -> bool:
        """Whether an outermost call is looked at that is counted by itself, the ``number``-th of its kind; others were ``skipped`` before it."""
        return self._begins(self._calls, is_first=number <= FIRST, skipped=skipped)

    def _begins(self, kind: _Kind, *, is_first: bool, skipped: int = 0) -> bool:
        now = self._clock()
        if self._busy_from < 0:
            self._busy_from = self._busy()
        if kind.began is not None:
            kind.seconds[kind.looks].append((now - kind.began) / (1 + skipped))
        if self._since is not None and kind.looks:
            self.spent += kind.cost
            kind.due = inf
        kind.began, kind.looks = now, is_first or self._is_looked_at(kind, now)
        return kind.looks

    def _is_looked_at(self, kind: _Kind, now: float) -> bool:
        if self._since is None:
            is_longer = self.is_in_half() and not torch.cuda.is_initialized()
            longest = self._credit * IN_HALF / CREDIT if is_longer else self._credit
            if self._busy() - self._busy_from < longest:
                return True
            self._since = now
        kind.more = max(0, kind.more - 1)
        if kind.more:
            return True
        if kind.due == inf and len(kind.seconds[False]) >= ENOUGH:
            kind.due = self._since + (self.spent + IN_A_ROW * kind.cost) / self.share
        if now < kind.due:
            return False
        kind.more = IN_A_ROW
        return True

    def sign(self, step: int, what: str) -> None:
        """Something is not as it was in ``step``: the next ones are looked at."""
        if self._signs == 0 or (self._since is None and self._every is None):
            return
        self._signs -= 1
        self.signs.append((step, what))
        self._steps.more = self._calls.more = 1 + AFTER_SIGN

    def begins_anew(self) -> bool:
        """The program begins with something else than it has done so far: whether all is looked at for a while, as at its beginning."""
        if self._since is None or not self._others:
            return False
        self._others -= 1
        self._since, self._busy_from = None, self._busy()
        return True

    def left_out(self, calls: int) -> Iterator[NotWatched]:
        """What was not looked at, in words.

        Args:
            calls: outermost calls that were not.
        """
        if not calls and not self.looked[False]:
            return
        limit = (
            f"{100 * self.share:g}% of the time"
            if self._every is None
            else f"1/{self._every}"
            if self._every
            else "none"
        )
        steps = self.looked.total()
        seen, besides, outside = "the others were looked at", "", ""
        if steps:
            seen = f"{self.looked[True]:,} of {steps:,} steps were looked at"
            besides = "; in the others the loss and the gradients of each optimizer step"
            outside = " and what runs between modules in their steps"
        again = f", again from step {self.signs[0][0]} on ({self.signs[0][1]})" if self.signs else ""
        yield NotWatched(
            what=f"the inside of {calls:,} outermost calls{outside}",
            why=f"{seen} ({limit}){again}{besides}. With --overhead-budget off all are",
        )


FIRST_STEPS = 8
"""Training steps in which a GPU is read from, besides those whose number is a power of 2, where all steps are looked at. A program without an optimizer is in its first."""
FIRST_CHECKS = 4
"""Rounds, and steps, that are compared: 1 to 4, and then each power of two."""
WINDOW, FROM = 4, 16
"""Steps after each of these in which state is looked at as well, so that it goes through several rounds; from which one on."""
EACH_STEP = 2_000
"""Readings of a GPU in one step: of the 50 µs or so that the host waits for each, 0.1 s."""
OVERALL = 40_000
"""Readings of a GPU in one run."""
AT_HAND, WAITED_FOR = frozenset({"cpu"}), frozenset({"cuda"})
"""Devices whose memory is read at any time, and those for which a reading waits; of others nothing is read."""


def is_checked(number: int) -> bool:
    """Whether the round or the step with this number, from 1, is compared."""
    return number <= FIRST_CHECKS or number.bit_count() == 1


def is_in_window(number: int) -> bool:
    """Whether the step with this number is compared, or follows closely on a later one that is."""
    before = range(max(FROM, number - WINDOW), number)
    return is_checked(number) or any(map(is_checked, before))


class Readings:
    """Says of each tensor whether it may be read now.

    Args:
        step: tells the training step.

    Attributes:
        made: readings of a GPU so far.
        is_paid: says whether what is looked at now is paid for by a share of the time, waits included.
    """

    def __init__(self, step: Callable[[], int]) -> None:
        self._now = step
        self.is_paid: Callable[[], bool] = bool
        self._step = 0
        self._in_step = 0
        self.made = 0

    @staticmethod
    def at_hand(tensor: Tensor) -> bool:
        """Whether nobody waits where it is read."""
        return tensor.device.type in AT_HAND

    def waits(self) -> bool:
        """Whether this is a step in which the host waits for a device: each look within a budget; of steps that are all looked at ever fewer."""
        step = self._now()
        return step <= FIRST_STEPS or step.bit_count() == 1 or self.is_paid()

    def may_read(self, tensor: Tensor) -> bool:
        """Whether this is a step in which tensors on its device are read."""
        return self.at_hand(tensor) or (tensor.device.type in WAITED_FOR and self.waits() and self._may_wait())

    def reads(self, tensor: Tensor) -> bool:
        """Whether a tensor is read that is one of many: in all steps on a CPU, in some on a GPU."""
        return self.may_read(tensor) and self.affords(tensor)

    def affords(self, tensor: Tensor) -> bool:
        """Whether a tensor is read that is one of few."""
        if self.at_hand(tensor):
            return True
        if tensor.device.type not in WAITED_FOR or not self._may_wait():
            return False
        if self._step != (step := self._now()):
            self._step, self._in_step = step, 0
        if self._in_step >= EACH_STEP or self.made >= OVERALL:
            return False
        self._in_step += 1
        self.made += 1
        return True

    @staticmethod
    def _may_wait() -> bool:
        """Whether the program lets the host wait for the device: it captures no graph, has not asked torch to tell of each time, and is no rank of a
        job, whose device may wait for what another rank's host has not begun yet."""
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            return False
        if not torch.cuda.is_initialized():
            return True
        return not torch.cuda.is_current_stream_capturing() and torch.cuda.get_sync_debug_mode() == 0
