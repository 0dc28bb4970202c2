"""What is to be expected in a sequence that repeats itself: who writes leaves it out, and who reads puts it back."""

from collections import deque
from typing import Any, Generic, TypeVar

T = TypeVar("T")

RUNS = 12
"""Runs of equal items that are looked back at."""
MOST_KNOWN = 20_000
"""Contexts that are remembered, before all are forgotten."""


class Succession(Generic[T]):
    """Expects what came the last time after the same runs of equal items.

    Where these never came, what came the last time after as many equal items in a row, and else after the same item: a loop over one item is known from its
    second round on.
    """

    def __init__(self) -> None:
        self._last: T | None = None
        self._in_a_row = 0
        self._runs: deque[tuple[T | None, int]] = deque(maxlen=RUNS)
        self._after: dict[Any, T] = {}

    def expected(self) -> T | None:
        """The next item; None where nothing is known."""
        known = (self._after.get(context) for context in self._contexts())
        return next((item for item in known if item is not None), None)

    def came(self, item: T) -> None:
        """The next item is this one."""
        if len(self._after) > MOST_KNOWN:
            self._after.clear()
        for context in self._contexts():
            self._after[context] = item
        if item == self._last:
            self._in_a_row += 1
            return
        self._runs.append((self._last, self._in_a_row))
        self._last, self._in_a_row = item, 1

    def _contexts(self) -> tuple[Any, ...]:
        """What has come so far, the longest first."""
        return (*self._runs, (self._last, self._in_a_row)), (self._last, self._in_a_row), (self._last,)
