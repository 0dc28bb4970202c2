"""The op trace: every operator of a call that is made again, with its operands, so that the op where a failure begins can be named.

A ``TorchDispatchMode`` runs below autocast and autograd: it sees the dtypes that the kernels really get, in the forward
and in the backward pass alike. While the operands are at hand, an op that turns finite operands into non-finite results
is run again in a wider dtype, and an op that refuses mixed dtypes is run again with equal ones; both are recorded.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dtypedoctor._torch_private import DisableTorchFunction, is_wrapper_subclass, without_modes
from dtypedoctor.instrument.float32_program import HALF, Originals, Programs
from dtypedoctor.instrument.frames import names_a_dtype
from dtypedoctor.instrument.lifted import LIFT, lifted_from
from dtypedoctor.instrument.module_tree import own_parameters
from dtypedoctor.instrument.naming import dtype_name
from dtypedoctor.instrument.operators import (
    Arguments,
    FunctionErrors,
    OperatorMode,
    TensorIds,
    bytes_of,
    fits,
    has_out,
    is_inplace,
    is_unfinished,
    is_whole,
    keep_written,
    scalars,
    tensors_of,
    written,
)
from dtypedoctor.instrument.packed_weights import WeightCheck
from dtypedoctor.instrument.replay import (
    AttentionReplay,
    Ran,
    mark_selected_away,
    replay_promotion,
    replay_refused,
    replay_wider,
)
from dtypedoctor.instrument.session import Session
from dtypedoctor.instrument.statistics import Extent, extent_of, is_spread, local_part, measurable
from dtypedoctor.instrument.whereabouts import KnownTensors, OpPlace, Whereabouts
from dtypedoctor.interruptions import noticing
from dtypedoctor.redaction.messages import elided
from dtypedoctor.trace.events import Op, TensorNote
from dtypedoctor.trace.records.execution import OpenRegions

MAX_OPS = 200_000
"""Ops after which a window closes by itself, so that a forgotten window cannot fill a disk."""
MAX_PROMOTIONS = 500
"""Replays, in one window, of ops that widen a dtype."""

_CASTS = ("aten._to_copy.", "aten.to.")
_SKIPPED = frozenset({"aten.detach.default", "aten.alias.default", "aten._local_scalar_dense.default"})


class OpTrace(OperatorMode):
    """Records ops while it is entered. Use :meth:`open` and :meth:`close`; both may be called more than once.

    For an op that raises, an :class:`OpenRegions` follows.
    """

    def __init__(self, session: Session, originals: Originals, first_id: int = 1) -> None:
        super().__init__()
        self._session = session
        self._writer, self._position = session.writer, session.position
        self._names, self._guard = session.names, session.guard
        self._ids = TensorIds(first_id)
        self._known = KnownTensors(session.names, self._ids)
        self._outside = originals.outside
        self._programs = Programs(session, before=originals.outside)
        self._originals = originals
        self._sent: dict[int, tuple[str, list[TensorNote]]] = {}
        self._whereabouts = Whereabouts(session)
        self._weights = WeightCheck(session)
        self._attention = AttentionReplay(session)
        self._functions = FunctionErrors(self._refused_by_function, self._made_of_number)
        self._ops = 0
        self._promotions = 0
        self._last_error = ""
        self.is_open = self._stays = False
        self.lines: dict[str | None, str | None] = {}
        """Lines of the program in the place of others: of what it has called, where that is made again from somewhere else."""

    @property
    def next_id(self) -> int:
        """The number that the next tensor would get: where another op trace of the same process goes on."""
        return self._ids.next

    def open(self, *, outside: bool = False) -> None:
        """Opens the window.

        Args:
            outside: functions of torch that raise outside of module calls are recorded, too.
        """
        if not self.is_open:
            self.is_open = True
            self._look_at_modules()
            self.__enter__()
        if outside:
            self._stays = True
            self._functions.open()

    def close(self) -> None:
        """Closes the window."""
        self._stays = False
        self.leave_root()
        if self.is_open:
            self.is_open = False
            self.leave()
            self._attention.forget()
            self._programs.forget()

    def enter_root(self, args: Any, kwargs: Any) -> None:
        """An outermost module is called with these arguments; :meth:`leave_root` has to follow when the call ends."""
        if self.is_open:
            self._look_at_modules()
            self._known.note_inputs(args, kwargs)
            self._functions.open()

    def leave_root(self) -> None:
        """The call of the outermost module has ended."""
        if not self._stays:
            self._functions.close()

    def _look_at_modules(self) -> None:
        with self._aside():
            self._known.refresh()
            self._weights.look_at(self._names)
            names = {id(tensor): f"{'buffer' if is_buffer else 'parameter'} {name}"
                     for _, name, tensor, _, is_buffer in self._names.tensors()}  # fmt: skip
            for tensor, original in self._originals.left():
                if id(tensor) in names:
                    self._programs.in_float32.learn(tensor, original, names[id(tensor)])

    def _made_of_number(self, result: Tensor, number: float) -> None:
        with self._aside():
            if measurable(result) and result.dtype in HALF:
                self._programs.in_float32.learn(
                    result, torch.full(result.shape, number, device=result.device), f"number {number:g}"
                )

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """The doctor's own work: seen by no mode, recorded by nobody, and its errors kept from the program."""
        with (
            self._guard.keeping("some operators"),
            self._position.mute(),
            without_modes(),
            DisableTorchFunction(),
        ):
            yield

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs ``func`` as it is and records it."""
        kwargs = dict(kwargs or {})
        if self._position.muted or str(func) in _SKIPPED or self._ops >= MAX_OPS:
            return self.run(func, args, kwargs)
        if any(is_wrapper_subclass(one) for one in types):
            return (
                NotImplemented  # the class computes with the tensors that it wraps, and these operators come here again
            )
        if is_unfinished(func):
            return self._collective(func, args, kwargs)
        if is_whole(func, types, tensors_of((args, kwargs))):
            return self._taken_apart(func, (args, kwargs))
        self._ops += 1
        kept = arguments = (args, kwargs)
        inputs: list[TensorNote] = []
        with self._aside():
            inputs = self._notes(tensors_of(arguments))
            kept = keep_written(func, arguments)
            self._whereabouts.note_function()
        n = self._writer.next_n()

        def refused(error: Exception) -> None:
            with self._aside():
                self._refused(n, func, arguments, inputs, error)

        with noticing(refused, Exception):
            result = self.run(func, args, kwargs)
        with self._aside():
            changed = written(func, arguments)
            for tensor in changed:
                self._ids.wrote(tensor)
            self._done(n, func, arguments, kept, inputs, tensors_of(result) or changed)
        return result

    def _collective(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A collective is recorded where its result is waited for, with what this rank has sent; it is never run again."""
        notes: list[TensorNote] = []
        with self._aside():
            notes = [] if _is_wait(func) else self._notes(tensors_of(args))
        result = self.run(func, args, kwargs)
        with self._aside():
            for tensor in tensors_of(result):
                if not _is_wait(func):
                    self._sent[self._ids.of(tensor)[1]] = (str(func), notes)
                    continue
                name, sent = self._sent.pop(self._ids.of(tensor)[1], ("", []))
                self._ids.wrote(tensor)
                if name:
                    place = self._whereabouts.here(sys._getframe(), tensor.device.type)
                    self._write(self._writer.next_n(), name, place, (sent, self._notes([tensor])), schema=None)
        return result

    def _taken_apart(self, func: Any, arguments: Arguments) -> Any:
        def refused(error: Exception) -> None:
            if str(error) != self._last_error:  # none of the operators that it is made of has refused
                with self._aside():
                    inputs = self._notes(tensors_of(arguments))
                    self._refused(self._writer.next_n(), func, arguments, inputs, error)

        with noticing(refused, Exception):
            return self.taken_apart(func, *arguments)

    def _done(self, n: int, func: Any, given: Arguments, kept: Arguments, inputs: list[TensorNote],
              results: list[Tensor]) -> None:  # fmt: skip
        if str(func) == LIFT and (made := lifted_from(results[0])) is not None and made.overflows:
            func, kept = made.cast
            given, inputs = kept, self._notes([made.exact])
        outputs = self._notes(results)
        operands = tensors_of(kept)
        place = self._whereabouts.here(sys._getframe(), _device(operands + results))
        by_name = str(func).startswith(_CASTS) and names_a_dtype(sys._getframe())
        if results and not any(map(is_spread, operands)):
            inputs = mark_selected_away(func, kept, inputs, results)
        self._write(n, str(func), place, (inputs, outputs), schema=func, scalars=scalars(kept), by_name=by_name)
        self._weights.check(n, str(func), operands, place.root, place.fqn)
        if any(map(is_spread, operands)):
            return  # an operator on shards may communicate, and what one rank repeats alone would wait for ever
        steps = self._programs.ran(func, given, kept, results, source=place.source, fqn=place.fqn, n=n)
        if _originates(inputs, outputs):
            replay_wider(self._writer, n, func, *kept)
            self._programs.explain(steps, n)
        if self._promotions < MAX_PROMOTIONS and results and fits(bytes_of(operands + results), results[0].device):
            self._promotions += replay_promotion(self._writer, n, func, kept, results)
        self._attention.saw(Ran(n, func, kept, inputs, results, outputs))

    def _refused(self, n: int, func: Any, arguments: Arguments, inputs: list[TensorNote], error: Exception) -> None:
        self._last_error = str(error)
        operands = tensors_of(arguments)
        place = self._whereabouts.here(sys._getframe(), _device(operands))
        self._write(
            n,
            str(func),
            place,
            (inputs, []),
            schema=func,
            scalars=scalars(arguments),
            error=_line(error),
            takes=_takes(arguments),
        )
        self._note_regions(n, _device(operands))
        self._weights.check(n, str(func), operands, place.root, place.fqn)
        if not any(map(is_spread, operands)):
            replay_refused(self._writer, n, func, arguments)

    def _refused_by_function(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any],
                             error: Exception) -> None:  # fmt: skip
        if not self.is_open or self._position.muted or str(error) == self._last_error:
            return  # one of the operators inside it has refused already
        with self._aside():
            self._last_error = str(error)
            arguments = (args, kwargs)
            operands = tensors_of(arguments)
            place = self._whereabouts.here(sys._getframe(), _device(operands))
            n = self._writer.next_n()
            self._write(n, name, place, (self._notes(operands), []), error=_line(error), takes=_takes(arguments))
            self._note_regions(n, _device(operands))
            replay_refused(self._writer, n, func, arguments)

    def refused_by_module(self, module: nn.Module, args: Any, error: BaseException) -> None:
        """A module call raised; recorded where neither an operator nor a function inside it is known to have."""
        if not self.is_open or str(error) == self._last_error:
            return
        with self._aside():
            self._last_error = str(error)
            operands = [*tensors_of(args), *own_parameters(module)]
            n = self._writer.next_n()
            place = self._whereabouts.here(sys._getframe(), _device(operands))
            self._write(n, f"module.{type(module).__name__}", place, (self._notes(operands), []), error=_line(error))
            self._note_regions(n, _device(operands))

    def _notes(self, tensors: list[Tensor]) -> list[TensorNote]:
        return [self._note(tensor, extent_of(local_part(tensor))) for tensor in tensors]

    def _note(self, tensor: Tensor, extent: Extent | None) -> TensorNote:
        number, storage = self._ids.of(tensor)
        name, origin = self._known.of(tensor)
        made = self._outside.dtype_by(tensor) if self._outside is not None and origin in ("", "input") else ("", "")
        return TensorNote(
            id=number,
            dtype=dtype_name(tensor),
            shape=list(tensor.shape),
            absmax=extent.absmax if extent else None,
            num_nan=extent.num_nan if extent else 0,
            num_posinf=extent.num_posinf if extent else 0,
            num_neginf=extent.num_neginf if extent else 0,
            name=name,
            origin=origin,
            storage=storage,
            made_by=made[0],
            made_at=made[1],
        )

    def _write(self, n: int, name: str, place: OpPlace, tensors: tuple[list[TensorNote], list[TensorNote]], *,
               schema: Any = None, scalars: list[str] | None = None, error: str | None = None,
               by_name: bool = False, takes: Sequence[str] = ()) -> None:  # fmt: skip
        step, call, phase = self._position.moment
        self._writer.write(
            Op(
                n=n,
                step=step,
                call=call,
                phase=phase,
                fqn=place.fqn,
                op=name,
                inputs=tensors[0],
                outputs=tensors[1],
                source=self.lines.get(place.source, place.source),
                inplace=schema is not None and is_inplace(schema),
                out_variant=schema is not None and has_out(schema),
                function=place.function,
                autocast=place.autocast,
                scalars=scalars or [],
                error=error,
                root=place.root,
                by_name=by_name,
                takes=list(takes),
            )
        )

    def _note_regions(self, n: int, device: str) -> None:
        regions = OpenRegions(of=n, device=device, regions=list(self._session.autocast.open_regions))
        self._session.emit(regions)


def _device(tensors: list[Tensor]) -> str:
    """The device type that decides which autocast region applies: that of the first tensor that is not on the CPU."""
    return next((t.device.type for t in tensors if t.device.type != "cpu"), "cpu")


def _line(error: BaseException) -> str:
    return elided(str(error).splitlines()[0]) if str(error) else type(error).__name__


def _takes(arguments: Arguments) -> list[str]:
    return ["tensor" if isinstance(value, Tensor) else type(value).__name__ for value in arguments[0]]


def _is_wait(func: Any) -> bool:
    return "wait_tensor" in str(func)


def _originates(inputs: list[TensorNote], outputs: list[TensorNote]) -> bool:
    """Whether an op turned finite operands into something else, or infinities into NaN (creating a constant is not that)."""
    measured = [t for t in inputs if t.absmax is not None]
    if not measured:
        return False
    if all(t.finite for t in measured):
        return not all(t.finite for t in outputs)
    return any(t.num_nan for t in outputs) and not any(t.num_nan for t in measured)
