"""Edits that keep values finite and training going: bounds, masks, learning rates, gradient scalers, the compiler."""

import ast
import re
from collections.abc import Iterator, Mapping
from itertools import pairwise

from dtypedoctor.diagnosis.dtype_edits import in_place_of_dtype, wider
from dtypedoctor.diagnosis.ops import MASKING, graph_of, mask_before, overload_free
from dtypedoctor.diagnosis.scene import (
    Change,
    Changes,
    Scene,
    Source,
    cast,
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
    "rsqrt": ".clamp_min(1e-12)", "acos": ".clamp(-1 + 1e-7, 1 - 1e-7)", "asin": ".clamp(-1 + 1e-7, 1 - 1e-7)",
    "exp": ".clamp(max=88)", "div": ".clamp_min(1e-6)",
}  # fmt: skip
"""What keeps the argument of a function inside of its domain, and leaves as much of that as float32 can tell from its border."""

_BORDER = {"sqrt": ".clamp_min(0)", "acos": ".clamp(-1, 1)", "asin": ".clamp(-1, 1)"}
"""The border of a domain, where that is in it."""

_IN_HALF = {
    "float16": {
        "sqrt": ".clamp_min(1e-6)", "rsqrt": ".clamp_min(1e-6)", "exp": ".clamp(max=11)", "div": ".clamp_min(1e-4)",
        **dict.fromkeys(("acos", "asin"), ".clamp(-0.9995, 0.9995)"),
    },
    "bfloat16": dict.fromkeys(("acos", "asin"), ".clamp(-0.996, 0.996)"),
}  # fmt: skip
"""The same for half precision: float16's numbers are between 6e-8 and 65,504, and the largest below 1 are 1 - 2**-11 and 1 - 2**-8."""


def keep_in_domain(scene: Scene) -> list[Changes]:
    """Keeps the argument of what returned NaN or inf inside of its domain, on the line that the finding names: a change for each function that it may be.

    The border itself comes first, which changes nothing that was right; behind it, where the gradient is not finite at the border, what the dtype can tell from
    it. Not where float32 has rounded what is inside of the domain: the bound would be the result.
    """
    found = scene.failing_line()
    if found is None or (scene.finding.id == "rounds-out-of-domain" and scene.finding.dtype == "float32"):
        return []
    names, bounds = _names_of_operator(scene), _bounds(scene)
    borders = {name: border for name, border in _BORDER.items() if name == _family(scene)}
    made = (
        _bounded(found[0], node, given, names) for given in (borders, bounds) for node in found[0].on_line(found[1])
    )
    return [(found[0], changes) for changes in made if changes]


def bound_of(scene: Scene) -> str:
    """What keeps the argument of the failing operator inside of its domain, as a call of a method; empty where none is known."""
    bounds = _bounds(scene)
    return bounds.get(_family(scene)) or next(iter(bounds.values()), "")


def _bounds(scene: Scene) -> Mapping[str, str]:
    """By the names that the failing operator may have in the source what keeps its argument inside of its domain."""
    known = _ARGUMENT | _IN_HALF.get(scene.finding.dtype or "", {})
    names = _names_of_operator(scene)
    return {name: bound for name, bound in known.items() if name in names}


def _names_of_operator(scene: Scene) -> set[str]:
    """What the failing operator is called in Python, or the one that it differentiates."""
    family = _family(scene)
    here = [op for op in scene.trace.all(Op) if op.source == scene.finding.source]
    derived = {name for op in here if (name := differentiated(op))}
    of_division = {"sqrt"} if family == "div" else set()  # the backward pass of a square root divides by it
    return {family, family.removesuffix("_backward"), *derived, *of_division}


def _family(scene: Scene) -> str:
    return overload_free(scene.finding.op or "").rstrip("_")


_DIVISIONS = frozenset({"div", "divide", "true_divide"})


def _bounded(source: Source, node: ast.expr, bounds: Mapping[str, str], names: set[str]) -> list[Change]:
    """The change of one expression; empty where it computes something else."""
    match node:
        case ast.BinOp(op=ast.Div()):
            return _divisor(source, node.right, bounds)
        case ast.Call(func=ast.Attribute(attr="std") as function) if names & {"std", "var", "sqrt"}:
            return _deviation(source, node, function)
        case ast.Call(func=ast.Attribute(attr="cross_entropy", value=value), args=[_, _]):
            return _mean_of_labels(source, node) if names_a_module(value) else []
        case ast.Call(func=ast.Attribute(attr=name) as function):
            argument = _argument(node, function, int(name in _DIVISIONS))
            if argument is None or name in _DIVISIONS:
                return _divisor(source, argument, bounds)
            return source.after(argument, bounds[name]) if name in bounds else []
    return []


def _deviation(source: Source, node: ast.Call, function: ast.Attribute) -> list[Change]:
    """``x.std(0)``: of a single value it is 0 / 0, as it divides by one less; of several it stays what it is."""
    values = source.text(function.value)
    if not isinstance(function.value, ast.Name | ast.Attribute) or values in {*_NUMBERS, "torch"} or len(node.args) > 1:
        return []
    dimension = next(iter([*node.args, *(keyword.value for keyword in node.keywords if keyword.arg == "dim")]), None)
    if dimension is not None and source.text(dimension) in ("True", "False"):
        return []  # the program chose what it divides by
    count = f"{values}.shape[{source.text(dimension)}]" if dimension is not None else f"{values}.numel()"
    return with_keyword(source, node, f"correction=min(1, {count} - 1)")


_NUMBERS = frozenset({"math", "cmath", "np", "numpy"})
"""Namespaces whose functions return numbers, or arrays that are no tensors."""


def _argument(node: ast.Call, function: ast.Attribute, number: int) -> ast.expr | None:
    """What ``torch.div(x, y)`` or ``x.div(y)`` is of, first or second; None where it is a function of something else."""
    if ast.unparse(function.value) in {"self", "cls", *_NUMBERS}:
        return None
    given = node.args if names_a_module(function.value) else [function.value, *node.args]
    return given[number] if len(given) == number + 1 else None


_POSITIVE = frozenset({"norm", "abs", "std", "var", "exp", "sqrt", "square", "count_nonzero", "clamp_min"})
"""Methods whose results are not negative."""
_KEEPING = frozenset({"sum", "mean", "amax", "amin", "unsqueeze", "squeeze", "float", "detach"})
"""Methods whose results are not negative where their tensor is not."""


def _is_positive(node: ast.expr) -> bool:
    """Whether an expression cannot be negative, by what it says itself."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return isinstance(node, ast.Compare)
    return node.func.attr in _POSITIVE or (node.func.attr in _KEEPING and _is_positive(node.func.value))


def _divisor(source: Source, divisor: ast.expr | None, bounds: Mapping[str, str]) -> list[Change]:
    """Keeps what is divided by away from 0, with its sign; an expression is computed once."""
    if "div" not in bounds or not has_torch(source) or divisor is None or isinstance(divisor, ast.Constant):
        return []
    if _is_positive(divisor):
        return list(source.after(divisor, bounds["div"]))
    text, least = source.text(divisor), bounds["div"].removeprefix(".clamp_min(").removesuffix(")")
    if isinstance(divisor, ast.Name | ast.Attribute):
        return [source.instead(divisor, f"torch.where({text} == 0, {least}, {text})")]
    name = "d" if not any(one.id == "d" for one in source.every(ast.Name)) else "divisor"
    return [source.instead(divisor, f"torch.where(({name} := {text}) == 0, {least}, {name})")]


def _mean_of_labels(source: Source, node: ast.Call) -> list[Change]:
    """``cross_entropy(logits, labels)``: the mean over no label at all is 0 / 0."""
    if node.keywords:
        return []
    count = f"({source.text(node.args[1])} != -100).sum().clamp_min(1)"
    return [*with_keyword(source, node, 'reduction="sum"'), *source.after(node, f" / {count}")]


_INFINITIES = frozenset({"float('-inf')", "-float('inf')", "-torch.inf", "-math.inf", "-np.inf", "-inf"})


def _infinities(source: Source) -> list[ast.expr]:
    """What puts minus infinity into a tensor: an argument of a call, or what is assigned to elements."""
    given = [
        one for call in source.every(ast.Call) for one in (*call.args, *(option.value for option in call.keywords))
    ]
    given += [made.value for made in source.every(ast.Assign) if isinstance(made.targets[0], ast.Subscript)]
    return [node for node in given if ast.unparse(node) in _INFINITIES]


def finite_mask(scene: Scene) -> list[Changes]:
    """Masks with a finite number in the place of -inf, so that a row without any key stays finite: the smallest of the narrowest dtype that the mask has.

    Then with one of which several can be added, in the place of the smallest too. That is on the line that has filled the mask, in whichever file; where
    that is not known, wherever the failing file fills one.
    """
    graph = graph_of(scene.trace)
    here = (op for op in graph.ops if op.op == scene.finding.op and op.source == scene.finding.source)
    mask = next(filter(None, (mask_before(graph, op) for op in here)), None)
    at = scene.line_at(mask.fill.source or "") if mask is not None else None
    source = at[0] if at is not None else scene.failing_file()
    if source is None or not has_torch(source):
        return []
    values = _infinities(source)
    if at is not None:
        on_line = [node for node in ast.walk(source.tree) if isinstance(node, ast.expr) and _is_on(node, at[1])]
        masking = [node for node in on_line if _masks(source, node)]
        values = [node for node in masking if not any(node in ast.walk(one) for one in masking if one is not node)]
    dtype = mask.narrowest if mask is not None else scene.finding.dtype
    lowest = [source.instead(value, f"torch.finfo(torch.{dtype}).min") for value in values]
    for keyword in source.every(ast.keyword):
        if keyword.arg == "key_padding_mask" and isinstance(keyword.value, ast.Name):
            lowest += source.after(keyword.value, f" & ~{keyword.value.id}.all(-1, keepdim=True)")
    lows = [node for node in source.every(ast.Attribute) if _LOWEST.fullmatch(source.text(node))]
    ways = (lowest, [source.instead(value, "-1e4") for value in (*values, *lows)])
    return [(source, changes) for changes in ways if changes]


_LOWEST = re.compile(r"torch\.finfo\(.*\)\.min", re.DOTALL)


def _is_on(node: ast.expr, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or line)


def _masks(source: Source, node: ast.expr) -> bool:
    """Whether an expression is -inf, a large negative number, or a variable of the file that is one."""
    if isinstance(node, ast.Name):
        assignments = (one for one in source.tree.body if isinstance(one, ast.Assign))
        made = [one.value for one in assignments if _names(one.targets[0], node.id)]
        return len(made) == 1 and not isinstance(made[0], ast.Name) and _masks(source, made[0])
    try:
        return ast.unparse(node) in _INFINITIES or float(ast.literal_eval(node)) <= -MASKING
    except (TypeError, ValueError, OverflowError, SyntaxError):
        return False  # no number


def finite_fill(scene: Scene) -> Changes | None:
    """A finite number in the place of -inf, where it is one of several values that are averaged."""
    source = scene.failing_file()
    return (
        some(source, [source.instead(value, "-1e4") for value in _infinities(source)]) if source is not None else None
    )


def skip_batch(scene: Scene) -> list[Changes]:
    """Goes on with the next batch where one holds inf or NaN, in a loop that trains: a change for each such loop."""
    loops = [(s, loop) for s in scene.program_files() if has_torch(s) for loop in s.every(ast.For) if _trains(loop)]
    return [(source, changes) for source, loop in loops if (changes := _skipping(source, loop))]


def _skipping(source: Source, loop: ast.For) -> list[Change]:
    names, first = _batch_of(source, loop)
    if not names or first is None:
        return []
    batch = f"[{', '.join(names)}]"
    if len(names) == 1:  # what a tokenizer returns is no dictionary that torch knows
        batch = f"dict({names[0]}) if hasattr({names[0]}, 'keys') else {names[0]}"
    leaves = f"x for x in torch.utils._pytree.tree_leaves({batch}) if torch.is_tensor(x)"
    test = f"if not all(x.isfinite().all() for x in [{leaves}]):"
    return source.before(first, test, "    continue  # inf or NaN in the data")


def _trains(loop: ast.For) -> bool:
    """Whether a loop itself, and none inside of it, makes backward passes."""
    inside = list(ast.walk(loop))
    attributes = {
        node.func.attr for node in inside if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    return "backward" in attributes and not any(_trains(one) for one in inside[1:] if isinstance(one, ast.For))


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


def _stepped(scene: Scene) -> tuple[Source, ast.Expr, str] | None:
    """The program's ``scaler.step(optimizer)`` that raised, and the optimizer's name."""
    found = scene.failing_node()
    call = found[1] if found is not None else None
    if found is None or not isinstance(call, ast.Call) or not call.args or not isinstance(call.args[0], ast.Name):
        return None
    statements = [one for one in found[0].around(call, ast.Expr) if one.value is call]
    return (found[0], statements[0], call.args[0].id) if statements else None


def optimizer_after_model(scene: Scene) -> list[Changes]:
    """Makes the optimizer after a statement that gives something another attribute or element, as a model a new layer: a change for each, the last first."""
    at = _stepped(scene)
    ways: list[Changes] = []
    for made in at[0].every(ast.Assign) if at is not None else ():
        if at is None or ast.unparse(made.targets[0]) != at[2] or made.lineno != made.end_lineno:
            continue
        for statement, following in pairwise(_behind(at[0], made)):
            if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Attribute | ast.Subscript):
                ways.append((at[0], [at[0].without(made), *at[0].before(following, at[0].text(made))]))
    return ways[::-1]


def _behind(source: Source, statement: ast.stmt) -> list[ast.stmt]:
    """The statements behind one in its block, which is that of the file or of a function."""
    blocks = [source.tree.body, *(function.body for function in source.every(ast.FunctionDef))]
    block = next((block for block in blocks if statement in block), [statement])
    return block[block.index(statement) + 1 :]


def _names(node: ast.AST, name: str) -> bool:
    """Whether a variable is used in a part of a file."""
    return any(isinstance(one, ast.Name) and one.id == name for one in ast.walk(node))


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
    """Keeps a number that changes, and that compiled code depends on, in a tensor."""
    counted = _counters(scene)
    for source in scene.program_files():
        values = []
        for made in source.every(ast.Assign):
            target, value = made.targets[0], made.value
            is_text = isinstance(value, ast.Constant) and isinstance(value.value, str)
            if isinstance(target, ast.Attribute) and target.attr in counted and not is_text:
                values.append(value)
        if values and has_torch(source):
            return source, [source.instead(value, f"torch.tensor({source.text(value)})") for value in values]
    return None


def _counters(scene: Scene) -> set[str]:
    """The attributes that compiled code was compiled anew for."""
    return {name for text in scene.finding.evidence for name in _COUNTER.findall(text)}


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


OWN = "updated-in-float32"


def fitting(scene: Scene, makers: tuple[str, ...]) -> tuple[str, ...]:
    """The makers that fit a finding: of a line that updates tensors of its own, the one that changes what makes these."""
    if scene.finding.id != "update-stall":
        return makers
    if scene.finding.fqn is not None and scene.finding.phase == "optimizer":
        return tuple(name for name in makers if name != OWN)  # weights, which no line of the program updates
    return makers if _steps_by_hand(scene) else tuple(name for name in makers if name == OWN)


def _steps_by_hand(scene: Scene) -> bool:
    """Whether the finding's line updates what comes from ``parameters()``."""
    at = _updating(scene)
    return at is not None and any(".parameters()" in text for text in (at[2], *map(ast.unparse, _made(at[0], at[2]))))


def updated_in_float32(scene: Scene) -> Changes | None:
    """A wider dtype where the tensors are made that the finding's line updates, and on that line: float32, or float64 in the place of float32."""
    at = _updating(scene)
    if at is None:
        return None
    (source, statement, holder), wide = at, wider(scene)
    made = [change for value in _made(source, holder) for change in _made_wider(source, value, wide)]
    return some(source, [*made, *_line_wider(source, statement, wide), *_swapped_in(source, holder)] if made else [])


def _updating(scene: Scene) -> tuple[Source, ast.stmt, str] | None:
    """The statement on the finding's line, and what holds the tensors that it updates: ``self.shadow`` for ``self.shadow[name].mul_(decay)``."""
    at = scene.failing_line()
    if at is None:
        return None
    source, line = at
    inside = (node for node in ast.walk(source.tree) if isinstance(node, ast.Expr | ast.Assign | ast.AugAssign))
    statements = [node for node in inside if node.lineno <= line <= (node.end_lineno or 0)]
    return (source, statements[-1], _holder(source, statements[-1])) if statements else None


def _holder(source: Source, statement: ast.Expr | ast.Assign | ast.AugAssign) -> str:
    """What holds the tensors that a statement updates: ``shadow`` for the variable ``s`` of ``for s, p in zip(shadow, parameters)``."""
    holder = _updated(statement)
    for loop in reversed(source.around(statement, ast.For)):
        holder = next((over for name, over in _pairs(loop) if ast.unparse(holder) == name), holder)
    return ast.unparse(holder)


def _updated(statement: ast.Expr | ast.Assign | ast.AugAssign) -> ast.expr:
    """What a statement writes to, or the collection that holds it."""
    if isinstance(statement, ast.Assign):
        node = statement.targets[0]
    else:
        node = statement.target if isinstance(statement, ast.AugAssign) else statement.value
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        in_list = node.func.attr.startswith("_foreach_") and bool(node.args)
        node = node.args[0] if in_list else node.func.value
    if isinstance(node, ast.List) and node.elts:
        node = node.elts[0]
    while isinstance(node, ast.Subscript):
        node = node.value
    return node


def _pairs(loop: ast.For) -> Iterator[tuple[str, ast.expr]]:
    """The variables of a loop over collections, each with the collection."""
    over = [loop.iter]
    if isinstance(loop.iter, ast.Call) and ast.unparse(loop.iter.func) == "zip":
        over = loop.iter.args
    targets = loop.target.elts if len(over) > 1 and isinstance(loop.target, ast.Tuple) else [loop.target]
    for target, values in zip(targets, over, strict=False):
        if (
            isinstance(values, ast.Call)
            and isinstance(values.func, ast.Attribute)
            and values.func.attr in ("values", "items")
        ):
            values = values.func.value
        last = target.elts[-1] if isinstance(target, ast.Tuple) else target
        yield ast.unparse(last), values


def _made(source: Source, holder: str) -> Iterator[ast.expr]:
    """The values that the holder, or an element of it, is given; not those that are computed from itself."""
    for target, value in _assigned(source):
        while isinstance(target, ast.Subscript):
            target = target.value
        if ast.unparse(target) == holder and holder not in {ast.unparse(one) for one in ast.walk(value)}:
            yield value
    for call in source.every(ast.Call):
        if ast.unparse(call.func) == f"{holder}.append" and call.args:
            yield call.args[0]


def _assigned(source: Source) -> Iterator[tuple[ast.expr, ast.expr]]:
    """What a file assigns to, and what: of ``a, b = x, y`` each by itself."""
    for node in source.every(ast.Assign):
        target, value = node.targets[0], node.value
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            yield from zip(target.elts, value.elts, strict=False)
        else:
            yield target, value


def _made_wider(source: Source, value: ast.expr, wide: str) -> list[Change]:
    """The dtypes that an expression names become wider; where it names none, each tensor that it makes is cast."""
    named = [change for node in ast.walk(value) for change in in_place_of_dtype(source, node, wide)]
    made = value
    while isinstance(made, ast.DictComp | ast.ListComp):
        made = made.value if isinstance(made, ast.DictComp) else made.elt
    # An empty list, say, is no tensor; what torch makes without a dtype is in that of another tensor, or in the default one
    module, _, called = ast.unparse(made.func).rpartition(".") if isinstance(made, ast.Call) else ("", "", "")
    makes = module == "torch" or called in ("clone", "deepcopy")
    return named or (list(source.after(made, cast(wide))) if makes else [])


def _line_wider(source: Source, statement: ast.stmt, wide: str) -> list[Change]:
    """The line itself: what it casts is wider, and ``lerp_``, which takes one dtype only, gets that of what it writes to."""
    changes = [change for node in ast.walk(statement) for change in in_place_of_dtype(source, node, wide)]
    calls = [node for node in ast.walk(statement) if isinstance(node, ast.Call)]
    return changes or [change for call in calls for change in _lerp(source, call, ast.unparse(call.func), wide)]


def _lerp(source: Source, call: ast.Call, function: str, wide: str) -> list[Change]:
    if function.endswith("._foreach_lerp_") and len(call.args) > 1:
        return [source.instead(call.args[1], f"[t{cast(wide)} for t in {source.text(call.args[1])}]")]
    return source.after(call.args[0], cast(wide)) if function.endswith(".lerp_") and call.args else []


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
