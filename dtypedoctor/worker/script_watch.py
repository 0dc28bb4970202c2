"""What is around a user's script from the moment at which it has imported torch: the instruments, and what was asked for."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from dtypedoctor.instrument.optrace import OpWindow
from dtypedoctor.trace.writer import TraceWriter
from dtypedoctor.worker.conditions import Conditions
from dtypedoctor.worker.environment import StepDigest
from dtypedoctor.worker.process_watch import ProcessWatch

if TYPE_CHECKING:
    from dtypedoctor.worker.outside import OutsideCorrections


class ScriptWatch:
    """The instruments, the conditions and corrections to switch, and the digest of what the script trains.

    Args:
        writer: where the records go.
        request: the decoded request file.
    """

    def __init__(self, writer: TraceWriter, request: Mapping[str, Any]) -> None:
        self._writer = writer
        windows = [OpWindow(**window) for window in request["windows"]]
        every = 1 if windows else request["scenario"]["watch_every"]
        self.process = ProcessWatch(writer, watch=request["watch"], windows=windows, every=every)
        self._corrections: Any = request["scenario"]["corrections"]
        self._outside: OutsideCorrections | None = None
        self._conditions = Conditions(writer, request["scenario"]["conditions"])
        self._digest = StepDigest() if request["witness"] else None

    def start(self) -> None:
        """Begins to watch."""
        instruments = self.process.instruments
        if self._corrections:
            instruments.modules.before_root.append(self._correct)
        if self._digest is not None:
            instruments.phases.after_step.append(self._digest.add)
        self._conditions.begin()  # before the instruments, which then see what they make of the script
        self.process.start()

    def finish(self, error: BaseException | None, libraries: Sequence[str]) -> int:
        """Stops watching, and writes what only the end knows; see :meth:`ProcessWatch.finish`."""
        steps = self.process.finish(error, libraries)
        if self._outside is not None:
            self._outside.conclude()
        self._conditions.end()
        return steps

    @property
    def checksum(self) -> str | None:
        """Digest of the trained parameters after each step, where the request asks for it."""
        return self._digest.value if self._digest is not None else None

    def _correct(self, module: nn.Module) -> None:
        if self._outside is None:
            from dtypedoctor.worker.outside import OutsideCorrections  # brings in transformers

            self._outside = OutsideCorrections(self._writer, self._corrections)
        self._outside.offer(module)
