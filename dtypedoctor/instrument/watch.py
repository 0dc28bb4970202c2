"""The module watch: what every module returns, and the gradients of it, without touching the model.

Two hooks that torch keeps globally see every module call; nothing is attached to a module, so a watched model pickles,
copies and compiles as before. Inside a compiled region the hooks do nothing (and add no graph break). A module that
``nn.Module.compile()`` has compiled in place is called past these hooks; its calls are followed where they enter the compiled code.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any, Protocol

from torch import Tensor, is_grad_enabled, nn
from torch.compiler import is_compiling
from torch.fx import GraphModule
from torch.nn.modules import module as hooks

from dtypedoctor._torch_private import (
    CompiledCall,
    DisableTensorClasses,
    ModuleHooks,
    being_recorded,
    count_no_global_hook_of,
    follow_compiled_calls,
    is_followed,
    register_own,
)
from dtypedoctor.instrument.budget import FIRST, Budget
from dtypedoctor.instrument.places import Looks, Place, Places, Rows, Sites, When
from dtypedoctor.instrument.recorders import Recorders
from dtypedoctor.instrument.returned import Returned
from dtypedoctor.instrument.session import Here, Session, calls_left_by, calls_running, forget_ended_calls
from dtypedoctor.instrument.statistics import Rooted
from dtypedoctor.unpatched import perf_counter

CallListener = Callable[[nn.Module], None]


class Replay(Protocol):
    """A call that is made again, of which nothing is measured here."""

    def entered(self, module: nn.Module) -> None:
        """A module is called."""

    def raised(self, module: nn.Module, args: Any, error: BaseException) -> None:
        """The innermost module call has raised."""

    def left(self, module: nn.Module, output: Any, *, outermost: bool) -> None:
        """A module has returned."""


MEASURED_ONLY = (
    "one call at a time is checked operator by operator; of the others, module outputs and gradients are measured"
)

_CALL = "call"

_RAISED = object()
"""Stands for what a module has returned whose call an exception has left."""


APART = 5e-3
"""Seconds between two outermost calls of a step that somebody is told of where none is looked at: to keep one takes 0.1 ms."""


class ModuleWatch:
    """Records dtype, shape, magnitude and finiteness of module outputs and their gradients.

    It keeps the position's ``call`` and ``stack``; a module called outside of any known one becomes a new root.

    Between looks it is told of outermost calls alone; their inner modules are not on the stack.

    Args:
        session: of the process.
        budget: says which steps and calls are looked at; None for all.
    """

    def __init__(self, session: Session, budget: Budget | None = None) -> None:
        self._budget = budget
        self._planned = -1
        self._looks_at_step = True
        self._kinds: Counter[tuple[int, str, bool]] = Counter()
        """Outermost calls so far, by their module, phase, and whether gradients follow."""
        self._passed: nn.Module | None = None
        """The module whose outermost call is running and is not looked at."""
        self._skipping = False
        """Whether nobody was told of that call."""
        self._skipped = 0
        """Such calls since the last one that somebody was told of."""
        self._next_kept = 0.0
        """When the next outermost call in this step is not skipped."""
        self.passed_by = 0
        """Outermost calls that were not looked at."""
        self._writer, self._position, self._names = session.writer, session.position, session.names
        self._guard, self._coverage = session.guard, session.coverage
        if budget is not None:
            session.readings.is_paid = lambda: self._position.looks
        self.sites = Sites(session.writer)
        self._places = Places(session.names)
        self.recorders = Recorders(session, self.sites)
        self.returned = Returned(session, self.sites, self.recorders)
        self._hooks = ModuleHooks()
        self._compiles = False
        self._handled: BaseException | None = None
        """The exception that was being handled when the hooks were lifted."""
        self._inside: dict[int, int] = {}
        """By the identity of an outermost module, or one that is called alone, the calls inside of its last one that was looked at: as many are taken
        to be in one that is not."""
        self._inside_from: dict[int, int] = {}
        self._again: set[int] = set()
        """Identities of modules that were called outside of looks, with a backward pass to follow."""
        self._undo: list[Callable[[], None]] = []
        self._in_place: set[int] = set()
        """Identities of modules that are compiled in place and were called; one may have gone since, and another have it."""
        self._alone: frozenset[int] = frozenset()
        self._apart: frozenset[int] = frozenset()
        """Both of these: modules of which more is asked than of others."""
        self._lead: dict[str, Here] = {}
        """Under :data:`_CALL` the thread whose outermost call is the one that is more than measured; a dictionary takes one in a single step, which
        nothing can interrupt."""
        self.raised_in: tuple[int, list[str]] = (0, [])
        """Identity of the last exception that left a module, and the module calls that were open where it began."""
        self._raised_at = (0, 0)
        self.recomputed: str | None = None
        """Dotted name of the module that was last called in a backward pass."""
        self.on_error: list[Callable[[nn.Module, Any, BaseException], None]] = []
        """Called with the innermost module whose call an exception has left, its positional arguments and the exception."""
        self.error_has_left: Callable[[BaseException], None] = lambda error: None
        """Called with an exception when all have heard that it has left an outermost call, before the program can see it."""
        self.before_root: list[CallListener] = []
        """Called with the module before each outermost call, but for one beside that of another thread."""
        self.before_first: list[CallListener] = []
        """The same after these, but not before a call outside of looks that is like one before it."""
        self.on_return: list[Callable[[nn.Module, Any, Any, Any], None]] = []
        """Called with the module, its positional and keyword arguments and its result when an outermost call has returned."""
        self.after_root: list[CallListener] = []
        """Called with the module after each outermost call that ``before_root`` was told of, also when it raised."""
        self.before_any: list[CallListener] = []
        """Called with the module before each outermost call, in whatever thread."""
        self.when_left: list[CallListener] = []
        """Called with the module when all of these have heard that its outermost call, with which ``before_root`` was called, is over."""
        self.before_alone: list[CallListener] = []
        self.alone_returned: list[Callable[[nn.Module, Any, Any, Any], None]] = []
        self.alone_left: list[CallListener] = []
        """Called before such a call, when it has returned, and when it is over, also by an exception; torch's hooks of the module run later."""
        self._replay: Replay | None = None
        self.after_any: list[Callable[[], None]] = []
        """Called after each outermost call, in whatever thread."""

    def start(self) -> None:
        """Begins to watch every module call of the process."""
        enters = self._guard.shield(self._enter, "some module calls", quick=True)
        leaves = self._guard.shield(self._leave, "the outputs of some modules", quick=True)
        if self._budget is not None:
            enters, leaves = self._only_looked_at(enters, leaves)
        self._ended = self._guard.shield(self._end, "the outputs of some modules", quick=True)
        self._undo = [
            self._hooks.remove,
            count_no_global_hook_of(self._hooks.put(enters, leaves)),
            follow_compiled_calls(self._around_compiled()),
        ]

    @property
    def alone(self) -> frozenset[int]:
        """Identities of modules below the outermost one whose calls are heard of as well, none of them inside of another."""
        return self._alone

    @alone.setter
    def alone(self, modules: frozenset[int]) -> None:
        self._alone = modules
        self._apart = modules | self._in_place

    def _around_compiled(self) -> CompiledCall:
        """Makes a call of a module that is compiled in place, as torch makes others: with the hooks before and after it."""
        enters = self._guard.shield(self._enter_compiled, "some module calls")
        leaves = self._guard.shield(self._leave_call, "the outputs of some modules")

        def call(module: nn.Module, compiled: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if is_compiling():
                return compiled(*args, **kwargs)
            if self._passed is not None and self._passed is not module:
                self._coverage.module_calls_skipped += self._hooks.lifted_for is None
                return compiled(*args, **kwargs)
            enters(module)
            output: Any = _RAISED
            try:
                output = compiled(*args, **kwargs)
                return output
            finally:
                if output is not _RAISED or isinstance(sys.exc_info()[1], Exception):  # torch's hooks hear of no other
                    leaves(module, args, kwargs, output)

        return call

    def _only_looked_at(
        self, enters: Callable[..., None], leaves: Callable[..., None]
    ) -> tuple[Callable[..., None], Callable[..., None]]:
        """The same hooks, which pass by what runs inside of a call that is not looked at.

        These modules are not on the stack of open calls, so what is said of a position is said of the call around them. One that
        raises is told of as if it had been entered.
        """
        position, coverage, in_place = self._position, self._coverage, self._in_place
        raised = self._guard.shield(self._raised_inside, "the outputs of some modules")

        def enter(module: nn.Module, args: Any) -> None:
            if is_compiling():
                return
            passed = self._passed
            if passed is None:
                if position.looks or not self._skips(module):
                    enters(module, args)
            elif passed is module or (id(module) in self._alone and not self._skipping):
                enters(module, args)

        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any = _RAISED) -> None:
            if is_compiling():
                return
            passed = self._passed
            if passed is None or (not self._skipping and (passed is module or id(module) in self._alone)):
                leaves(module, args, kwargs, output)
                return
            if output is not _RAISED:
                coverage.module_calls_skipped += not in_place or id(module) not in in_place
            else:
                raised(module, args)
            if passed is module:
                self._passed, self._skipping = None, False
                (position.of.here or position.last).stack.clear()

        return enter, leave

    def _raised_inside(self, module: nn.Module, args: Any) -> None:
        """The call of a module that is not looked at has raised: it is as if it, and those around it, had been entered."""
        if self.raised_in[0] != id(sys.exc_info()[1]) and self._replay is None:
            if self._skipping and self._skipped:
                self._begin_call(self._skipped - 1)
            self._position.stack[:] = calls_running()
            self._leave_any(module, args, {}, _RAISED)

    def _begin_call(self, skipped: int) -> None:
        """Gives an outermost call its number; those before it that nobody was told of have theirs, too."""
        self.passed_by += skipped
        self._skipped = 0
        self._position.begin_call(skipped)

    def _skips(self, module: nn.Module) -> bool:
        """Whether nobody is told of an outermost call: it is recomputed, or one of many in quick succession. The first call in a step is never skipped."""
        position = self._position
        here = position.of.here or position.last
        if here.stack or here.muted or self._replay is not None or self._lead or position.step != self._planned:
            return False
        if not here.backward_depth:
            kind = (id(module), here.phase, is_grad_enabled())
            if self._kinds[kind] < FIRST or perf_counter() >= self._next_kept:
                return False
            self._skipped += 1
        self._passed, self._skipping = module, True
        return True

    def stop(self) -> None:
        """Stops watching; everything measured so far gets into the trace."""
        while self._undo:
            self._undo.pop()()
        self.recorders.finish()
        self.returned.finish()

    @contextmanager
    def only_marking(self) -> Iterator[None]:
        """Nothing inside is recorded, but a process that dies inside says in which module; compiled code does not."""

        def mark(module: nn.Module, args: tuple[Any, ...]) -> None:
            place = None if is_compiling() or being_recorded() else self._places.of(module)
            if place is not None:
                here = position.here
                self._writer.mark(position.step, here.call, self.sites.entry(place, here.phase))

        position = self._position
        handle = register_own(hooks.register_module_forward_pre_hook, mark)
        try:
            yield
        finally:
            handle.remove()

    @property
    def is_replaying(self) -> bool:
        """Whether a call is being made again."""
        return self._replay is not None

    @contextmanager
    def following(self, replay: Replay) -> Iterator[None]:
        """Inside, only the stack of module calls is kept, and ``replay`` hears what becomes of the calls."""
        seen = (self.raised_in, self._raised_at, self.recomputed)  # of the exception that is on its way out
        self._replay = replay
        try:
            yield
        finally:
            self._replay = None
            self.raised_in, self._raised_at, self.recomputed = seen

    def plan_step(self) -> None:
        """A step begins, or the first event in it: decides whether it is looked at."""
        step = self._position.step
        if step == self._planned:
            return
        self._planned = step
        self._looks_at_step = self._position.looks = self._budget is None or self._budget.step_begins(step)
        self._next_kept = 0.0
        if (
            self._passed is not None and not calls_running()
        ):  # torch tells nobody of the end of a call that an interruption has left
            self._passed, self._skipping = None, False
            self._hooks.put_back()

    def _plan_call(self, module: nn.Module, here: Here) -> None:
        """An outermost call begins. Those that no backward pass follows are counted by themselves, and before the first step is done all are."""
        position, budget = self._position, self._budget
        if position.step != self._planned:
            self.plan_step()
        if budget is None or budget.is_fixed:
            return
        trains = is_grad_enabled()
        kind = (id(module), here.phase, trains)
        self._kinds[kind] = number = self._kinds[kind] + 1
        if trains and position.step > 1:
            self._position.looks = self._looks_at_step or number <= FIRST
        else:
            if number == 1 and position.step > 1:
                budget.begins_anew()
            self._position.looks = budget.call_begins(number, self._skipped) or 1 < position.step <= FIRST
        self._next_kept = perf_counter() + APART

    def begins_anew(self) -> None:
        """The program begins with something else than it has done so far, between its steps: what follows is looked at, as its first steps are."""
        position = self._position
        if self._budget is not None and not (position.looks or position.stack or position.backward_depth):
            position.looks = self._budget.begins_anew()

    def optimizer_steps(self) -> None:
        """An optimizer is about to step: in the first steps that is looked at, also where the calls before it are too many for that."""
        if self._budget is not None and not self._budget.is_fixed and self._position.step <= FIRST:
            self._position.looks = True

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """A module is called.

        An inner call of a known module outside of a backward pass needs no further function but one: each would take as long as all that is asked here.
        """
        here = self._position.of.here or self._position.last
        held = self._places.known.get(id(module))
        if not here.stack and id(module) in self._again and held is not None and self._is_as_before(module, here, held):
            self._enter_again(module, here, held[1])
        elif (
            held is None
            or held[0]() is not module
            or not held[1].fqn  # it may be an outermost one
            or not here.stack
            or here.backward_depth
            or id(module) in self._apart
            or here.thread != get_ident()
            or self._places.version != self._names.version
            or self._replay is not None
            or being_recorded()
        ):
            self._enter_any(module)
        else:
            self._mark(module, here, held[1])

    def _mark(self, module: nn.Module, here: Here, place: Place) -> None:
        here.stack.append(module)
        phase = here.overrides[-1] if here.overrides else "forward"
        self._writer.mark(self._position.step, here.call, place.sites.get(phase) or self.sites.entry(place, phase))

    def _is_as_before(self, module: nn.Module, here: Here, known: tuple[Any, Place]) -> bool:
        """Whether an outermost call outside of looks is, as far as the watch goes, like one before it of the same module."""
        something_else = (
            self._position.looks,
            self._looks_at_step,
            self._position.step != self._planned,
            known[0]() is not module,
            self._places.version != self._names.version,
            here.backward_depth,
            here.overrides,
            self._lead,
            self._in_place,
            self._replay is not None,
            not is_grad_enabled(),
            being_recorded(),
        )
        return not any(something_else)

    def _enter_again(self, module: nn.Module, here: Here, place: Place) -> None:
        """Such a call begins: all that the one before it has found out is left out."""
        here.thread = get_ident()
        self._writer.begin_call()
        self._begin_call(self._skipped)
        if self._budget is not None and not self._budget.is_fixed:
            self._next_kept = perf_counter() + APART
        self._lead[_CALL] = here
        self._passed, self._skipping = module, False
        self.passed_by += 1
        with DisableTensorClasses():
            for listener in (*self.before_any, *self.before_root):
                listener(module)
        if not self._alone:
            self._pass_by_inside(module)
        self._mark(module, here, place)

    def _enter_any(self, module: nn.Module) -> None:
        with DisableTensorClasses():
            if not (self._position.stack or self._in_place) or not self._is_told_otherwise(module):
                self._enter_call(module)

    def _enter_compiled(self, module: nn.Module) -> None:
        if id(module) not in self._in_place:
            self._in_place.add(id(module))
            self._apart = self._alone | self._in_place
        self._enter_call(module)

    def _is_told_otherwise(self, module: nn.Module) -> bool:
        """Whether the call of ``module`` that torch's hooks tell of is known already: they run inside of one that is compiled in place where Dynamo
        leaves it uncompiled."""
        return self._is_compilers(module) or (id(module) in self._in_place and is_followed(module))

    def _enter_call(self, module: nn.Module) -> None:
        if being_recorded():
            return
        here = self._position.of.here or self._position.last
        stack = here.stack
        if self._replay is not None:
            stack.append(module)
            self._replay.entered(module)
            return
        place = None
        if stack:
            place = self._places.of(module)
            if place is None or not place.fqn:  # it may be an outermost one
                forget_ended_calls(stack, here.thread)
        if stack and here.thread != get_ident() and self._in_another_thread():
            return
        if not stack:
            here.thread = get_ident()
            self._enter_root(module, here)
            place = self._places.of(module)
        is_alone = bool(stack) and id(module) in self._alone and self._leader is here
        stack.append(module)
        if place is not None:
            phase = here.phase
            self._writer.mark(self._position.step, here.call, place.sites.get(phase) or self.sites.entry(place, phase))
        if is_alone:
            for listener in self.before_alone:
                listener(module)
            self._pass_by_inside(module)

    def _is_compilers(self, module: nn.Module) -> bool:
        """Whether Dynamo has made ``module`` of code of the module that is being called, which returns what it returns; backends that
        generate no code of their own call such a one."""
        return isinstance(module, GraphModule) and bool(self._position.stack) and self._names.find(module) is None

    def _enter_root(self, module: nn.Module, here: Here) -> None:
        if self._names.find(module) is None:
            self._names.add_root(module)
        self._places.begin_call()
        self._writer.begin_call()
        if not here.backward_depth:  # a recomputed block belongs to the call that is being differentiated
            self._begin_call(self._skipped)
            if self._budget is not None and self._lead.get(_CALL, here) is here:
                self._plan_call(module, here)
        elif (place := self._names.find(module)) is not None:
            self.recomputed = place[1]
        for listener in self.before_any:
            listener(module)
        if self._leads(here):
            if not self._position.looks:
                self._passed, self._skipping = module, False
                self.passed_by += 1
            self.recorders.begin_call()
            for listener in (*self.before_root, *self.before_first):
                listener(module)
            if not self._alone:
                self._pass_by_inside(module)
            if not self._position.looks and self._position.step > 1 and is_grad_enabled():
                self._again.add(id(module))

    def _pass_by_inside(self, module: nn.Module) -> None:
        """``module`` is being called, and inside of it there is none of which more is asked: between looks nobody hears of those."""
        self._inside_from[id(module)] = self._coverage.module_calls
        if self._passed is not None and not (self._compiles or id(module) in self._in_place):
            self._handled = sys.exc_info()[1]
            self._hooks.lift(module, self._ended)

    def _end(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """The call for which the hooks were lifted is over."""
        error = sys.exc_info()[1]
        if self._hooks.lifted_for is not module:  # a copy of it, made while it was called
            return
        if output is not None or error is self._handled or error is None:
            self._hooks.put_back()
            self._coverage.module_calls_skipped += self._inside.get(id(module), 1) - 1
            self._leave_any(module, args, kwargs, output)
            return
        self._hooks.put_back(keep=True)  # torch is going through those of the module
        inner, inner_args = calls_left_by(error)
        self._position.stack[-1:] = inner
        if inner[-1] is not module:
            self._leave_any(inner[-1], inner_args, {}, _RAISED)
        self._leave_any(module, args, {}, _RAISED)

    def compiled_called(self) -> None:
        """A compiled function is about to be entered: from here on the hooks stay, since it may be compiled with as many as there are."""
        self._compiles = True
        self._hooks.put_back()

    @property
    def _leader(self) -> Here | None:
        return self._lead.get(_CALL)

    def _leads(self, here: Here) -> bool:
        """Whether what is done around an outermost call may be done for this one: modes, which belong to a thread, are put on and taken
        off, and comparisons made from call to call. Calls that other threads make at the same time are only measured."""
        if self._lead.setdefault(_CALL, here) is here:
            return True
        self._guard.tell("checks of single operators in modules that several threads call at once", MEASURED_ONLY)
        return False

    def _in_another_thread(self) -> bool:
        """Whether a thread that Python has not started calls a module while another one is inside of one: they cannot be told apart.

        Blocks that are recomputed in the backward pass of CUDA run in a thread of autograd's own, while the program waits.
        """
        if self._position.backward_depth:
            return False
        self._guard.tell(
            "modules in several threads at once",
            "only one thread's calls can be distinguished; call modules from one thread to have all of them measured",
        )
        return True

    def _leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: Any, output: Any = _RAISED) -> None:
        """A module call is over; the usual case in the same way."""
        here = self._position.of.here or self._position.last
        stack = here.stack
        held = self._places.known.get(id(module))
        if (
            held is None
            or held[0]() is not module
            or output is _RAISED
            or len(stack) < 2
            or stack[-1] is not module
            or id(module) in self._apart
            or here.thread != get_ident()
            or self._places.version != self._names.version
            or self._replay is not None
            or being_recorded()
        ):
            self._leave_any(module, args, kwargs, output)
            return
        try:
            self._coverage.module_calls += 1
            self.returned.record(module, held[1], args, kwargs, output)
        finally:  # whatever goes wrong in here, the call is over
            stack.pop()

    def _leave_any(self, module: nn.Module, args: tuple[Any, ...], kwargs: Any, output: Any) -> None:
        with DisableTensorClasses():
            stack = (self._position.of.here or self._position.last).stack
            is_only_call = len(stack) == 1 and stack[0] is module and not self._in_place
            if is_only_call or not self._is_told_otherwise(module):
                self._leave_call(module, args, kwargs, output)

    def _leave_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: Any, output: Any) -> None:
        if self._replay is not None or being_recorded():
            self._leave_replayed(module, args, output)
            return
        here = self._position.of.here or self._position.last
        stack = here.stack
        raised = output is _RAISED  # torch leaves the keyword arguments out where forward has raised
        if raised:
            kwargs, output = {}, None
        # Where no loss follows, what an outermost call returns is all that shows what went wrong inside.
        measures = not raised and (self._position.looks or (len(stack) == 1 and not is_grad_enabled()))
        self._coverage.module_calls += measures  # first of all: whatever goes wrong from here on, this call has run
        self._coverage.module_calls_skipped += not measures and not raised
        if stack and here.thread != get_ident() and self._in_another_thread():
            return
        if not (stack and stack[-1] is module) and not _unwound_to(module, stack):
            return  # entered while muted, or before the watch began
        try:
            if raised and (error := sys.exc_info()[1]) is not None:
                self._note_error(module, args, error)
            else:
                if measures:
                    place = self._places.of(module) or self._places.inside(stack)
                    self.returned.record(module, place, args, kwargs, output)
                if self._lead.get(_CALL) is here:
                    listeners = self.on_return if len(stack) == 1 else self.alone_returned
                    for listener in listeners if len(stack) == 1 or id(module) in self._alone else ():
                        listener(module, args, kwargs, output)
        finally:  # whatever goes wrong in here, the call is over
            stack.pop()
            if not stack:
                self._leave_root(module, here)
                if raised and (error := sys.exc_info()[1]) is not None:
                    self.error_has_left(error)
            elif id(module) in self._alone:
                self._leave_alone(module, here)

    def _leave_alone(self, module: nn.Module, here: Here) -> None:
        if self._leader is not here:
            return
        self._note_inside(module)
        for listener in self.alone_left:
            listener(module)

    def _note_inside(self, module: nn.Module) -> None:
        if self._passed is None and (begin := self._inside_from.get(id(module))) is not None:
            self._inside[id(module)] = self._coverage.module_calls - begin

    def _leave_replayed(self, module: nn.Module, args: Any, output: Any) -> None:
        """A module call inside of a replay is over; ``output`` is :data:`_RAISED` where it raised."""
        replay, stack = self._replay, self._position.stack
        if replay is None or being_recorded():
            return
        error = sys.exc_info()[1] if output is _RAISED else None
        if error is not None and self.raised_in[0] != id(error):
            self.raised_in = (id(error), self.open_modules())
            replay.raised(module, args, error)
        while stack and stack.pop() is not module:
            pass
        if output is not _RAISED:
            replay.left(module, output, outermost=not stack)

    def _leave_root(self, module: nn.Module, here: Here) -> None:
        led = self._lead.get(_CALL) is here
        if led:
            self._note_inside(module)
            self._passed = None
        try:
            if self._position.looks or not is_grad_enabled():  # else nothing was measured
                self.recorders.end_call(leads=led)
            if led:
                for listener in self.after_root:
                    listener(module)
            for after in self.after_any:
                after()
        finally:
            if led:
                del self._lead[_CALL]
        if led:
            for listener in self.when_left:
                listener(module)

    def _note_error(self, module: nn.Module, args: Any, error: BaseException) -> None:
        here = (self._position.call, len(self._position.stack))
        # An exception that nobody holds any more has left its address to the next one: the same one leaves the calls around it.
        same = self.raised_in[0] == id(error) and self._raised_at[0] == here[0] and self._raised_at[1] > here[1]
        self._raised_at = here
        if not same:
            self.raised_in = (id(error), self.open_modules())
            for listener in self.on_error:
                listener(module, args, error)

    def open_modules(self) -> list[str]:
        """Dotted names of the module calls that are open, outermost first."""
        found = (self._names.find(module) for module in self._position.stack)
        return [name for _, name in (place for place in found if place is not None)]

    def sample_now(self, kind: str, found: Sequence[Rooted], phase: str, when: When | None = None) -> None:
        """Measures tensors that no module returned (a loss, gradients of parameters, parameters).

        Args:
            kind: the site's kind.
            found: number of the outermost module that each tensor belongs to (0 where to none), its name, and the tensor.
            phase: the phase they belong to.
            when: coordinates of the samples; those of the moment if left out.
        """
        if found:
            self._measure([(self.site_of(kind, named, phase), named[2]) for named in found], when)

    def site_of(self, kind: str, named: Rooted, phase: str) -> int:
        """Number of the site of a tensor that no module returned."""
        root, name, tensor = named
        place = self._places.by_name.get((root, name, "")) or self._places.named(root, name)
        looks = (phase, kind, "", tensor.dtype, tensor.shape, None, tensor.device)
        return place.sites.get(looks) or self.sites.id_of(place, Looks(*looks))

    def sample_rows(self, found: Sequence[tuple[Place, Looks, Tensor]]) -> None:
        """Measures tensors, each at a place and as what it looks like there."""
        if found:
            self._measure([(self.sites.id_of(place, looks), tensor) for place, looks, tensor in found], None)

    def _measure(self, rows: Rows, when: When | None) -> None:
        position = self._position
        self.recorders.record(rows, when or When(self._writer.next_n(len(rows)), position.step, position.call))


def _unwound_to(module: nn.Module, stack: list[nn.Module]) -> bool:
    """Takes calls that an exception has left off ``stack``, so that ``module`` is the last on it; False where it is not on it."""
    if not any(open_module is module for open_module in stack):
        return False
    while stack[-1] is not module:
        stack.pop()
    return True
