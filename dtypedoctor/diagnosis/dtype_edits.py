"""Edits that give operands, weights and regions another dtype: on the line that failed, on the line that set a dtype, or in a whole file."""

import ast
import builtins
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from dtypedoctor.diagnosis import spec_of
from dtypedoctor.diagnosis.ops import graph_of, overload_free
from dtypedoctor.diagnosis.rule import SILENT, Edit, Link
from dtypedoctor.diagnosis.scene import (
    Change,
    Changes,
    Scene,
    Source,
    cast,
    floats,
    function_around,
    has_torch,
    in_calls,
    names_a_module,
    other_method,
    scalers,
    some,
    with_keyword,
)
from dtypedoctor.dtypes import DTYPES
from dtypedoctor.trace.events import Op, ParameterNote
from dtypedoctor.trace.records.silent import RoundedUse


def cast_operand(scene: Scene) -> Changes | list[Changes] | None:
    """Casts what the failing call gets, where the program itself makes that call."""
    found, op = scene.own_node(), scene.rejected
    if found is None or op is None or not has_torch(found[0]):
        return None
    source, node = found
    if isinstance(node, ast.Subscript):
        return _stored_value(source, node)
    if isinstance(node, ast.BinOp):
        # left @ right: the odd side in the dtype of the other; or its variable, for what comes after as well
        dtypes = floats(op.inputs)
        if len(dtypes) != 2 or scene.finding.dtype not in dtypes:
            return []
        odd = dtypes.index(scene.finding.dtype)
        side, into = (node.left, node.right)[odd], cast(dtypes[1 - odd])
        ways = [(source, list(source.after(side, into)))]
        root: ast.expr = side  # the variable of ``grad.t()``
        while isinstance(root, ast.Attribute | ast.Call | ast.Subscript):
            root = root.func if isinstance(root, ast.Call) else root.value
        statements = source.around(node, ast.stmt)
        if isinstance(root, ast.Name) and statements:
            ways.append((source, list(source.before(statements[-1], f"{root.id} = {root.id}{into}"))))
        return ways
    return _arguments(source, node, op, scene) if isinstance(node, ast.Call) else None


def _arguments(source: Source, node: ast.Call, op: Op, scene: Scene) -> Changes | None:
    """What a call gets, cast."""
    held = _held(op)
    if _modules_inside(scene) and held is not None and node.args:
        return _module_input(source, node, op, scene, held)
    if op.inplace and isinstance(node.func, ast.Attribute):
        return _into_destination(source, node, node.func.attr, op)
    out = next((source.text(keyword.value) for keyword in node.keywords if keyword.arg == "out"), None)
    return _odd_arguments(source, node, op, scene) if out is None else _into_out(source, node, out, op)


def _into_out(source: Source, node: ast.Call, out: str, op: Op) -> Changes | None:
    """``function(a, b, out=c)``: the arguments in the dtype of ``c``."""
    tensors = _tensors_in(node, op, len(op.inputs) - 1)
    return some(source, [change for i in tensors for change in source.after(node.args[i], f".to({out}.dtype)")])


def _held(op: Op) -> str | None:
    """The dtype of a parameter among the operands, or else of a buffer."""
    held = sorted((t for t in op.inputs if t.origin in ("parameter", "buffer")), key=lambda t: t.origin, reverse=True)
    return next(iter(floats(held)), None)


def _module_input(source: Source, node: ast.Call, op: Op, scene: Scene, held: str) -> Changes | None:
    """The inputs of a module, cast to the dtype that it holds; its output cast back where what follows needs that."""
    odd = _odd_arguments_of(node, op, held) if _outermost_call(scene) == (source, node) else []
    changes: list[Change] = []
    for number, is_part in dict(odd or [(0, False)]).items():
        argument = node.args[number]
        if is_part:
            each = f"tuple(t{cast(held)} for t in {source.text(argument)})"
            changes.append((source.start(argument), source.end(argument), each.encode()))
        else:
            changes += source.after(argument, cast(held))
    given = [dtype for dtype in floats(op.inputs) if dtype != held]
    if given and held == scene.finding.dtype and scene.finding.id not in _KEEPS_DTYPE:
        changes += source.after(node, cast(given[0]))  # what follows is in the dtype of the activations
    return source, changes


def _odd_arguments_of(node: ast.Call, op: Op, held: str | None) -> list[tuple[int, bool]]:
    """For each operand of another dtype that is an argument of the outermost call, its number; and whether it is only a part of that, as ``args.1.0``."""
    names = [(t.name or "").split(".") for t in op.inputs if t.dtype in DTYPES and t.dtype != held]
    numbered = [(int(name[1]), len(name) > 2) for name in names if name[0] == "args" and name[1].isdigit()]
    return [(number, is_part) for number, is_part in numbered if number < len(node.args)]


def casts_every_operand(scene: Scene) -> bool:
    """Whether :func:`cast_operand` gives each operand of the failing operator the dtype that an experiment on the operator has given it.

    Where the line calls a module, the operator may lie in another module inside of it, or get operands that are none of the arguments.
    """
    found, op, modules = scene.own_node(), scene.rejected, _modules_inside(scene)
    node = found[1] if found is not None else None
    if op is None or not isinstance(node, ast.Call) or not modules:
        return True
    held = _held(op)
    odd = [dtype for dtype in floats(op.inputs) if dtype != held]
    arguments = _odd_arguments_of(node, op, held) if _outermost_call(scene) == found else []
    return len(arguments) == len(odd) or modules == len(odd) == len(node.args) == 1


_KEEPS_DTYPE = frozenset({"head-dtype-mismatch", "model-input-dtype"})
"""Findings about the last layer, or the first: nothing follows that needs the dtype of the activations."""


def _modules_inside(scene: Scene) -> int:
    """How many modules lie between the program's innermost frame, where that calls one, and what has raised."""
    raised, found = scene.raised, scene.failing_frame()
    assert raised is not None
    assert found is not None
    frames = [frame.rpartition(" ")[2] for frame in raised.frames]
    own = max((i for i, frame in enumerate(raised.frames) if frame.startswith(f"{found[0].path}:")), default=-1)
    inside = frames[own + 1 :]
    return inside.count("_wrapped_call_impl") if inside[:1] == ["_wrapped_call_impl"] else 0


def _stored_value(source: Source, target: ast.Subscript) -> Changes | None:
    """``x[rows] = value``: the value in the dtype of ``x``; so too what else a module or function returns for the same rows of something else."""
    rows = ast.unparse(target.slice)
    assignments = (node for node in ast.walk(function_around(source, target)) if isinstance(node, ast.Assign))
    changes = []
    for node in assignments:
        written = node.targets[0]
        if not isinstance(written, ast.Subscript) or ast.unparse(written.slice) != rows:
            continue
        if written is target or (isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Attribute)):
            changes += source.after(node.value, f".to({source.text(written.value)}.dtype)")
    return (source, changes) if changes else None


def _into_destination(source: Source, node: ast.Call, method: str, op: Op) -> Changes | None:
    """``out.index_add_(0, rows, values)``: what is written, in the dtype of ``out``; so too where the same function does it to something else."""
    tensors = zip(_tensors_in(node, op, len(op.inputs) - 1, behind=1), op.inputs[1:], strict=False)
    written = [i for i, tensor in tensors if tensor.dtype in DTYPES]
    changes: list[Change] = []
    for call in ast.walk(function_around(source, node)):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == method:
            into = f".to({source.text(call.func.value)}.dtype)"
            for argument in (call.args[i] for i in written if i < len(call.args)):
                changes += source.after(argument, into)
    return some(source, changes)


def _tensors_in(node: ast.Call, op: Op, count: int, *, behind: int = 0) -> list[int]:
    """Which positional arguments of a call are tensors, of which the operator has got ``count``; empty where that is not known.

    Args:
        node: the call.
        op: the operator that it has called.
        count: how many tensors are among the arguments.
        behind: how many arguments the operator has before these: what a method is called on.
    """
    if op.takes:
        kinds = op.takes[behind : behind + len(node.args)]
        positions = [i for i, kind in enumerate(kinds) if kind == "tensor"]
    else:
        positions = [i for i, argument in enumerate(node.args) if not isinstance(argument, ast.Constant)]
    return positions if len(positions) == count else []


def _odd_arguments(source: Source, node: ast.Call, op: Op, scene: Scene) -> Changes | None:
    """``function(a, b, c)``: the arguments of the odd dtype in that of the others."""
    # The dtype of the parameter among the operands, unless that is the odd one; else the one that the odd operand meets
    held = next(iter(floats(t for t in op.inputs if t.origin == "parameter")), None)
    wanted = held if held is not None and held != scene.finding.dtype else scene.other

    given = _operands(node)
    if len(given) < len(op.inputs):
        given += [keyword.value for keyword in node.keywords if not isinstance(keyword.value, ast.Constant)]
    called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    if called == "linear" and overload_free(op.op) == "addmm":  # addmm(bias, input, weight)
        given = [*given[-1:], *given[:-1]]
    if wanted is None or len(given) != len(op.inputs):  # which of them is which operand is not known
        return None

    changes: list[Change] = []
    for argument, tensor in zip(given, op.inputs, strict=True):
        if tensor.dtype in DTYPES and tensor.dtype != wanted:
            changes += source.after(argument, cast(wanted))
    most = scene.most_weights
    if most in ("bfloat16", "float16") and scene.finding.dtype == most and op.autocast is None:
        changes += source.after(node, cast(most))  # what follows is in the dtype of most weights
    return source, changes


def _operands(node: ast.Call) -> list[ast.expr]:
    """What a method is called on, and the positional arguments that may be tensors."""
    is_method = isinstance(node.func, ast.Attribute) and not names_a_module(node.func.value)
    on = [node.func.value] if is_method and isinstance(node.func, ast.Attribute) else []
    return [*on, *(argument for argument in node.args if not isinstance(argument, ast.Constant))]


_FACTORIES = frozenset({"zeros", "ones", "empty", "full", "randn", "rand", "arange", "eye", "linspace"})


def make_in_dtype(scene: Scene) -> Changes | None:
    """Names the dtype where the odd tensor, or the one that it meets, is made: ``torch.zeros(n)`` is float32 whatever it is used with.

    Keys and values are made alike, in one function or on one line; what else a function or a script makes (a sum, positions) keeps its dtype.
    """
    for links, wanted in ((scene.finding.provenance, scene.other), (scene.finding.met, scene.finding.dtype)):
        made = _factory_of(scene, links) if wanted is not None else None
        if made is not None:
            calls = _calls_alike(*made)
            return made[0], [one for call in calls for one in with_keyword(made[0], call, f"dtype=torch.{wanted}")]
    return None


def _calls_alike(source: Source, call: ast.expr) -> list[ast.Call]:
    """A call and those like it: in its function, or outside of all on its line."""
    function = function_around(source, call)
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    alike = [node for node in calls if ast.unparse(node) == ast.unparse(call)]
    return [node for node in alike if function is not source.tree or node.lineno == call.lineno]


def _factory_of(scene: Scene, links: Sequence[Link]) -> tuple[Source, ast.expr] | None:
    """The call that has made a tensor, of a step or of what outlives it, where its provenance ends at a line with one that names no dtype."""
    is_made = bool(links) and links[-1].op.partition(":")[0] in ("factory", "cache", "attribute", "buffer")
    at = scene.line_at(links[-1].source or "") if is_made else None
    call = next(filter(_is_factory, at[0].on_line(at[1])), None) if at is not None else None
    return (at[0], call) if at is not None and call is not None else None


def _is_factory(node: ast.AST) -> bool:
    """Whether a call makes a tensor and names no dtype."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    named = any(keyword.arg == "dtype" for keyword in node.keywords)
    return node.func.attr in _FACTORIES and ast.unparse(node.func.value) == "torch" and not named


def cast_where_set(scene: Scene) -> Changes | None:
    """Casts the odd parameter or buffer to the dtype that it meets, on the line that gave it its own."""
    return _set_notes(scene, list(_odd_notes(scene)), scene.other)


def cast_met_weights(scene: Scene) -> Changes | None:
    """Casts the weights that the odd operand meets."""
    notes = [note for link in scene.finding.met[-1:] for note in _alike(scene, _name_in(link))]
    return _set_notes(scene, notes, scene.finding.dtype)


def changes_most_weights(scene: Scene, edits: Sequence[Edit]) -> bool:
    """Whether edits change the weights that the odd operand meets on a line that gave most weights of the model their dtype: other edits come first."""
    weights = [note for note in scene.parameters.values() if not note.buffer]
    names = {_name_in(link) for link in scene.finding.met[-1:]}
    met = {note.set_at for note in weights if note.set_at and note.name in names}
    places = [(scene.source(file), line) for file, _, line in (at.rpartition(":") for at in met)]
    changed = {(edit.file, edit.line) for edit in edits}
    is_changed = any(source and (scene.shown(source.path), int(line)) in changed for source, line in places)
    return is_changed and 2 * sum(note.set_at in met for note in weights) > max(len(weights), 2)


def set_float32(scene: Scene) -> Changes | None:
    """Makes the parameters of the finding float32, on the line that gave them their dtype."""
    return _set_notes(scene, list(_odd_notes(scene)), "float32")


def _set_notes(scene: Scene, parameters: Sequence[ParameterNote], dtype: str | None) -> Changes | None:
    """Gives parameters a dtype, on the lines that gave them theirs, in the file of the first."""
    spans: dict[str, list[Sequence[int]]] = {}
    for note in parameters:
        if note.set_at and note.set_span and note.dtype != dtype:
            spans.setdefault(note.set_at.rpartition(":")[0], []).append(note.set_span)
    if not spans or dtype is None:
        return None
    file, places = next(iter(spans.items()))
    source = scene.source(file)
    if source is None or not has_torch(source):
        return None
    changes: list[Change] = []
    for span in places:
        changes += _recast(source, source.spanned(span), dtype)
    return some(source, changes)


def _odd_notes(scene: Scene) -> Iterator[ParameterNote]:
    """The parameters and buffers that the finding is about: the last of its provenance, or the first of its module that a line gave its dtype."""
    names = [name for link in scene.finding.provenance[-1:] if (name := _name_in(link)) in scene.parameters]
    inside = (note for note in _inside(scene).values() if note.dtype in DTYPES and note.set_at)
    for name in names or [note.name for note in inside][:1]:
        yield from _alike(scene, name)


def _name_in(link: Link) -> str:
    """The parameter's name in ``load-dtype: head.weight (model.float())``."""
    return link.op.partition(": ")[2].partition(" (")[0]


def _alike(scene: Scene, name: str) -> Iterator[ParameterNote]:
    """A parameter, then those of its module and of modules beside that which have its dtype and are trained, or not, as it is."""
    first = scene.parameters.get(name)
    if first is None:
        return
    owner = name.rpartition(".")[0]
    parent = owner.rpartition(".")[0]
    yield first
    for note in scene.parameters.values():
        beside = note.name.rpartition(".")[0] == owner or (parent and note.name.startswith(f"{parent}."))
        alike = (note.buffer, note.dtype, note.requires_grad) == (first.buffer, first.dtype, first.requires_grad)
        if beside and alike and note.set_at:
            yield note


def cast_promoted_output(scene: Scene) -> Changes | None:
    """Casts what a norm returns to the dtype of its input, where it returns it on the line that promotes, nearest to the origin of that dtype."""
    casts = [link.source for link in scene.finding.provenance if link.source and link.dtype_in and link.dtype_out]
    at = scene.line_at(casts[-1]) if casts and scene.other else None
    if at is None:
        return None
    for value in _returned_on(*at):
        into = _dtype_of_input(at[0], value) or f"torch.{scene.other}"
        return at[0], list(at[0].after(value, f".to({into})"))
    return None


def _returned_on(source: Source, line: int) -> list[ast.expr]:
    """The value of the ``return`` that a line is a part of, in a file that imports torch."""
    returns = (node for node in source.every(ast.Return) if node.lineno <= line <= (node.end_lineno or node.lineno))
    return [node.value for node in returns if node.value is not None and has_torch(source)]


def _dtype_of_input(source: Source, value: ast.expr) -> str:
    """``x.dtype`` for the input ``x`` of the ``forward(self, x)`` that returns ``value``; empty where ``x`` is assigned to."""
    function = function_around(source, value)
    if not isinstance(function, ast.FunctionDef) or function.name != "forward" or len(function.args.args) < 2:
        return ""
    name = function.args.args[1].arg
    names = [node for node in ast.walk(function) if isinstance(node, ast.Name) and node.id == name]
    return "" if any(isinstance(node.ctx, ast.Store) for node in names) else f"{name}.dtype"


def _recast(source: Source, node: ast.expr | None, dtype: str) -> list[Change]:
    """Changes the call that set a dtype: the method's name, the dtype that it names, or a cast of its result."""
    if isinstance(node, ast.Attribute):
        return _parameter(source, node, dtype)
    if not isinstance(node, ast.Call):
        return []
    method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    if method in _METHODS.values():
        return [other_method(source, node, method, f"to(torch.{dtype})")]
    if (named := _named_dtype(node)) is not None:
        return [source.instead(named, f"torch.{dtype}")]
    assigned = _assigned(source, node) if method == "to" else None
    if assigned is not None:
        return [source.instead(assigned, f"torch.{dtype}")]
    is_buffer = method == "register_buffer" and len(node.args) > 1
    return source.after(node.args[1] if is_buffer else node, cast(dtype))


def _assigned(source: Source, call: ast.Call) -> ast.expr | None:
    """What is assigned to the variable of ``model.to(dtype)``, where other tensors are given that dtype too; else None."""
    name = source.text(call.args[0]) if len(call.args) == 1 else ""
    inside = list(ast.walk(function_around(source, call)))
    uses = [one for one in inside if isinstance(one, ast.Name) and one.id == name]
    made = [one.value for one in inside if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == name]
    return made[0] if len(made) == 1 and len(uses) > 2 else None


def _named_dtype(node: ast.Call) -> ast.Attribute | None:
    """The argument ``torch.float16`` of a call."""
    given = [*node.args, *(keyword.value for keyword in node.keywords)]
    named = [value for value in given if isinstance(value, ast.Attribute) and value.attr in DTYPES]
    return next((value for value in named if ast.unparse(value.value) == "torch"), None)


def _parameter(source: Source, target: ast.Attribute, dtype: str) -> list[Change]:
    """``self.weight = nn.Parameter(values)``: the values in another dtype."""
    made = next((one.value for one in source.every(ast.Assign) if target in one.targets), None)
    if isinstance(made, ast.Call) and source.text(made.func).endswith("Parameter") and made.args:
        return source.after(made.args[0], cast(dtype))
    return []


def whole_program(scene: Scene, narrow: str, wide: str) -> Changes | None:
    """Another dtype in the place of one in the first of the program's files that names it; what goes with that dtype alone is switched off."""
    changed = ((source, whole_file(source, narrow, wide)) for source in scene.program_files())
    return next((way for way in changed if way[1]), None)


def whole_file(source: Source, narrow: str, wide: str) -> list[Change]:
    """The same in a file; not in what is written to a checkpoint, which is cast again where it is loaded."""
    saves = (call for call in source.every(ast.Call) if ast.unparse(call.func) == "torch.save")
    saved = {node for call in saves for node in ast.walk(call)}
    changes: list[Change] = []
    for node in ast.walk(source.tree):
        changes += in_place_of(source, node, narrow, wide) if node not in saved else []
    for call in scalers(source) if changes and narrow == "float16" else ():
        changes += with_keyword(source, call, "enabled=False")
    return list(dict.fromkeys(changes))


_METHODS = {"float16": "half", "bfloat16": "bfloat16", "float32": "float", "float64": "double"}
"""Methods that cast to a dtype."""
_PRECISIONS = {"float16": "fp16", "bfloat16": "bf16", "float32": "no"}
"""How options of trainers call a dtype; of another spelling is Lightning's `16-mixed`."""


def in_place_of(source: Source, node: ast.AST, narrow: str, wide: str) -> list[Change]:
    """The change of a node that names a dtype: ``torch.float16``, ``.half()``, or an option."""
    if isinstance(node, ast.Attribute) and ast.unparse(node) in (f"torch.{narrow}", f"torch.{_METHODS[narrow]}"):
        return _other_dtype(source, node, wide)
    if isinstance(node, ast.keyword) and isinstance(node.value, ast.Constant):
        return _other_option(source, node, node.value, narrow, wide)
    if not isinstance(node, ast.Call):
        return []
    function = source.text(node.func)
    if function.endswith(f".{_METHODS[narrow]}") and not node.args:
        return [other_method(source, node, _METHODS[narrow], f"{_METHODS[wide]}()")]
    return with_keyword(source, node, "enabled=False") if wide == "float32" and function.endswith("autocast") else []


def _other_option(source: Source, option: ast.keyword, value: ast.Constant, narrow: str, wide: str) -> list[Change]:
    """``dtype="float16"``, ``mixed_precision="fp16"``, ``fp16=True``; not ``variant="fp16"``, which names a file."""
    name, short, other = option.arg or "", _PRECISIONS[narrow], _PRECISIONS[wide]
    if name == short and value.value is True:
        return _other_switch(source, option, value, other)
    if value.value == narrow and "dtype" in name:
        return [source.instead(value, repr(wide))]
    return _other_precision(source, value, short, other) if "precision" in name else []


def _other_precision(source: Source, value: ast.Constant, short: str, other: str) -> list[Change]:
    """``"fp16"``, or Lightning's ``"16-mixed"``; not the key of a table of the program's own."""
    given, bits = str(value.value), f"{short.removeprefix('fp')}-"
    keys = {key.value for table in source.every(ast.Dict) for key in table.keys if isinstance(key, ast.Constant)}
    if given in keys or not (given == short or given.startswith(bits)):
        return []
    lightning = "32-true" if other == _PRECISIONS["float32"] else other + given[len(bits) - 1 :]
    return [source.instead(value, repr(other if given == short else lightning))]


def _other_switch(source: Source, option: ast.keyword, value: ast.Constant, other: str) -> list[Change]:
    """``fp16=True``, which becomes ``bf16=True``; or ``fp16=False`` where there is such an option already, or none."""
    given = [one.value for one in getattr(source.parents[option], "keywords", []) if one.arg == other]
    if given or other == _PRECISIONS["float32"]:
        return [source.instead(value, "False"), *(source.instead(one, "True") for one in given)]
    start = source.at(option.lineno, option.col_offset)
    return [(start, start + len(option.arg or ""), other.encode())]


def _other_dtype(source: Source, node: ast.Attribute, dtype: str) -> list[Change]:
    """Another dtype in the place of one that is named; of a table of precisions, which is right, the key of the other where the program gives that of this one."""
    table = source.parents.get(node)
    pairs = zip(table.keys, table.values, strict=True) if isinstance(table, ast.Dict) else ()
    keys = {ast.unparse(value): key for key, value in pairs if isinstance(key, ast.Constant)}
    own, other = keys.get(ast.unparse(node)), keys.get(f"torch.{dtype}")
    given = _given(source, own.value) if own is not None and other is not None else []
    if other is None or not given:
        return [source.instead(node, f"torch.{dtype}")]
    return [source.instead(constant, source.text(other)) for constant in given]


def _given(source: Source, value: object) -> list[ast.Constant]:
    """Where a program gives a constant."""
    constants = [constant for constant in source.every(ast.Constant) if constant.value == value]
    return [constant for constant in constants if isinstance(source.parents.get(constant), _GIVES)]


_GIVES = (ast.Call, ast.keyword, ast.Assign, ast.AnnAssign, ast.arguments, ast.Subscript)
"""What a constant is given by: an argument, a default, an assignment, an index; not a list of choices, nor a comparison."""


def in_wider_dtype(scene: Scene) -> list[Changes]:
    """Computes what the finding's line computes in a wider dtype, or else what the lines compute that use it: a change for each way, the trial tells which helps."""
    narrow, is_undefined = scene.finding.dtype, scene.finding.id == "domain-error"
    if narrow in (None, "float64") or (is_undefined and not is_beyond_float32(scene)):
        return []
    ways = [_line_in_wider_dtype(scene, source, line) for source, line in _rounding_lines(scene)]
    first, *others = ways or [[]]
    return [*first, *(way for of_use in others for way in of_use[:2])][:MOST_WAYS]


def _rounding_lines(scene: Scene) -> list[tuple[Source, int]]:
    """The line that the finding names, then those that use what it has rounded."""
    of_cause = (seen.what for seen in scene.trace.observed(RoundedUse) if seen.what.made_at == scene.finding.source)
    places = [scene.finding.source or "", *(line for what in of_cause for line in (what.source, what.used_at))]
    return [at for place in dict.fromkeys(places) if (at := scene.line_at(place)) is not None]


def _line_in_wider_dtype(scene: Scene, source: Source, line: int) -> list[Changes]:
    """The ways to compute a line in a wider dtype.

    That is by the dtypes that the line names, else by its operands, all or one of them: one of a wider dtype makes the result of most operators wider. With
    a cast back at the end of the statement, or where the function returns; or all of the function. Which operands are tensors is not known: the cast of a
    number raises in the trial.
    """
    narrow, wide = scene.finding.dtype or "", wider(scene)
    nodes = [node for node in ast.walk(source.tree) if getattr(node, "lineno", 0) == line]
    expressions = [node for node in nodes if isinstance(node, ast.expr)]
    named = [change for node in nodes for change in in_place_of_dtype(source, node, wide)]
    if narrow not in DTYPES:  # an integer dtype, in which fractions are cut off: what is cast on from it is as it was
        return [(source, [change]) for change in named]
    operands: dict[str, list[ast.expr]] = {}
    for node in filter(partial(_is_operand, source), expressions):
        operands.setdefault(source.text(node), []).append(node)
    everything = [one for nodes in operands.values() for one in nodes]

    def widened(nodes: Sequence[ast.expr]) -> list[Change]:
        casts = [change for node in nodes for change in source.after(node, cast(wide))]
        return [one for one in casts if not any(begin <= one[0] <= end for begin, end, _ in named)]

    function, back = function_around(source, expressions[0]), cast(narrow)
    own = next((name for name in operands if name.isidentifier()), None)
    if own is not None and isinstance(function, ast.FunctionDef) and _is_alike(scene):
        back = f".to({own}.dtype)"  # others may call the function with another one
    alone = list(operands.values()) if not named and 1 < len(operands) <= MOST_OPERANDS else []
    here = [[*widened(nodes), *_narrowed(source, nodes, back)] for nodes in (everything, *alone)]
    first = named or widened(everything)
    if isinstance(function, ast.FunctionDef) and (at_beginning := _argument_wider(source, function, named, wide)):
        first = at_beginning  # what the function makes beside it is in the dtype of the same argument
    ways = [first, named, *map(widened, alone), [*named, *widened(everything)]]
    last: list[Change] = []
    if isinstance(function, ast.FunctionDef) and (at_return := returned(source, function, back)):
        ways.insert(1, [*first, *at_return])
        last = _computed_in(source, function, cast(wide), back)
    # What is undefined may fit the dtype again where it goes on; what is rounded is rounded again there
    is_rounded = spec_of(scene.finding.id).family is SILENT
    ways = [*ways, *(here if not named else []), last] if is_rounded else [*here, *ways, last]
    return [(source, list(dict.fromkeys(changes))) for changes in ways if changes and first]


def _argument_wider(source: Source, function: ast.FunctionDef, named: Sequence[Change], wide: str) -> list[Change]:
    """A wider dtype at the beginning of a function for its argument that a line takes its dtype from; none where it takes it from elsewhere."""
    given = {source.data[begin:end].decode() for begin, end, _ in named}
    arguments = {one.arg for one in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)}
    body = function.body[ast.get_docstring(function) is not None :]
    names = sorted(given & arguments) if body else []
    return source.before(body[0], *(f"{name} = torch.{wide}" for name in names)) if names else []


def _narrowed(source: Source, nodes: Sequence[ast.expr], back: str) -> list[Change]:
    """What torch computes from some expressions, cast where it goes on: each part of it, where several variables get it."""
    changes: list[Change] = []
    for node in dict.fromkeys(_computed_from(source, node) for node in nodes):
        targets = getattr(source.parents.get(node), "targets", [])
        if any(isinstance(target, ast.Tuple) for target in targets):
            begin, end = source.start(node), source.end(node)
            changes += [(begin, begin, f"[t{back} for t in ".encode()), (end, end, b"]")]
        else:
            changes += source.after(node, back)
    return changes


def _computed_from(source: Source, node: ast.expr) -> ast.expr:
    """The largest expression that operators, methods and functions of torch compute from one."""
    parent = source.parents.get(node)
    is_of_torch = isinstance(parent, ast.Call) and (parent.func is node or names_a_module(parent.func))
    goes_on = isinstance(parent, ast.BinOp | ast.UnaryOp | ast.Attribute) or is_of_torch
    return _computed_from(source, parent) if goes_on and isinstance(parent, ast.expr) else node


MOST_WAYS = 9
"""Ways to compute in a wider dtype: more would leave no trials for what other makers change."""
MOST_OPERANDS = 3
"""Operands of a line that are cast one by one."""


def wider(scene: Scene) -> str:
    """The dtype in which what the finding tells of is neither rounded away nor infinite."""
    is_half = scene.finding.dtype != "float32"
    return "float32" if is_half and not is_beyond_float32(scene) else "float64"


def is_beyond_float32(scene: Scene) -> bool:
    """Whether float64 holds the result of the operator that the finding names, and float32 does not."""
    finding, graph = scene.finding, graph_of(scene.trace)
    return any(graph.is_beyond_float32(op) for op in graph.ops if (op.op, op.source) == (finding.op, finding.source))


def _is_alike(scene: Scene) -> bool:
    """Whether all that the finding's line computes with has the dtype of the finding."""
    on_line = [op for op in graph_of(scene.trace).ops if op.source == scene.finding.source]
    return bool(on_line) and {tensor.dtype for op in on_line for tensor in op.inputs} == {scene.finding.dtype}


def _computed_in(source: Source, function: ast.FunctionDef, wide: str, back: str) -> list[Change]:
    """Casts the arguments of a function that have no default where it begins, and what it returns back."""
    arguments = [*function.args.posonlyargs, *function.args.args]
    names = [one.arg for one in arguments[: len(arguments) - len(function.args.defaults)]]
    given = [name for name in names if name not in ("self", "cls") and _is_only_read(source, function, name)]
    casts = [f"{name} = {name}{wide}" for name in given]
    if given and "torch." not in back:
        casts.insert(0, f"dtype_before = {given[0]}.dtype")
        back = ".to(dtype_before)"
    body = function.body[ast.get_docstring(function) is not None :]
    return [*source.before(body[0], *casts), *returned(source, function, back)] if casts and body else []


def _is_only_read(source: Source, function: ast.FunctionDef, name: str) -> bool:
    """Whether a function neither writes to an argument in place nor gives it to a function that may: what is written to a copy is lost."""
    uses = (node for node in ast.walk(function) if isinstance(node, ast.Name) and node.id == name)
    return not any(_may_write(node, source.parents.get(node)) for node in uses)


def _may_write(node: ast.Name, parent: ast.AST | None) -> bool:
    match parent:
        case ast.Attribute(attr=method):
            return method.endswith("_") and not method.endswith("__")
        case ast.Subscript(value=value, ctx=context):
            return value is node and not isinstance(context, ast.Load)
        case ast.Call(func=function):
            return isinstance(function, ast.Name) and not names_a_module(function)
    return isinstance(parent, ast.AugAssign) and parent.target is node


def returned(source: Source, function: ast.FunctionDef, narrow: str) -> list[Change]:
    """What a function returns, cast."""
    values = [node.value for node in ast.walk(function) if isinstance(node, ast.Return) and node.value is not None]
    own = [value for value in values if function_around(source, value) is function]
    return [change for value in own for change in source.after(value, narrow)]


def _is_operand(source: Source, node: ast.expr) -> bool:
    """Whether an expression is computed with, and may be a tensor that is only read: no function, namespace, dtype or index, and not cast as it is.

    What is written to, or goes to a function of the program that may write to it, is none: the write would go to the copy, and be lost. What a module or a
    function of the program returns is one, what torch computes from others is none itself.
    """
    parent = source.parents.get(node)
    is_made = isinstance(node, ast.Call) and _is_of_the_program(node.func)
    if not is_made and not _may_be_tensor(source, node):
        return False
    if isinstance(parent, ast.Attribute):
        return _is_read_by_methods(source, node)
    if isinstance(parent, ast.Call):
        is_function = names_a_module(parent.func) and not source.text(parent.func).endswith("_")
        return is_function and node in parent.args
    goes_on = ast.Return | ast.Assign | ast.AugAssign | ast.Tuple | ast.List
    return isinstance(parent, ast.BinOp | ast.UnaryOp) or (not is_made and isinstance(parent, goes_on))


def _may_be_tensor(source: Source, node: ast.expr) -> bool:
    """Whether a variable, an attribute or an element is read that may be one: no namespace, dtype or index."""
    is_read = isinstance(node, ast.Name | ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Load)
    return is_read and not (names_a_module(node) or _NO_TENSOR.search(ast.unparse(node)) or _is_number(source, node))


def _is_number(source: Source, node: ast.expr) -> bool:
    """Whether a name is that of an argument whose default, or annotation, is a number or a text."""
    function = function_around(source, node)
    if not isinstance(node, ast.Name) or not isinstance(function, ast.FunctionDef):
        return False
    given = function.args
    positional = [*given.posonlyargs, *given.args]
    defaults = [
        *zip(reversed(positional), reversed(given.defaults), strict=False),
        *zip(given.kwonlyargs, given.kw_defaults, strict=True),
    ]
    numbers = {one.arg for one, default in defaults if isinstance(default, ast.Constant) and default.value is not None}
    told = {
        one.arg
        for one in (*positional, *given.kwonlyargs)
        if one.annotation and ast.unparse(one.annotation) in ("int", "float", "bool", "str")
    }
    return node.id in numbers | told


def _is_of_the_program(function: ast.expr) -> bool:
    """Whether a function is one that the program names, or an attribute of ``self``: neither a method of a tensor nor one of Python's or torch's."""
    root = function
    while isinstance(root, ast.Attribute):
        root = root.value
    if not isinstance(root, ast.Name) or hasattr(builtins, root.id) or names_a_module(function):
        return False
    return root is function or root.id == "self"


_NO_TENSOR = re.compile(r"^(self|cls|math|np)$|dtype[^.]*$|\.shape\b")


def _is_read_by_methods(source: Source, node: ast.AST) -> bool:
    """Whether the methods that are called on an expression, one behind the other, neither write in place nor cast: not for ``x`` of ``x.view(2).half()``."""
    while isinstance(method := source.parents.get(node), ast.Attribute):
        call = source.parents.get(method)
        writes = method.attr.endswith("_") and not method.attr.endswith("__")
        if not isinstance(call, ast.Call) or writes or in_place_of_dtype(source, call, "float32"):
            return False
        node = call
    return True


def in_place_of_dtype(source: Source, node: ast.AST, wide: str) -> list[Change]:
    """A wider dtype in the place of one that a node names, or takes from a variable or from another tensor."""
    halves = ("bfloat16", "float16") if wide == "float32" else ()
    named = [change for narrow in halves for change in in_place_of(source, node, narrow, wide)]
    if named or not isinstance(node, ast.Call):
        return named
    method = source.text(node.func).rpartition(".")[2]
    if method == "type_as" or (method, wide) == ("float", "float64"):
        return [other_method(source, node, method, f"to(torch.{wide})")]
    given = _dtypes_given(node, method)
    return [source.instead(value, f"torch.{wide}") for value in given if _may_be_narrow(ast.unparse(value), wide)]


def _dtypes_given(call: ast.Call, method: str) -> list[ast.expr]:
    """The arguments of a call that are a dtype."""
    named = [keyword.value for keyword in call.keywords if keyword.arg == "dtype"]
    given = call.args if method in ("to", "type") else []
    return [*named, *(value for value in given if re.search(r"^torch\.|dtype[^.]*$", ast.unparse(value)))]


def _may_be_narrow(dtype: str, wide: str) -> bool:
    """Whether an expression that gives a dtype may give a narrower one: none that names a wide dtype, or one of integers."""
    module, _, name = dtype.rpartition(".")
    return dtype != f"torch.{wide}" and (module != "torch" or name in DTYPES)


def region_without_cache(scene: Scene) -> Changes | None:
    """The autocast region keeps no cast copies of weights."""
    return in_calls(scene, "autocast", lambda source, call: with_keyword(source, call, "cache_enabled=False"))


def region_on_device(scene: Scene) -> Changes | None:
    """Autocast regions and custom functions are for the device that the tensors are on."""
    device = scene.device

    def moved(source: Source, call: ast.Call) -> list[Change]:
        values = [*call.args[:1], *(k.value for k in call.keywords if k.arg == "device_type")]
        named = [v for v in values if isinstance(v, ast.Constant) and v.value in ("cuda", "cpu") and v.value != device]
        return [source.instead(value, f'"{device}"') for value in named]

    return in_calls(scene, ("autocast", "custom_fwd", "custom_bwd"), moved)


_CAST_BY_AUTOCAST = frozenset({"mm", "addmm", "bmm", "baddbmm", "convolution", "mv", "addmv"})


def autocast_around(scene: Scene) -> Changes | None:
    """Makes the program's call of the model in an autocast region of the half-precision dtype, which casts what meets in a product."""
    op, at = scene.rejected, _outermost_call(scene)
    if op is None or at is None or op.autocast is not None or overload_free(op.op) not in _CAST_BY_AUTOCAST:
        return None
    half = next((dtype for dtype in floats(op.inputs) if dtype in ("bfloat16", "float16")), None)
    statements = at[0].around(at[1], ast.Assign, ast.AugAssign, ast.Expr, ast.Return)
    if half is None or not statements or not has_torch(at[0]):
        return None
    changes = at[0].indented(statements[-1], f'with torch.autocast("{scene.device}", dtype=torch.{half}):')
    return some(at[0], changes)


def _outermost_call(scene: Scene) -> tuple[Source, ast.expr] | None:
    """The program's call of the outermost module; None where a library makes it."""
    raised = scene.raised
    if raised is None or len(raised.spans) != len(raised.frames):
        return None
    called = next((n for n, frame in enumerate(raised.frames) if frame.endswith(" _wrapped_call_impl")), 0)
    if called == 0:
        return None
    source = scene.source(raised.frames[called - 1].rpartition(" ")[0].rpartition(":")[0])
    node = source.spanned(raised.spans[called - 1]) if source is not None else None
    return (source, node) if source is not None and node is not None else None


def custom_function_decorators(scene: Scene) -> Changes | None:
    """Gives forward and backward of a custom function the decorators that carry the region over; takes them away where ``setup_context`` leaves no ctx for it."""
    for source in scene.program_files():
        classes = (
            one for one in source.every(ast.ClassDef) if any(ast.unparse(b).endswith("Function") for b in one.bases)
        )
        changes = [change for one in classes for change in _decorated(source, one, scene.device)]
        if changes:
            return (source, changes) if has_torch(source) else None
    return None


def _decorated(source: Source, cls: ast.ClassDef, device: str) -> list[Change]:
    """The changes of one class."""
    methods = {one.name: one for one in cls.body if isinstance(one, ast.FunctionDef)}
    changes: list[Change] = []
    for name, decorator in (("forward", "custom_fwd"), ("backward", "custom_bwd")):
        if name in methods:
            given = [one for one in methods[name].decorator_list if decorator in source.text(one)]
            if "setup_context" in methods:
                changes += map(source.without, given)
            elif not given:
                changes += source.before(methods[name], f'@torch.amp.{decorator}(device_type="{device}")')
    return changes


def plain_linear_only(scene: Scene) -> Changes | None:
    """``type(x) is nn.Linear``: nn.MultiheadAttention multiplies with the weight of its output projection itself, which is of a subclass."""
    note = scene.parameters.get(f"{scene.finding.fqn}.out_proj.weight")
    if note is None or note.quant is None:
        return None

    def exact(source: Source, call: ast.Call) -> list[Change]:
        if len(call.args) != 2 or ast.unparse(call.args[1]) not in ("nn.Linear", "torch.nn.Linear"):
            return []
        return [source.instead(call, f"type({source.text(call.args[0])}) is {source.text(call.args[1])}")]

    return in_calls(scene, "isinstance", exact)


def dequantized_weights(scene: Scene) -> Changes | None:
    """Unpacks the 4-bit weights of the finding's module that the program's own function multiplies with."""
    at = scene.own_node()
    if at is None:
        return None
    source, node = at
    packed = {f"self.{name}" for name, note in _inside(scene).items() if note.quant}
    changes = []
    for name in ast.walk(function_around(source, node)):
        if isinstance(name, ast.Attribute) and (text := source.text(name)) in packed:
            changes.append(source.instead(name, f"dequantize_4bit({text}, {text}.quant_state)"))
    for statement in source.tree.body if changes else ():
        if source.text(statement).startswith(_BITSANDBYTES):
            return source, [*source.before(statement, "from bitsandbytes.functional import dequantize_4bit"), *changes]
    return None


_BITSANDBYTES = ("import bitsandbytes", "from bitsandbytes")


def _inside(scene: Scene) -> dict[str, ParameterNote]:
    """The parameters of the finding's module, by their names in it."""
    begin = f"{scene.finding.fqn}." if scene.finding.fqn else ""
    return {name.removeprefix(begin): note for name, note in scene.parameters.items() if name.startswith(begin)}


def shard_apart(scene: Scene) -> list[Changes]:
    """Shards the modules of the odd dtype by themselves, before the module that they are in: a change for each call that shards."""
    inside = _inside(scene).items()
    odd = [name for name, note in inside if note.dtype == scene.finding.dtype and not note.buffer]
    modules = dict.fromkeys(name.rpartition(".")[0] for name in odd)
    sharding = ((source, one) for source in scene.program_files() for one in source.every(ast.Expr))
    ways = ((source, source.before(one, *_sharded(source, one.value, modules))) for source, one in sharding)
    return [way for way in ways if way[1]]


def _sharded(source: Source, call: ast.expr, modules: Iterable[str]) -> Iterator[str]:
    """The same call for modules inside of what is sharded; none where a call does something else."""
    if isinstance(call, ast.Call) and source.text(call.func).endswith("fully_shard") and call.args:
        unit = call.args[0]
        begin, rest = (
            source.data[source.start(call) : source.end(unit)],
            source.data[source.end(unit) : source.end(call)],
        )
        yield from (f"{begin.decode()}.{module}{rest.decode()}" for module in modules)
