"""Makes the statement again with which the program has ended, in its frame, under the op trace: outside of module calls nobody has kept the operands.

The frames of an exception outlive it with their variables, and Python knows which expression an instruction belongs to. That of the innermost frame is
run again, so that as little as possible is: of ``scores.cpu().numpy()`` in a callback these two calls, of a gradient scaler's step the call of its kernel. What it
computes with is there as it was, unless something has written to it since; only if the same is raised again does it show anything.
"""

import ast
import builtins
import linecache
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import CodeType, TracebackType
from typing import TYPE_CHECKING, Any

import torch

from dtypedoctor._torch_private import as_the_program
from dtypedoctor.dtypes import DTYPE_WORDS
from dtypedoctor.instrument.frames import Line, is_own_file, source_of, span_of
from dtypedoctor.instrument.repeated_call import type_and_message
from dtypedoctor.instrument.session import Session
from dtypedoctor.instrument.untouched import Again, KeptMemory, at_moment, make_again
from dtypedoctor.interruptions import contained
from dtypedoctor.trace.events import REPLAY_OF_FAILURES
from dtypedoctor.trace.records.execution import AutocastRegion

if TYPE_CHECKING:
    from dtypedoctor.instrument.optrace import OpTrace

__all__ = ["show_operands"]

RESERVED = 1 << 17
"""Numbers of the trace for its operators."""
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
            session.writer.forget_held()  # another failure shows nothing of this one

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
