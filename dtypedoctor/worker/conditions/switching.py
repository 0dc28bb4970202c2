"""Puts conditions in force around a whole process, and records how often they took effect."""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

from dtypedoctor.interruptions import contained
from dtypedoctor.trace.events import Condition
from dtypedoctor.trace.writer import TraceWriter
from dtypedoctor.worker.conditions import CONDITIONS
from dtypedoctor.worker.conditions.contract import Switch
from dtypedoctor.worker.on_import import after_import


class Conditions:
    """The conditions of one process.

    Args:
        writer: where it is recorded which took effect, the first time and at the end.
        wanted: their ids.
    """

    def __init__(self, writer: TraceWriter, wanted: Sequence[str]) -> None:
        self._writer = writer
        self._effects = Counter(dict.fromkeys(wanted, 0))
        self._reasons = {name: CONDITIONS[name].without_effect for name in wanted}
        self._in_force = ExitStack()
        self._waiting: list[Callable[[], None]] = []

    def begin(self) -> None:
        """Switches each on as soon as the module is there that it takes hold of."""
        for name in self._effects:
            for module, switch in CONDITIONS[name].switches.items():
                self._waiting.append(after_import(module, partial(self._switch, name, switch)))

    def end(self) -> None:
        """Puts everything back, and records what each has done."""
        for stop_waiting in self._waiting:
            stop_waiting()
        self._in_force.close()
        for name in self._effects:
            self._record(name)

    def _switch(self, name: str, switch: Switch) -> None:
        with contained() as ours:  # another version of the library; that must not end the program
            self._in_force.enter_context(switch(partial(self._took_effect, name)))
        if ours.error is not None:
            self._reasons[name] = f"it could not be switched: {type(ours.error).__name__}: {ours.error}"

    def _took_effect(self, name: str) -> None:
        self._effects[name] += 1
        if self._effects[name] == 1:  # at once: the process may be killed
            self._record(name)

    def _record(self, name: str) -> None:
        effects = self._effects[name]
        reason = "" if effects else self._reasons[name]
        self._writer.write(Condition(n=self._writer.next_n(), id=name, effects=effects, reason=reason))
