"""One module call, made again inside of the running program under the op trace, and the smallest call inside of it that fails by itself.

Which calls are kept, and when one is made again, is decided in :mod:`dtypedoctor.instrument.in_place`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor, nn

from dtypedoctor._torch_private import MemoryRef, Writes, copy_all, parameters_of, sees_operators, version_of
from dtypedoctor.instrument.frames import Line
from dtypedoctor.instrument.live_call import LiveCall, tensors_of
from dtypedoctor.instrument.module_tree import (
    ByModule,
    Given,
    all_are_here,
    mapped,
    modules_in,
    unit_set_aside,
)
from dtypedoctor.instrument.operators import bytes_of, why_opaque
from dtypedoctor.instrument.session import Session
from dtypedoctor.instrument.silent.underflow import SCALE, when_scaled
from dtypedoctor.instrument.statistics import Extent, is_finite, measurable, measure, out_of_their_sight, real_of
from dtypedoctor.instrument.untouched import Again, CannotReplayError, KeptMemory, at_moment, make_again
from dtypedoctor.instrument.whereabouts import call_arguments
from dtypedoctor.interruptions import contained
from dtypedoctor.redaction.messages import LONGEST, elided, message_of, without_volatile
from dtypedoctor.trace.records.execution import EagerCall
from dtypedoctor.trace.records.silent import ScaledGradient
from dtypedoctor.unpatched import perf_counter

if TYPE_CHECKING:
    from dtypedoctor.instrument.optrace import OpTrace

__all__ = [
    "MAX_HELD",
    "CopiesOfParameters",
    "InnerCalls",
    "KeptCall",
    "Made",
    "ParameterCopies",
    "RepeatedCall",
    "Versions",
    "is_same",
    "itself",
    "share_of_device",
    "type_and_message",
]

MAX_RESULT = 16 << 20
"""Bytes of a result that is kept alive, to compare that of the replay with it."""
REPEATS = 60
"""How often an inner call may be made again to reduce it."""
ROUNDINGS = 8
"""Spacings of the largest number up to which what was compiled may differ from the same in eager mode: roundings of many layers partly cancel."""
MAX_HELD = 256 << 20
"""Bytes of inputs and upstream gradients that one call may keep alive."""
SHARE_HELD = 0.02
"""Share of the device's memory that the inputs of kept calls may take together, where that is more than :data:`MAX_HELD`; copies of the parameters
of units may take as much, and so may copies of what an optimizer step begins with."""
SHARE_COPIED = 0.25
"""Share of the memory that is still free on the device beyond which copies of parameters are not allowed to grow."""


class Made:
    """A tensor that a call has returned, without its autograd graph: a small one is kept, another as long as the program keeps its memory.

    One of a class of the program that sees operators is not kept: it would see how.

    Args:
        tensor: was returned; nothing hangs on it afterwards.
    """

    __slots__ = ("_large", "_small", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._small: Tensor | None = None
        self._large: tuple[MemoryRef, Writes] | None = None
        self._version = version_of(tensor)
        if sees_operators(type(tensor)):
            return
        if tensor.numel() * tensor.element_size() <= MAX_RESULT:
            self._small = tensor.detach()  # shares its memory, and its version
        else:
            self._large = MemoryRef(tensor), Writes(tensor)

    def tensor(self) -> Tensor | None:
        """The tensor; None where it was freed, or written to since, or not kept."""
        if self._large is not None:
            memory, writes = self._large
            return None if writes.happened else memory.tensor()
        return self._small if self._small is not None and version_of(self._small) == self._version else None


class Versions:
    """How often some parameters had been written to. They are found by their owners: what offloads weights makes new ones, which were not.

    Args:
        held: owner and name of each, of which any may have gone.
    """

    __slots__ = ("_before", "_held")

    def __init__(self, held: "Sequence[tuple[ref[nn.Module], str]]") -> None:
        self._held = held
        self._before = self._now()

    def _now(self) -> list[tuple[int, int]]:
        """Identity and version of each."""
        now = []
        for owner, name in self._held:
            module = owner()
            parameter = None if module is None else parameters_of(module).get(name)
            now.append((id(parameter), -1 if parameter is None else version_of(parameter)))
        return now

    @property
    def have_changed(self) -> bool:
        """Whether one has been written to since."""
        return any(
            identity == before[0] and version != before[1]
            for before, (identity, version) in zip(self._before, self._now(), strict=True)
        )


def share_of_device() -> int:
    """Bytes that may be kept of one kind: :data:`SHARE_HELD` of the device, at least :data:`MAX_HELD`."""
    if not torch.cuda.is_initialized():
        return MAX_HELD
    return max(MAX_HELD, int(_memory_of(torch.cuda.current_device()) * SHARE_HELD))


@cache
def _memory_of(device: int) -> int:
    """Bytes of a CUDA device."""
    return torch.cuda.get_device_properties(device).total_memory


class PlacesOfParameters:
    """Where a module, and those inside of it, hold parameters.

    Args:
        module: is searched once.
    """

    def __init__(self, module: nn.Module) -> None:
        parts = ((parameters_of(part), name) for part in modules_in(module) for name in parameters_of(part))
        self.held = [(where, name) for where, name in parts if where[name] is not None]

    def distinct(self) -> "dict[int, nn.Parameter]":
        """The parameters that are there now, each once, by identity."""
        now = [where[name] for where, name in self.held]
        return {id(parameter): parameter for parameter in now if parameter is not None}


_BYTES: Callable[[Tensor], int] = attrgetter("nbytes")


def _looks_unlike(copy: Tensor, parameter: Tensor) -> bool:
    return copy.shape != parameter.shape or copy.dtype != parameter.dtype or copy.device != parameter.device


class ParameterCopies:
    """Copies of the parameters of a module, made behind the stream: FSDP2 frees the memory of the originals when it reshards them.

    Args:
        places: of a module that has all of its parameters at the moment.

    Attributes:
        size: bytes that the copies take.
    """

    def __init__(self, places: PlacesOfParameters) -> None:
        self._copies = {
            key: nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
            for key, parameter in places.distinct().items()
        }
        self._places = [(where, name, self._copies[id(where[name])]) for where, name in places.held]
        self.size = bytes_of(self._copies.values())

    def made_again(self, places: PlacesOfParameters) -> bool:
        """Copies into the same memory what the module holds now; False where that looks otherwise, or lies elsewhere."""
        now = places.distinct()
        if list(now) != list(self._copies) or any(map(_looks_unlike, self._copies.values(), now.values())):
            return False
        copy_all([copy.detach() for copy in self._copies.values()], list(now.values()))
        return True

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the copies are the module's parameters."""
        before = [(where, name, where[name]) for where, name, _ in self._places]
        try:
            for where, name, copy in self._places:
                where[name] = copy
            yield
        finally:
            for where, name, parameter in before:
                where[name] = parameter


class CopiesOfParameters:
    """Keeps copies of what the last units of FSDP2 computed with, until it is known whether all was finite.

    A copy is made behind the stream; nothing waits for it. The one that was used longest ago makes room for the next.

    Args:
        session: of the process.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._kept: list[KeptCall] = []
        self._most = 0
        self._places: ByModule[PlacesOfParameters] = ByModule()
        self._spare: ByModule[ParameterCopies] = ByModule()
        """Of calls that are let go of: the next call of the module has its copies in the same memory."""

    def keep(self, kept: "KeptCall", calls: Sequence["KeptCall"]) -> None:
        """Copies the parameters of a call, which are unsharded at the moment; those of calls that are not among ``calls`` are let go of."""
        if kept.copies is not None:
            self._kept.remove(kept)
            self._kept.append(kept)
            return
        module = kept.live.module
        places = self._places_in(module)
        parameters = places.distinct().values()
        size, limit = sum(map(_BYTES, parameters)), share_of_device()
        if size == 0 or size > limit or not all_are_here(parameters):
            return
        if gone := [one for one in self._kept if one not in calls]:
            self._spare = ByModule()
            for one in gone:
                if one.live.is_there and one.copies is not None:
                    self._spare[one.live.module] = one.copies
            self._drop(gone)
        copies = self._spare.pop(module)
        with self._session.position.mute(), out_of_their_sight(), torch.no_grad():
            if copies is None or not copies.made_again(places):
                copies = self._new(places, size, limit)
        if copies is not None:  # nothing of a copy that has failed on its way is kept
            kept.copies = copies
            self._kept.append(kept)

    def _places_in(self, module: nn.Module) -> PlacesOfParameters:
        """Searched for in looks, and at first: from step to step a unit has its parameters in the same places."""
        places = None if self._session.position.looks else self._places.get(module)
        if places is None:
            places = self._places[module] = PlacesOfParameters(module)
        return places

    def _new(self, places: PlacesOfParameters, size: int, limit: int) -> ParameterCopies | None:
        self._spare = ByModule()  # what is spare is not counted
        while self._size() + size > limit:
            self._drop(self._kept[:1])
        return ParameterCopies(places) if self._fits(self._size() + size) else None

    def forget(self) -> None:
        """Lets go of all copies."""
        self._spare = ByModule()
        self._drop(list(self._kept))

    def _drop(self, calls: list["KeptCall"]) -> None:
        for kept in calls:
            kept.copies = None
            self._kept.remove(kept)

    def _size(self) -> int:
        return sum(kept.copies.size for kept in self._kept if kept.copies is not None)

    def _fits(self, size: int) -> bool:
        """Whether the device has room for copies of ``size`` bytes together; asked only where there were never as many."""
        if size > self._most and torch.cuda.is_initialized():
            free, _ = torch.cuda.mem_get_info()
            if size - self._most > free * SHARE_COPIED:
                return False
        self._most = max(self._most, size)
        return True


@dataclass(slots=True, kw_only=True, weakref_slot=True, eq=False)
class KeptCall:
    """A call that may be replayed: an outermost one, or one of those below it that a rank can make alone.

    Attributes:
        live: the call.
        size: bytes of its inputs.
        number: the first of the numbers that are reserved for it.
        backward: the first of those that are reserved for it in the backward pass that began last.
        step, call, overrides, regions: the position and the autocast regions at entry.
        line: that of the program which makes the call.
        made: what it has returned.
        hooks: on what it has returned; they live as long as something can come back through it.
        error: type and message of what it has raised.
        replayed: what of it has been replayed, ``forward`` or ``backward``.
        bad: modules in it whose result or input was the first that was not finite.
        old: a step has ended since, which may have been skipped.
        moved: an optimizer has stepped since.
        versions: a few of the parameters, and how often they had been written to.
        depth: backward passes around it: it is a part of a call that is recomputed.
        part: of a parameter that is looked at, the gradient that a replay has made.
        copies: of the parameters that it computed with, where these are resharded before its failure can be known.
    """

    live: LiveCall
    size: int
    number: int
    backward: int = 0
    step: int
    call: int
    overrides: tuple[str, ...]
    regions: tuple[Any, ...]
    line: Line | None = None
    made: list[Made] = field(default_factory=list)
    hooks: list[ref[Any]] = field(default_factory=list)
    error: tuple[str, str] | None = None
    replayed: set[str] = field(default_factory=set)
    bad: set[str] = field(default_factory=set)
    old: bool = False
    moved: bool = False
    versions: Versions | None = None
    depth: int = 0
    part: Tensor | None = None
    copies: ParameterCopies | None = None

    @property
    def has_moved(self) -> bool:
        """Whether parameters have been updated since, by an optimizer or by the program itself."""
        return self.moved or (self.versions is not None and self.versions.have_changed)

    def with_its_parameters(self) -> AbstractContextManager[None]:
        """Inside, the module has the parameters of the call, where they were copied; else those of now."""
        return self.copies.in_place() if self.copies is not None else nullcontext()

    def holds(self, call: int, fqn: str) -> bool:
        """Whether the module ``fqn`` is called in this call, in the outermost one of that number."""
        own = self.live.fqn
        return self.call == call and (not own or fqn == own or fqn.startswith(f"{own}."))

    def is_spoilt(self) -> bool:
        """Whether an input or a parameter was not finite before it; asks the device, and waits for it. -inf is what masks are made of."""
        with self.with_its_parameters():
            held = (*self.live.inputs(), *self.live.parameters())
        given = [real_of(t).detach() for _, t in held if t.is_floating_point() or t.is_complex()]
        with out_of_their_sight():
            return any(bool((tensor.isnan() | (tensor == torch.inf)).any()) for tensor in given)

    def has_bad_parameters(self) -> bool:
        """Whether a parameter is not finite now; asks the device, and waits for it."""
        return not all(is_finite(tensor) for _, tensor in self.live.parameters())

    def has_bad_results(self) -> bool:
        """Whether something that it has returned is not finite; asks the device, and waits for it."""
        made = [tensor for result in self.made if (tensor := result.tensor()) is not None]
        return not all(is_finite(tensor) for tensor in made)

    def gets_finite_gradients(self) -> bool:
        """Whether all gradients that have come back to its results are finite; asks the device, and waits for it."""
        return all(map(is_finite, self.live.gradients.values()))


class RepeatedCall:
    """One replay of one call.

    Args:
        session: of the process.
        kept: the call.
        ops: the op trace.
        inner: keeps the module calls inside, to leave a capsule; None where none is wanted.
        traced: have the op trace on.
        leaf: a parameter whose gradient is kept, for what becomes of the sum.
        scaled: compare the gradients with those of a multiplied upstream gradient.
        shown: a context in which the checks for silent failures see the call: what raises may have got numbers that were rounded before.

    Attributes:
        ops: the op trace.
        scale: what the upstream gradient was multiplied by.
        gradients: of the call's parameters, as they are and with the upstream gradient multiplied, by name.
        why_not: why the call could not be made again; empty where it was.
        error: what the replay has raised.
        compared: whether its result could be compared with what the call itself had returned or raised.
        rounds: whether the two differ, though by no more than compiled code differs from the same code in eager mode.
        is_bad: whether a gradient that it has made is not finite.
        capsule: description and tensors of the smallest module call in it that fails; None where there is none.
    """

    def __init__(
        self, session: Session, kept: KeptCall, ops: "OpTrace", inner: "InnerCalls | None", *,
        traced: bool = True, scaled: bool = False, leaf: Tensor | None = None,
        shown: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:  # fmt: skip
        self._session = session
        self._kept = kept
        self._inner = inner
        self._given: Given = lambda args, kwargs: (args, kwargs)
        self.error: BaseException | None = None
        self.capsule: tuple[dict[str, Any], bytes] | None = None
        self.ops = ops
        self._traced, self._scaled, self._leaf, self._shown = traced, scaled, leaf, shown
        self.scale = SCALE
        self.gradients: dict[str, ScaledGradient] = {}
        self._result: list[Tensor] = []
        self.why_not = ""
        self.compared = self.rounds = False
        self.is_bad = False

    def entered(self, module: nn.Module) -> None:
        """A module is called in the replay."""
        if self._inner is not None:
            self._inner.entered(module)

    def raised(self, module: nn.Module, args: Any, error: BaseException) -> None:
        """The innermost module call of the replay has raised."""
        self.ops.refused_by_module(module, args, error)
        if self._inner is not None:
            self._inner.raised(module)

    def left(self, module: nn.Module, output: Any, *, outermost: bool) -> None:
        """A module has returned, before hooks of the program's see it."""
        if self._inner is not None:
            self._inner.left(module, output)
        if outermost and self._session.position.backward_depth == self._kept.depth:  # else a part of it is recomputed
            self._result = list(tensors_of(output))

    def run(self, first: int, *, backward: bool, error: tuple[str, str] | None) -> str:
        """Makes the call, with records numbered from ``first`` on; how it went differently, empty where it did not."""
        kept, session = self._kept, self._session
        live = kept.live if backward else replace(kept.live, gradients={})
        memory = KeptMemory.within_free((*live.parameters(), *live.inputs()))

        @contextmanager
        def moment_of_call() -> Iterator[None]:
            position = at_moment(
                session, first, step=kept.step, call=kept.call, overrides=kept.overrides, depth=kept.depth
            )
            with position, unit_set_aside(live.module) as self._given:
                yield

        def call() -> None:
            with self._shown():
                self.error = live.again(forward=self._forward, pull=self._pull).error
            if isinstance(self.error, CannotReplayError):
                raise self.error

        def keep_smallest(again: Again) -> None:
            if self._inner is not None:
                self.capsule = self._inner.smallest(self.error)

        again = make_again(
            session,
            call,
            roots=(live.module, live.args, live.kwargs),
            at=moment_of_call(),
            ops=self.ops if self._traced else None,
            memory=memory,
            before_undone=keep_smallest,
        )
        self.why_not = again.why_not
        if self.why_not:
            return ""
        said = type_and_message(self.error) if self.error is not None else None
        return self._difference(said, error if error is not None else kept.error)

    def let_go(self) -> None:
        """Everything is told: lets go of the graph of what was made again, which would hold parameters until Python's collector comes."""
        self._result, self.error, self._inner = [], None, None

    def in_eager_mode(self) -> EagerCall | None:
        """The call beside its replay, under which nothing is compiled, where only the replay is finite; None where that cannot be told."""
        made = [tensor for one in self._kept.made if (tensor := one.tensor()) is not None]
        if len(made) != len(self._result) or self.error is not None:
            return None
        with self._session.position.mute():
            real, again = (measure(list(filter(measurable, tensors))) for tensors in (made, self._result))
        if all(extent.finite for extent in real) or not all(extent.finite for extent in again):
            return None
        return EagerCall(finite=False, absmax=_largest(real), eager_finite=True, eager_absmax=_largest(again))

    @contextmanager
    def _forward(self, made: LiveCall) -> Iterator[tuple[Any, Any]]:
        # What a call inside of a model gets is no input of the program's.
        self.ops.enter_root(*((made.args, made.kwargs) if not made.fqn else ((), {})))
        try:
            self._session.autocast.open_again(self._kept.regions)
            yield self._given(made.args, made.kwargs)
        finally:
            self.ops.leave_root()

    def _pull(self, made: LiveCall, output: Any, upstream: Mapping[int, Tensor]) -> dict[str, Tensor]:
        """Pulls the upstream gradient through what was made again."""
        outputs = list(tensors_of(output))
        results, gradients = [outputs[i] for i in upstream], list(upstream.values())
        given = tensors_of((made.args, made.kwargs))
        ends = [tensor for tensor in (*given, *self._trained().values()) if tensor.requires_grad]
        pull = self._pull_scaled if self._scaled else self._pull_plain
        with self._differentiating():
            pull(results, gradients, ends)
        return {}

    def _pull_plain(self, results: list[Tensor], upstream: list[Tensor], ends: list[Tensor]) -> None:
        """Pulls the upstream gradient through once, as the program has."""
        if results and ends:
            made = _gradients_of(results, upstream, ends)
            self._kept.part = next((part for end, part in zip(ends, made, strict=True) if end is self._leaf), None)
            self.is_bad = not all(is_finite(gradient) for gradient in made if gradient is not None)

    def _pull_scaled(self, results: list[Tensor], upstream: list[Tensor], _: object) -> None:
        """Pulls the upstream gradient through twice, as it is and multiplied as far as float16 holds it."""
        trained = self._trained()
        ends = list(trained.values())

        def gradients(scale: float) -> Sequence[Tensor | None]:
            return _gradients_of(results, [one * scale for one in upstream], ends)

        if not trained or not upstream:
            return
        with self._session.position.mute():
            self.scale = _largest_scale(upstream)
            self.gradients = when_scaled(trained, gradients, self.scale)

    def _trained(self) -> dict[str, Tensor]:
        """The parameters of the call that get a gradient, by the names that the trace has for them."""
        known = self._session.names.parameters()
        found = {known.get(id(p), (0, name))[1]: p for name, p in self._kept.live.parameters()}
        return {name: parameter for name, parameter in found.items() if parameter.requires_grad}

    def _spacing(self, result: Tensor) -> float:
        """The spacing around 1 of the narrowest dtype that a result of the call may have been rounded to."""
        if not result.is_floating_point():
            return 0.0
        dtypes = [result.dtype, *(region.dtype for region in self._kept.live.autocast)]
        return max(torch.finfo(dtype).eps for dtype in dtypes)

    def _difference(self, said: tuple[str, str] | None, before: tuple[str, str] | None) -> str:
        if said != before:
            self.compared = True
            return f"the call {_raised(before)}, its replay {_raised(said)}"
        if before is not None:
            self.compared = True
            return ""
        made = self._kept.made
        if not made:  # a recomputation ends as soon as everything is there
            return ""
        if len(made) != len(self._result):
            return "the call and its replay return different numbers of tensors"
        for one, again in zip(made, self._result, strict=True):
            tensor = one.tensor()
            if tensor is None:
                continue
            self.compared = True
            if is_same(tensor, again):
                continue
            if not (why_opaque(self._kept.live.module) and differs_by_rounding(tensor, again, self._spacing(tensor))):
                return "the result of the replay differs from that of the call"
            self.rounds = True
        return ""

    @contextmanager
    def _differentiating(self) -> Iterator[None]:
        position = self._session.position
        position.backward_depth += 1
        try:
            yield
        finally:
            position.backward_depth -= 1


class InnerCalls:
    """Keeps the module calls inside of a replay by reference, and makes a capsule of the smallest of them that fails by itself.

    Args:
        session: of the process.
        kind: how the call fails: ``raised``, ``nonfinite`` or ``backward``.
        limit: bytes that its capsule may take.
        shown_by: of a call that fails silently, the modules that show it, the first one first.
        depth: backward passes around the outermost call.

    Attributes:
        began: dotted name of the first module that raised, or that returned something that is not finite.
    """

    def __init__(self, session: Session, kind: str, limit: int, shown_by: Sequence[str] = (), depth: int = 0) -> None:
        self._session = session
        self._kind = kind
        self._limit = limit
        self._depth = depth
        self._shown_by = shown_by[0] if shown_by else None
        self._open: list[LiveCall] = []
        self._returned: list[LiveCall] = []
        self._found: list[LiveCall] = []
        self.began = ""

    def entered(self, module: nn.Module) -> None:
        """A module is called."""
        place = self._session.names.find(module)
        if place is None or self._session.position.backward_depth != self._depth:
            return
        args, kwargs = call_arguments(module)
        memo: dict[int, Any] = {}
        with self._session.position.mute():
            given, named = mapped(tuple(args), itself, memo), mapped(dict(kwargs), itself, memo)
            self._open.append(LiveCall.entered(module, place[1], given, named))

    def raised(self, module: nn.Module) -> None:
        """The innermost call has raised."""
        self._fail()

    def _fail(self) -> None:
        if not self._found and self._open:
            self._found, self.began = self._open[::-1], self._open[-1].fqn

    def left(self, module: nn.Module, output: Any) -> None:
        """A module has returned."""
        if not any(call.module is module for call in self._open):
            return
        while self._open[-1].module is not module:
            self._open.pop()
        with self._session.position.mute():
            if not self._found and self._shows_it(output):
                self._fail()
            call = self._open.pop()
            if self._kind == "backward":
                call.keep_gradients(tensors_of(output))
                self._returned.append(call)

    def _shows_it(self, output: Any) -> bool:
        """Whether the innermost open call, which returns ``output``, is the first that shows the failure."""
        if self._kind == "silent":
            return self._open[-1].fqn == self._shown_by
        return self._kind == "nonfinite" and not all(map(is_finite, tensors_of(output)))

    def smallest(self, error: BaseException | None) -> tuple[dict[str, Any], bytes] | None:
        """The capsule of the innermost call that fails by itself; why there is none, and nothing, where it is too large; None where no call does.

        Args:
            error: what the replay has raised.
        """
        from dtypedoctor.instrument.capsule import LONGEST, Failing, Kind, capsule_of, signature

        kind = Kind.RAISED if error is not None else Kind(self._kind)
        if kind is Kind.RAISED:
            self._found.sort(
                key=_mixes_dtypes
            )  # stable: the innermost first, and first those where the dtypes do not meet yet
        through = sorted((call for call in self._returned if call.gradients), key=lambda call: -len(call.fqn))
        call = None
        until = perf_counter() + LONGEST  # of all together: each of a recursion's calls makes all those below it
        with self._session.position.mute(), contained() as ours:
            for call in self._found or through:
                is_outermost = (
                    not call.fqn
                )  # its inputs may be what is wrong; one inside may have got them from another
                failing = Failing(
                    kind=kind, error=signature(error), left=REPEATS, until=until, may_be_given=is_outermost
                )
                if failing.shows(call):
                    description, tensors = capsule_of(call, failing, self._limit)
                    return (description if tensors else {**description, "kind": kind, "fqn": call.fqn}), tensors
        if ours.error is not None and call is not None:
            return {"why": f"the call cannot be kept: {message_of(ours.error)}", "kind": kind, "fqn": call.fqn}, b""
        return None


def _mixes_dtypes(call: LiveCall) -> bool:
    """Whether a call, without autocast, already gets another floating-point dtype than its parameters have: what it shows comes from outside."""
    given = {tensor.dtype for _, tensor in call.inputs() if tensor.is_floating_point()}
    own = {tensor.dtype for _, tensor in call.parameters() if tensor.is_floating_point()}
    return not call.autocast and bool(given and own) and given != own


def itself(tensor: Tensor) -> Tensor:
    """Keeps a tensor itself where :func:`mapped` copies the containers around it."""
    return tensor


def _gradients_of(results: list[Tensor], gradients: list[Tensor], ends: list[Tensor]) -> Sequence[Tensor | None]:
    try:
        return torch.autograd.grad(results, ends, gradients, allow_unused=True, retain_graph=True)
    except RuntimeError as error:
        if "use_reentrant=True" not in str(error):
            raise
        # The gradients of leaves of a backward pass that `autograd.grad` cannot run; they hold afterwards what they
        # held
        before = [(leaf, leaf.grad) for leaf in ends if leaf.is_leaf]
        try:
            for leaf, _ in before:
                leaf.grad = None
            torch.autograd.backward(results, gradients)
            return [leaf.grad for leaf, _ in before]
        finally:
            for leaf, gradient in before:
                leaf.grad = gradient


def _largest_scale(gradients: list[Tensor]) -> float:
    """The largest power of two up to that of :class:`GradientCheck` with which the product of a gradient stays in float16's range."""
    largest = max((float(gradient.detach().abs().max()) for gradient in gradients if gradient.numel()), default=0.0)
    scale = SCALE
    while largest * scale > SCALE and scale > 1:
        scale /= 2
    return scale


def type_and_message(error: BaseException) -> tuple[str, str]:
    """By what an exception of the call is compared with that of its replay, which is made at another time, with other objects."""
    return type(error).__name__, without_volatile(str(error)[:LONGEST])


def _raised(said: tuple[str, str] | None) -> str:
    return (
        f"raised {said[0]}: {elided(said[1].splitlines()[0] if said[1] else '')}"
        if said is not None
        else "raised nothing"
    )


def differs_by_rounding(one: Tensor, other: Tensor, spacing: float) -> bool:
    """Whether two tensors of one shape and dtype have inf and NaN at the same places, and nearly the same numbers at all others.

    Args:
        one, other: the tensors.
        spacing: of numbers around 1 in the narrowest dtype that they are computed in; the largest difference is compared with the largest number.
    """
    if one.dtype != other.dtype or one.shape != other.shape or not one.is_floating_point():
        return False
    with torch.no_grad():
        first, second = one.detach().double(), other.detach().double()
        finite = first.isfinite()
        bad, bad_too = first[~finite], second[~finite]
        if not (torch.equal(finite, second.isfinite()) and torch.equal(bad.nan_to_num(0.0), bad_too.nan_to_num(0.0))):
            return False
        numbers, difference = first[finite], (first - second)[finite]
        return not numbers.numel() or float(difference.abs().max()) <= ROUNDINGS * spacing * float(numbers.abs().max())


def is_same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same bits; NaN equals NaN."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    with torch.no_grad():
        first, second = one.detach().contiguous().reshape(-1), other.detach().contiguous().reshape(-1)
        return torch.equal(first.view(torch.uint8), second.view(torch.uint8))


def _largest(extents: Iterable[Extent]) -> float:
    return max((extent.absmax for extent in extents), default=0.0)
