"""Records what modules returned and the gradients of it, and counts what could not be measured.

Nearly all calls look like the call of the same module before: one tensor in, one tensor out, of the same dtypes and shape. For
these everything but the tensor is known, and a call costs a few microseconds.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.cuda import is_current_stream_capturing

from dtypedoctor._torch_private import (
    DisableTorchFunction,
    function_mode_is_on,
    hook_gradient,
    is_wrapped,
    number_of_modes,
)
from dtypedoctor.instrument.contents import Contents, contents, tensors_given
from dtypedoctor.instrument.naming import dtype_name
from dtypedoctor.instrument.operators import why_opaque
from dtypedoctor.instrument.places import Looks, Place, Recorder, Sites, Source
from dtypedoctor.instrument.readable import Missed, readable, wants_gradient
from dtypedoctor.instrument.recorders import Recorders
from dtypedoctor.instrument.session import Session
from dtypedoctor.instrument.statistics import Named, measurable, modes_are_on, out_of_their_sight
from dtypedoctor.trace.events import Flow, NotWatched

MOST_MISSED = 20
"""Different types of results that are told of because they could not be measured."""


class _Usual(NamedTuple):
    """What the last call of a module looked like: one positional tensor in, one tensor out."""

    phase: str
    autocast: str | None
    device_type: str
    given: torch.dtype
    dtype: torch.dtype
    shape: torch.Size
    device: torch.device
    site: int
    recorder: Recorder
    source: Source


class _Gradient(NamedTuple):
    """What the last gradient of an output looked like."""

    dtype: torch.dtype
    shape: torch.Size
    device: torch.device
    site: int
    recorder: Recorder


class _Hook:
    """What is called with the gradient of an output: one object, where a partial call of a method is four.

    Python's garbage collector looks through whatever a step keeps until its backward pass.
    """

    __slots__ = ("_call", "_path", "_place", "_returned")
    __torch_unserializable__ = True
    """torch warns of other hooks when it pickles a tensor."""

    def __init__(self, returned: "Returned", place: Place, path: str, call: int) -> None:
        self._returned = returned
        self._place = place
        self._path = path
        self._call = call

    def __call__(self, gradient: Tensor) -> None:
        """Records it."""
        self._returned.gradient(self._place, self._path, self._call, gradient)


class Returned:
    """Hands module outputs and their gradients to the recorders.

    Args:
        session: where new combinations of dtypes go; counts the calls, and those that were measured.
        sites: numbers the places.
        recorders: measure.

    Attributes:
        heard: called with each gradient that is measured, and the number of its sample.
    """

    def __init__(self, session: Session, sites: Sites, recorders: Recorders) -> None:
        self._writer, self._position, self._autocast = session.writer, session.position, session.autocast
        self._guard, self._coverage = session.guard, session.coverage
        self._sites = sites
        self._recorders = recorders
        self.gradient = session.guard.shield(self._gradient, "some gradients of module outputs")
        """Records the gradient of an output: its place, its path, the outermost call that returned it, and the gradient."""
        self.heard: Callable[[Tensor, int], None] = lambda _, __: None
        self._missed: Counter[Missed] = Counter()
        self._first_missed: dict[Missed, str] = {}

    def record(self, module: nn.Module, place: Place, args: Any, kwargs: Any, output: Any) -> None:
        """Records what ``module`` returned, and sees to it that its gradients are.

        Args:
            module: has just been called.
            place: its place.
            args, kwargs: what it was called with.
            output: what it returned.
        """
        usual: _Usual | None = place.usual
        modes = function_mode_is_on() or number_of_modes()
        if usual is None or modes or kwargs or len(args) != 1 or not self._is_usual(usual, args[0], output):
            with out_of_their_sight() if modes or modes_are_on() else nullcontext():
                self._record_any(module, place, (args, kwargs), output)
            return
        call = (self._position.of.here or self._position.last).call
        when = (self._writer.next_n(), self._position.step, call)
        usual.recorder.record(((usual.site, output),), when, usual.source, (("0", args[0]),))
        self._coverage.module_calls_measured += 1
        if output.requires_grad and not output.is_leaf:
            _hook_gradient(output, _Hook(self, place, "", call))

    def _is_usual(self, usual: _Usual, given: Any, output: Any) -> bool:
        """Whether a call looks like the last one of its module. One function: it runs at each call, and a call of another costs more."""
        if type(output) is not Tensor or type(given) is not Tensor:
            return False
        # the cheapest comparisons first: nearly all calls that are unusual have another dtype or shape
        if output.dtype is not usual.dtype or given.dtype is not usual.given:
            return False
        if not _lies_there(output) or not _lies_there(given):
            return False
        if output.shape != usual.shape:
            return False
        if output.device != usual.device or given.device != usual.device:
            return False
        here = self._position.of.here or self._position.last
        if here.phase != usual.phase:
            return False
        if self._autocast.dtype(usual.device_type) != usual.autocast:
            return False
        return not (usual.device_type == "cuda" and is_current_stream_capturing())

    def _record_any(self, module: nn.Module, place: Place, given: tuple[Any, Any], output: Any) -> None:
        position = self._position
        phase = position.phase
        found = contents(output, given)
        outputs = found.tensors
        inputs = tensors_given(*given)
        autocast = self._autocast.dtype(outputs[0].tensor.device.type if outputs else "cpu")
        flow = (phase, autocast, *[t.dtype for _, t in inputs], None, *[one.tensor.dtype for one in outputs])
        if flow not in place.flows:
            self._note_flow(module, place, (inputs, [(one.path, one.tensor) for one in outputs]), autocast)
            place.flows.add(flow)
        if not outputs:
            self._count(place, found)
            return
        rows = []
        for path, t, _ in outputs:
            looks = (phase, "output", path, t.dtype, t.shape, autocast, t.device)
            rows.append((place.sites.get(looks) or self._sites.id_of(place, Looks(*looks)), t))
        source = Source(place, phase, autocast)
        when = (self._writer.next_n(len(rows)), position.step, position.call)
        self._recorders.record(rows, when, source, inputs)
        self._count(place, found)
        for path, _, original in outputs:
            if wants_gradient(original):
                _hook_gradient(original, _Hook(self, place, path, position.call))
        self._learn(place, given, output, source)

    def _count(self, place: Place, found: Contents) -> None:
        """Counts a call whose result has been seen: a result without any floats is none that could be measured."""
        if found.missed:
            for missed in found.missed:
                self._miss(place, missed)
        elif found.tensors:
            self._coverage.module_calls_measured += 1
        else:
            self._coverage.module_calls -= 1

    def _miss(self, place: Place, missed: Missed) -> None:
        if missed in self._missed or len(self._missed) < MOST_MISSED:
            self._missed[missed] += 1
            self._first_missed.setdefault(missed, place.fqn or place.cls)

    def finish(self) -> None:
        """The run is over: tells what could not be measured, and how often."""
        for missed, times in self._missed.items():
            calls = f"{times:,} time{'s' if times > 1 else ''}, first from {self._first_missed[missed]}"
            self._writer.write(NotWatched(what=f"module outputs of type {missed.type} ({calls})", why=missed.why))
        self._missed.clear()

    def _learn(self, place: Place, given: tuple[Any, Any], output: Any, source: Source) -> None:
        """Keeps what this call looked like, where it has one tensor in and one out."""
        args, kwargs = given
        place.usual = None
        if kwargs or len(args) != 1 or type(args[0]) is not Tensor or type(output) is not Tensor:
            return
        if not measurable(output) or not measurable(args[0]) or args[0].device != output.device:
            return
        looks = (source.phase, "output", "", output.dtype, output.shape, source.autocast, output.device)
        site = place.sites.get(looks)
        if site is not None:
            place.usual = _Usual(
                phase=source.phase,
                autocast=source.autocast,
                device_type=output.device.type,
                given=args[0].dtype,
                dtype=output.dtype,
                shape=output.shape,
                device=output.device,
                site=site,
                recorder=self._recorders.of(output.device),
                source=source,
            )

    def _gradient(self, place: Place, path: str, call: int, gradient: Tensor) -> None:
        if type(gradient) is not Tensor or not _lies_there(gradient):
            with out_of_their_sight():
                self._gradient_of_class(place, path, call, gradient)
            return
        usual: _Gradient | None = place.gradients.get(path)
        if (
            usual is None
            or gradient.dtype is not usual.dtype
            or gradient.shape != usual.shape
            or gradient.device != usual.device
        ):
            usual = self._learn_gradient(place, path, gradient)
        if usual is not None and not (gradient.is_cuda and is_current_stream_capturing()):
            when = (self._writer.next_n(), self._position.step, call)
            self.heard(gradient, when[0])
            usual.recorder.record(((usual.site, gradient),), when)

    def _gradient_of_class(self, place: Place, path: str, call: int, gradient: Tensor) -> None:
        """Records a gradient that is no plain dense tensor."""
        values = gradient if measurable(gradient) else readable(gradient)
        if isinstance(values, Missed):
            self._miss(place, Missed(f"{values.type}, as gradients,", values.why))
        elif values is not None and (usual := self._learn_gradient(place, path, values)) is not None:
            usual.recorder.record(((usual.site, values),), (self._writer.next_n(), self._position.step, call))

    def _learn_gradient(self, place: Place, path: str, gradient: Tensor) -> _Gradient | None:
        if not measurable(gradient):
            return None
        looks = ("backward", "grad_output", path, gradient.dtype, gradient.shape, None, gradient.device)
        site = place.sites.get(looks) or self._sites.id_of(place, Looks(*looks))
        usual = _Gradient(gradient.dtype, gradient.shape, gradient.device, site, self._recorders.of(gradient.device))
        place.gradients[path] = usual
        return usual

    def _note_flow(self, module: nn.Module, place: Place, tensors: tuple[list[Named], list[Named]],
                   autocast: str | None) -> None:  # fmt: skip
        position = self._position
        why = why_opaque(module)
        if why:
            self._guard.tell(f"the inside of {place.fqn or place.cls}", why)
        self._writer.write(
            Flow(
                n=self._writer.next_n(),
                step=position.step,
                call=position.call,
                phase=position.phase,
                root=place.root,
                fqn=place.fqn,
                cls=place.cls,
                inputs=[dtype_name(t) for _, t in tensors[0]],
                outputs=[dtype_name(t) for _, t in tensors[1]],
                weights=sorted({dtype_name(p) for p in module.parameters(recurse=False)}),
                autocast=autocast,
            )
        )


def _lies_there(tensor: Tensor) -> bool:
    """Whether a tensor of a floating-point dtype on a real device is dense, has its data, and is in no transformation."""
    return tensor.layout is torch.strided and not tensor.is_nested and not is_wrapped(tensor)


def _hook_gradient(tensor: Tensor, hook: _Hook) -> None:
    """Has ``hook`` called with the gradient of ``tensor``, which is no leaf."""
    if type(tensor) is not Tensor:
        with DisableTorchFunction():
            Tensor.register_hook(tensor, hook)
        return
    hook_gradient(tensor, hook)
