"""Records what modules returned and the gradients of it, and counts what could not be measured.

Nearly all calls look like the call of the same module before: the same kinds of arguments, one tensor out, of the same dtypes and shape. For
these everything but the tensor is known, and a call costs a few microseconds.
"""

from collections import Counter
from collections.abc import Callable, Collection
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dtypedoctor._torch_private import (
    DisableTensorClasses,
    DisableTorchFunction,
    hook_gradient,
    is_capturing,
    is_wrapped,
    number_of_modes,
    register_own,
    transformation,
)
from dtypedoctor.instrument.contents import (
    Contents,
    Found,
    contents,
    has_floats,
    may_hold_tensors,
    tensors_given,
)
from dtypedoctor.instrument.module_tree import own_parameters
from dtypedoctor.instrument.naming import dtype_name
from dtypedoctor.instrument.operators import why_opaque
from dtypedoctor.instrument.places import Looks, Place, Recorder, Sites, Source
from dtypedoctor.instrument.readable import Missed, readable, wants_gradient
from dtypedoctor.instrument.recorders import Recorders
from dtypedoctor.instrument.session import Session
from dtypedoctor.instrument.statistics import Named, measurable, modes_are_on, out_of_their_sight
from dtypedoctor.trace.events import Flow, NotWatched

MOST_SHAPES = 8
"""Shapes of what one module returns for which the look of a call is kept."""
MOST_MISSED = 20
"""Different types of results that are told of because they could not be measured."""


class _Arguments(NamedTuple):
    """How a call was made whose arguments are not one tensor alone, or whose result is a tuple with one tensor.

    Attributes:
        names: of the keyword arguments.
        kinds: types of all arguments, positional ones first.
        items: the same with the items of tuples in place of the tuples.
        tensors: of these items, which are tensors, and their dtypes.
        given: which are measured, their dtypes, and their paths.
        returned: types of what the result holds; None where it is a tensor.
        at: which of that is the tensor.
    """

    names: tuple[str, ...]
    kinds: tuple[type, ...]
    items: list[type]
    tensors: list[tuple[int, torch.dtype]]
    given: list[tuple[int, torch.dtype, str]]
    returned: tuple[type, ...] | None
    at: int

    def of(self, args: Any, kwargs: Any, output: Any, device: torch.device) -> tuple[Tensor, list[Named]] | None:
        """What another call returned, and the tensors that went into it; None where it was made in another way."""
        values = (*args, *kwargs.values())
        if tuple(kwargs) != self.names or tuple(map(type, values)) != self.kinds:
            return None
        items: list[Any] = []
        for value in values:
            if type(value) is tuple:
                items += value
            else:
                items.append(value)
        if list(map(type, items)) != self.items:
            return None
        for i, dtype in self.tensors:
            if items[i].dtype is not dtype:
                return None
        given: list[Named] = []
        for i, dtype, path in self.given:
            tensor = items[i]
            if (
                tensor.dtype is not dtype
                or tensor.layout is not torch.strided
                or tensor.is_nested
                or tensor.device != device
            ):
                return None
            given.append((path, tensor))
        if self.returned is None:
            return (output, given) if type(output) is Tensor else None
        if type(output) is not tuple or tuple(map(type, output)) != self.returned:
            return None
        return output[self.at], given


def _arguments(args: Any, kwargs: Any, output: Any, device: torch.device) -> _Arguments | None:
    """How a call was made; None where that is not to be seen from types alone, so that each such call is searched."""
    values = {**{str(i): value for i, value in enumerate(args)}, **kwargs}
    items: list[tuple[str, Any]] = []
    for name, value in values.items():
        items += [(f"{name}.{i}", one) for i, one in enumerate(value)] if type(value) is tuple else [(name, value)]
    if len(values) != len(args) + len(kwargs) or any(may_hold_tensors(one) for _, one in items):
        return None
    tensors = [(i, path, one) for i, (path, one) in enumerate(items) if type(one) is Tensor]
    given = [(i, one.dtype, path) for i, path, one in tensors if measurable(one)]
    if any(one.device != device for _, _, one in tensors if measurable(one)):
        return None
    returned, at = None, 0
    if type(output) is tuple:
        returned = tuple(map(type, output))
        if returned.count(Tensor) != 1 or any(type(one) is not Tensor and has_floats(one) for one in output):
            return None
        at = returned.index(Tensor)
    return _Arguments(
        names=tuple(kwargs),
        kinds=tuple(map(type, values.values())),
        items=[type(one) for _, one in items],
        tensors=[(i, one.dtype) for i, _, one in tensors if not measurable(one)],
        given=given,
        returned=returned,
        at=at,
    )


class _Usual(NamedTuple):
    """What the last call of a module looked like: one tensor out, and one positional tensor in unless ``arguments`` say more."""

    phase: str
    autocast: str | None
    device_type: str
    is_cuda: bool
    arguments: _Arguments | None
    given: torch.dtype | None
    dtype: torch.dtype
    shape: torch.Size
    device: torch.device
    site: int
    path: str
    recorder: Recorder
    source: Source


class _Gradient(NamedTuple):
    """What the last gradient of an output looked like."""

    dtype: torch.dtype
    shape: torch.Size
    device: torch.device
    site: int
    recorder: Recorder

    def fits(self, gradient: Tensor) -> bool:
        """Whether a dense gradient looks the same."""
        return gradient.dtype is self.dtype and gradient.shape == self.shape and gradient.device == self.device


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

    def __call__(self, gradient: Tensor | None) -> None:
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
        self._gradient = session.guard.shield(self._gradient_is_there, "some gradients of module outputs", quick=True)
        self._anything: tuple[Collection[object], ...] = ()
        self._heard: Callable[[Tensor, int], None] = lambda _, __: None
        self._missed: Counter[Missed] = Counter()
        self._first_missed: dict[Missed, str] = {}

    def hear_gradients(self, listener: Callable[[Tensor, int], None], *anything: Collection[object]) -> None:
        """Has ``listener`` called with each gradient and the number of its sample, while there is something in one of ``anything``."""
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
        if usual is None:
            self._record_other(module, place, args, kwargs, output)
            return
        if usual.arguments is not None:
            found = usual.arguments.of(args, kwargs, output, usual.device)
            if found is None:
                self._record_other(module, place, args, kwargs, output)
                return
            returned, given = found
        else:
            if (
                kwargs
                or len(args) != 1
                or type(output) is not Tensor
                or type(one := args[0]) is not Tensor
                or one.dtype is not usual.given
                or one.layout is not torch.strided
                or one.is_nested
                or one.device != usual.device
            ):
                self._record_other(module, place, args, kwargs, output)
                return
            returned, given = output, [("0", one)]
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
            returned.dtype is not usual.dtype
            or returned.layout is not torch.strided
            or returned.is_nested
            or returned.shape != usual.shape
            or returned.device != usual.device
            or (here.phase if here.overrides or here.backward_depth else "forward") != usual.phase
            or autocast != usual.autocast
            or number_of_modes()
            or transformation() is not None
            or (usual.is_cuda and is_capturing())
        ):
            self._record_other(module, place, args, kwargs, output)
            return
        call = here.call
        usual.recorder.record_one(usual.site, returned, self._position.step, call, usual.source, given)
        self._coverage.module_calls_measured += 1
        if returned.requires_grad and not returned.is_leaf:
            hook_gradient(returned, _Hook((self._gradient, place, usual.path, call)))

    def _record_other(self, module: nn.Module, place: Place, args: Any, kwargs: Any, output: Any) -> None:
        """Records a call that does not look like the last one, but perhaps like one before: generation calls with many tokens, then with one."""
        returned = output[0] if type(output) is tuple and output else output
        if type(returned) is Tensor and returned.layout is torch.strided and not returned.is_nested:
            usual = place.usuals.get(returned.shape)
            if usual is not None and usual is not place.usual:
                place.usual = usual
                self.record(module, place, args, kwargs, output)
                return
        with DisableTensorClasses(), out_of_their_sight() if modes_are_on() else nullcontext():
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
                hook = _Hook((self._gradient, place, path, position.call))
                if type(original) is Tensor:
                    hook_gradient(original, hook)
                else:
                    with DisableTorchFunction():
                        register_own(Tensor.register_hook, original, hook)
        self._learn(place, given, output, outputs, source)

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

    def _learn(self, place: Place, given: tuple[Any, Any], output: Any, found: list[Found], source: Source) -> None:
        """Keeps what this call looked like, where one tensor was returned."""
        args, kwargs = given
        place.usual = arguments = None
        if len(found) != 1 or type(found[0].original) is not Tensor or not measurable(found[0].original):
            return
        path, returned, _ = found[0]
        if kwargs or len(args) != 1 or type(args[0]) is not Tensor or type(output) is not Tensor:
            arguments = _arguments(args, kwargs, output, returned.device)
            if arguments is None or (arguments.returned is None and type(output) is not Tensor):
                return
        elif not measurable(args[0]) or args[0].device != returned.device:
            return
        looks = (source.phase, "output", path, returned.dtype, returned.shape, source.autocast, returned.device)
        site = place.sites.get(looks)
        if site is not None:
            if len(place.usuals) >= MOST_SHAPES:
                place.usuals.clear()
            place.usual = place.usuals[returned.shape] = _Usual(
                phase=source.phase,
                autocast=source.autocast,
                device_type=returned.device.type,
                is_cuda=returned.is_cuda,
                arguments=arguments,
                given=None if arguments is not None else args[0].dtype,
                dtype=returned.dtype,
                shape=returned.shape,
                device=returned.device,
                site=site,
                path=path,
                recorder=self._recorders.of(returned.device),
                source=source,
            )

    def _gradient_is_there(self, place: Place, path: str, call: int, gradient: Tensor | None) -> None:
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
            or any(self._anything)
            or number_of_modes()
            or transformation() is not None
            or (gradient.is_cuda and is_capturing())
        ):
            self._gradient_of_any(place, path, call, gradient)
            return
        usual.recorder.record_one(usual.site, gradient, self._position.step, call)

    def _gradient_of_any(self, place: Place, path: str, call: int, gradient: Tensor | None) -> None:
        if gradient is None:  # autograd has none for an output that nothing has used, where its siblings have one
            return
        if type(gradient) is not Tensor or not _lies_there(gradient):
            with out_of_their_sight(), DisableTensorClasses():
                self._gradient_of_class(place, path, call, gradient)
            return
        usual: _Gradient | None = place.gradients.get(path)
        if usual is None or not usual.fits(gradient):
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
                weights=sorted({dtype_name(p) for p in own_parameters(module)}),
                autocast=autocast,
            )
        )


def _lies_there(tensor: Tensor) -> bool:
    """Whether a tensor of a floating-point dtype on a real device is dense, has its data, and is in no transformation."""
    return tensor.layout is torch.strided and not tensor.is_nested and not is_wrapped(tensor)
