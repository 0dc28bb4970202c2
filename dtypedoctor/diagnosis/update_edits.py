"""Edits for a line that updates tensors of its own, a moving average say: what makes these tensors, and nothing besides."""

import ast
from collections.abc import Iterator

from dtypedoctor.diagnosis.dtype_edits import half_in_float32
from dtypedoctor.diagnosis.scene import Change, Changes, Scene, Source, some

OWN = "updated-in-float32"


def fitting(scene: Scene, makers: tuple[str, ...]) -> tuple[str, ...]:
    """The makers that fit a finding: of a line that updates tensors of its own, the one that changes what makes these."""
    if scene.finding.id != "update-stall" or scene.finding.source is None:
        return tuple(name for name in makers if name != OWN)
    at = _updating(scene)
    if at is not None and any(".parameters()" in text for text in (at[2], *map(ast.unparse, _made(at[0], at[2])))):
        return makers  # a step by hand
    return tuple(name for name in makers if name == OWN)


def updated_in_float32(scene: Scene) -> Changes | None:
    """Half precision becomes float32 where the tensors are made that the finding's line updates, and on that line."""
    at = _updating(scene)
    if at is None:
        return None
    source, statement, holder = at
    made = [change for value in _made(source, holder) for change in _in_float32(source, value)]
    return some(source, [*made, *_in_place_of_half(source, statement), *_swapped_in(source, holder)] if made else [])


def _updating(scene: Scene) -> tuple[Source, ast.stmt, str] | None:
    """The statement on the finding's line, and what holds the tensors that it updates."""
    at = scene.failing_line()
    statements = _statements_on(*at) if at is not None else []
    return (at[0], statements[-1], _holder(at[0], statements[-1])) if at is not None and statements else None


def _statements_on(source: Source, line: int) -> list[ast.stmt]:
    kinds = (ast.Expr, ast.Assign, ast.AugAssign)
    return [
        node
        for node in ast.walk(source.tree)
        if isinstance(node, kinds) and node.lineno <= line <= (node.end_lineno or 0)
    ]


def _holder(source: Source, statement: ast.stmt) -> str:
    """What holds the tensors that a statement updates: ``self.shadow`` for ``self.shadow[name].mul_(decay)``; empty where that is not seen."""
    target = _updated(statement)
    for _ in range(3):  # a variable of a loop, then what the loop goes over
        if target is None:
            return ""
        while isinstance(target, ast.Subscript):
            target = target.value
        over = _looped_over(source, target, statement)
        if over is None:
            break
        target = over
    return ast.unparse(target) if target is not None else ""


def _updated(statement: ast.stmt) -> ast.expr | None:
    """The expression that a statement writes to."""
    if isinstance(statement, ast.AugAssign):
        return statement.target
    if isinstance(statement, ast.Assign):
        return statement.targets[0]
    node: ast.expr | None = statement.value if isinstance(statement, ast.Expr) else None
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr.startswith("_foreach_"):
            first = node.args[0] if node.args else None
            return first.elts[0] if isinstance(first, ast.List) and first.elts else first
        node = node.func.value
    return node


def _looped_over(source: Source, target: ast.expr, statement: ast.stmt) -> ast.expr | None:
    """``self.shadow`` for the variable ``s`` of ``for s, p in zip(self.shadow.values(), parameters)``."""
    for loop in reversed(source.around(statement, ast.For)):
        for names, values in _pairs(loop.target, loop.iter):
            if ast.unparse(names) == ast.unparse(target):
                return values
    return None


def _pairs(target: ast.expr, values: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """The variables of a loop, each with what it goes over."""
    parts = target.elts if isinstance(target, ast.Tuple) else [target]
    called = ast.unparse(values.func) if isinstance(values, ast.Call) else ""
    if not isinstance(values, ast.Call):
        yield target, values
    elif called in ("zip", "enumerate"):
        for part, value in zip(parts[called == "enumerate" :], values.args, strict=False):
            yield from _pairs(part, value)
    elif isinstance(values.func, ast.Attribute) and values.func.attr in ("values", "items"):
        yield parts[-1], values.func.value
    else:
        yield target, values


def _made(source: Source, holder: str) -> Iterator[ast.expr]:
    """The values that the holder, or an element of it, is given; not those that are computed from itself."""
    for node in source.every(ast.Assign):
        target = node.targets[0]
        while isinstance(target, ast.Subscript):
            target = target.value
        if ast.unparse(target) == holder and holder not in {ast.unparse(one) for one in ast.walk(node.value)}:
            yield node.value
    for call in source.every(ast.Call):
        if ast.unparse(call.func) == f"{holder}.append" and call.args:
            yield call.args[0]


def _in_float32(source: Source, value: ast.expr) -> list[Change]:
    """The dtypes that an expression names become float32; where it names none, each tensor that it makes is cast."""
    named = [change for node in ast.walk(value) for change in half_in_float32(source, node)]
    return named or [change for one in _elements(value) for change in source.after(one, ".float()")]


def _elements(value: ast.expr) -> list[ast.expr]:
    """The tensors that an expression makes; none where it makes no tensor that is seen, an empty list say."""
    if isinstance(value, ast.DictComp):
        return _elements(value.value)
    if isinstance(value, ast.ListComp):
        return _elements(value.elt)
    clones = isinstance(value, ast.Call) and ast.unparse(value.func).rpartition(".")[2] in (
        "clone",
        "deepcopy",
        "zeros_like",
    )
    return [value] if clones else []


def _in_place_of_half(source: Source, statement: ast.stmt) -> list[Change]:
    """The line itself: what it casts to half precision is float32, and ``lerp_`` gets the dtype of what it writes to."""
    changes = [change for node in ast.walk(statement) for change in half_in_float32(source, node)]
    calls = [
        node for node in ast.walk(statement) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    ]
    return changes or [change for call in calls for change in _lerp(source, call, ast.unparse(call.func))]


def _lerp(source: Source, call: ast.Call, function: str) -> list[Change]:
    """``lerp_`` takes one dtype only, where other operators promote."""
    if function.endswith("._foreach_lerp_") and len(call.args) > 1:
        return [source.instead(call.args[1], f"[t.float() for t in {source.text(call.args[1])}]")]
    return source.after(call.args[0], ".float()") if function.endswith(".lerp_") and call.args else []


def _swapped_in(source: Source, holder: str) -> Iterator[Change]:
    """``p.data = self.shadow[name]``: weights keep their dtype where the tensors take their place."""
    for node in source.every(ast.Assign):
        target = node.targets[0]
        if (
            isinstance(target, ast.Attribute)
            and target.attr == "data"
            and ast.unparse(node.value).startswith(f"{holder}[")
        ):
            yield from source.after(node.value, f".to({ast.unparse(target.value)}.dtype)")
