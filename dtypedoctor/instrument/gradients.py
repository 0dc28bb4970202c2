"""What an optimizer step works on: gradients, parameters and the loss scale.

Gradients are measured before every step: a weight's gradient can overflow where no module's does. Parameters only change
by a step that gradients have gone into, so in ordinary steps only some are measured after it, in turn, few enough that a
model of any size costs the same; and all of them as soon as anything at all is found not to be finite. In programs in which no optimizer of
torch's takes the gradients, they are measured where a backward pass leaves them.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isfinite
from typing import Any, TypeGuard
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn import Parameter
from torch.optim import Optimizer

from dtypedoctor._torch_private import is_capturing, norms_of, scale_where_it_lies, version_now, version_of
from dtypedoctor.instrument.naming import dtype_name
from dtypedoctor.instrument.phases import ScalerStep
from dtypedoctor.instrument.places import When
from dtypedoctor.instrument.readable import Arrivals, held_values
from dtypedoctor.instrument.session import Session
from dtypedoctor.instrument.statistics import Rooted, is_spread, local_part, local_parts, measurable, out_of_their_sight
from dtypedoctor.trace.events import Observed, ScalerState
from dtypedoctor.trace.records.execution import SteppedBy, Unscaled

BYTES_A_STEP = 64 << 20
"""Parameters measured after an ordinary step; what a CPU reads in a few milliseconds and a GPU in 20 microseconds."""

Sample = Callable[[str, list[Rooted], str, When | None], None]
Known = Callable[[Rooted, float, When], None]


@dataclass(slots=True)
class _Kept:
    """What is kept of one optimizer."""

    shape: list[int]
    version: int
    named: list[Rooted]
    unread: list[Rooted]
    """Parameters whose values cannot be read; their gradients may be plain ones all the same."""
    turn: int = 0
    steps: int = 0
    whole: int = 0
    """Steps after which parameters were measured."""
    passes: int = 0
    """Backward passes that had ended by its last step."""
    when: When | None = None
    """Coordinates of the parameters after the last step."""
    measured: set[int] = field(default_factory=set)
    versions: list[int] = field(default_factory=list)
    """Of each parameter how often it had been written to by the end of the last step."""
    told: bool = False
    """Whether it is written down which optimizer this is."""
    alike: bool = field(init=False)
    """Whether all parameters lie on one device and hold something."""
    is_spread: bool = field(init=False)
    """Whether some are DTensors, of which this process holds a part, or nothing."""

    def __post_init__(self) -> None:
        parameters = [parameter for *_, parameter in self.named]
        self.alike = all(p.numel() for p in parameters) and len({p.device for p in parameters}) == 1
        self.is_spread = any(map(is_spread, parameters))


class OptimizerSamples:
    """Measures around optimizer steps.

    Args:
        session: knows the parameters' names; counts the gradients, and those that were measured.
        sample: measures named tensors as a kind of site in a phase.
        arrivals: brings numbers from a device.
        known: takes note of a named gradient of which only the magnitude is known.
    """

    def __init__(self, session: Session, sample: Sample, arrivals: Arrivals, known: Known) -> None:
        self._session = session
        self._arrivals, self._known = arrivals, known
        self._writer, self._position = session.writer, session.position
        self._names, self._coverage = session.names, session.coverage
        self._sample = sample
        self._kept: WeakKeyDictionary[Optimizer, _Kept] = WeakKeyDictionary()
        self._passes = 0
        """Backward passes that have ended."""

    def before_step(self, optimizer: Optimizer) -> None:
        """Measures the gradients, and before the first step the parameters as they were before any training."""
        kept = self._of(optimizer)
        if kept.when is None and not kept.whole:
            self._sample("initial", _read(kept.named), "optimizer", None)
        found, count = _gradients(kept.named)
        if kept.unread:
            others, more = _gradients(kept.unread)
            found, count = found + others, count + more
        self._coverage.gradients += count
        if found:
            self._sample("grad", found, "backward", None)
            self._coverage.gradients_measured += len(found)

    def glance(self, optimizer: Optimizer) -> None:
        """Asks of all gradients by one operator whether they are finite, and measures those that are not."""
        if torch.cuda.is_initialized() and is_capturing():
            return
        kept = self._of(optimizer)
        gradients = [named[2].grad for named in kept.named]
        if kept.is_spread:
            gradients = local_parts(gradients)
        if kept.alike and _are_plain(gradients) and not (kept.is_spread and 0 in map(Tensor.numel, gradients)):
            self._glance_at(kept.named, gradients)
            return
        # Parameters that have a gradient which holds something, and what it holds.
        by_device: dict[torch.device, tuple[list[Rooted], list[Tensor]]] = {}
        for named, gradient in zip(kept.named, gradients, strict=True):
            if gradient is None:
                continue
            is_plain = type(gradient) is Tensor and gradient.layout is torch.strided
            values = gradient if is_plain else held_values(gradient)
            if values is not None and values.numel():
                of_device = by_device.setdefault(values.device, ([], []))
                of_device[0].append(named)
                of_device[1].append(values)
        for parameters, held in by_device.values():
            self._glance_at(parameters, held)

    def _glance_at(self, parameters: list[Rooted], gradients: list[Tensor]) -> None:
        """Asks the gradients of parameters, which lie on one device and hold something."""
        self._coverage.gradients_skipped += len(gradients)
        if not gradients[0].is_cuda:
            with out_of_their_sight(), torch.no_grad():
                # A maximum, which overflows no dtype, takes a CPU twenty times as long as a sum of squares.
                norms = norms_of(gradients, 2.0).tolist()
            if not all(map(isfinite, norms)):
                found = zip(parameters, gradients, norms, strict=True)
                bad = [(root, name, values) for (root, name, _), values, norm in found if not isfinite(norm)]
                self._sample("grad", bad, "backward", None)
            return
        when = When(self._writer.next_n(len(gradients)), self._position.step, self._position.call)

        def tell(magnitudes: list[float]) -> None:  # the gradients themselves may be gone by then
            if all(map(isfinite, magnitudes)):
                return
            for number, (named, magnitude) in enumerate(zip(parameters, magnitudes, strict=True)):
                if not isfinite(magnitude):
                    self._known(named, magnitude, when._replace(n=when.n + number))

        with out_of_their_sight(), torch.no_grad():
            self._arrivals.ask_each(norms_of(gradients, inf), tell)

    def gradients_left(self) -> list[Rooted]:
        """The gradients of all optimizers that no step has taken."""
        found: list[Rooted] = []
        for optimizer, kept in self._kept.items():
            if kept.passes < self._passes:
                of_now = self._of(optimizer)
                found += _gradients([*of_now.named, *of_now.unread])[0]
        return found

    def backward_is_over(self) -> None:
        """A backward pass has ended, and left gradients."""
        self._passes += 1

    def skipped(self, optimizer: Optimizer) -> None:
        """A loss scaler has found the gradients unfit and does not let the optimizer take them."""
        if optimizer in self._kept:
            self._kept[optimizer].passes = self._passes

    def after_step(self, optimizer: Optimizer, *, looks: bool = True) -> None:
        """Measures those parameters whose turn it is; after the first step all, between ``looks`` none."""
        kept = self._of(optimizer)
        position = self._position
        kept.when = When(self._writer.next_n(len(kept.named)), position.step, position.call)
        kept.measured.clear()
        kept.versions = _versions(kept)
        kept.passes = self._passes
        kept.steps += 1
        if not looks:
            return
        kept.whole += 1
        budget = BYTES_A_STEP if kept.whole > 1 else sum(p.nbytes for *_, p in kept.named)
        places: list[int] = []
        while len(places) < len(kept.named) and budget > 0:
            places.append(kept.turn)
            budget -= kept.named[kept.turn][-1].nbytes
            kept.turn = (kept.turn + 1) % len(kept.named)
        self._measure(kept, sorted(places))

    def look_closer(self) -> None:
        """Something was not finite: measures all parameters that have not been measured since their optimizer's last step.

        They get the coordinates of that step, so that they stand before what they may have spoilt; those that have been written to since, which
        may have spoilt them, get the present ones.
        """
        for kept in self._kept.values():
            now = _versions(kept) if kept.versions else []
            left = set(range(len(now))) - kept.measured
            written = sorted(i for i in left if now[i] != kept.versions[i])
            self._measure(kept, sorted(left.difference(written)))
            kept.measured.update(written)
            if written:
                self._sample("param", _read([kept.named[i] for i in written]), self._position.phase, None)

    def describe_optimizers(self) -> None:
        """Writes down, once, which optimizers have made steps."""
        for optimizer, kept in self._kept.items():
            if kept.steps and not kept.told:
                kept.told = True
                cls = type(optimizer)
                eps = not cls.__module__.startswith("torch.optim.") or any("eps" in g for g in optimizer.param_groups)
                self._session.emit(SteppedBy(optimizer=cls.__name__, eps=eps), phase="optimizer")

    def _measure(self, kept: _Kept, places: list[int]) -> None:
        if kept.when is None:
            return
        kept.measured.update(places)
        n, step, call = kept.when
        run: list[int] = []
        for place in [*places, -1]:
            if run and place != run[-1] + 1:  # numbers in one call of sample() follow each other
                self._sample("param", _read([kept.named[i] for i in run]), "optimizer", When(n + run[0], step, call))
                run = []
            run.append(place)

    def _of(self, optimizer: Optimizer) -> _Kept:
        shape = [len(group["params"]) for group in optimizer.param_groups]
        kept = self._kept.get(optimizer)
        if kept is None or kept.shape != shape or kept.version != self._names.version:
            # The parameters that are trained and can be read, and those that cannot
            known = self._names.parameters()
            found: list[Rooted] = []
            unread: list[Rooted] = []
            for group_number, group in enumerate(optimizer.param_groups):
                for number, parameter in enumerate(group["params"]):
                    if parameter.requires_grad:
                        unknown = (0, f"param_groups.{group_number}.{number}")
                        where = found if held_values(parameter) is not None else unread
                        where.append((*known.get(id(parameter), unknown), parameter))
            fresh = _Kept(shape, self._names.version, *(found, unread), passes=self._passes)
            if kept is not None:
                fresh.steps, fresh.whole, fresh.told = kept.steps, kept.whole, kept.told
            kept = self._kept[optimizer] = fresh
        return kept


def _are_plain(gradients: list[Tensor | None]) -> TypeGuard[list[Tensor]]:
    """Whether there is a gradient of each parameter, and all are plain dense tensors."""
    if set(map(type, gradients)) != {Tensor}:
        return False
    return {gradient.layout for gradient in gradients if gradient is not None} == {torch.strided}


def _gradients(named: Sequence[Rooted]) -> tuple[list[Rooted], int]:
    """The gradients of these parameters that can be read, and how many there are."""
    count = 0
    found: list[Rooted] = []
    for root, name, parameter in named:
        grad = parameter.grad
        if grad is None:
            continue
        count += 1
        values = grad if measurable(grad) else held_values(grad)
        if values is not None:
            found.append((root, name, values))
    return found, count


def _read(named: Sequence[Rooted]) -> list[Rooted]:
    """Parameters with what this process holds of their values."""
    return [(root, name, p if measurable(p) else _held(p)) for root, name, p in named]


def _held(parameter: Tensor) -> Tensor:
    values = held_values(parameter)
    return local_part(parameter) if values is None else values


def _versions(kept: _Kept) -> list[int]:
    """How often each parameter has been written to, as far as torch counts it; without a call of a function for an ordinary one."""
    held = [one[2] for one in kept.named]
    if kept.is_spread:
        held = local_parts(held)
    try:
        return [version_now(one) if type(one) in (Parameter, Tensor) else _version(one) for one in held]
    except RuntimeError:  # one was made in inference mode
        return list(map(_version, held))


def _version(parameter: Tensor) -> int:
    tensor = _held(parameter)
    return -1 if tensor.is_inference() else version_of(tensor)


MAX_NODES = 5_000
"""Nodes of one graph that are looked through."""


class LeafGradients:
    """The leaves of the graph of the backward pass that is running.

    Where no optimizer has taken a gradient yet, they are looked up, and what the pass has added up in them is measured when it is over.
    """

    def __init__(self, session: Session) -> None:
        self._coverage, self._names = session.coverage, session.names
        self._known: tuple[int, dict[int, tuple[int, str]]] = (-1, {})
        self._leaves: list[Tensor] = []
        self.claimed = False
        """Whether an optimizer takes the gradients."""
        self._last = (0, 0)

    def before(self, tensors: list[Tensor]) -> None:
        """A backward pass begins at ``tensors``."""
        self._leaves = [] if self.claimed else leaves_of(tensors)

    def inside(self, tensors: list[Tensor]) -> None:
        """A backward pass of a checkpoint begins inside of this one: its parameters are not in the outer graph."""
        if not self.claimed:
            held = {id(leaf) for leaf in self._leaves}
            self._leaves += [leaf for leaf in leaves_of(tensors) if type(leaf) is Parameter and id(leaf) not in held]

    def claim(self) -> None:
        """An optimizer takes the gradients, which are counted and measured with its step, and so will all later ones."""
        if not self.claimed:
            self.claimed = True
            self._coverage.gradients -= self._last[0]
            self._coverage.gradients_measured -= self._last[1]

    def after(self) -> list[Rooted]:
        """The gradients that the pass has left in them."""
        leaves, self._leaves = self._leaves, []
        if not leaves:
            self._last = (0, 0)
            return []
        known = self._parameters()
        found = [(leaf, leaf.grad) for leaf in leaves if leaf.grad is not None]
        named = [(*known.get(id(leaf), (0, "")), grad) for leaf, grad in found]
        return self._counted([(root, name or f"leaf {i}", grad) for i, (root, name, grad) in enumerate(named)])

    def returned(self, gradients: object) -> list[Rooted]:
        """The gradients that ``torch.autograd.grad`` returns."""
        found = gradients if isinstance(gradients, (tuple, list)) else ()
        return self._counted([(0, f"gradient {i}", g) for i, g in enumerate(found) if isinstance(g, Tensor)])

    def _counted(self, found: list[Rooted]) -> list[Rooted]:
        """Those that can be read: inside of ``vmap`` the values of all rows."""
        read = ((root, name, held_values(gradient)) for root, name, gradient in found)
        held = [(root, name, values) for root, name, values in read if values is not None]
        self._coverage.gradients += len(found)
        self._coverage.gradients_measured += len(held)
        self._last = (len(found), len(held))
        return held

    def _parameters(self) -> dict[int, tuple[int, str]]:
        if self._known[0] != self._names.version:
            self._known = (self._names.version, self._names.parameters())
        return self._known[1]


def leaves_of(tensors: list[Tensor]) -> list[Tensor]:
    """The leaves that a backward pass from ``tensors`` reaches, as far as they are found among the first nodes."""
    waiting = [t.grad_fn for t in tensors if t.grad_fn is not None]
    seen: set[Node] = set(waiting)
    leaves: list[Tensor] = []
    while waiting and len(seen) < MAX_NODES:
        node = waiting.pop()
        if type(node).__name__ == "AccumulateGrad":
            leaves.append(node.variable)  # type: ignore[attr-defined]
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return leaves


MAX_NAMES = 8
"""Parameters named per dtype."""


def scale_of(scaler: Any) -> Tensor | float:
    """The loss scale of a gradient scaler where it lies; ``scaler.get_scale()`` would wait for the device."""
    held = scale_where_it_lies(scaler)
    return held if held is not None else float(scaler.get_scale())


class ScalerLog:
    """Writes a :class:`ScalerState` for each step of a gradient scaler, when the scale and what it found have arrived.

    Args:
        session: where the records go.
        arrivals: brings the numbers.
        on_fused: called where a fused optimizer, which is called for every step, has left its parameters as they were.
    """

    def __init__(self, session: Session, arrivals: Arrivals, on_fused: Callable[[], None]) -> None:
        self._writer, self._arrivals, self._on_fused = session.writer, arrivals, on_fused
        self._numbers: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()

    def tell(self, ended: ScalerStep) -> None:
        """A step of a scaler has ended."""
        n, step = self._writer.next_n(), ended.step
        number = self._numbers.setdefault(ended.optimizer, len(self._numbers))
        found_inf: list[float] = []

        def write(scale: float) -> None:
            bad = not ended.called or any(found_inf)
            if bad and ended.called:
                self._on_fused()
            self._writer.write(ScalerState(n=n, step=step, scale=scale, found_inf=bad, skipped=bad, optimizer=number))

        for of_device in ended.found_inf:
            self._arrivals.ask(of_device, found_inf.append)
        self._arrivals.ask(scale_of(ended.scaler), write)


class UnscaleLog:
    """Writes what a gradient scaler finds when it is about to unscale: which parameters, in which dtypes, with or without a gradient.

    That is an :class:`Unscaled` for each optimizer, and again where a look finds one of its fields but the scale changed.
    """

    def __init__(self, session: Session, arrivals: Arrivals) -> None:
        self._writer, self._position, self._names = session.writer, session.position, session.names
        self._arrivals = arrivals
        self._last: dict[int, Unscaled] = {}

    def tell(self, scaler: Any, optimizer: Optimizer) -> None:
        """``scaler`` is about to unscale the gradients of ``optimizer``."""
        inner = getattr(optimizer, "optimizer", optimizer)
        if not scaler.is_enabled() or (id(inner) in self._last and not self._position.looks):
            return
        described = self._describe(inner)
        if self._last.get(id(inner)) == described:
            return
        self._last[id(inner)] = described
        position = self._position
        n, step, call = self._writer.next_n(), position.step, position.call

        def write(scale: float) -> None:
            what = replace(described, scale=scale)
            self._writer.write(Observed(n=n, step=step, call=call, phase="optimizer", what=what))

        self._arrivals.ask(scale_of(scaler), write)

    def _describe(self, optimizer: Optimizer) -> Unscaled:
        """All but the scale, which is still on its way."""
        known = self._names.parameters()
        params: Counter[str] = Counter()
        gradients: Counter[str] = Counter()
        names: dict[str, list[str]] = {}
        frozen = strangers = 0
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            dtype = dtype_name(parameter)
            params[dtype] += 1
            frozen += not parameter.requires_grad
            strangers += id(parameter) not in known
            if parameter.grad is not None:
                gradients[dtype_name(parameter.grad)] += 1
            if dtype in ("float16", "bfloat16") and parameter.requires_grad and id(parameter) in known:
                names.setdefault(dtype, []).append(known[id(parameter)][1])
        return Unscaled(
            scale=0.0,
            params=dict(params),
            gradients=dict(gradients),
            names={dtype: found[:MAX_NAMES] for dtype, found in names.items()},
            frozen=frozen,
            strangers=strangers,
            optimizer=type(optimizer).__name__,
        )
