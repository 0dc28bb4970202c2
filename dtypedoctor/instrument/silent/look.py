"""The routine look: now and then, every operator of one outermost call passes before the eyes of a few cheap checks.

What goes wrong between two modules and leaves finite values behind is invisible to the module watch, and nothing fails, so
that there would never be a reason for an op trace. A look writes nothing but what its checks conclude, and is taken rarely:
of each outermost module at its calls 1, 2, 16, 128, 1024 …, apart for each phase, with gradients and without, in training and not, and for each dtype, forward only. After a call in which something was not finite, the next
one is looked at too, a few times: a program that has got into float16's limits by training hides what it makes there more often than it fails.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from threading import get_ident
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dtypedoctor._torch_private import (
    MODES_CAN_IGNORE_COMPILED,
    OpOverload,
    being_recorded,
    modes_on,
    profiler_is_on,
    transformation,
    without_modes,
)
from dtypedoctor.instrument.budget import is_in_window
from dtypedoctor.instrument.module_tree import modules_in, parameters_in
from dtypedoctor.instrument.operators import (
    Arguments,
    OperatorMode,
    TensorIds,
    bytes_of,
    fits,
    is_unfinished,
    is_whole,
    keep_written,
    node_of_operator,
    tensors_of,
    why_opaque,
    written,
)
from dtypedoctor.instrument.session import Session
from dtypedoctor.instrument.statistics import is_spread

FIRST_LOOKS = 2
EACH_LATER = 8
"""The calls that are looked at are 1, 2, and then each 8 times the one before."""
STATE_CALLS = 64
"""Calls of a module in one step that are all looked at where they add to half-precision state: its values depend on each of them."""
MORE_LOOKS = 8
"""Calls that are looked at besides because something was not finite, or every gradient 0, in the one before."""

TOO_LARGE = "a copy of what they overwrite would take too much memory; use a smaller batch to have them checked"

_SKIPPED = frozenset({"aten.detach.default", "aten.alias.default"})


class Moves(Protocol):
    """Is shown each operator before it runs, and with what it has returned then, after it."""

    def before(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operator is about to run."""

    def after(self, call: Any, result: Any) -> None:
        """It has run."""


@dataclass(frozen=True)
class Seen:
    """One operator call.

    Attributes:
        func: the operator.
        arguments: what it was given, with copies of what it has written to since.
        given: the same without copies.
        results: the tensors that it returned.
        ids: tells tensors apart.
        before: numbers of the tensors that it has written to, as they were, by the identity of their copies.
        node: number of its autograd node; None where it has none.
    """

    func: Any
    arguments: Arguments
    given: Arguments
    results: Sequence[Tensor]
    ids: TensorIds
    before: Mapping[int, int]
    node: int | None = None

    @cached_property
    def name(self) -> str:
        """Name with namespace and overload."""
        return str(self.func)

    @cached_property
    def operands(self) -> list[Tensor]:
        """The tensors that it was given."""
        return tensors_of(self.arguments)

    def number(self, tensor: Tensor) -> int:
        """Equal for two tensors exactly when they are the same in the same version."""
        known = self.before.get(id(tensor))
        return known if known is not None else self.ids.of(tensor)[0]


class RoutineLook:
    """Decides which calls are looked at, and shows their operators to the observers.

    Args:
        saw: who is shown them.
        ended: called when a call that was looked at is over.
        session: tells the moment, and keeps the observers' errors from the program.
        steps: only calls up to this training step are looked at.

    Attributes:
        moves: is shown each operator before and after it runs.
        accumulating: those of ``saw`` that look at more calls, because these add to half-precision state.
    """

    def __init__(
        self,
        saw: Sequence[Callable[[Seen], None]],
        ended: Sequence[Callable[[], None]],
        session: Session,
        steps: float = float("inf"),
    ) -> None:
        self._saw, self._ended = saw, ended
        self._steps = steps
        self.moves: Moves | None = None
        self.accumulating: list[Callable[[Seen], None]] = []
        self._session = session
        self._calls: Counter[tuple[int, str]] = Counter()
        self._steps_of: dict[tuple[int, str], tuple[int, int, int]] = {}
        """Steps of each module that were counted, the last of them, and its calls in that."""
        self._mode: _Mode | None = None
        self._thread = 0
        self._more_looks = MORE_LOOKS
        self._looks_again = False

    def look_again(self) -> None:
        """Something has just been found not to be finite, or all gradients to be 0: the next call forward is looked at too. Nothing may have come of it."""
        self._looks_again = self._more_looks > 0

    @contextmanager
    def at_call_made_again(self) -> Iterator[None]:
        """Has the observers see a call that the doctor makes, muted, once more; what they know of the one that is looked at now they forget."""
        mode = _Mode(self._saw, self._session, self.moves, is_again=True)
        self._end(mode)
        try:
            with mode:
                yield
        finally:
            self._end(mode)

    @property
    def looks(self) -> bool:
        """Whether a call is looked at."""
        return self._mode is not None

    def is_turn(self, function: object) -> bool:
        """Whether this call of a function outside of modules is looked at."""
        key = (id(function), self._session.position.phase)
        self._calls[key] += 1
        return _is_looked_at(self._calls[key])

    def before_call(self, module: nn.Module) -> None:
        """An outermost call begins."""
        self.after_call()  # of one that was left without a word
        position = self._session.position
        if position.backward_depth or position.step > self._steps:
            return
        key = (id(module), f"{position.phase} {_kind_of(module)}")
        self._calls[key] += 1
        again, self._looks_again = self._looks_again, False
        self._more_looks -= again
        number = self._calls[key]
        if again or _is_looked_at(number):
            looking = self._saw
        elif self.accumulating and self._is_of_state(key, position.step):
            looking = self.accumulating
        else:
            return
        if looking and may_look() and (MODES_CAN_IGNORE_COMPILED or not any(map(why_opaque, modules_in(module)))):
            self._mode = _Mode(looking, self._session, self.moves)
            self._thread = get_ident()
            self._mode.__enter__()

    def _is_of_state(self, key: tuple[int, str], step: int) -> bool:
        """Whether state is followed through the calls of a step: of a few in a row, and of one that follows on others which were not looked at."""
        number, last, calls = self._steps_of.get(key, (0, 0, 0))
        number, calls = (number, calls + 1) if step == last else (number + 1, 1)
        self._steps_of[key] = (number, step, calls)
        return calls <= STATE_CALLS and (is_in_window(number) or step > last + 1)

    def after_call(self, _: object = None) -> None:
        """The outermost call has ended, in whatever way; nothing is done in another thread than the one that it was made in."""
        if self._mode is None or self._thread != get_ident():
            return
        mode, self._mode = self._mode, None
        mode.leave()
        self._end(mode)

    def _end(self, mode: "_Mode") -> None:
        with mode.aside():
            for end in self._ended:
                end()


class _Mode(OperatorMode):
    supports_higher_order_operators = True

    def __init__(
        self, saw: Sequence[Callable[[Seen], None]], session: Session, moves: Moves | None, *, is_again: bool = False
    ) -> None:
        super().__init__()
        self._is_again = is_again
        self._saw = saw
        self._moves = moves
        self._position, self._guard = session.position, session.guard
        self._ids = TensorIds()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code is compiled and runs as it would without the look; what is inside a fused kernel is not seen."""
        return True

    @contextmanager
    def aside(self) -> Any:
        """The doctor's own work: seen by no mode, recorded by nobody, and its errors kept from the program."""
        with self._guard.keeping("some operators in a routine look"), self._position.aside():
            yield

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs ``func`` as it is and shows it to the checks."""
        kwargs = dict(kwargs or {})
        if (self._position.muted and not self._is_again) or not isinstance(func, OpOverload) or str(func) in _SKIPPED:
            return self.run(func, args, kwargs)
        if is_unfinished(func) or any(map(is_spread, tensors_of((args, kwargs)))):
            return self.run(func, args, kwargs)
        if is_whole(func, types, tensors_of((args, kwargs))):
            return self.taken_apart(func, args, kwargs)
        changed = written(func, (args, kwargs))
        if changed and not fits(bytes_of(changed), changed[0].device):
            return self._unseen(func, (args, kwargs))
        kept = (args, kwargs)
        before: dict[int, int] = {}
        with without_modes():
            call = self._moves.before(func, args, kwargs) if self._moves is not None else None
        if changed:
            with self.aside():
                kept = keep_written(func, kept)
                before = {
                    id(copy): self._ids.of(old)[0] for copy, old in zip(written(func, kept), changed, strict=True)
                }
        node = node_of_operator()
        result = self.run(func, args, kwargs)
        with self.aside():
            if self._moves is not None and call is not None:
                self._moves.after(call, result)
            for tensor in changed:
                self._ids.wrote(tensor)
            seen = Seen(func, kept, (args, kwargs), tensors_of(result), self._ids, before, node)
            for saw in self._saw:
                saw(seen)
        return result

    def _unseen(self, func: Any, arguments: Arguments) -> Any:
        """Runs an operator that no check sees: what it writes to is too large to be kept as it was."""
        self._guard.tell("operators that write to large tensors, in a routine look", TOO_LARGE)
        args, kwargs = arguments
        result = self.run(func, args, kwargs)
        with self.aside():
            for tensor in written(func, arguments):
                self._ids.wrote(tensor)
        return result


def _kind_of(module: nn.Module) -> str:
    """What else makes other calls of those of a module: a trained model that is cast and then evaluated rounds as it never has before."""
    dtype = next((parameter.dtype for parameter in parameters_in(module)), None)
    return f"{dtype} {module.training} {torch.is_grad_enabled()}"


def _is_looked_at(number: int) -> bool:
    if number <= FIRST_LOOKS:
        return True
    while number % EACH_LATER == 0:
        number //= EACH_LATER
    return number == FIRST_LOOKS


def may_look() -> bool:
    """Whether a look would change nothing: not under modes or a profiler of the program's own, nor where operators are recorded."""
    if not all(type(mode).__module__.startswith("dtypedoctor.") for mode in modes_on()):
        return False
    if transformation() is not None or profiler_is_on():
        return False
    return not (being_recorded() or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()))
