"""Ways of watching a training step."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
)
from torch.utils._debug_mode import DebugMode
from transformers.debug_utils import DebugUnderflowOverflow

from dtypedoctor.instrument.budget import Budget
from dtypedoctor.instrument.contents import tensors_in
from dtypedoctor.instrument.instruments import Instruments
from dtypedoctor.trace.events import Header
from dtypedoctor.trace.lines import EVENTS
from dtypedoctor.trace.writer import TraceWriter
from tests.benchmarks.counting import count_synchronisations
from tests.benchmarks.workload import Workload


class Variant:
    """One way of watching.

    Attributes:
        slow: takes several times as long as the step itself, so that a few steps tell.
        doctor: whether it is the doctor's own.
        peak: highest memory use seen, bytes.
        host: seconds that the host took for each step, before it waited for the device.
    """

    def __init__(self, name: str, workload: Workload, *, slow: bool = False) -> None:
        self.name = name
        self.slow = slow
        self.doctor = False
        self.peak = 0
        self.host: list[float] = []
        self._workload = workload

    def active(self) -> AbstractContextManager[Any]:
        """Inside, the step is watched."""
        return nullcontext()

    def counts(self) -> dict[str, object]:
        """What is counted once, apart from the timing."""
        if self._workload.device.type != "cuda":
            return {}
        with self.active():
            self._workload.step()
            return {"syncs": count_synchronisations(self._workload.step)}


class _Inside(Variant):
    """A variant made of a function that returns a context manager."""

    def __init__(self, name: str, workload: Workload, make: Callable[[Workload], Any], *, slow: bool = False) -> None:
        super().__init__(name, workload, slow=slow)
        self._make = make

    def active(self) -> AbstractContextManager[Any]:
        made: AbstractContextManager[Any] = self._make(self._workload)
        return made


class Doctor(Variant):
    """The doctor's watch, writing its trace to a temporary directory."""

    def __init__(self, name: str, workload: Workload, budget: Budget | None = None) -> None:
        super().__init__(name, workload)
        self.doctor = True
        self._directory = Path(tempfile.mkdtemp(prefix="watch-cost-"))
        writer = TraceWriter(self._directory)
        writer.write(Header())
        self._instruments = Instruments(writer, budget=budget)

    @contextmanager
    def active(self) -> Iterator[None]:
        self._instruments.start()
        try:
            yield
        finally:
            self._instruments.stop()

    def counts(self) -> dict[str, object]:
        found = super().counts()
        with self.active():
            self._workload.step()
            self._workload.step()
            before = self._size()
            self._workload.step()
            self._workload.synchronize()
        # what ends the run (parameters looked at once more) is not part of a step
        size = self._size() - before
        return found | {"trace_bytes": size, "records": self._records(before)}

    def _size(self) -> int:
        return (self._directory / EVENTS).stat().st_size

    def _records(self, begin: int) -> int:
        data = (self._directory / EVENTS).read_bytes()[begin:]
        return sum(line.count(b"[") - 2 if line.startswith(b'["s"') else 1 for line in data.splitlines())


@contextmanager
def _own_hooks(workload: Workload) -> Iterator[None]:
    """DebugUnderflowOverflow cannot be taken off again; its hooks are."""
    before = {module: dict(module._forward_hooks) for module in workload.model.modules()}
    DebugUnderflowOverflow(workload.model)
    try:
        yield
    finally:
        for module, hooks in before.items():
            module._forward_hooks.clear()
            module._forward_hooks.update(hooks)


def _hooks(look: Callable[[Tensor], Any]) -> Callable[[Workload], AbstractContextManager[None]]:
    @contextmanager
    def active(workload: Workload) -> Iterator[None]:
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            for _, tensor in tensors_in(output):
                look(tensor)
                if tensor.requires_grad:
                    tensor.register_hook(lambda gradient: look(gradient) and None)

        handle = register_module_forward_hook(leave)
        try:
            yield
        finally:
            handle.remove()

    return active


def _is_finite(tensor: Tensor) -> bool:
    return bool(tensor.isfinite().all().item())


@contextmanager
def _debug_mode(workload: Workload) -> Iterator[None]:
    with DebugMode(record_nn_module=True):
        yield


@contextmanager
def _debug_mode_with_hashes(workload: Workload) -> Iterator[None]:
    with DebugMode(record_nn_module=True), DebugMode.log_tensor_hashes():
        yield


VARIANTS: dict[str, Callable[[Workload], Variant]] = {
    "untouched": lambda w: Variant("untouched", w),
    "untouched again": lambda w: Variant("untouched again", w),
    "dtypedoctor watch": lambda w: Doctor("dtypedoctor watch", w),
    "dtypedoctor sentinel": lambda w: Doctor("dtypedoctor sentinel", w, Budget(every=0)),
    "hooks without statistics": lambda w: _Inside("hooks without statistics", w, _hooks(lambda tensor: None)),
    "aminmax, not read": lambda w: _Inside("aminmax, not read", w, _hooks(lambda t: torch.aminmax(t.detach()))),
    "DebugUnderflowOverflow": lambda w: _Inside("DebugUnderflowOverflow", w, _own_hooks, slow=True),
    "isfinite hooks": lambda w: _Inside("isfinite hooks", w, _hooks(_is_finite), slow=True),
    "DebugMode modules": lambda w: _Inside("DebugMode modules", w, _debug_mode, slow=True),
    "DebugMode hashes": lambda w: _Inside("DebugMode hashes", w, _debug_mode_with_hashes, slow=True),
    "detect_anomaly": lambda w: _Inside(
        "detect_anomaly", w, lambda _: torch.autograd.detect_anomaly(check_nan=True), slow=True
    ),
}
"""Every way, by name."""
