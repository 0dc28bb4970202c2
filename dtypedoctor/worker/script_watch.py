"""The instruments around a user's script, from the moment at which it has imported torch."""

import os
import time
from collections.abc import Mapping
from math import isfinite
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dtypedoctor.instrument.compile_events import CompileWatch, observations
from dtypedoctor.instrument.session import Instruments, OpWindow
from dtypedoctor.trace.events import Environment, Metric, NotWatched, Observation
from dtypedoctor.trace.writer import TraceWriter
from dtypedoctor.worker.environment import describe_environment
from dtypedoctor.worker.on_import import after_import
from dtypedoctor.worker.resources import StepDigest, peak_resident, resident

if TYPE_CHECKING:
    from dtypedoctor.worker.outside import OutsideCorrections

COMPILER = "torch._dynamo.convert_frame"
"""Imported by torch when something is compiled for the first time."""


class ScriptWatch:
    """Watches every module, optimizer and scaler of the process.

    Args:
        writer: where the records go.
        request: the decoded request file.
    """

    def __init__(self, writer: TraceWriter, request: Mapping[str, Any]) -> None:
        window = request["window"]
        self._writer = writer
        self._instruments = Instruments(
            writer, watch=request["watch"], window=OpWindow(**window) if window is not None else None
        )
        self._corrections: Any = request["scenario"]["corrections"]
        self._outside: OutsideCorrections | None = None
        self._compiler = CompileWatch()
        self._compiling = False
        self._digest = StepDigest() if request["witness"] else None
        self._loss: float | None = None
        self._step_began = time.perf_counter()
        self._memory = resident()
        self._described = False
        self._owner = os.getpid()

    def start(self) -> None:
        """Begins to watch."""
        self._instruments.modules.before_root.append(self._before_root)
        self._instruments.phases.before_backward.append(self._note_loss)
        self._instruments.phases.after_step.append(self._note_step)
        self._instruments.start()
        after_import(COMPILER, self._compiler_is_there)
        os.register_at_fork(after_in_child=self._be_quiet)

    def finish(self, error: BaseException | None) -> int:
        """Stops watching, and writes what only the end knows.

        Returns:
            Optimizer steps done.
        """
        self._instruments.stop()
        if error is not None:
            self._instruments.note_exception(error)
        if self._outside is not None:
            self._outside.conclude()
        self._writer.write(Environment(values=describe_environment(torch.device(self.device))))
        if not self._instruments.names.count:
            self._writer.write(NotWatched(what="modules", why="the script has not called any torch.nn.Module"))
        self._note_compiled()
        return self._instruments.position.step - 1

    @property
    def checksum(self) -> str | None:
        """Digest of the trained parameters after each step, where the request asks for it."""
        return self._digest.value if self._digest is not None else None

    @property
    def device(self) -> str:
        """``cuda`` if the script has used CUDA so far, else ``cpu``. Asking does not initialise CUDA."""
        return "cuda" if torch.cuda.is_initialized() else "cpu"

    def peak_memory(self) -> int:
        """Bytes over what the process took when torch had been imported; on CUDA, of its allocator."""
        if self.device == "cuda":
            return torch.cuda.max_memory_allocated()
        return max(0, peak_resident() - self._memory)

    def _be_quiet(self) -> None:
        """A forked child (a data loader's worker, say) is not watched: the trace is its parent's."""
        self._instruments.position.muted += 1

    def _compiler_is_there(self) -> None:
        if self._instruments.watching and os.getpid() == self._owner:
            self._compiler.__enter__()
            self._compiling = True

    def _before_root(self, module: nn.Module) -> None:
        if not self._described:
            self._described = True
            self._writer.write(Environment(values=describe_environment(torch.device(self.device))))
        if self._corrections:
            if self._outside is None:
                from dtypedoctor.worker.outside import OutsideCorrections

                self._outside = OutsideCorrections(self._writer, self._corrections)
            self._outside.offer(module)

    def _note_loss(self, tensors: list[Tensor]) -> None:
        if len(tensors) == 1 and tensors[0].numel() == 1:
            self._loss = float(tensors[0].detach())

    def _note_step(self, optimizer: Optimizer) -> None:
        if self._digest is not None:
            self._digest.add(optimizer)
        now = time.perf_counter()
        values = {"step_time": now - self._step_began}
        self._step_began = now
        nonfinite = []
        if self._loss is not None and isfinite(self._loss):
            values["loss"] = self._loss
        elif self._loss is not None:
            nonfinite = ["loss"]
        position = self._instruments.position
        self._writer.write(Metric(n=self._writer.next_n(), step=position.step, values=values, nonfinite=nonfinite))

    def _note_compiled(self) -> None:
        if not self._compiling:
            return
        self._compiler.__exit__(None, None, None)
        report = self._compiler.report()
        if not (report.frames or report.unique_graphs):
            return
        position = self._instruments.position
        for kind, values in observations(report):
            self._writer.write(
                Observation(
                    n=self._writer.next_n(),
                    step=position.step,
                    call=position.call,
                    phase="compile",
                    kind=kind,
                    fqn=None,
                    values=values,
                )
            )
        if report.unique_graphs:
            self._writer.write(
                NotWatched(
                    what=f"the inside of {report.unique_graphs} compiled graph(s)",
                    why="compiled code runs no module hooks; what goes into watched modules and comes out was watched",
                )
            )
