"""Whether the program only tests a number that it reads: ``assert x.item() == inf``, ``if math.isnan(x)``, ``self.assertEqual(float(x), inf)``.

The number itself has left torch, so its use is read from the source; this is asked of numbers that are not finite alone.
"""

import ast
import linecache
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from types import CodeType, FrameType

from dtypedoctor.instrument.frames import span_of, users_frame

ASSERTED, TESTED, OTHER = "asserted", "guard", "item"
"""A number that an assertion has accepted; one that is asked whether it is finite; any other."""
_RETURNED = "returned"
_ASKING = frozenset({"isfinite", "isinf", "isnan", "isneginf", "isposinf"})
_INFINITY = re.compile(r"\b(neg)?inf(inity|ty)?\b", re.IGNORECASE)
Span = tuple[int, int, int, int]
"""First and last line (from 1), first and last column (bytes, from 0)."""


def use_of_number(frame: FrameType | None) -> str:
    """What becomes of the number that the user's line reads, there or where it is returned to."""
    frame = users_frame(frame)
    while frame is not None:
        use = _use(frame.f_code, frame.f_lasti)
        if use != _RETURNED:
            return use
        frame = frame.f_back
    return OTHER


@lru_cache(maxsize=1024)
def _use(code: CodeType, instruction: int) -> str:
    tree, span = _tree(code.co_filename), span_of(code, instruction)
    if tree is None or not span:
        return OTHER
    around = list(_around(tree, (span[0], span[1], span[2], span[3])))
    statement = next((node for node in around if isinstance(node, ast.stmt)), None)
    if isinstance(statement, ast.Return) and _tested_as(around) == OTHER:
        return _RETURNED
    if not isinstance(statement, ast.Assign) or not isinstance(name := statement.targets[0], ast.Name):
        return _tested_as(around)
    scope = next((node for node in around if isinstance(node, ast.FunctionDef)), tree)
    names = [node for node in ast.walk(scope) if isinstance(node, ast.Name) and node.id == name.id]
    uses = {_tested_as(_around(tree, _span(node))) for node in names if isinstance(node.ctx, ast.Load)}
    return OTHER if OTHER in uses else min(uses, default=OTHER)


@lru_cache(maxsize=8)
def _tree(file: str) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return None


def _around(node: ast.AST, span: Span) -> Iterator[ast.AST]:
    """The nodes that hold a span, innermost first."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.expr | ast.stmt | ast.keyword):
            yield from _around(child, span)
            continue
        first, last, begin, end = _span(child)
        if (first, begin) <= (span[0], span[2]) and (span[1], span[3]) <= (last, end):
            yield from _around(child, span)
            yield child


def _span(node: ast.expr | ast.stmt | ast.keyword) -> Span:
    return node.lineno, node.end_lineno or node.lineno, node.col_offset, node.end_col_offset or node.col_offset


def _tested_as(around: Iterable[ast.AST]) -> str:
    """Whether the innermost of nodes is asserted by those around it, asked whether it is finite, or compared with an infinity or with itself."""
    use = OTHER
    for node in around:
        name = _name_of(node.func).lower() if isinstance(node, ast.Call) else ""
        if isinstance(node, ast.Assert) or name.startswith("assert"):
            return ASSERTED
        if name in _ASKING or (isinstance(node, ast.Compare) and _asks_for_infinity(node)):
            use = TESTED
        if isinstance(node, ast.stmt):
            break
    return use


def _name_of(called: ast.expr) -> str:
    return called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""


def _asks_for_infinity(comparison: ast.Compare) -> bool:
    compared = [ast.unparse(side) for side in (comparison.left, *comparison.comparators)]
    return len(set(compared)) < len(compared) or any(map(_INFINITY.search, compared))
