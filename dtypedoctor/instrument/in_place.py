"""Makes a module call again inside of the running program, under the op trace, at the moment at which it has failed.

For programs of which no fork can go on: those that use CUDA, above all. Each outermost call is kept by reference
(:class:`~dtypedoctor.instrument.live_call.LiveCall`) until the optimizer has stepped. A call is replayed when it has raised, or when something
that it made is known not to be finite; on CUDA that is what has arrived at the end of a later call, after a backward pass or before an optimizer
step. Nobody waits for the device until then.

The operators of a replay are recorded in the trace of the run itself, with numbers that were reserved when the call, or the backward pass, began:
so they stand where they would stand if the op trace had been on.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch import distributed as dist
from torch.cuda import is_current_stream_capturing

from dtypedoctor._torch_private import hook_gradient, transformation
from dtypedoctor.instrument.facts import packed_dtypes
from dtypedoctor.instrument.float32_program import Originals
from dtypedoctor.instrument.live_call import LiveCall, mapped, tensors_of
from dtypedoctor.instrument.naming import dtype_name
from dtypedoctor.instrument.optrace import OpTrace
from dtypedoctor.instrument.phases import Phases
from dtypedoctor.instrument.recorders import Nonfinite
from dtypedoctor.instrument.repeated_call import (
    InnerCalls,
    KeptCall,
    Made,
    RepeatedCall,
    bytes_of,
    itself,
    type_and_message,
)
from dtypedoctor.instrument.session import Session
from dtypedoctor.instrument.statistics import out_of_their_sight
from dtypedoctor.instrument.untouched import CannotReplayError
from dtypedoctor.instrument.whereabouts import call_arguments
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
IN_PLACE = "capsule-{call}-{kind}"
"""Name of the files of a capsule, beside the trace, until it is known whether it is of what is found."""
_KINDS = {"raised": "raised", "value": "nonfinite", "gradient": "backward", "backward raised": "backward"}
"""How the call fails, by why it is replayed."""
MAX_REPLAYS = 12
MAX_SECONDS = 60.0
"""Replays in one process, and the time after which no further one begins."""
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
        self._calls: list[KeptCall] = []
        self._current: KeptCall | None = None
        self._failed: tuple[str, str] | None = None
        self._places: set[tuple[object, ...]] = set()
        self._spent = 0.0
        self._next_id = 1
        self._packed: dict[int, set[str]] = {}
        self._held = HeldInputs(session)
        self.count = 0
        self.begun = False
        self._every = 0

    def _is_forced(self, kept: KeptCall) -> bool:
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
            mapped(tuple(args), itself, memo),
            mapped(dict(kwargs), itself, memo),
        )
        if bytes_of(tensor for _, tensor in live.inputs()) > MAX_HELD:
            return
        self._current = KeptCall(
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
            self._current.error = type_and_message(error) if _is_failure(error) else None

    def _returned(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """The outermost call has returned."""
        kept = self._current
        if kept is None or kept.call != self._session.position.call:
            return
        kept.error = None  # the program has caught what was raised inside
        tensors = list(tensors_of(output))
        with torch.no_grad(), out_of_their_sight():
            kept.made = [Made.of(tensor) for tensor in tensors]
        for index, tensor in enumerate(tensors):
            if tensor.requires_grad and not tensor.is_leaf and bytes_of([tensor]) <= MAX_HELD:
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
            self._failed = type_and_message(error)

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

    def _calls_behind(self, gradient: Nonfinite) -> list[KeptCall]:
        """The calls through which a gradient may have come back, the likeliest first."""
        calls = [kept for kept in reversed(self._calls) if kept.step == gradient.step]
        own = [kept for kept in calls if kept.call == gradient.call] if gradient.kind == "grad_output" else []
        return own or calls

    def _through(self, calls: list[KeptCall], why: str, error: tuple[str, str] | None) -> None:
        """Replays the backward pass through ``calls``, until one of them shows what is looked for."""
        for kept in calls:
            if kept.live.gradients and self._replay(kept, why, backward=True, error=error) and why != "forced":
                return

    def _replay(
        self, kept: KeptCall, why: str, *, backward: bool = False, error: tuple[str, str] | None = None
    ) -> bool:
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
        replay = RepeatedCall(self._session, kept, ops, inner)
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
        if not found or bytes_of(tensor for _, tensor in found) > HELD_BYTES:
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
                end = begin + bytes_of([tensor])
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


def _is_capturing() -> bool:
    return torch.cuda.is_initialized() and is_current_stream_capturing()


def _is_failure(error: BaseException) -> bool:
    """Whether an exception may be about dtypes or values, and the device still answers."""
    if not isinstance(error, Exception) or isinstance(error, (*_NOT_FAILURES, CannotReplayError)):
        return False
    return not _is_dead(error)


def _is_dead(error: BaseException) -> bool:
    """Whether an exception says that the device answers no more."""
    return isinstance(error, RuntimeError) and ("CUDA error" in str(error) or "device-side assert" in str(error))
