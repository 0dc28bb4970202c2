"""Records what modules returned and the gradients of it, and counts what could not be measured.

Nearly all calls look like the call of the same module before: one tensor in, one tensor out, of the same dtypes and shape. For
these everything but the tensor is known, and a call costs a few microseconds.
"""

from collections import Counter
from collections.abc import Callable, Collection
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dtypedoctor._torch_private import (
    DisableTorchFunction,
    hook_gradient,
    is_capturing,
    is_wrapped,
    number_of_modes,
    transformation,
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
    is_cuda: bool
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


class _Hook(tuple[Any, ...]):
    """What is called with the gradient of an output: the function that records it, the place, the path in the output and the outermost call.

    One object, where a partial call of a method is four, and made without a call of Python code. Python's garbage collector looks through whatever a step
    keeps until its backward pass.
    """

    __slots__ = ()
    __torch_unserializable__ = True
    """torch warns of other hooks when it pickles a tensor."""
    __hash__ = object.__hash__
    __eq__ = object.__eq__
    """A tensor that a module returns twice has two of them."""

    def __call__(self, gradient: Tensor) -> None:
        """Records it."""
        record, place, path, call = self
        record(place, path, call, gradient)


class Returned:
    """Hands module outputs and their gradients to the recorders.

    Args:
        session: where new combinations of dtypes go; counts the calls, and those that were measured.
        sites: numbers the places.
        recorders: measure.
    """

    def __init__(self, session: Session, sites: Sites, recorders: Recorders) -> None:
        self._writer, self._position, self._autocast = session.writer, session.position, session.autocast
        self._guard, self._coverage = session.guard, session.coverage
        self._sites = sites
        self._recorders = recorders
        self._gradient = session.guard.shield(self._gradient_is_there, "some gradients of module outputs")
        self._anything: Collection[object] = ()
        self._heard: Callable[[Tensor, int], None] = lambda _, __: None
        self._missed: Counter[Missed] = Counter()
        self._first_missed: dict[Missed, str] = {}

    def hear_gradients(self, listener: Callable[[Tensor, int], None], anything: Collection[object]) -> None:
        """Has ``listener`` called with each gradient and the number of its sample, while there is something in ``anything``."""
        self._heard, self._anything = listener, anything

    def record(self, module: nn.Module, place: Place, args: Any, kwargs: Any, output: Any) -> None:
        """Records what ``module`` returned, and sees to it that its gradients are.

        One function for the usual call, because it runs at each: a call of another takes longer than what is asked here.

        Args:
            module: has just been called.
            place: its place.
            args, kwargs: what it was called with.
            output: what it returned.
        """
        usual: _Usual | None = place.usual
        if usual is None or kwargs or len(args) != 1 or type(output) is not Tensor or type(args[0]) is not Tensor:
            self._record_unusual(module, place, args, kwargs, output)
            return
        given: Tensor = args[0]
        here = self._position.of.here or self._position.last
        autocast = None
        if regions := self._autocast.of.regions:
            inner = regions[-1]
            if inner.device == usual.device_type:
                autocast = inner.wanted if inner.enabled else None
            else:
                autocast = self._autocast.dtype(usual.device_type)
        if (
            # the cheapest comparisons first: nearly all calls that are unusual have another dtype or shape
            output.dtype is not usual.dtype
            or given.dtype is not usual.given
            or output.layout is not torch.strided
            or given.layout is not torch.strided
            or output.is_nested
            or given.is_nested
            or output.shape != usual.shape
            or output.device != usual.device
            or given.device != usual.device
            or (here.phase if here.overrides or here.backward_depth else "forward") != usual.phase
            or autocast != usual.autocast
            or number_of_modes()
            or transformation() is not None
            or (usual.is_cuda and is_capturing())
        ):
            self._record_unusual(module, place, args, kwargs, output)
            return
        call = here.call
        usual.recorder.record_one(usual.site, output, self._position.step, call, usual.source, given)
        self._coverage.module_calls_measured += 1
        if output.requires_grad and not output.is_leaf:
            hook_gradient(output, _Hook((self._gradient, place, "", call)))

    def _record_unusual(self, module: nn.Module, place: Place, args: Any, kwargs: Any, output: Any) -> None:
        with out_of_their_sight() if modes_are_on() else nullcontext():
            self._record_any(module, place, (args, kwargs), output)

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
                _hook_gradient(original, _Hook((self._gradient, place, path, position.call)))
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
                is_cuda=output.is_cuda,
                given=args[0].dtype,
                dtype=output.dtype,
                shape=output.shape,
                device=output.device,
                site=site,
                recorder=self._recorders.of(output.device),
                source=source,
            )

    def _gradient_is_there(self, place: Place, path: str, call: int, gradient: Tensor) -> None:
        """The gradient of an output: of a place and a path in what it returned, in an outermost call. The usual case in one function, as above."""
        usual: _Gradient | None = place.gradients.get(path)
        if (
            usual is None
            or type(gradient) is not Tensor
            or gradient.dtype is not usual.dtype
            or gradient.layout is not torch.strided
            or gradient.is_nested
            or gradient.shape != usual.shape
            or gradient.device != usual.device
            or self._anything
            or number_of_modes()
            or transformation() is not None
            or (gradient.is_cuda and is_capturing())
        ):
            self._gradient_of_any(place, path, call, gradient)
            return
        usual.recorder.record_one(usual.site, gradient, self._position.step, call)

    def _gradient_of_any(self, place: Place, path: str, call: int, gradient: Tensor) -> None:
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
        if usual is not None and not (gradient.is_cuda and is_capturing()):
            when = (self._writer.next_n(), self._position.step, call)
            self._heard(gradient, when[0])
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
