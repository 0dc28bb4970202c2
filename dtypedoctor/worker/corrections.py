"""Installs the corrections of a scenario, in the models that it builds or in those that a script has built, and records them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from torch import nn

from dtypedoctor.corrections.contract import Counters, Installed, put_in
from dtypedoctor.errors import UsageError
from dtypedoctor.interruptions import contained, noticing
from dtypedoctor.plugins import left_out
from dtypedoctor.trace.events import Correction, NotWatched
from dtypedoctor.trace.writer import TraceWriter

if TYPE_CHECKING:
    from dtypedoctor.scenario.model import CorrectionSpec

__all__ = ["OutsideCorrections", "StageCorrections", "record_left_out"]


class StageCorrections:
    """Installs all corrections of a scenario in each model that it builds.

    Args:
        writer: where it is recorded what was installed, or why not.
        specs: the corrections of the scenario.
    """

    def __init__(self, writer: TraceWriter, specs: "Sequence[CorrectionSpec]") -> None:
        self._writer = writer
        self._specs = specs
        self._installed: dict[str, list[Installed]] = {}

    @property
    def counters(self) -> list[Counters]:
        """What counts the elements that each installed correction has changed."""
        return [one.counters for several in self._installed.values() for one in several]

    def install(self, model: nn.Module) -> None:
        """Installs them in ``model``; those in the model before it are taken out first.

        Raises:
            UsageError: there is no such correction.
            Exception: it does not fit the model.
        """
        self.take_out()
        for spec in self._specs:
            self._install(spec, model)

    def take_out(self) -> None:
        """Takes all of them out again."""
        for one in reversed([one for several in self._installed.values() for one in several]):
            one.undo()

    def conclude(self) -> None:
        """Records what each has done, in all models."""
        for name, several in self._installed.items():
            self._writer.write(_record(self._writer, name, several))

    def _install(self, spec: "CorrectionSpec", model: nn.Module) -> None:
        record = Correction(n=self._writer.next_n(), id=spec.id, target="", installed=False)

        def refused(error: Exception) -> None:
            if not isinstance(error, UsageError):
                self._writer.write(replace(record, reason=f"{type(error).__name__}: {error}"))

        with noticing(refused, Exception):
            installed = put_in(spec.id, model, spec.modules)
        self._installed.setdefault(spec.id, []).append(installed)
        self._writer.write(replace(record, target=installed.target, installed=True, proof=installed.proof))


class OutsideCorrections:
    """Installs each correction in the first outermost module of a script that it fits, when that is first called.

    Args:
        writer: where it is recorded what was installed, or why not.
        wanted: ``id`` and ``modules`` of each correction, as in a scenario.
    """

    def __init__(self, writer: TraceWriter, wanted: Iterable[Mapping[str, Any]]) -> None:
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
        record_left_out(self._writer)
        for name in self._waiting:
            self._writer.write(
                Correction(n=self._writer.next_n(), id=name, target="", installed=False, reason=self._reasons[name])
            )
        for installed in reversed(list(self._installed.values())):
            installed.undo()

    def _record(self, name: str) -> None:
        self._writer.write(_record(self._writer, name, [self._installed[name]]))


def record_left_out(writer: TraceWriter) -> None:
    """Records the plug-ins that cannot be used."""
    for one in left_out():
        writer.write(NotWatched(what=one.what, why=f"it cannot be used: {one.why}"))


def _record(writer: TraceWriter, name: str, several: Sequence[Installed]) -> Correction:
    """What a correction has done so far wherever it was installed, the last place of which is named."""
    return Correction(
        n=writer.next_n(),
        id=name,
        target=several[-1].target,
        installed=True,
        proof=several[-1].proof,
        hits=sum(one.counters.hits for one in several),
        rescued=sum(one.counters.elements("rescued") for one in several),
        clamped=sum(one.counters.elements("clamped") for one in several),
    )
