"""Edits that keep values finite and training going: bounds, masks, learning rates, gradient scalers, the compiler."""

import ast
import re
from collections.abc import Iterator, Mapping

from dtypedoctor.diagnosis.ops import MASKING, Mask, graph_of, mask_before, overload_free
from dtypedoctor.diagnosis.scene import (
    ATOMS,
    Change,
    Changes,
    Scene,
    Source,
    function_around,
    has_torch,
    in_calls,
    names_a_module,
    scalers,
    some,
    with_keyword,
)
from dtypedoctor.diagnosis.wording import differentiated
from dtypedoctor.trace.events import Op
from dtypedoctor.trace.records.execution import Unscaled


def lower_learning_rate(scene: Scene) -> Changes | None:
    """A hundredth of each learning rate that is a number."""

    def lowered(source: Source, call: ast.Call) -> list[Change]:
        rates = [keyword.value for keyword in call.keywords if keyword.arg in ("lr", "learning_rate")]
        numbers = [rate for rate in rates if isinstance(rate, ast.Constant) and isinstance(rate.value, float | int)]
        return [source.instead(rate, f"{float(str(rate.value)) / 100:g}") for rate in numbers]

    return in_calls(scene, "", lowered)


_ARGUMENT = {
    "log": ".clamp_min(1e-6)", "log2": ".clamp_min(1e-6)", "log10": ".clamp_min(1e-6)", "sqrt": ".clamp_min(1e-12)",
    "rsqrt": ".clamp_min(1e-12)", "acos": ".clamp(-1 + 1e-6, 1 - 1e-6)", "asin": ".clamp(-1 + 1e-6, 1 - 1e-6)",
    "exp": ".clamp(max=80)", "div": ".clamp_min(1e-6)",
}  # fmt: skip
"""What keeps the argument of a function inside of its domain."""

_IN_FLOAT16 = {
    "sqrt": ".clamp_min(1e-6)", "rsqrt": ".clamp_min(1e-6)", "exp": ".clamp(max=10)", "div": ".clamp_min(1e-4)",
}  # fmt: skip
"""The same for float16, whose numbers are between 6e-8 and 65,504."""

_IN_HALF = dict.fromkeys(("acos", "asin"), ".clamp(-0.99, 0.99)")
"""The same for float16 and bfloat16, in which 1 - 1e-6 is 1."""


def keep_in_domain(scene: Scene) -> Changes | None:
    """Keeps the argument of the function that returned NaN or inf inside of its domain, on the line that the finding names."""
    found = scene.failing_line()
    if found is None or _was_given_inf(scene):
        return None
    source, line = found
    names = _names_of_operator(scene)
    bounds = {name: bound for name, bound in _bounds(scene).items() if name in names}
    nodes = list(source.on_line(line))
    is_tensor = _divides_by_tensors(scene) if sum(map(_is_division, nodes)) == 1 else False
    made = list(filter(None, (_bounded(source, node, bounds, names, is_tensor) for node in nodes)))
    return (source, made[0]) if len(made) == 1 else None  # of several, which one failed is not known


def _was_given_inf(scene: Scene) -> bool:
    """Whether an operand of the failing operator is not finite: no bound of its argument helps then."""
    place = scene.finding.source, scene.finding.op
    failing = [
        op for op in scene.trace.all(Op) if (op.source, op.op) == place and any(not t.finite for t in op.outputs)
    ]
    return bool(failing) and not all(t.finite for t in failing[0].inputs)


def _names_of_operator(scene: Scene) -> set[str]:
    """What the failing operator is called in Python, or the one that it differentiates."""
    family = overload_free(scene.finding.op or "").rstrip("_")
    here = [op for op in scene.trace.all(Op) if op.source == scene.finding.source]
    derived = {name for op in here if (name := differentiated(op))}
    of_division = {"sqrt"} if family == "div" else set()  # the backward pass of a square root divides by it
    return {family, family.removesuffix("_backward"), *derived, *of_division}


def _bounds(scene: Scene) -> dict[str, str]:
    """What bounds the arguments of functions in the dtype of the finding."""
    dtype = scene.finding.dtype
    half = _IN_HALF if dtype in ("float16", "bfloat16") else {}
    return _ARGUMENT | half | (_IN_FLOAT16 if dtype == "float16" else {})


def _divides_by_tensors(scene: Scene) -> bool | None:
    """Whether the divisions that the finding's line makes are by tensors, and not by numbers; None where none was recorded."""
    here = (op for op in scene.trace.all(Op) if op.source == scene.finding.source and op.phase == "forward")
    by_tensors = [len(op.inputs) == 2 for op in here if overload_free(op.op).rstrip("_") == "div"]
    return all(by_tensors) if by_tensors else None


_DIVISIONS = frozenset({"div", "divide", "true_divide"})


def _is_division(node: ast.expr) -> bool:
    """``a / b``, ``torch.div(a, b)``, ``a.div(b)``."""
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.Div)
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _DIVISIONS


def _bounded(
    source: Source, node: ast.expr, bounds: Mapping[str, str], names: set[str], is_tensor: bool | None
) -> list[Change]:
    """The change of one expression; empty where it is not the one that left its domain."""
    if _is_division(node):
        divisor = _divided_by(node)
        return _divisor(source, divisor, bounds["div"], is_tensor) if divisor is not None and "div" in bounds else []
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return _bounded_call(source, node, node.func, bounds, names)
    return []


def _divided_by(node: ast.expr) -> ast.expr | None:
    """What a division divides by."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return _argument(node, node.func, 1)
    return node.right if isinstance(node, ast.BinOp) else None


def _bounded_call(
    source: Source, node: ast.Call, function: ast.Attribute, bounds: Mapping[str, str], names: set[str]
) -> list[Change]:
    name = function.attr
    if name == "std" and names & {"std", "var", "sqrt"}:
        return _deviation(source, node, function)
    if name == "cross_entropy" and len(node.args) == 2:
        return _mean_of_labels(source, node) if names_a_module(function.value) else []
    argument = _argument(node, function, 0)
    return source.after(argument, bounds[name]) if name in bounds and argument is not None else []


def _deviation(source: Source, node: ast.Call, function: ast.Attribute) -> list[Change]:
    """``x.std(0)``: of a single value it is 0 / 0 where it divides by one less; not where the program chose that."""
    given = [*node.args, *(keyword.value for keyword in node.keywords if keyword.arg == "unbiased")]
    chosen = any(isinstance(one, ast.Constant) and isinstance(one.value, bool) for one in given)
    is_numpy = ast.unparse(function.value) in _NUMBERS
    return with_keyword(source, node, "correction=0") if not chosen and not is_numpy else []


_NUMBERS = frozenset({"math", "cmath", "np", "numpy"})
"""Namespaces whose functions return numbers, or arrays that are no tensors."""


def _argument(node: ast.Call, function: ast.Attribute, number: int) -> ast.expr | None:
    """What ``torch.div(x, y)`` or ``x.div(y)`` is of, first or second; None where it is a function of something else."""
    if ast.unparse(function.value) in {"self", "cls", *_NUMBERS}:
        return None
    given = node.args if names_a_module(function.value) else [function.value, *node.args]
    return given[number] if len(given) == number + 1 else None


def _divisor(source: Source, divisor: ast.expr, bound: str, is_tensor: bool | None) -> list[Change]:
    """Keeps what is divided by away from 0, where it is a tensor, with its sign; empty for what may be a number, or must be computed once."""
    if _may_be_number(source, divisor) or not (is_tensor or (is_tensor is None and _is_reduced(divisor))):
        return []
    if _is_positive(divisor):
        return source.after(divisor, bound)
    if not has_torch(source) or not _is_repeatable(divisor):
        return []
    text, least = source.text(divisor), bound.removeprefix(".clamp_min(").removesuffix(")")
    compared = text if isinstance(divisor, ATOMS) else f"({text})"
    return [source.instead(divisor, f"torch.where({compared} == 0, {least}, {text})")]


def _may_be_number(source: Source, node: ast.expr, depth: int = 3) -> bool:
    """Whether an expression is a number of Python's, or made of such numbers alone: ``len(x)``, ``count`` where that is one."""
    if isinstance(node, ast.BinOp):
        return all(_may_be_number(source, side, depth) for side in (node.left, node.right))
    if isinstance(node, ast.Name) and depth:
        return any(_may_be_number(source, value, depth - 1) for value in _values_of(source, node.id))
    if isinstance(node, ast.Call):
        return _calls_for_number(node.func)
    return isinstance(node, ast.Constant | ast.UnaryOp) or ".shape" in ast.unparse(node)


def _values_of(source: Source, name: str) -> Iterator[ast.expr]:
    """What a file assigns to a variable."""
    for one in source.every(ast.Assign):
        yield from (one.value for target in one.targets if ast.unparse(target) == name)


def _calls_for_number(function: ast.expr) -> bool:
    """``len``, ``int``, ``math.sqrt``, ``x.item``, ``x.numel``."""
    if isinstance(function, ast.Attribute):
        return function.attr in _NUMBER_METHODS or ast.unparse(function.value).partition(".")[0] in _NUMBERS
    return True  # a function of Python's, or of the program's


_NUMBER_METHODS = frozenset({"item", "numel", "size", "dim", "nelement", "element_size", "tolist", "__len__"})
_POSITIVE = frozenset({"norm", "abs", "std", "var", "exp", "sqrt", "square", "count_nonzero", "clamp_min"})
"""Methods whose results are not negative."""
_KEEPING = frozenset({"sum", "mean", "amax", "amin", "unsqueeze", "squeeze", "float", "detach"})
"""Methods whose results are not negative where their tensor is not."""
_FUNCTIONS = _POSITIVE | _KEEPING | {"pow", "to", "half", "bfloat16", "view", "reshape", "expand", "any", "all"}
"""Methods that return a tensor, and the same one each time."""


def _is_reduced(node: ast.expr) -> bool:
    """Whether an expression is a call of a method that returns a tensor."""
    if isinstance(node, ast.BinOp):
        return _is_reduced(node.left) or _is_reduced(node.right)
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _FUNCTIONS


def _is_positive(node: ast.expr) -> bool:
    """Whether an expression cannot be negative, by what it says itself."""
    if isinstance(node, ast.Compare | ast.Constant):  # a negative number is no constant but a minus before one
        return True
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
        return _is_positive(node.left) and _is_positive(node.right)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        name = node.func.attr
        return name in _POSITIVE or (name in _KEEPING and _is_positive(node.func.value))
    return False


def _is_repeatable(node: ast.expr) -> bool:
    """Whether an expression may be written twice: it calls nothing but functions that only compute."""
    calls = [one.func for one in ast.walk(node) if isinstance(one, ast.Call)]
    return all(isinstance(one, ast.Attribute) and one.attr in _FUNCTIONS for one in calls)


def _mean_of_labels(source: Source, node: ast.Call) -> list[Change]:
    """``cross_entropy(logits, labels)``: the mean over no label at all is 0 / 0."""
    if node.keywords:
        return []
    count = f"({source.text(node.args[1])} != -100).sum().clamp_min(1)"
    return [*with_keyword(source, node, 'reduction="sum"'), *source.after(node, f" / {count}")]


_INFINITIES = frozenset({"float('-inf')", "-float('inf')", "-torch.inf", "-math.inf", "-np.inf", "-inf"})


def _is_infinity(node: ast.expr) -> bool:
    """Whether an expression is minus infinity, as a number or as a tensor of it alone."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.tensor" and node.args:
        return _is_infinity(node.args[0])
    return ast.unparse(node) in _INFINITIES


def _infinities(source: Source, recorded: str = "") -> Iterator[tuple[ast.expr, str]]:
    """What fills a tensor with minus infinity, and an expression of the dtype of that tensor: the one that was recorded where the tensor has no name."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield from _filled(source, node, node.func, recorded)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript) and _is_infinity(node.value):
            yield node.value, f"{source.text(node.targets[0].value)}.dtype"


def _filled(source: Source, node: ast.Call, function: ast.Attribute, recorded: str) -> Iterator[tuple[ast.expr, str]]:
    """``x.masked_fill(mask, -inf)``, ``torch.where(mask, x, -inf)``, ``torch.full(size, -inf)``."""
    is_function = ast.unparse(function.value) == "torch"
    given = node.args if is_function else [function.value, *node.args]
    if len(given) < 2:
        return
    kept, value = sorted((given[-2 if function.attr == "where" and is_function else 0], given[-1]), key=_is_infinity)
    if function.attr in _FILL and _is_infinity(value):
        yield value, _dtype_of(source, kept, recorded)
    elif function.attr == "full" and _is_infinity(value):
        options = {keyword.arg: source.text(keyword.value) for keyword in node.keywords}
        yield value, options.get("dtype", "torch.get_default_dtype()")


_FILL = frozenset({"masked_fill", "masked_fill_", "full_like", "where"})
"""Functions that put a value into a tensor of the dtype of another argument."""


def _dtype_of(source: Source, node: ast.expr, recorded: str) -> str:
    """An expression of the dtype of a tensor that calls nothing a second time; empty where there is none."""
    if recorded and isinstance(node, ast.BinOp | ast.Call):
        return recorded
    if any(isinstance(part, ast.Call) for part in ast.walk(node)):
        return ""
    text = source.text(node)
    return f"{text}.dtype" if isinstance(node, ATOMS) else f"({text}).dtype"


def finite_mask(scene: Scene) -> Changes | None:
    """Masks with the smallest finite number of the dtype in the place of -inf, so that a row without any key stays finite."""
    source = scene.failing_file()
    if source is None or not has_torch(source):
        return None
    mask = _mask(scene)
    recorded = f"torch.{mask.fill.outputs[0].dtype}" if mask is not None else ""
    filled = [(value, dtype) for value, dtype in _infinities(source, recorded) if _may_fill(scene, source, mask, value)]
    changes = [source.instead(value, f"torch.finfo({dtype}).min") for value, dtype in filled if dtype]
    for value in (
        keyword.value
        for call in source.every(ast.Call)
        for keyword in call.keywords
        if keyword.arg == "key_padding_mask"
    ):
        if isinstance(value, ast.Name):
            changes += source.after(value, f" & ~{value.id}.all(-1, keepdim=True)")
    return some(source, changes)


def _may_fill(scene: Scene, source: Source, mask: Mask | None, value: ast.expr) -> bool:
    """Whether ``value`` is what fills the mask of the failing operator: it stands on the line that does, where that is known."""
    at = scene.line_at(mask.fill.source or "") if mask is not None else None
    if at is None or at[0].path != source.path:
        return True
    around = source.around(value, ast.stmt)
    return bool(around) and around[-1].lineno <= at[1] <= (around[-1].end_lineno or at[1])


def _mask(scene: Scene) -> Mask | None:
    """How the rows of -inf came before the failing operator."""
    graph = graph_of(scene.trace)
    here = (op for op in graph.ops if op.op == scene.finding.op and op.source == scene.finding.source)
    return next(filter(None, (mask_before(graph, op) for op in here)), None)


def mask_where_made(scene: Scene) -> Changes | None:
    """Fills a mask with the smallest finite number of the dtype that it is cast to, where another file makes it or another dtype holds it first."""
    mask = _mask(scene)
    at = scene.line_at(mask.fill.source or "") if mask is not None else None
    if mask is None or at is None or not has_torch(at[0]):
        return None
    failing, stays = scene.failing_line(), mask.narrowest == mask.fill.outputs[0].dtype
    if stays and failing is not None and failing[0].path == at[0].path:
        return None
    source, line = at
    own = dict(_infinities(source)) if stays else {}
    values = [node for node in source.on_line(line) if _masks(source, node)]
    inner = [node for node in values if not any(node in ast.walk(other) for other in values if other is not node)]
    return some(
        source,
        [
            source.instead(node, f"torch.finfo({own.get(node) or _dtype_cast_to(source, node, mask)}).min")
            for node in inner
        ],
    )


def _masks(source: Source, node: ast.expr) -> bool:
    """Whether an expression is -inf, a large negative number, or a variable of the file that is one."""
    if not isinstance(node, ast.Name):
        return _is_infinity(node) or _number_of(node) <= -MASKING
    assignments = (one for one in source.tree.body if isinstance(one, ast.Assign))
    made = [one.value for one in assignments if _names(one.targets[0], node.id)]
    return len(made) == 1 and not isinstance(made[0], ast.Name) and _masks(source, made[0])


def _number_of(node: ast.expr) -> float:
    """The number that an expression is written as; 0 for any other."""
    try:
        return float(ast.literal_eval(node))
    except (TypeError, ValueError, OverflowError, SyntaxError):
        return 0.0


def _dtype_cast_to(source: Source, node: ast.expr, mask: Mask) -> str:
    """The parameter of the function that the mask is cast to, or else the dtype by its name."""
    function = function_around(source, node)
    names = {one.arg for one in ast.walk(function) if isinstance(one, ast.arg)}
    calls = [call for call in ast.walk(function) if isinstance(call, ast.Call) and call.args]
    casts = [ast.unparse(call.args[0]) for call in calls if source.text(call.func).endswith(".to")]
    return next((name for name in casts if name in names), f"torch.{mask.narrowest}")


def finite_fill(scene: Scene) -> Changes | None:
    """A finite number in the place of -inf, where it is one of several values that are averaged."""
    source = scene.failing_file()
    changes = [source.instead(value, "-1e4") for value, _ in _infinities(source)] if source is not None else []
    return (source, changes) if source is not None and changes else None


def smaller_masks(scene: Scene) -> Changes | None:
    """Masks with an eighth of the smallest finite number, where the sum of several masks left the range of the dtype."""
    places = [scene.line_at(op.source or "") for op in scene.trace.all(Op) if _made_infinity(op)]
    for source, _ in filter(None, places):
        texts = [(node, source.text(node)) for node in source.every(ast.Attribute)]
        lows = [(node, text) for node, text in texts if text.startswith("torch.finfo(") and text.endswith(").min")]
        return some(source, [source.instead(node, f"{text} / 8") for node, text in lows])
    return None


def _made_infinity(op: Op) -> bool:
    """Whether a sum of finite numbers is -inf."""
    is_sum = overload_free(op.op) in ("add", "add_")
    return is_sum and any(t.num_neginf for t in op.outputs) and not any(t.num_neginf or t.num_posinf for t in op.inputs)


def skip_batch(scene: Scene) -> Changes | None:
    """Goes on with the next batch where one holds inf or NaN, in the loop that trains."""
    loops = [(s, loop) for s in scene.program_files() if has_torch(s) for loop in s.every(ast.For) if _trains(loop)]
    ran = [one for one in loops if _has_run(scene, *one)] or loops
    return some(ran[0][0], _skipping(*ran[0])) if len(ran) == 1 else None  # of several, which one trains is not known


def _has_run(scene: Scene, source: Source, loop: ast.For) -> bool:
    """Whether an operator of the run was called by a line of a loop: a file may have others that it never comes to."""
    lines = range(loop.lineno, (loop.end_lineno or loop.lineno) + 1)
    places = (op.source.rpartition(":") for op in scene.trace.all(Op) if op.source)
    here = f"/{source.path.as_posix()}"
    return any(here.endswith(f"/{file}") and line.isdecimal() and int(line) in lines for file, _, line in places)


def _skipping(source: Source, loop: ast.For) -> list[Change]:
    names, first = _batch_of(source, loop)
    if not names or first is None or (len(names) == 1 and _holds_others(loop, names[0])):
        return []
    batch = _values_of_batch(loop, names[0]) if len(names) == 1 else f"[{', '.join(names)}]"
    test = f"if any(torch.is_tensor(x) and not x.isfinite().all() for x in {batch}):"
    return source.before(first, test, "    continue  # inf or NaN in the data")


def _values_of_batch(loop: ast.For, name: str) -> str:
    """The tensors of a batch that one variable holds. Where the loop only passes it on, it may be a tensor, a list of some or a mapping."""
    if _is_mapping(loop, name):
        return f"{name}.values()"
    if _is_used_itself(loop, name):
        return f"[{name}]"
    return (
        f"({name}.values() if hasattr({name}, 'keys') else {name} if isinstance({name}, (list, tuple)) else [{name}])"
    )


def _is_used_itself(loop: ast.For, name: str) -> bool:
    """Whether a loop computes with a variable, as it can with a tensor and not with a list."""
    used: list[ast.expr] = []
    for node in ast.walk(loop):
        if isinstance(node, ast.BinOp):
            used += [node.left, node.right]
        elif isinstance(node, ast.Attribute) and node.attr in _OF_TENSORS:
            used.append(node.value)
    return any(isinstance(one, ast.Name) and one.id == name for one in used)


_OF_TENSORS = (_FUNCTIONS | {"shape", "dtype", "size", "dim"}) - {"to"}
"""Attributes of tensors that what a tokenizer returns lacks."""


def _trains(loop: ast.For) -> bool:
    """Whether a loop itself, and none inside of it, makes backward passes."""
    calls = [node for node in ast.walk(loop) if isinstance(node, ast.Call)]
    inner = [node for node in ast.walk(loop) if isinstance(node, ast.For) and node is not loop]
    return any(isinstance(node.func, ast.Attribute) and node.func.attr == "backward" for node in calls) and not any(
        map(_trains, inner)
    )


def _batch_of(source: Source, loop: ast.For) -> tuple[list[str], ast.stmt | None]:
    """The variables that hold the batch of a loop, and the first statement after they are made."""
    target: ast.expr | None = loop.target
    called = source.text(loop.iter.func) if isinstance(loop.iter, ast.Call) else ""
    if called == "enumerate" and isinstance(target, ast.Tuple):
        target = target.elts[-1]
    body = iter(loop.body)
    first = next(body, None)
    if called.endswith("range"):
        made = first if isinstance(first, ast.Assign) else None
        target, first = (made.targets[0], next(body, None)) if made is not None else (None, None)
    return [one.id for one in ast.walk(target) if isinstance(one, ast.Name)] if target is not None else [], first


def _holds_others(loop: ast.For, name: str) -> bool:
    """Whether a variable seems to be a list of tensors, ``x, y = batch``, or to choose rows of one, ``data[rows]``: its own values say nothing."""
    for node in ast.walk(loop):
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Tuple | ast.List)
            and _names(node.value, name)
        ):
            return not isinstance(node.value, ast.Tuple) or not _is_mapping(loop, name)
        if isinstance(node, ast.Starred) and _names(node.value, name):
            return True
        if isinstance(node, ast.Subscript) and (_names(node.slice, name) or _is_numbered(node, name)):
            return True
    return False


def _is_numbered(node: ast.Subscript, name: str) -> bool:
    """``batch[0]``"""
    is_number = isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, int)
    return is_number and ast.unparse(node.value) == name


def _is_mapping(loop: ast.For, name: str) -> bool:
    """Whether ``batch["x"]`` or ``**batch`` is used in a loop."""
    for node in ast.walk(loop):
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == name and isinstance(node.slice, ast.Constant):
            return isinstance(node.slice.value, str)
        if isinstance(node, ast.keyword) and node.arg is None and ast.unparse(node.value) == name:
            return True
    return False


def _stepped(scene: Scene) -> tuple[Source, ast.Expr, str] | None:
    """The program's ``scaler.step(optimizer)`` that raised, and the optimizer's name."""
    found = scene.failing_node()
    call = found[1] if found is not None else None
    if found is None or not isinstance(call, ast.Call) or not call.args or not isinstance(call.args[0], ast.Name):
        return None
    statements = [one for one in found[0].around(call, ast.Expr) if one.value is call]
    return (found[0], statements[0], call.args[0].id) if statements else None


def optimizer_after_model(scene: Scene) -> Changes | None:
    """Makes the optimizer after the last statement that gives the model another layer."""
    at = _stepped(scene)
    if at is None:
        return None
    source, _, name = at
    for made in source.every(ast.Assign):
        following = _after_last_change(source, made, name) if ast.unparse(made.targets[0]) == name else None
        moved = source.before(following, source.text(made)) if following is not None else []
        if moved and made.lineno == made.end_lineno:
            return source, [source.without(made), *moved]
    return None


def _after_last_change(source: Source, made: ast.Assign, name: str) -> ast.stmt | None:
    """The statement behind the last, in the block in which an optimizer is made, that assigns to an attribute of the optimizer's model.

    None where there is none, or where something before it uses the optimizer.
    """
    call = made.value
    model = ast.unparse(call.args[0]).partition(".")[0] if isinstance(call, ast.Call) and call.args else ""
    later = _behind(source, made)
    changing = [
        n for n, one in enumerate(later[:-1]) if isinstance(one, ast.Assign) and _belongs(one.targets[0], model)
    ]
    if not changing or any(_names(one, name) for one in later[: changing[-1] + 1]):
        return None
    return later[changing[-1] + 1]


def _behind(source: Source, statement: ast.stmt) -> list[ast.stmt]:
    """The statements behind one in its block, which is that of the file or of a function."""
    blocks = [source.tree.body, *(function.body for function in source.every(ast.FunctionDef))]
    block = next((block for block in blocks if statement in block), [statement])
    return block[block.index(statement) + 1 :]


def _names(node: ast.AST, name: str) -> bool:
    """Whether a variable is used in a part of a file."""
    return any(isinstance(one, ast.Name) and one.id == name for one in ast.walk(node))


def _belongs(target: ast.expr, model: str) -> bool:
    """Whether ``target`` is an attribute of the model, or an element of one."""
    inside = isinstance(target, ast.Attribute | ast.Subscript)
    while isinstance(target, ast.Attribute | ast.Subscript):
        target = target.value
    return inside and isinstance(target, ast.Name) and target.id == model


def step_where_gradients(scene: Scene) -> Changes | None:
    """Steps an optimizer only where one of its parameters has a gradient, if the program has others that may."""
    at = _stepped(scene)
    strangers = any(seen.what.strangers for seen in scene.trace.observed(Unscaled))  # of another model: never stepped
    if at is None or strangers:
        return None
    source, statement, name = at
    made = [call for call in source.every(ast.Call) if ".optim." in source.text(call.func)]
    test = f'if any(p.grad is not None for group in {name}.param_groups for p in group["params"]):'
    return some(source, source.indented(statement, test) if len(made) > 1 else [])


_COUNTER = re.compile(r"\.([A-Za-z_]\w*) == -?\d+\b")


def counter_in_tensor(scene: Scene) -> Changes | None:
    """Keeps a number that changes, and that compiled code depends on, in a tensor; not where it is used as an index, or may be anything but a number."""
    for source in scene.program_files():
        counted = _counters(scene) - _indices(source)
        values = [node.value for node in _assignments_to_modules(source) if _sets(node.targets[0], counted)]
        if values and has_torch(source):
            tensors = [source.instead(value, f"torch.tensor({source.text(value)})") for value in values]
            return some(source, tensors if all(_is_number(source, value) for value in values) else [])
    return None


def _counters(scene: Scene) -> set[str]:
    """The attributes that compiled code was compiled anew for."""
    return {name for text in scene.finding.evidence for name in _COUNTER.findall(text)}


def _assignments_to_modules(source: Source) -> Iterator[ast.Assign]:
    """The assignments of a file but for those in classes that have no ``forward``: their attributes are not a module's."""
    others = [
        one
        for one in source.every(ast.ClassDef)
        if not any(getattr(part, "name", "") == "forward" for part in one.body)
    ]
    inside = {node for one in others for node in ast.walk(one)}
    return (node for node in source.every(ast.Assign) if node not in inside)


def _is_number(source: Source, node: ast.expr) -> bool:
    """Whether an expression is a number: written as one, or the variable of a loop over a range."""
    if isinstance(node, ast.Name):
        loops = source.around(node, ast.For)
        return any(
            ast.unparse(loop.target) == node.id and ast.unparse(loop.iter).startswith("range(") for loop in loops
        )
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)


def _indices(source: Source) -> set[str]:
    """Attributes that a file uses as an index, or as the end of a range."""
    used: list[ast.expr] = [node.slice for node in source.every(ast.Subscript)]
    for call in source.every(ast.Call):
        used += call.args if source.text(call.func) == "range" else []
    return {one.attr for node in used for one in ast.walk(node) if isinstance(one, ast.Attribute)}


def _sets(target: ast.expr, names: set[str]) -> bool:
    """Whether ``target`` is an attribute of one of these names."""
    return isinstance(target, ast.Attribute) and target.attr in names


def without_scaler(scene: Scene) -> Changes | None:
    """The gradient scaler is switched off."""
    for source in scene.program_files():
        if made := scalers(source):
            return source, [change for call in made for change in with_keyword(source, call, "enabled=False")]
    return None


def without_compiler(scene: Scene) -> Changes | None:
    """The model is called as it is, and not compiled."""

    def plain(source: Source, call: ast.Call) -> list[Change]:
        return [source.instead(call, source.text(call.args[0]))] if call.args else []

    return in_calls(scene, "torch.compile", plain)


def compiled_for_any_size(scene: Scene) -> Changes | None:
    """The model is compiled once for all sizes; not where it is a number that makes it compile anew."""
    if _counters(scene):
        return None
    return in_calls(scene, "torch.compile", lambda source, call: with_keyword(source, call, "dynamic=True"))
