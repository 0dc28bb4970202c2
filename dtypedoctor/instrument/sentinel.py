"""The operator sentinel: looks at what is computed outside of module calls, where no hook of a module sees it.

Losses, metrics and whole programs without modules are operators on plain tensors. A dispatch mode sees them, and is on only there: it leaves
the stack of modes when an outermost module is called and comes back after it, always at the bottom, so that the modes that the program puts
on above it come off as if it were not there. In backward passes it is on where the program calls no modules; where it does, a hook on
each autograd node of what was computed between the calls puts it on, and the engine, which gives each node the modes that the pass began
with, takes it off. The nodes of a GPU run in threads of autograd's own, in which it is the sentinel of the thread whose backward pass it is.

What it costs is bounded by counts: everything is measured up to an allowance that each module call adds to; beyond it an eighth of the
operators, in turns, and of backward passes each eighth is seen. What is computed on a GPU is measured at once in some steps, at each line
a few times (:mod:`budget`); else each eighth result is measured behind the device, which tells where a program first stops being finite.
"""

import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from math import inf
from operator import itemgetter
from threading import get_ident
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn import Parameter

from dtypedoctor._torch_private import (
    OpOverload,
    autograd_node,
    being_recorded,
    functions_of_programs,
    has_no_memory,
    is_wrapped,
    modes_on,
    next_sequence_number,
    number_of_modes,
    pop_mode,
    push_mode,
    register_own,
    schema_of,
    sequence_number,
)
from dtypedoctor.instrument.bad_values import FINITE, BadValues, Ends, Ran, ends_of
from dtypedoctor.instrument.budget import FIRST_STEPS
from dtypedoctor.instrument.float32_program import Programs, Step
from dtypedoctor.instrument.frames import Line, line_of
from dtypedoctor.instrument.lifted import LIFT, Lifted, lifted_from
from dtypedoctor.instrument.operators import (
    Arguments,
    OperatorMode,
    is_unfinished,
    keep_compiler_out,
    keep_written,
    names_written,
    tensors_of,
    written,
)
from dtypedoctor.instrument.recorders import BEHIND
from dtypedoctor.instrument.session import Here, Session
from dtypedoctor.instrument.statistics import HALF, measurable, real_of
from dtypedoctor.unpatched import at_fork

if TYPE_CHECKING:
    from dtypedoctor.instrument.silent.state import StateCheck

ALLOWANCE = 20_000
"""Operators that are all measured, however many there are between two module calls."""
PER_CALL = 500
"""Operators that each outermost module call adds to the allowance."""
EACH = 8
"""Beyond the allowance every Nth backward pass is seen; on a GPU every Nth result is measured from the start."""
ROUND, MEASURED = 509, 64
"""Beyond the allowance, ``MEASURED`` consecutive operators of each ``ROUND`` are measured; no loop is likely to be as long as a round."""
BYTES = 2 << 30
"""Results larger than :data:`SMALL` that are measured, in bytes; each outermost module call adds :data:`BYTES_PER_CALL`."""
BYTES_PER_CALL = 64 << 20
SMALL = 1 << 20
"""Bytes up to which a result is measured without counting its size."""
COPIED = 1 << 20
"""Elements of an operand that is copied before an operator writes to it, so that the operator can be run again."""
MAX_LINES = 50_000
"""Autograd nodes whose line is remembered."""
MAX_WALKED = 2_000
"""Autograd nodes that are looked at for one backward pass, or for what goes into one outermost module call."""
MAX_INSIDE = 20_000
"""The same where nodes of custom functions are looked for inside of module calls, in a few steps."""
MAX_SPANS = 4_096
"""Outermost module calls, in a row without a node between them, whose autograd nodes are known to be theirs."""


_NOTHING = (
    "aten.empty",
    "aten.new_empty",
    "aten.resize_",
    "aten.set_",
    "aten.detach",
    "aten.alias",
    "aten.view",
)
"""Beginnings of the names of operators that compute nothing."""

_KEEPING = (
    "aten::native_",
    "aten::_scaled_dot_product",
    "aten::_flash",
    "aten::_efficient",
    "aten::_cudnn",
    "aten::_thnn",
    "aten::_ctc_loss",
)
"""Beginnings of the names of operators whose further results only their backward reads."""


AT_ONE_LINE = 16
"""Results of an operator at one line that are read from a GPU in a step."""
_NOT_FOLLOWED = (
    "sums, indices and overflows that become finite again, outside of modules on a GPU, in most steps",
    f"followed from operator to operator in the steps 1 to {FIRST_STEPS} and those whose number is a power of 2, of programs of one process; on a CPU, and with --overhead-budget, in all that are looked at",
)


class _Plan(NamedTuple):
    """What is to be done about an operator."""

    passes: bool = False
    """Nothing: it computes nothing, or nothing can be measured."""
    draws: bool = False
    """It writes uniform random numbers into memory, whose last digits half precision has cut off."""
    reads: bool = False
    """It makes a number of a tensor, for Python, or a tensor of numbers."""
    lifts: bool = False
    """It makes a tensor of Python's numbers, which have been rounded to its dtype."""
    writes: bool = False
    """It writes to operands."""
    fresh: bool = False
    """It takes no more than the form of its operands."""
    begins: bool = False
    """It has none."""
    followed: Sequence[Callable[[Any, Arguments, Any], None]] = ()
    """Who is called with each call of it."""


class Sentinel(OperatorMode):
    """Sees the operators that run outside of module calls.

    Args:
        session: counts the operators.
        bad: follows what is not finite.
        sample: measures a result on a device that works behind the host, under a name.

    Attributes:
        quiet: says whether somebody else looks at the operators now.
        raised, rejected: called with an operator that has raised, its arguments, and what it raised; raise nothing themselves.
        writing: called with an operator that is about to write to its operands.
        state: is shown each operator, and alone those of an optimizer's step.
        in_scaler: says whether a gradient scaler is at work, of which nothing is looked at but the step of its optimizer.
        computed: called in a process that the program has forked from this thread, when it first computes in less than float32.
        following: says who is called with each call of an operator, its arguments and its result; these raise nothing themselves.
        shadowed: called with each operator of a forward pass, or of a custom function's backward: it, its arguments with copies of what it has written to, its arguments, its results, its line.
        lifted: called with a tensor that is made of Python's numbers, where these are known.
        readout: called with a tensor of which Python has read the number, and the line.
        rounded: says whether an operator with these finite results is to be handed to ``overflowed``.
        overflowed: called with each operator of a forward pass, or of a custom function's backward, that was run while something is not finite: it, its arguments with copies of what it has written
            to, its arguments, its result.
        programs: remember how values came about.
    """

    supports_higher_order_operators = True

    def __init__(self, session: Session, bad: BadValues, sample: Callable[[str, Tensor], None]) -> None:
        super().__init__()
        self._bad = bad
        self._position, self._coverage, self._guard = session.position, session.coverage, session.guard
        self._readings = session.readings
        self._settling = session.guard.keeping("operators outside of modules")
        self._looking = session.guard.keeping("some operators outside of modules")
        self._sample = sample
        self._plans: dict[Any, _Plan] = {}
        self._lines: dict[int, Line] = {}
        self._visits: dict[Any, int] = {}
        self._last_node = -1
        self._spans: list[tuple[int, int]] = []
        self._first_span = 0
        self._call_began = 0
        self._between = False
        self._hooked: set[int] = set()
        self._inside: tuple[type, ...] = ()
        """Classes of nodes that are looked at in module calls, too: the backward of a custom function is the program's own code."""
        self._lent = False
        self._entering = session.guard.shield(self._node_begins, "gradients of some operators outside of modules")
        self._backwards = 0
        self._seen = 0
        self._missed = 0
        self._bytes = 0
        self._thread = 0
        self._here: Here | None = None
        self._abroad = False
        self._read_in = 0
        self._readings_at: dict[Any, int] = {}
        self._pauses = 0
        self.on = False
        """Whether it is on the stack of modes, as far as anybody has said."""
        self._has_compiled = False
        self._forked_mode: Computing | None = None
        self.quiet: Callable[[], bool] = lambda: False
        self.raised: Callable[[Any, Arguments, BaseException], None] = lambda *_: None
        self.rejected: Callable[[Any, Arguments, BaseException], None] = lambda *_: None
        self.computed: Callable[[], None] = lambda: None
        self.writing: Sequence[Callable[[Any, tuple[Any, ...], dict[str, Any]], None]] = ()
        self.state: StateCheck | None = None
        self.in_scaler: Callable[[], bool] = lambda: False
        self.following: Callable[[Any], Sequence[Callable[[Any, Arguments, Any], None]]] = lambda _: ()
        self.shadowed: Callable[[Any, Arguments, Arguments, Sequence[Tensor], Line | None], None] = lambda *_: None
        self.lifted: Sequence[Callable[[Lifted], None]] = ()
        self.readout: Callable[[Tensor, Line | None], None] = lambda *_: None
        self.rounded: Callable[[Sequence[Tensor]], bool] = lambda _: False
        self.overflowed: Callable[[Any, Arguments, Arguments, Any], None] = lambda *_: None
        self.programs = Programs(session)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code is compiled and runs as it would without the sentinel."""
        return True

    def start(self) -> None:
        """Begins to look at what this thread computes."""
        self._thread = get_ident()
        self._here = self._position.here
        at_fork(after_in_child=self._forked)
        self.settle()

    def stop(self) -> None:
        """Ends for good; tells of what is not finite and was never used."""
        self.leave()
        super().leave()  # an interruption between the putting on and the note of it has left it on
        self._bad.finish()

    def leave(self) -> None:
        """Ends in this thread, which is about to end, or in this process, which the program has forked."""
        self.off()
        self._thread = 0

    def _forked(self) -> None:
        """The program has forked this process, of which nothing is recorded but whether it computes."""
        here = self._thread == get_ident()
        self.leave()
        others = self._others()
        if not here or others is None or self._has_compiled or _loads_data():
            return
        keep_compiler_out()
        for _ in others:
            pop_mode()
        self._forked_mode = Computing(self.computed)
        for mode in (self._forked_mode, *others):
            push_mode(mode)

    def pause(self) -> None:
        """Until :meth:`resume`, nothing is looked at: the doctor is at work, or an optimizer."""
        self._pauses += 1
        if self.on or self._lent:
            self.settle()

    def resume(self) -> None:
        """Ends one :meth:`pause`."""
        self._pauses -= 1
        self.settle()

    def backward_begins(self, tensors: Iterable[Tensor]) -> None:
        """An outermost backward pass is about to begin from ``tensors``."""
        self._backwards += 1
        if self._position.looks and self._position.call:
            self._follow(tensors)
        if self._position.looks or self.on:
            self.settle()

    def modules_begin(self, given: Callable[[], Iterable[Tensor]]) -> None:
        """An outermost module call begins.

        Args:
            given: gets the tensors that the module is called with.
        """
        if self.on or self._lent:
            self.off()
        if self._between:
            self._follow(given())
        self._call_began = next_sequence_number()

    def modules_end(self) -> None:
        """An outermost module call is over."""
        end = next_sequence_number()
        if self._spans and self._spans[-1][1] == self._call_began:
            self._spans[-1] = (self._spans[-1][0], end)
        elif end > self._call_began:
            self._spans.append((self._call_began, end))
        if len(self._spans) > MAX_SPANS:
            self._spans = self._spans[MAX_SPANS // 2 :]
            self._first_span = self._spans[0][0]
        self._between = False
        self.settle()

    def _follow(self, tensors: Iterable[Tensor]) -> None:
        """Hooks the autograd nodes that lead to ``tensors``, as far as the next ones that a module call has made."""
        if self._thread != get_ident() or self._is_thin or not self._position.looks:
            return
        if len(self._hooked) > MAX_LINES:
            self._hooked.clear()
        self._inside = functions_of_programs() if self._readings.waits() else ()
        self._hook_behind([tensor.grad_fn for tensor in tensors if self._is_in_a_graph(tensor)])

    def _hook_behind(self, waiting: list[Any]) -> None:
        """Hooks the nodes ``waiting``, which it empties, and those behind them; of those that a module call has made only custom functions of programs."""
        for _ in range(MAX_INSIDE if self._inside else MAX_WALKED):
            if not waiting:
                return
            node = waiting.pop()
            number = sequence_number(node)
            inside = self.is_of_a_module(number)
            if number in self._hooked or (inside and not (self._inside and self._is_known(number))):
                continue
            self._hooked.add(number)
            if not inside or isinstance(node, self._inside):
                register_own(node.register_prehook, self._entering)
            waiting += filter(None, map(itemgetter(0), node.next_functions))

    def _is_known(self, number: int) -> bool:
        return self._first_span <= number < next_sequence_number()

    def is_of_a_module(self, number: int) -> bool:
        """Whether the autograd node with this number was made in a module call, is too old to be known, or is the end of a leaf."""
        if not self._is_known(number):
            return True
        place = bisect_right(self._spans, (number, inf)) - 1
        return place >= 0 and number < self._spans[place][1]

    def _node_begins(self, _: Any) -> None:
        """The engine is about to run a node that was made between module calls, and will take the mode off after it."""
        abroad = self._thread != get_ident()
        # Whether this thread is one of autograd's that works for a backward pass of the sentinel's thread, which waits
        # for it
        if abroad and not (bool(self._thread) and self._position.of.here is None and self._position.last is self._here):
            return
        if self._pauses or self._position.muted or self.quiet() or self._is_there():
            return
        if not self._position.stack:
            self._lent = True
            self._abroad |= abroad
            self._into_stack()

    def _is_there(self) -> bool:
        return any(mode is self for mode in modes_on())

    def _take_back(self) -> None:
        """What was lent to a node is gone with it, and nobody has said so."""
        self.on = self._is_there()
        self._lent = self._position.backward_depth > 0
        self._abroad &= self._lent

    def settle(self) -> None:
        """Puts the mode on the stack or takes it off, as the position of the program demands; cheap to call again."""
        is_idle = (
            not self.on and not self._lent and (self._pauses or not self._position.looks)
        )  # as always between looks
        if is_idle or self._thread != get_ident():
            return
        with self._settling:
            if self._lent:
                self._take_back()
            wanted = not self._position.stack and self._may_be_on()
            if wanted != self.on:
                self._into_stack() if wanted else self.off()

    def compiled_begins(self) -> None:
        """A compiled function is about to be entered, with a torch that compiles it anew at each call under a mode: leaves for good."""
        if self._forked_mode is not None and modes_on() == [self._forked_mode]:
            pop_mode()
            self.computed()
        if self._has_compiled or self._thread != get_ident():
            return
        self._has_compiled = True
        self.settle()
        self._guard.tell(
            "operators outside of modules, since compiled code has run",
            "this torch would recompile it at each call; torch 2.10 or later measures them",
        )

    def _may_be_on(self) -> bool:
        position = self._position
        if self._pauses or not self._position.looks:
            return False
        if "optimizer" in position.overrides:
            return self.state is not None and self.state.is_stepping
        if self.in_scaler():
            return False
        if position.backward_depth and (position.call or (self._is_thin and self._backwards % EACH)):
            return False
        return not self._has_compiled

    @property
    def _is_thin(self) -> bool:
        """Whether the allowance is spent."""
        return self._seen > ALLOWANCE + PER_CALL * self._position.call

    def _into_stack(self) -> None:
        keep_compiler_out()
        self._last_node = next_sequence_number() - 1
        if number_of_modes() == 0:
            push_mode(self)
            self.on = True
            return
        others = self._others()
        if others is None:
            return
        for _ in others:
            pop_mode()
        push_mode(self)
        for mode in others:
            push_mode(mode)
        self.on = True

    def off(self) -> None:
        """Leaves the stack of modes until :meth:`settle` is called."""
        if self._lent and self._thread == get_ident():
            self._take_back()
        if not self.on or self._thread != get_ident():
            return
        self.on = False
        if number_of_modes() == 1:
            pop_mode()
            return
        others = self._others()
        if others is None:
            self._pauses += 1  # stays on the stack, and only hands on
            return
        for _ in range(len(others) + 1):
            pop_mode()
        for mode in others:
            push_mode(mode)

    def _others(self) -> list[Any] | None:
        """The other modes on the stack, bottom first; None where there are some of torch's own, which have their own order."""
        others = [mode for mode in modes_on() if mode is not self]
        return None if any(mode.is_infra_mode() for mode in others) else others

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Runs ``func`` as it is and looks at what comes out."""
        kwargs = kwargs or {}
        plan = self._plans.get(func) or self._plan(func)
        if plan.passes or not self.on or self._position.muted or self.quiet():
            return self._drawing(func, args, kwargs) if plan.draws else self.run(func, args, kwargs)
        # Where a node of a GPU calls a module, nothing takes the mode off; where torch records a program, what is measured would become part of it.
        if (self._abroad and self._position.stack) or being_recorded():
            return self.run(func, args, kwargs)
        if self._lent and self._inside and self._is_inside_of_a_module():
            return self._in_a_module(func, plan, args, kwargs)
        if "optimizer" in self._position.overrides:
            return self._in_step(func, plan, args, kwargs)
        if not plan.reads:
            self._seen += 1
            self._coverage.operators += 1
            if self._seen > ALLOWANCE and self._seen % ROUND >= MEASURED and self._is_thin:
                result = self.run(func, args, kwargs)
                if plan.writes and self._bad.any:
                    with self._looking:
                        self._bad.overwritten(written(func, (args, kwargs)))
                for follow in plan.followed:
                    follow(func, (args, kwargs), result)
                return result
        kept: Arguments = (args, kwargs)
        if plan.writes:
            kept = self._before(func, kept)
        try:
            result = self._moving(func, args, kwargs)
        except Exception as error:  # told and passed on; nothing cheaper stands around each operator of a program
            self.raised(func, kept, error)
            self.rejected(func, kept, error)
            raise
        with self._looking:
            self._after(func, plan, (args, kwargs), kept, result)
        for follow in plan.followed:
            follow(func, (args, kwargs), result)
        return result

    def _drawing(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Runs an operator that draws uniform random numbers, of which only those in half precision are followed."""
        drawn = self.run(func, args, kwargs)
        if drawn.dtype in HALF and self.on and not self._position.muted:
            with self._looking:
                self.shadowed(func, (args, kwargs), (args, kwargs), [drawn], line_of(sys._getframe()))
        return drawn

    def follow_until_it_returns(self, func: Any, arguments: Arguments, returned: Callable[[], None]) -> None:
        """Calls ``returned``, which raises nothing, once: when ``func`` returns what it makes of operands of these shapes."""
        shapes = [tensor.shape for tensor in tensors_of(arguments)]

        def follow(_: Any, given: Arguments, __: Any) -> None:
            with self._looking:
                if [tensor.shape for tensor in tensors_of(given)] == shapes:
                    plan = self._plans[func]
                    self._plans[func] = plan._replace(followed=[one for one in plan.followed if one is not follow])
                    returned()

        plan = self._plans[func]
        self._plans[func] = plan._replace(followed=[*plan.followed, follow])

    def _is_inside_of_a_module(self) -> bool:
        node = autograd_node()
        return isinstance(node, self._inside) and self.is_of_a_module(sequence_number(node))

    def _in_step(self, func: Any, plan: _Plan, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Runs an operator of an optimizer's step, of which only state is followed, and the numbers that it is computed with."""
        result = self._moving(func, args, kwargs)
        if plan.lifts:
            with self._looking:
                self._made_of_numbers(args[0])
        if plan.begins:  # what the optimizer keeps, in a dtype of its own
            with self._looking:
                line = line_of(sys._getframe())
                self.programs.made(tensors_of(result), (), str(func), None if line is None else line.source)
        return result

    def _moving(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Runs an operator, and says where state goes with it."""
        state = self.state
        moves = state.before(func, args, kwargs) if state is not None else None
        result = self.run(func, args, kwargs)
        if state is not None and moves is not None:
            state.after(moves, result)
        return result

    def _in_a_module(self, func: Any, plan: _Plan, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Runs an operator in the backward of a custom function that a module has called: gradients tell what is not finite, but not what was replaced."""
        kept = self._before(func, (args, kwargs)) if plan.writes else (args, kwargs)
        result = self.run(func, args, kwargs)
        if not plan.reads:
            with self._looking:
                self.overflowed(func, kept, (args, kwargs), result)
        return result

    def _plan(self, func: Any) -> _Plan:
        plan = _plan_of(func) if isinstance(func, OpOverload) else _Plan(passes=True)
        if not (plan.passes or plan.reads):
            plan = plan._replace(followed=self.following(func))
        self._plans[func] = plan
        return plan

    def _before(self, func: Any, arguments: Arguments) -> Arguments:
        """The arguments with copies of the small ones that are about to be written to; as they are where one is not small."""
        with self._looking:
            for writing in self.writing:
                writing(func, *arguments)
            if all(t.numel() <= COPIED and self._readings.may_read(t) for t in written(func, arguments)):
                return keep_written(func, arguments)
        return arguments

    def _after(self, func: Any, plan: _Plan, arguments: Arguments, kept: Arguments, result: Any) -> None:
        if plan.lifts:
            self._made_of_numbers(arguments[0][0])
            return
        if plan.reads and not isinstance(arguments[0][0], Tensor):  # a number that TorchScript keeps as a tensor
            return
        line, node = self._where()
        if plan.reads:
            self._bad.read(arguments[0][0], result, line)
            self.readout(arguments[0][0], line)
            return
        self._computed(func, plan, arguments, kept, result, line, node)

    def _made_of_numbers(self, tensor: Tensor) -> None:
        """Follows what a tensor is made of: the numbers, where they are known, are cast to its dtype."""
        with self._position.aside():
            made = lifted_from(tensor)
            if made is None:
                return
            for lifted in self.lifted:
                lifted(made)
            source = made.line.source if made.line is not None else None
            program = self.programs.in_float32
            step = program.lifted(tensor, made.exact.float(), source) if tensor.dtype in HALF else None
            if made.overflows:
                self._bad.ran(Ran(*made.cast, True, [made.exact], [tensor], [ends_of(tensor)], made.line))
                if self._bad.made is not None:
                    program.explain(step, self._bad.made)
                func, arguments = made.cast
                self.overflowed(func, arguments, arguments, tensor)

    def _computed(
        self,
        func: Any,
        plan: _Plan,
        arguments: Arguments,
        kept: Arguments,
        result: Any,
        line: Line | None,
        node: str | None,
    ) -> None:
        results = written(func, arguments) if plan.writes else _results(func, result)
        missed = self._missed
        ends = [self._measured(func, line, tensor) for tensor in results]
        self._coverage.operators_measured += self._missed == missed
        exact = not plan.writes or kept is not arguments
        call = (func, kept, arguments, result) if exact and (node is None or _is_of_program()) else None
        steps = self._remembered(func, arguments, kept if exact else None, results, line)
        if call is not None:
            self.shadowed(func, kept, arguments, tensors_of(result) or results, line)
        if not self._bad.any and _all_finite(ends):
            if call is not None and self.rounded(results):
                self.overflowed(*call)
            return
        operands = [] if plan.fresh else tensors_of(arguments)
        self._bad.ran(Ran(func, kept, exact, operands, results, ends, line, node))
        if self._bad.made is not None:
            self.programs.explain(steps, self._bad.made)
        if call is not None:
            self.overflowed(*call)
        if plan.writes:
            self._bad.overwritten([tensor for tensor, end in zip(results, ends, strict=True) if end is None])

    def _remembered(
        self, func: Any, arguments: Arguments, kept: Arguments | None, results: list[Tensor], line: Line | None
    ) -> tuple[Step | None, Step | None]:
        if not results or not self._readings.may_read(results[0]):
            return None, None
        if kept is None:  # too large to be copied before it was written to
            self.programs.begins_with(results)
            return None, None
        source = None if line is None else line.source
        with self._position.aside():
            return self.programs.ran(func, arguments, kept, results, source=source, fqn=None)

    def _where(self) -> tuple[Line | None, str | None]:
        """The line that an operator belongs to, in a backward pass the one that it differentiates; and the autograd node."""
        node: Any = autograd_node()
        if node is None:
            line = line_of(sys._getframe(3))
            if line is not None:
                self._remember(line)
            return line, None
        name: str = node.name()
        if _is_of_program():
            return line_of(sys._getframe(3)), name
        return self._lines.get(sequence_number(node)), name

    def _remember(self, line: Line) -> None:
        """The node of an operator is made just before the operator itself is dispatched, and takes the number before the next."""
        number = next_sequence_number() - 1
        if number == self._last_node:
            return
        self._last_node = number
        self._between = True
        if len(self._lines) >= MAX_LINES:
            for old in list(self._lines)[: MAX_LINES // 2]:
                del self._lines[old]
        self._lines[number] = line

    def _measured(self, func: Any, line: Line | None, tensor: Tensor) -> Ends | None:
        """Its ends where they are known at once; None for a whole number, for what is sampled behind the host, and for what is missed."""
        if not (tensor.is_floating_point() or tensor.is_complex()):
            return None
        if has_no_memory(tensor):
            return FINITE
        tensor = real_of(tensor)
        if not measurable(tensor):
            self._missed += 1
            if (kind := _unreadable_kind(tensor)) is not None:
                self._guard.tell(
                    f"{kind} outside of modules",
                    "what operators return in this form is not read; convert it to a plain tensor (`to_dense()`) to have it measured",
                )
        elif self._affords(tensor) if self._readings.at_hand(tensor) else self._is_read(func, line, tensor):
            return ends_of(tensor)
        elif tensor.device.type in BEHIND:
            if tensor.dtype in HALF and not self._readings.may_read(tensor):
                self._guard.tell(*_NOT_FOLLOWED)
            key = (("sampled", func), line)
            self._visits[key] = number = self._visits.get(key, 0) + 1
            if number % EACH == 1:
                # The name of a sample of what an operator returned: the operator and its line
                self._sample(f"{func} {'' if line is None else line.source}", tensor)
            else:
                self._missed += 1
        else:
            self._missed += 1
        return None

    def _affords(self, tensor: Tensor) -> bool:
        size = tensor.nbytes
        if size > SMALL:
            self._bytes += size
        return size <= SMALL or self._bytes <= BYTES + BYTES_PER_CALL * self._position.call

    def _is_read(self, func: Any, line: Line | None, tensor: Tensor) -> bool:
        """Whether a result on a GPU is read at once."""
        if not self._readings.may_read(tensor):
            return False
        if self._read_in != (step := self._position.step):
            self._read_in = step
            self._readings_at.clear()
        number = self._readings_at[func, line] = self._readings_at.get((func, line), 0) + 1
        return number <= AT_ONE_LINE and self._readings.reads(tensor)

    def _is_in_a_graph(self, tensor: Tensor) -> bool:
        """Whether a plain tensor that may be read was made by an autograd node."""
        if type(tensor) is not Tensor or not self._readings.may_read(tensor):
            return False
        return not is_wrapped(tensor) and tensor.grad_fn is not None


def _unreadable_kind(tensor: Tensor) -> str | None:
    """What a tensor is that holds values which are not read; None where there are none now, as inside of a transformation."""
    if is_wrapped(tensor) or tensor.is_meta:
        return None
    if tensor.is_nested:
        return "nested tensors"
    if tensor.layout is not torch.strided:
        return f"sparse tensors ({str(tensor.layout).removeprefix('torch.')})"
    plain = type(tensor) in (Tensor, Parameter)
    return (
        None if plain or type(tensor).__module__.startswith("torch.") else f"tensors of class {type(tensor).__name__}"
    )


def _is_of_program() -> bool:
    """Whether the backward of a custom function is running, which is the program's own code as any forward is: its context is its node."""
    return isinstance(autograd_node(), FunctionCtx)


def _all_finite(ends: Iterable[Ends | None]) -> bool:
    """Whether nothing that was measured is not finite."""
    return all(one is FINITE or one is None for one in ends)


class Computing(OperatorMode):
    """Is on in a process that the program has forked, and tells once that operators in less than float32 run there.

    Workers that a pool forks to prepare data compute in float32, which by itself is no doubt about the program.
    """

    supports_higher_order_operators = True

    def __init__(self, tell: Callable[[], None]) -> None:
        super().__init__()
        self._tell: Callable[[], None] | None = tell

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code is compiled and runs as it would without this."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Runs ``func`` as it is."""
        kwargs = kwargs or {}
        if (tell := self._tell) is not None and _computes(func, (args, kwargs)):
            self._tell = None
            tell()
        return self.run(func, args, kwargs)


def _computes(func: Any, arguments: Arguments) -> bool:
    if not isinstance(func, OpOverload) or _plan_of(func).passes:
        return False
    return any(
        tensor.is_floating_point() and tensor.itemsize < torch.float32.itemsize for tensor in tensors_of(arguments)
    )


def _loads_data() -> bool:
    """Whether multiprocessing is about to run a worker of torch's data loader here: what it makes comes back to the program."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != "_launch":
        frame = frame.f_back
    process = frame.f_locals.get("process_obj") if frame is not None else None
    return getattr(getattr(process, "_target", None), "__name__", "") == "_worker_loop"


def _results(func: Any, result: Any) -> list[Tensor]:
    """What an operator returns; of those of torch's own that keep something for their backward, what the program gets."""
    if isinstance(result, Tensor):
        return [result]
    results = tensors_of(result)
    return results[:1] if schema_of(func).name.startswith(_KEEPING) else results


def _plan_of(func: Any) -> _Plan:
    if str(func) == "aten._local_scalar_dense.default":
        return _Plan(reads=True)
    if str(func) == LIFT:
        return _Plan(reads=True, lifts=True)
    if _passes(func):
        return _Plan(passes=True, draws=str(func) == "aten.uniform_.default")
    schema = schema_of(func)
    name = schema.name.removeprefix("aten::")
    fresh = name.endswith("_like") or name.startswith("new_")
    begins = not any("Tensor" in str(argument.type) for argument in schema.arguments)
    return _Plan(writes=bool(names_written(func)), fresh=fresh, begins=begins)


def _passes(func: Any) -> bool:
    """Whether an operator computes nothing: views, random numbers written into memory, what is unfinished."""
    schema = schema_of(func)
    if is_unfinished(func) or str(func).startswith(_NOTHING):
        return True
    if any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns):
        return True
    return schema.is_mutable and torch.Tag.nondeterministic_seeded in func.tags
