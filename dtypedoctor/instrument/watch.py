"""The module watch: what every module returns, and the gradients of it, without touching the model.

Two hooks that torch keeps globally see every module call; nothing is attached to a module, so a watched model pickles,
copies and compiles as before. Inside a compiled region the hooks do nothing (and add no graph break).
"""

import sys
from collections.abc import Callable
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks

from dtypedoctor.instrument.autocast import AutocastLog
from dtypedoctor.instrument.naming import Names, dtype_name
from dtypedoctor.instrument.position import Position
from dtypedoctor.instrument.sites import Sites
from dtypedoctor.instrument.statistics import Extent, measure, tensors_in
from dtypedoctor.trace.events import Flow
from dtypedoctor.trace.writer import TraceWriter

CallListener = Callable[[nn.Module], None]


class ModuleWatch:
    """Records dtype, shape, magnitude and finiteness of module outputs and their gradients.

    Args:
        writer: where the records go.
        position: shared coordinates; this watch keeps ``call`` and ``stack``.
        names: gives modules their dotted names; a module called outside of any known one becomes a new root.
        autocast: tells the autocast dtype in force.
    """

    def __init__(self, writer: TraceWriter, position: Position, names: Names, autocast: AutocastLog) -> None:
        self._writer = writer
        self._position = position
        self._names = names
        self._autocast = autocast
        self._sites = Sites(writer)
        self._flows: set[tuple[Any, ...]] = set()
        self._measured: dict[int, tuple[ReferenceType[Tensor], int, Extent]] = {}
        self._handles: list[Any] = []
        self.raised_in: tuple[int, list[str]] = (0, [])
        """Identity of the last exception that left a module, and the module calls that were open where it began."""
        self.before_root: list[CallListener] = []
        """Called with the module before each outermost call."""
        self.after_root: list[CallListener] = []
        """Called with the module after each outermost call, also when it raised."""

    def start(self) -> None:
        """Begins to watch every module call of the process."""
        self._handles = [
            hooks.register_module_forward_pre_hook(self._enter),
            hooks.register_module_forward_hook(self._leave, with_kwargs=True, always_call=True),
        ]

    def stop(self) -> None:
        """Stops watching."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling():
            return
        position = self._position
        if position.muted:
            if position.phase == "probe":  # nothing of it is recorded, but a process that dies in it says where
                self._mark(module)
            return
        if not position.stack:
            self._enter_root(module)
        position.stack.append(module)
        self._mark(module)

    def _mark(self, module: nn.Module) -> None:
        place = self._names.find(module)
        if place is not None:
            entered = self._sites.entry(*place, type(module).__name__, self._position.phase)
            self._writer.mark(self._position.step, self._position.call, entered)

    def _enter_root(self, module: nn.Module) -> None:
        if self._names.find(module) is None:
            self._names.add_root(module)
        if not self._position.backward_depth:  # a recomputed block belongs to the call that is being differentiated
            self._position.call += 1
        self._measured.clear()
        for listener in self.before_root:
            listener(module)

    def _leave(self, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> None:
        if torch.compiler.is_compiling() or self._position.muted:
            return
        kwargs, output = rest if len(rest) == 2 else ({}, rest[0])  # torch drops kwargs where forward has raised
        stack = self._position.stack
        if module not in stack[-1:]:
            if module not in stack:
                return  # entered while muted, or before the watch began
            del stack[stack.index(module) + 1 :]
        error = sys.exc_info()[1]
        if error is not None and output is None:
            self._note_error(error)
        else:
            place = self._names.find(module)
            if place is not None:
                self._record(module, place, (args, kwargs), output)
        stack.pop()
        if not stack:
            for listener in self.after_root:
                listener(module)

    def _note_error(self, error: BaseException) -> None:
        if self.raised_in[0] != id(error):
            self.raised_in = (id(error), self.open_modules())

    def open_modules(self) -> list[str]:
        """Dotted names of the module calls that are open, outermost first."""
        found = (self._names.find(module) for module in self._position.stack)
        return [name for _, name in (place for place in found if place is not None)]

    def _record(self, module: nn.Module, place: tuple[int, str], given: tuple[Any, Any], output: Any) -> None:
        cls = type(module).__name__
        phase = self._position.phase
        outputs = list(tensors_in(output))
        device = outputs[0][1].device.type if outputs else "cpu"
        autocast = self._autocast.dtype(device)
        self._note_flow(module, place, given, outputs, autocast)
        finite = self._sample(place, cls, phase, "output", outputs, autocast)
        if not finite:  # whether it came in from outside decides who is to blame
            self._sample(place, cls, phase, "input", [*tensors_in(given[0]), *tensors_in(given[1])], autocast)
        for index, tensor in outputs:
            if tensor.requires_grad:
                tensor.register_hook(self._gradient_hook(place, cls, index))

    def _sample(self, place: tuple[int, str], cls: str, phase: str, kind: str, found: list[tuple[str, Tensor]],
                autocast: str | None) -> bool:  # fmt: skip
        if not found:
            return True
        extents = self._extents([tensor for _, tensor in found])
        rows = [
            (self._sites.id_of(*place, cls, phase, kind, index, tensor, autocast), extent.absmax, extent.num_nan,
             extent.num_posinf + extent.num_neginf)
            for (index, tensor), extent in zip(found, extents, strict=True)
        ]  # fmt: skip
        position = self._position
        self._writer.write_samples(self._writer.next_n(len(rows)), position.step, position.call, rows)
        return all(extent.finite for extent in extents)

    def _extents(self, tensors: list[Tensor]) -> list[Extent]:
        """Measures each distinct tensor once: a container usually returns what its last child returned."""
        known = [self._known(tensor) for tensor in tensors]
        fresh = [tensor for tensor, extent in zip(tensors, known, strict=True) if extent is None]
        with self._position.mute():
            measured = iter(measure(fresh))
        result = []
        for tensor, extent in zip(tensors, known, strict=True):
            if extent is None:
                extent = next(measured)
                self._measured[id(tensor)] = (ref(tensor), _version(tensor), extent)
            result.append(extent)
        return result

    def _known(self, tensor: Tensor) -> Extent | None:
        held = self._measured.get(id(tensor))
        if held is None or held[0]() is not tensor or held[1] != _version(tensor):
            return None
        return held[2]

    def _gradient_hook(self, place: tuple[int, str], cls: str, index: str) -> Callable[[Tensor], None]:
        call = self._position.call

        def hook(gradient: Tensor) -> None:
            if torch.compiler.is_compiling() or self._position.muted:
                return
            now, self._position.call = self._position.call, call
            try:
                self._sample(place, cls, "backward", "grad_output", list(tensors_in(gradient, index)), None)
            finally:
                self._position.call = now

        return hook

    def _note_flow(self, module: nn.Module, place: tuple[int, str], given: tuple[Any, Any],
                   outputs: list[tuple[str, Tensor]], autocast: str | None) -> None:  # fmt: skip
        entering = tuple(t.dtype for part in given for _, t in tensors_in(part))
        leaving = tuple(t.dtype for _, t in outputs)
        key = (place, self._position.phase, entering, leaving, autocast)
        if key in self._flows:
            return
        self._flows.add(key)
        position = self._position
        self._writer.write(
            Flow(
                n=self._writer.next_n(),
                step=position.step,
                call=position.call,
                phase=position.phase,
                root=place[0],
                fqn=place[1],
                cls=type(module).__name__,
                inputs=[str(d).removeprefix("torch.") for d in entering],
                outputs=[str(d).removeprefix("torch.") for d in leaving],
                weights=sorted({dtype_name(p) for p in module.parameters(recurse=False)}),
                autocast=autocast,
            )
        )

    def sample_now(self, kind: str, found: list[tuple[str, Tensor]], phase: str, fqn: str = "") -> bool:
        """Measures tensors that no module returned (a loss, gradients of parameters, parameters).

        Args:
            kind: the site's kind.
            found: name of each tensor and the tensor.
            phase: the phase they belong to.
            fqn: dotted name to record, the tensor's own name if empty.

        Returns:
            Whether all of them are finite.
        """
        finite = True
        for name, tensor in found:
            finite &= self._sample((0, fqn or name), "", phase, kind, [("", tensor)], None)
        return finite


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
