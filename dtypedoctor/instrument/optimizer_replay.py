"""An optimizer step that has written inf or NaN into a parameter is made again on copies, under the op trace.

For programs of which no fork can go on. Parameters in float16, their gradients and their state are copied before each step, behind the stream:
float16 is the dtype in which an epsilon rounds to 0 and an update overflows. When a parameter is found not to be finite that was finite before the
step, as its gradient was, the same ``step`` runs on the copies; nothing of the program is touched.

The statement with which the program has ended is made again, too, in its frame (:func:`show_operands`): outside of module calls nobody has kept the operands.
The frames of an exception outlive it with their variables, and Python knows which expression an instruction belongs to. That of the innermost frame is
run again, so that as little as possible is: of ``scores.cpu().numpy()`` in a callback these two calls, of a gradient scaler's step the call of its kernel. What it
computes with is there as it was, unless something has written to it since; only if the same is raised again does it show anything.
"""

import ast
import builtins
import linecache
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from inspect import unwrap
from itertools import zip_longest
from types import CodeType, TracebackType
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dtypedoctor._torch_private import as_the_program, copy_all, version_of
from dtypedoctor.dtypes import DTYPE_WORDS
from dtypedoctor.instrument.frames import Line, is_own_file, source_of, span_of
from dtypedoctor.instrument.operators import bytes_of, uncollected
from dtypedoctor.instrument.repeated_call import is_same, share_of_device, type_and_message
from dtypedoctor.instrument.session import Session
from dtypedoctor.instrument.statistics import is_finite, measurable, out_of_their_sight
from dtypedoctor.instrument.untouched import Again, KeptMemory, at_moment, make_again
from dtypedoctor.interruptions import contained
from dtypedoctor.redaction.messages import message_of
from dtypedoctor.trace.events import REPLAY_OF_FAILURES
from dtypedoctor.trace.records.execution import AutocastRegion, ReplayedCall

if TYPE_CHECKING:
    from dtypedoctor.instrument.optrace import OpTrace


__all__ = ["OptimizerReplays", "show_operands"]

KEPT = 2
"""Steps of which the copies are kept: what a device computes may be known one step later."""
RESERVED = 1 << 17
"""Numbers of the trace that are kept free for the operators of a replay."""
LEFT_OUT = (
    "copies of all float16 parameters, gradients and states take more than {:,} MiB; --rerun records the optimizer step"
)


@dataclass(slots=True, kw_only=True)
class _Copy:
    """A parameter before the step: the parameter, copies of it and of its gradient, its state, and its version after the step."""

    parameter: Tensor
    value: Tensor
    gradient: Tensor
    state: dict[str, Any]
    version: int = -1

    def is_spoilt(self, after: Tensor) -> bool:
        """Whether the step has made it inf or NaN, which leaves it as ``after``; asks the device, and waits for it."""
        return not is_finite(after) and is_finite(self.value) and is_finite(self.gradient)


@dataclass(slots=True, kw_only=True)
class _Step:
    """An optimizer step as it began.

    Attributes:
        optimizer: which one; the program may want it and its parameters to die.
        cls: its class.
        fields: its attributes.
        groups: its groups of parameters, with the options of then.
        copies: by the identity of the parameter.
        buffers: memory of the copies, for the step after the next.
        number: the first of the numbers that are reserved for it.
        step, call: the position.
        source: the line of the program that has called it.
        is_whole: whether all float16 parameters were copied.
    """

    optimizer: ref[Optimizer]
    cls: type[Optimizer]
    fields: dict[str, Any]
    groups: list[dict[str, Any]]
    copies: dict[int, _Copy]
    buffers: list[Tensor]
    number: int
    step: int
    call: int
    source: str | None
    is_whole: bool

    def spoils(self, later: "_Step | None") -> bool:
        """Whether the step has made a parameter inf or NaN; what it left is what the ``later`` one, if there is one, has begun with."""
        begun_later = later.copies if later is not None else {}
        return any(
            copy.is_spoilt(begun_later[key].value if key in begun_later else copy.parameter)
            for key, copy in self.copies.items()
        )

    def twin(self) -> Optimizer:
        """An optimizer of the same class that has the copies for parameters, and nothing in common with the program's."""
        others = {number: nn.Parameter(copy.value) for number, copy in self.copies.items()}
        twin: Optimizer = object.__new__(self.cls)
        vars(twin).update(self.fields)
        twin.state = defaultdict(dict)
        for number, copy in self.copies.items():
            others[number].grad = copy.gradient
            if copy.state:
                twin.state[others[number]] = copy.state
        twin.param_groups = [
            {**group, "params": [others[id(p)] for p in group["params"] if id(p) in others]} for group in self.groups
        ]
        return twin


class OptimizerReplays:
    """Copies what optimizer steps begin with, and makes the step again that has spoilt a parameter.

    Args:
        session: of the process.
        new_trace: makes an op trace.
        measure: has all parameters measured that were not since the last step.

    Attributes:
        has_explained: whether a step was found that has spoilt a parameter: what is not finite later follows from it.
    """

    def __init__(self, session: Session, new_trace: "Callable[[], OpTrace]", measure: Callable[[], None]) -> None:
        self._session = session
        self._new_trace = new_trace
        self._measure = measure
        self._steps: list[_Step] = []
        self._is_told = False
        self.has_explained = False

    def before_step(self, optimizer: Optimizer) -> None:
        """A step begins: queues the copies, and does not wait for them."""
        if self.has_explained or isinstance(getattr(optimizer, "optimizer", None), Optimizer):
            return  # a wrapper; the optimizer inside tells of itself
        parameters, is_whole = _copied(optimizer)
        if not parameters:
            return
        oldest = self._steps.pop(0) if len(self._steps) >= KEPT else None
        position = self._session.position
        with position.mute(), out_of_their_sight(), torch.no_grad():
            buffers, copies = _copies(optimizer, parameters, oldest.buffers if oldest is not None else [])
        begun = _Step(
            optimizer=ref(optimizer, self._forget),
            cls=type(optimizer),
            fields=dict(vars(optimizer)),
            groups=[dict(group) for group in optimizer.param_groups],
            copies=copies,
            buffers=buffers,
            number=self._session.writer.next_n(RESERVED),
            step=position.step,
            call=position.call,
            source=source_of(sys._getframe()),
            is_whole=is_whole,
        )
        self._steps.append(begun)

    def after_step(self, optimizer: Optimizer) -> None:
        """A step has ended."""
        for begun in self._steps[-1:]:
            if begun.optimizer() is optimizer:
                for copy in begun.copies.values():
                    copy.version = version_of(copy.parameter)

    def _forget(self, optimizer: ref[Optimizer]) -> None:
        """An optimizer has died."""
        self._steps = [begun for begun in self._steps if begun.optimizer is not optimizer]

    def explain(self) -> None:
        """Something is not finite: makes the step again that has spoilt a parameter, if one has. Waits for the device."""
        for begun, later in zip_longest(self._steps, self._steps[1:]):
            if begun.spoils(later):
                self.has_explained = True
                self._measure()
                self._replay(begun)
                self._steps.clear()
                return
        if not all(begun.is_whole for begun in self._steps) and not self._is_told:
            self._is_told = True
            limit = share_of_device() >> 20
            self._session.guard.tell(REPLAY_OF_FAILURES, LEFT_OUT.format(limit))

    def _replay(self, begun: _Step) -> None:
        ops = self._new_trace()
        ops.lines = {source_of(sys._getframe()): begun.source}
        twin = begun.twin()
        session = self._session
        same: list[bool] = []

        def step() -> None:
            with torch.no_grad(), as_the_program():
                unwrap(type(twin).step)(twin)

        again = make_again(
            session,
            step,
            roots=[vars(twin)],
            at=at_moment(session, begun.number, step=begun.step, call=begun.call, overrides=("optimizer",)),
            ops=ops,
            before_undone=lambda _: same.extend(_compared(begun)),
        )
        if again.error is not None and not again.why_not:
            again.why_not = f"its optimizer step raised {message_of(again.error)}"
        if again.why_not:
            session.guard.tell(REPLAY_OF_FAILURES, again.why_not)
            return
        doubt = None if all(same) else "the result of the optimizer step differs from that of its replay"
        session.emit(ReplayedCall(why="optimizer", compared=bool(same), doubt=doubt, copies=True))


def _compared(begun: _Step) -> Iterator[bool]:
    """Whether each parameter that was not written to since has the bits that the replay has made of its copy."""
    for copy in begun.copies.values():
        if version_of(copy.parameter) == copy.version:
            yield is_same(copy.parameter, copy.value)


def _copied(optimizer: Optimizer) -> tuple[list[Tensor], bool]:
    """The parameters that are copied before a step, and whether these are all of float16."""
    narrow = [p for group in optimizer.param_groups for p in group["params"] if p.dtype is torch.float16]
    if not narrow:
        return [], True
    left, is_whole = share_of_device() // KEPT, True
    found = []
    for parameter in filter(_is_at_risk, narrow):
        size = bytes_of([parameter, parameter.grad, *_tensors(optimizer, parameter)])
        if size <= left:
            left -= size
            found.append(parameter)
        else:
            is_whole = False
    return found, is_whole


def _is_at_risk(parameter: Tensor) -> bool:
    """Whether an optimizer step may make a parameter inf or NaN, and plain memory is all that there is of it."""
    is_plain = type(parameter) in (Tensor, nn.Parameter) and measurable(parameter)
    return is_plain and parameter.grad is not None and measurable(parameter.grad)


def _tensors(optimizer: Optimizer, parameter: Tensor) -> list[Tensor]:
    """The state of a parameter as far as it is tensors."""
    return [value for value in optimizer.state.get(parameter, {}).values() if isinstance(value, Tensor)]


def _copies(
    optimizer: Optimizer, parameters: list[Tensor], buffers: list[Tensor]
) -> tuple[list[Tensor], dict[int, _Copy]]:
    """Copies of parameters, their gradients and their states, in ``buffers`` if these fit; the memory that they lie in."""
    sources: list[Tensor] = []
    for parameter in parameters:
        assert parameter.grad is not None
        sources += [parameter.detach(), parameter.grad.detach(), *_tensors(optimizer, parameter)]
    if list(map(_looks, buffers)) != list(map(_looks, sources)):
        buffers = uncollected([torch.empty_like(source) for source in sources])
    copy_all(buffers, sources)
    left = iter(buffers)
    found = {}
    for parameter in parameters:
        value, gradient = next(left), next(left)
        state = dict(optimizer.state.get(parameter, {}))
        state = {key: next(left) if isinstance(held, Tensor) else held for key, held in state.items()}
        found[id(parameter)] = _Copy(parameter=parameter, value=value, gradient=gradient, state=state)
    return buffers, found


def _looks(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.device, tensor.stride()


MAX_SECONDS = 10.0
"""Time in which its operators may begin: its operands may come from a call that takes hours."""
CANNOT = "what raised at {} cannot be run again: {}"
_SIMPLE = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr, ast.Return)
"""Statements without others inside."""


@dataclass(frozen=True, slots=True)
class _Statement:
    """An expression or a statement that has raised, and a copy of the variables that its frame sees."""

    node: ast.expr | ast.stmt
    code: CodeType
    variables: dict[str, Any]

    @property
    def named(self) -> dict[str, Any]:
        """The variables that it names."""
        names = {node.id for node in ast.walk(self.node) if isinstance(node, ast.Name)}
        return {name: self.variables[name] for name in names & self.variables.keys()}

    def run(self) -> None:
        """Runs it. What it assigns to a name, it assigns in the copy."""
        value = self.node.value if isinstance(self.node, (ast.Expr, ast.Return)) and self.node.value else self.node
        if isinstance(value, ast.expr):
            compiled = compile(ast.Expression(value), self.code.co_filename, "eval", dont_inherit=True)
        else:
            compiled = compile(ast.Module([value], []), self.code.co_filename, "exec", dont_inherit=True)
        exec(compiled, self.variables)  # noqa: S102  (the program's own code, which has just run)


def show_operands(error: BaseException, session: Session, ops: "OpTrace") -> None:
    """Records which operator or function of torch has raised ``error``, with its operands and what it does with others.

    Args:
        error: ends the program, and was raised outside of module calls and of backward passes.
        session: of the process.
        ops: an op trace.
    """
    links = list(_links(error.__traceback__))
    statement = _raised_by(links[-1]) if links else None
    if statement is None or not any(word in str(error) for word in DTYPE_WORDS):
        return  # what has nothing to do with dtypes need not run twice
    # What a library raises is told at the line of the program that has called it.
    own = next((link for link in reversed(links) if is_own_file(link.tb_frame.f_code.co_filename)), links[-1])
    line = Line(own.tb_frame.f_code, own.tb_frame.f_globals.get("__name__", ""), own.tb_lineno).source
    ops.lines = {source_of(sys._getframe()): line}
    why_not = _run_again(statement, error, session, ops)
    if why_not:
        session.guard.tell(REPLAY_OF_FAILURES, CANNOT.format(line, why_not))


def _links(traceback: TracebackType | None) -> Iterator[TracebackType]:
    """The links of a traceback, outermost first, without those of the doctor's."""
    while traceback is not None:
        if not traceback.tb_frame.f_globals.get("__name__", "").startswith("dtypedoctor."):
            yield traceback
        traceback = traceback.tb_next


def _raised_by(link: TracebackType) -> _Statement | None:
    """What has raised in a frame; None where its source cannot be read."""
    frame, code = link.tb_frame, link.tb_frame.f_code
    variables = {**frame.f_globals, **frame.f_locals}
    nodes = _nodes_around(code.co_filename, span_of(code, link.tb_lasti))
    # A comprehension that is part of its function's code (Python 3.12) has taken its variables with it: it runs again as a whole.
    node = next((node for node in nodes if _names_of(node) <= {*variables, *vars(builtins)}), None)
    return None if node is None else _Statement(node, code, variables)


def _nodes_around(file: str, span: Sequence[int]) -> list[ast.expr | ast.stmt]:
    """The expressions and simple statements of a file around an instruction, the smallest first; of what is assigned to, the statement."""
    around: list[ast.expr | ast.stmt] = []
    with contained():  # the file has changed, or is no Python
        first, last, begin, end = span
        tree = ast.parse("".join(linecache.getlines(file)))
        for node in ast.walk(tree):  # comes to what is inside of a node after the node
            if not isinstance(node, (ast.expr, *_SIMPLE)) or isinstance(getattr(node, "ctx", None), ast.Store):
                continue
            ends = (node.end_lineno or 0, node.end_col_offset or 0)
            if (node.lineno, node.col_offset) <= (first, begin) and (last, end) <= ends:
                around.insert(0, node)
    return around


def _names_of(node: ast.expr | ast.stmt) -> set[str]:
    """The variables that it reads and does not make itself."""
    names = [each for each in ast.walk(node) if isinstance(each, ast.Name)]
    made = {name.id for name in names if isinstance(name.ctx, ast.Store)}
    made |= {
        arg.arg
        for each in ast.walk(node)
        if isinstance(each, ast.Lambda)
        for arg in ast.walk(each)
        if isinstance(arg, ast.arg)
    }
    return {name.id for name in names} - made


def _run_again(statement: _Statement, error: BaseException, session: Session, ops: "OpTrace") -> str:
    """Why the statement could not be run again; empty where it was, whatever came of it."""
    named = list(statement.named.values())
    if any(hasattr(type(value), "__next__") for value in named):
        return "it may take the next item of an iterator"
    position = session.position

    def run() -> None:
        with _modes(session, error):
            ops.open(outside=True)
            statement.run()

    def forget_another(again: Again) -> None:
        if again.error is None or type_and_message(again.error) != type_and_message(error):
            session.writer.forget_held()  # the operators of another failure do not belong to this one

    number = session.writer.next_n(RESERVED)
    again = make_again(
        session,
        run,
        roots=named,
        at=at_moment(session, number, step=position.step, call=position.call, overrides=position.overrides),
        ops=ops,
        memory=KeptMemory(seconds=MAX_SECONDS),
        before_undone=forget_another,
    )
    return again.why_not


@contextmanager
def _modes(session: Session, error: BaseException) -> Iterator[None]:
    """Inside, the autocast regions are open that ``error`` has left. Gradients are not recorded: a result changes nothing of them."""
    regions = session.autocast.left_by(error)
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(as_the_program())
        for region in regions:
            stack.enter_context(_opened(region))
        session.autocast.open_again(regions)
        yield


def _opened(region: AutocastRegion) -> torch.autocast:
    return torch.autocast(
        region.device, dtype=getattr(torch, region.wanted), enabled=region.enabled, cache_enabled=False
    )
