"""The instruments around a user's script, from the moment at which it has imported torch."""

import sys
import time
from collections.abc import Mapping
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dtypedoctor.instrument.session import Instruments, OpWindow
from dtypedoctor.trace.events import Environment, Metric, NotWatched
from dtypedoctor.trace.writer import TraceWriter
from dtypedoctor.worker.environment import describe_environment
from dtypedoctor.worker.resources import peak_resident, resident


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
        self._loss: float | None = None
        self._step_began = time.perf_counter()
        self._memory = resident()
        self._described = False

    def start(self) -> None:
        """Begins to watch."""
        self._instruments.modules.before_root.append(self._first_call)
        self._instruments.phases.before_backward.append(self._note_loss)
        self._instruments.phases.after_step.append(self._note_step)
        self._instruments.start()

    def finish(self, error: BaseException | None) -> int:
        """Stops watching, and writes what only the end knows.

        Returns:
            Optimizer steps done.
        """
        self._instruments.stop()
        if error is not None:
            self._instruments.note_exception(error)
        self._writer.write(Environment(values=describe_environment(torch.device(self.device))))
        if not self._instruments.names.roots:
            self._writer.write(NotWatched(what="modules", why="the script has not called any torch.nn.Module"))
        self._note_compiled()
        return self._instruments.position.step - 1

    @property
    def device(self) -> str:
        """``cuda`` if the script has used CUDA so far, else ``cpu``. Asking does not initialise CUDA."""
        return "cuda" if torch.cuda.is_initialized() else "cpu"

    def peak_memory(self) -> int:
        """Bytes over what the process took when torch had been imported; on CUDA, of its allocator."""
        if self.device == "cuda":
            return torch.cuda.max_memory_allocated()
        return max(0, peak_resident() - self._memory)

    def _first_call(self, module: nn.Module) -> None:
        if not self._described:
            self._described = True
            self._writer.write(Environment(values=describe_environment(torch.device(self.device))))

    def _note_loss(self, tensors: list[Tensor]) -> None:
        if len(tensors) == 1 and tensors[0].numel() == 1:
            self._loss = float(tensors[0].detach())

    def _note_step(self, optimizer: Optimizer) -> None:
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
        dynamo = sys.modules.get("torch._dynamo.utils")
        if dynamo is None:
            return
        graphs = dynamo.counters["stats"]["unique_graphs"]
        if graphs:
            self._writer.write(
                NotWatched(
                    what=f"the inside of {graphs} compiled graph(s)",
                    why="torch.compile runs no module hooks there; what enters and leaves them was watched",
                )
            )
