"""Makes a module call again inside of the running program, under the op trace, at the moment at which it has failed.

For programs of which no fork can go on: those that use CUDA, above all. Each outermost call is kept by reference
(:class:`~dtypedoctor.instrument.live_call.LiveCall`) until the optimizer has stepped. A call is replayed when it has raised, or when something
that it made is known not to be finite; on CUDA that is what has arrived at the end of a later call, after a backward pass or before an optimizer
step. Nobody waits for the device until then.

The operators of a replay are recorded in the trace of the run itself, with numbers that were reserved when the call, or the backward pass, began:
so they stand where they would stand if the op trace had been on.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from threading import get_ident
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch import distributed as dist
from torch.cuda import is_current_stream_capturing

from dtypedoctor._torch_private import hook_gradient, transformation, version_of
from dtypedoctor.instrument.facts import packed_dtypes
from dtypedoctor.instrument.float32_program import Originals
from dtypedoctor.instrument.live_call import LiveCall, as_leaf, from_outside, mapped, tensors_of
from dtypedoctor.instrument.naming import dtype_name
from dtypedoctor.instrument.optrace import OpTrace
from dtypedoctor.instrument.phases import Phases
from dtypedoctor.instrument.recorders import Nonfinite
from dtypedoctor.instrument.session import Session
from dtypedoctor.instrument.statistics import out_of_their_sight
from dtypedoctor.instrument.untouched import CannotReplayError, KeptMemory, as_before
from dtypedoctor.instrument.whereabouts import call_arguments
from dtypedoctor.interruptions import contained
from dtypedoctor.redaction.messages import elided
from dtypedoctor.trace.events import REPLAY_OF_FAILURES
from dtypedoctor.trace.records.execution import HeldInput, ReplayedCall
from dtypedoctor.unpatched import perf_counter, to_json

if TYPE_CHECKING:
    from dtypedoctor.instrument.watch import ModuleWatch

__all__ = ["InPlaceReplays"]

RESERVED = 1 << 20
"""Numbers of the trace that are kept free before each outermost call and backward pass, for the operators of a replay."""
MAX_KEPT = 8
"""Outermost calls that are kept at a time."""
MAX_HELD = 256 << 20
"""Bytes of inputs and upstream gradients that one call may keep alive."""
CAPSULE_LIMIT = 64 << 20
"""Bytes of a capsule."""
REPEATS = 60
"""How often an inner call may be made again to reduce it."""
IN_PLACE = "capsule-{call}-{kind}"
"""Name of the files of a capsule, beside the trace, until it is known whether it is of what is found."""
_KINDS = {"raised": "raised", "value": "nonfinite", "gradient": "backward", "backward raised": "backward"}
"""How the call fails, by why it is replayed."""
MAX_RESULT = 16 << 20
"""Bytes of a result that is kept alive, to compare that of the replay with it."""
MAX_REPLAYS = 12
MAX_SECONDS = 60.0
"""Replays in one process, and the time after which no further one begins."""
SHARE_OF_FREE = 0.5
"""Share of the free memory of the device that a replay may take."""
GRADIENTS = frozenset({"grad_output", "grad", "accumulated"})
"""Kinds of sites that a backward pass makes."""
RESULTS = frozenset({"output", "input"})
"""Kinds of sites that a module call makes."""

USUAL = frozenset({"float16", "bfloat16"})
"""Dtypes of quantization states that every dequantizer has a kernel for."""
HELD_CALLS = 4
HELD_BYTES = 1 << 20
"""Calls of which small integer inputs are copied to the host, and bytes for each."""
HELD_FILE = "held-inputs.safetensors"

OF_SEVERAL = (
    "a process of several cannot repeat a call alone: the others would wait for it; --rerun runs all of them again"
)
_NOT_FAILURES = (torch.OutOfMemoryError, StopIteration, StopAsyncIteration, MemoryError)


class _Made(NamedTuple):
    """A tensor that a call has returned: without its autograd graph where it is small, else as long as the program holds it."""

    tensor: Callable[[], Tensor | None]
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> "_Made":
        """Keeps ``tensor``."""
        version = version_of(tensor)
        if _bytes([tensor]) > MAX_RESULT:
            return cls(ref(tensor), version)
        held = tensor.detach()  # shares its memory, and its version
        return cls(lambda: held, version)


@dataclass(slots=True, kw_only=True)
class _Kept:
    """An outermost call that may be replayed.

    Attributes:
        live: the call.
        number: the first of the numbers that are reserved for it.
        backward: the first of those that are reserved for it in the backward pass that began last.
        step, call, overrides, regions: the position and the autocast regions at entry.
        made: what it has returned.
        error: type and message of what it has raised.
        replayed: what of it has been replayed, ``forward`` or ``backward``.
        moved: an optimizer has stepped since.
    """

    live: LiveCall
    number: int
    backward: int = 0
    step: int
    call: int
    overrides: tuple[str, ...]
    regions: tuple[Any, ...]
    made: list[_Made] = field(default_factory=list)
    error: tuple[str, str] | None = None
    replayed: set[str] = field(default_factory=set)
    moved: bool = False


class InPlaceReplays:
    """Keeps outermost calls, and replays those that fail.

    Args:
        session: of the process.
        modules: says when outermost modules are called.
        phases: says when backward passes and optimizer steps begin and end.
        originals: values that casts have rounded away; see :class:`OpTrace`.
        aside: called for a context in which the instruments that watch operators stand aside.

    Attributes:
        begun: whether calls are kept.
        count: replays so far.
    """

    def __init__(self, session: Session, modules: "ModuleWatch", phases: Phases, originals: Originals,
                 aside: Callable[[], Any]) -> None:  # fmt: skip
        self._session, self._modules, self._phases = session, modules, phases
        self._originals = originals
        self._aside = aside
        self._calls: list[_Kept] = []
        self._current: _Kept | None = None
        self._failed: tuple[str, str] | None = None
        self._places: set[tuple[object, ...]] = set()
        self._spent = 0.0
        self._next_id = 1
        self._packed: dict[int, set[str]] = {}
        self._held = HeldInputs(session)
        self.count = 0
        self.begun = False
        self._every = 0

    def _is_forced(self, kept: _Kept) -> bool:
        return bool(self._every) and kept.call % self._every == 0 and not kept.moved

    def begin(self, *, force: int = 0) -> None:
        """Begins to keep calls. Listens after the instruments, which have then seen what happened.

        Args:
            force: each so-manieth call is replayed, forward and backward, although nothing is wrong; for tests, and without a bound.
        """
        self.begun, self._every = True, force
        modules, phases = self._modules, self._phases
        modules.before_root.append(self._enter)
        modules.on_error.append(self._raised)
        modules.on_return.append(self._returned)
        modules.when_left.append(self._left)
        phases.before_backward.append(self._before_backward)
        phases.on_failure.append(self._backward_raised)
        phases.after_backward.append(self._after_backward)
        phases.before_step.append(self._before_step)
        phases.after_scaler.append(self._after_scaler)
        phases.after_step.append(self._after_step)

    # What happens in the program ---------------------------------------------------------------------------------------------------------

    def _enter(self, module: nn.Module) -> None:
        """An outermost call begins."""
        self._current = None
        position = self._session.position
        if position.backward_depth or _is_capturing() or transformation() is not None:
            return
        if dist.is_available() and dist.is_initialized():
            self._session.guard.tell(REPLAY_OF_FAILURES, OF_SEVERAL)
            return
        args, kwargs = call_arguments(module)
        memo: dict[int, Any] = {}
        found = self._session.names.find(module)
        live = LiveCall.entered(
            module,
            found[1] if found is not None else "",
            mapped(tuple(args), _itself, memo),
            mapped(dict(kwargs), _itself, memo),
        )
        if _bytes(tensor for _, tensor in live.inputs()) > MAX_HELD:
            return
        self._current = _Kept(
            live=live,
            number=self._session.writer.next_n(RESERVED),
            step=position.step,
            call=position.call,
            overrides=tuple(position.overrides),
            regions=self._session.autocast.open_regions,
        )
        if not torch.is_grad_enabled():
            self._calls = self._calls[
                -1:
            ]  # nothing comes back from an optimizer step: what arrives late is of the last call
        self._calls = [*self._calls[1 - MAX_KEPT :], self._current]
        self._held.keep(position.call, live)

    def _raised(self, module: nn.Module, args: Any, error: BaseException) -> None:
        """The innermost module call has raised, and the exception is on its way out."""
        self.noticed(error)
        if self._current is not None:
            self._current.error = _said(error) if _is_failure(error) else None

    def _returned(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """The outermost call has returned."""
        kept = self._current
        if kept is None or kept.call != self._session.position.call:
            return
        kept.error = None  # the program has caught what was raised inside
        tensors = list(tensors_of(output))
        with torch.no_grad(), out_of_their_sight():
            kept.made = [_Made.of(tensor) for tensor in tensors]
        for index, tensor in enumerate(tensors):
            if tensor.requires_grad and not tensor.is_leaf and _bytes([tensor]) <= MAX_HELD:
                hook_gradient(tensor, _KeepGradient(kept.live.gradients, index))

    def _left(self, module: nn.Module) -> None:
        """The outermost call is over, and its module's name is off the stack."""
        kept, self._current = self._current, None
        if kept is None or kept.live.module is not module:
            return
        if kept.error is not None and self._is_new("raised", kept.live.fqn, *kept.error):
            self._replay(kept, "raised")
        elif self._is_forced(kept):
            self._replay(kept, "forced")
        elif self._is_doubtful(module):
            self._replay(kept, "packed")
        self._look()

    def noticed(self, error: BaseException) -> None:
        """The program ends with ``error``, which may have been raised outside of all modules."""
        if _is_dead(error):
            self._held.write()

    def _before_backward(self, tensors: object) -> None:
        first = self._session.writer.next_n(RESERVED)
        for number, kept in enumerate(self._calls):
            kept.backward = first + number * (RESERVED // MAX_KEPT)

    def _backward_raised(self, error: BaseException) -> None:
        self.noticed(error)
        if self._session.position.backward_depth and _is_failure(error):
            self._failed = _said(error)

    def _after_backward(self) -> None:
        failed, self._failed = self._failed, None
        if failed is not None and self._is_new("backward", *failed):
            self._through([kept for kept in reversed(self._calls) if not kept.moved], "backward raised", failed)
        elif forced := list(filter(self._is_forced, self._calls)):
            self._through(forced, "forced", None)
        self._look()

    def _before_step(self, optimizer: object) -> None:
        self._modules.flush()
        self._look()

    def _after_scaler(self, scaler: object, optimizer: object, skipped: bool) -> None:
        if skipped:
            self._before_step(optimizer)
            self._after_step(optimizer)

    def _after_step(self, optimizer: object) -> None:
        self._calls = [kept for kept in self._calls if not kept.moved]
        for kept in self._calls:
            kept.moved = True

    # What is replayed --------------------------------------------------------------------------------------------------------------------

    def _is_new(self, *place: object) -> bool:
        new = place not in self._places
        self._places.add(place)
        return new

    def _is_doubtful(self, module: nn.Module) -> bool:
        """Whether this was the first call of a model whose packed weights may be dequantized wrongly: its quantization states say something
        else than those of a model before it, or no 16-bit dtype."""
        found = self._session.names.find(module)
        if found is None or found[0] in self._packed:
            return False
        before = set().union(*self._packed.values())
        dtypes = self._packed[found[0]] = packed_dtypes(self._session.names, found[0])
        return bool(dtypes - USUAL) or bool(before and not dtypes <= before)

    def _look(self) -> None:
        """Replays the calls of what has become known not to be finite: the first result of a module, and the first gradient."""
        news = sorted(self._modules.news())
        forward = next((one for one in news if one.kind in RESULTS), None)
        backward = next((one for one in news if one.kind in GRADIENTS), None)
        if forward is not None:
            for kept in self._calls:
                if kept.call == forward.call:
                    self._replay(kept, "value")
        if backward is not None:
            self._through(self._calls_behind(backward), "gradient", None)

    def _calls_behind(self, gradient: Nonfinite) -> list[_Kept]:
        """The calls through which a gradient may have come back, the likeliest first."""
        calls = [kept for kept in reversed(self._calls) if kept.step == gradient.step]
        own = [kept for kept in calls if kept.call == gradient.call] if gradient.kind == "grad_output" else []
        return own or calls

    def _through(self, calls: list[_Kept], why: str, error: tuple[str, str] | None) -> None:
        """Replays the backward pass through ``calls``, until one of them shows what is looked for."""
        for kept in calls:
            if kept.live.gradients and self._replay(kept, why, backward=True, error=error) and why != "forced":
                return

    def _replay(self, kept: _Kept, why: str, *, backward: bool = False, error: tuple[str, str] | None = None) -> bool:
        """Makes the call again; whether it has done what it did before.

        Args:
            kept: the call.
            why: it is made again.
            backward: also pull the upstream gradient through it.
            error: what the backward pass has raised.
        """
        pass_ = "backward" if backward else "forward"
        spent = pass_ in kept.replayed or self.count >= MAX_REPLAYS or self._spent > MAX_SECONDS
        if spent and why != "forced":
            return False
        kept.replayed.add(pass_)
        self.count += 1
        began = perf_counter()
        ops = OpTrace(self._session, self._originals, first_id=self._next_id)
        inner = InnerCalls(self._session, _KINDS[why]) if why in _KINDS else None
        replay = _Replay(self._session, kept, ops, inner)
        with self._aside(), self._modules.following(replay), self._phases.standing_aside():
            doubt = replay.run(kept.backward if backward else kept.number, backward=backward, error=error)
        self._next_id = replay.ops.next_id
        self._spent += perf_counter() - began
        if replay.why_not:
            self._session.guard.tell(REPLAY_OF_FAILURES, replay.why_not)
            return False
        if replay.capsule is not None:
            description, tensors = replay.capsule
            name = IN_PLACE.format(call=kept.call, kind=description["kind"])
            self._session.writer.write_beside(f"{name}.safetensors", tensors)
            self._session.writer.write_beside(f"{name}.json", to_json(description).encode("utf-8"))
        if why != "forced":
            record = ReplayedCall(why=why, compared=replay.compared, doubt=doubt or None, late=kept.moved)
            self._session.emit(record, fqn=kept.live.fqn)
        return not doubt


class _Replay:
    """One replay of one call.

    Args:
        session: of the process.
        kept: the call.
        ops: the op trace.
        inner: keeps the module calls inside, to leave a capsule; None where none is wanted.

    Attributes:
        ops: the op trace.
        why_not: why the call could not be made again; empty where it was.
        compared: whether its result could be compared with what the call itself had returned or raised.
        capsule: description and tensors of the smallest module call in it that fails; None where there is none.
    """

    def __init__(self, session: Session, kept: _Kept, ops: OpTrace, inner: "InnerCalls | None") -> None:
        self._session = session
        self._kept = kept
        self._inner = inner
        self._reducing = False
        self._error: BaseException | None = None
        self.capsule: tuple[dict[str, Any], bytes] | None = None
        self.ops = ops
        self._result: list[Tensor] = []
        self.why_not = ""
        self.compared = False

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
        if outermost:
            self._result = list(tensors_of(output))

    def run(self, first: int, *, backward: bool, error: tuple[str, str] | None) -> str:
        """Makes the call, with records numbered from ``first`` on; how it went differently, empty where it did not."""
        live = self._kept.live
        memory = KeptMemory(*_allowed(live))
        roots = (live.module, live.args, live.kwargs)
        said: tuple[str, str] | None = None
        position = self._session.position
        try:
            with ExitStack() as stack:
                stack.callback(memory.restore)
                stack.enter_context(as_before(roots, get_ident(), lambda: position.muted and not self._reducing))
                stack.enter_context(self._position(first))
                stack.enter_context(self._session.autocast.unheard())
                memory.keep_buffers(live.module)
                stack.enter_context(memory)
                said = self._attempt(backward=backward)
                self.why_not = memory.why_not
                if self._inner is not None and not self.why_not:
                    self._reducing = True
                    self.capsule = self._inner.smallest(self._error, self._kept.call)
        except CannotReplayError as why_not:
            self.why_not = str(why_not)
            return ""
        if said is not None and said[0] == CannotReplayError.__name__:
            self.why_not = said[1]
        return "" if self.why_not else self._difference(said, error if error is not None else self._kept.error)

    def _attempt(self, *, backward: bool) -> tuple[str, str] | None:
        """Type and message of what the call has raised, or the backward pass through it."""
        live = self._kept.live
        memo: dict[int, Any] = {}
        args, kwargs = mapped(live.args, as_leaf, memo), mapped(live.kwargs, as_leaf, memo)
        self.ops.open()
        try:
            self.ops.enter_root(args, kwargs)
            with live.modes(), contained() as forward:
                self._session.autocast.open_again(self._kept.regions)
                output = live.module(*args, **kwargs)
            self.ops.leave_root()
            self._error = forward.error
            if self._error is None and backward:
                with contained() as pulled, self._differentiating():
                    self._pull(output, args, kwargs)
                self._error = pulled.error
            return _said(self._error) if self._error is not None else None
        finally:
            self.ops.close()

    def _pull(self, output: Any, args: Any, kwargs: Any) -> None:
        """Pulls the upstream gradient through what was made again."""
        outputs = list(tensors_of(output))
        upstream = from_outside(self._kept.live.gradients, outputs)
        given = [*tensors_of((args, kwargs)), *(parameter for _, parameter in self._kept.live.parameters())]
        ends = [tensor for tensor in given if tensor.requires_grad]
        if not upstream or not ends:
            return
        results, gradients = [outputs[i] for i in upstream], list(upstream.values())
        try:
            torch.autograd.grad(results, ends, gradients, allow_unused=True, retain_graph=True)
        except RuntimeError as error:
            if "use_reentrant=True" not in str(error):
                raise
            _accumulate(results, gradients, ends)

    def _difference(self, said: tuple[str, str] | None, before: tuple[str, str] | None) -> str:
        if said != before:
            self.compared = True
            return f"the call {_raised(before)}, its replay {_raised(said)}"
        if before is not None:
            self.compared = True
            return ""
        made = [(one.tensor(), one.version) for one in self._kept.made]
        if len(made) != len(self._result):
            return "the call and its replay return different numbers of tensors"
        for (tensor, version), again in zip(made, self._result, strict=True):
            if tensor is None or version_of(tensor) != version:
                continue  # freed, or written to since
            self.compared = True
            if not _is_same(tensor, again):
                return "the result of the replay differs from that of the call"
        return ""

    @contextmanager
    def _position(self, first: int) -> Iterator[None]:
        """Inside, the position is that of the call, and records take the numbers that were reserved for it."""
        position, writer, kept = self._session.position, self._session.writer, self._kept
        here = position.here
        before = (here.call, here.stack, here.overrides, here.backward_depth, position.step)
        try:
            here.call, here.stack, here.overrides, here.backward_depth = kept.call, [], list(kept.overrides), 0
            position.step = kept.step
            with writer.numbering_from(first):
                yield
        finally:
            here.call, here.stack, here.overrides, here.backward_depth, position.step = before

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
    """

    def __init__(self, session: Session, kind: str) -> None:
        self._session = session
        self._kind = kind
        self._open: list[LiveCall] = []
        self._returned: list[LiveCall] = []
        self._found: list[LiveCall] = []

    def entered(self, module: nn.Module) -> None:
        """A module is called."""
        place = self._session.names.find(module)
        if place is None or self._session.position.backward_depth:
            return
        args, kwargs = call_arguments(module)
        memo: dict[int, Any] = {}
        with self._session.position.mute():
            given, named = mapped(tuple(args), _itself, memo), mapped(dict(kwargs), _itself, memo)
            self._open.append(LiveCall.entered(module, place[1], given, named))

    def raised(self, module: nn.Module) -> None:
        """The innermost call has raised."""
        self._found = self._found or self._open[::-1]

    def left(self, module: nn.Module, output: Any) -> None:
        """A module has returned."""
        if not any(call.module is module for call in self._open):
            return
        while self._open[-1].module is not module:
            self._open.pop()
        with self._session.position.mute():
            if self._kind == "nonfinite" and not self._found and not all(map(_is_finite, tensors_of(output))):
                self._found = self._open[::-1]
            call = self._open.pop()
            if self._kind == "backward":
                call.keep_gradients(output)
                self._returned.append(call)

    def smallest(self, error: BaseException | None, number: int) -> tuple[dict[str, Any], bytes] | None:
        """The capsule of the innermost call that fails by itself; None where none does.

        Args:
            error: what the replay has raised.
            number: of the outermost call.
        """
        from dtypedoctor.instrument.capsule import Failing, Kind, Wanted, capsule_of, signature

        kind = Kind.RAISED if error is not None else Kind(self._kind)
        through = sorted((call for call in self._returned if call.gradients), key=lambda call: -len(call.fqn))
        wanted = Wanted(module="", call=number, kind=kind, limit=CAPSULE_LIMIT, finding={})
        with self._session.position.mute(), contained():
            for call in self._found or through:
                failing = Failing(kind=kind, error=signature(error), left=REPEATS)
                if failing.shows(call):
                    description, tensors = capsule_of(call, failing, wanted)
                    return (description, tensors) if tensors else None
        return None


class HeldInputs:
    """Copies small integer inputs (token ids) of the last outermost calls to the host, behind the stream: a device-side assert ends every access to
    the device.

    Args:
        session: of the process.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._rooms: list[Tensor] = []
        self._calls: list[tuple[int, nn.Module, dict[str, Tensor]]] = []

    def keep(self, call: int, live: LiveCall) -> None:
        """Queues the copies for a call; does not wait."""
        found = [(n, t) for n, t in live.inputs() if t.is_cuda and t.dtype in (torch.int64, torch.int32)]
        if not found or _bytes(tensor for _, tensor in found) > HELD_BYTES:
            return
        if len(self._rooms) < HELD_CALLS:
            self._rooms.append(torch.empty(HELD_BYTES, dtype=torch.uint8, pin_memory=True))
        else:
            self._rooms.append(self._rooms.pop(0))  # that of the oldest call
        room = self._rooms[-1]
        copies: dict[str, Tensor] = {}
        begin = 0
        with self._session.position.mute(), out_of_their_sight(), torch.no_grad():
            for name, tensor in found:
                end = begin + _bytes([tensor])
                copies[name] = room[begin:end].view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)
                begin = end
        self._calls = [*self._calls[1 - HELD_CALLS :], (call, live.module, copies)]

    def write(self) -> None:
        """The device has stopped: writes what has come to the host, once."""
        calls, self._calls = self._calls, []
        tensors: dict[str, Tensor] = {}
        with self._session.position.mute():
            for call, module, copies in calls:
                rows = [part.num_embeddings for part in module.modules() if isinstance(part, nn.Embedding)]
                for name, copy in copies.items():
                    if copy.numel():
                        values = tensors[f"call-{call}.{name}"] = copy.clone()
                        self._tell(call, name, values, min(rows, default=None))
            if tensors:
                self._session.writer.write_beside(HELD_FILE, save(tensors))

    def _tell(self, call: int, name: str, values: Tensor, rows: int | None) -> None:
        record = HeldInput(
            of=call,
            name=name,
            dtype=dtype_name(values),
            shape=list(values.shape),
            least=int(values.min()),
            most=int(values.max()),
            rows=rows,
            file=HELD_FILE,
        )
        self._session.emit(record)


class _KeepGradient:
    """Keeps the first gradient of an output, by reference."""

    __slots__ = ("_gradients", "_index")
    __torch_unserializable__ = True
    """torch warns of other hooks when it pickles a tensor."""

    def __init__(self, gradients: dict[int, Tensor], index: int) -> None:
        self._gradients = gradients
        self._index = index

    def __call__(self, gradient: Tensor) -> None:
        """It has come back."""
        self._gradients.setdefault(self._index, gradient)


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _is_finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(tensor.detach().isfinite().all())


def _accumulate(results: list[Tensor], gradients: list[Tensor], ends: list[Tensor]) -> None:
    """Runs a backward pass that ``autograd.grad`` cannot; the gradients of leaves are afterwards what they were."""
    before = [(leaf, leaf.grad) for leaf in ends if leaf.is_leaf]
    try:
        for leaf, _ in before:
            leaf.grad = None
        torch.autograd.backward(results, gradients)
    finally:
        for leaf, gradient in before:
            leaf.grad = gradient


def _bytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _is_capturing() -> bool:
    return torch.cuda.is_initialized() and is_current_stream_capturing()


def _allowed(live: LiveCall) -> tuple[torch.device | None, int]:
    """The CUDA device that the call runs on, and the bytes that its replay may take there."""
    tensors = [*(tensor for _, tensor in live.parameters()), *(tensor for _, tensor in live.inputs())]
    device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
    if device is None:
        return None, 0
    free, _ = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return device, int((free + reserved) * SHARE_OF_FREE)


def _said(error: BaseException) -> tuple[str, str]:
    return type(error).__name__, str(error)


def _raised(said: tuple[str, str] | None) -> str:
    return (
        f"raised {said[0]}: {elided(said[1].splitlines()[0] if said[1] else '')}"
        if said is not None
        else "raised nothing"
    )


def _is_failure(error: BaseException) -> bool:
    """Whether an exception may be about dtypes or values, and the device still answers."""
    if not isinstance(error, Exception) or isinstance(error, (*_NOT_FAILURES, CannotReplayError)):
        return False
    return not _is_dead(error)


def _is_dead(error: BaseException) -> bool:
    """Whether an exception says that the device answers no more."""
    return isinstance(error, RuntimeError) and ("CUDA error" in str(error) or "device-side assert" in str(error))


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same bits; NaN equals NaN."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    with torch.no_grad():
        first, second = one.detach().contiguous().reshape(-1), other.detach().contiguous().reshape(-1)
        return torch.equal(first.view(torch.uint8), second.view(torch.uint8))
