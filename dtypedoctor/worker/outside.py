"""Switches corrections on from outside, in models that a script has built."""

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakSet

from torch import nn

from dtypedoctor.corrections.contract import Installed, put_in
from dtypedoctor.interruptions import contained
from dtypedoctor.plugins import left_out
from dtypedoctor.trace.events import Correction, NotWatched
from dtypedoctor.trace.writer import TraceWriter


class OutsideCorrections:
    """Installs each correction in the first outermost module that it fits, when that is first called.

    Args:
        writer: where it is recorded what was installed, or why not.
        wanted: ``id`` and ``modules`` of each correction, as in a scenario.
    """

    def __init__(self, writer: TraceWriter, wanted: Sequence[Mapping[str, Any]]) -> None:
        self._writer = writer
        self._waiting = {spec["id"]: spec["modules"] for spec in wanted}
        self._reasons = dict.fromkeys(self._waiting, "the script has not called any module")
        self._installed: dict[str, Installed] = {}
        self._offered: WeakSet[nn.Module] = WeakSet()

    def offer(self, module: nn.Module) -> None:
        """An outermost module is about to be called."""
        if not self._waiting or module in self._offered:
            return
        self._offered.add(module)
        for name, modules in list(self._waiting.items()):
            with contained() as ours:
                self._installed[name] = put_in(name, module, modules)
            if ours.error is not None:  # it does not fit here; perhaps it fits the next model
                self._reasons[name] = f"{type(ours.error).__name__}: {ours.error}"
            else:
                del self._waiting[name]
                self._record(name)

    def conclude(self) -> None:
        """The script has ended: records what the corrections did, and those that could not be installed."""
        for name in self._installed:
            self._record(name)
        for one in left_out():
            self._writer.write(NotWatched(what=one.what, why=f"it cannot be used: {one.why}"))
        for name in self._waiting:
            self._writer.write(
                Correction(n=self._writer.next_n(), id=name, target="", installed=False, reason=self._reasons[name])
            )
        for installed in reversed(list(self._installed.values())):
            installed.undo()

    def _record(self, name: str) -> None:
        installed = self._installed[name]
        self._writer.write(
            Correction(
                n=self._writer.next_n(),
                id=name,
                target=installed.target,
                installed=True,
                proof=installed.proof,
                hits=installed.counters.hits,
                rescued=installed.counters.elements("rescued"),
                clamped=installed.counters.elements("clamped"),
            )
        )
