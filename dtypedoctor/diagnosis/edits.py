"""What to do about each finding, in words and as edits of the program's source: from the line that failed, or the one that set a dtype.

Each maker reads the syntax tree of a file and gives changes of it, or none where it does not see exactly what to change. What comes out is
checked: applied line by line it still parses, and no line of it holds what may be a secret.

A cast whose result the program keeps stays a copy: ``p.detach().to(torch.bfloat16)`` copies float32 weights, ``p.detach().to(torch.float32)`` returns
``p``. Where an edit changes the dtype on one side of such a cast, what was a copy shares its storage with the weights, and what updates it in place
changes them. Nothing raises, and the trial of the edit need not show it. So each cast that may stop copying gets ``.clone()``: one too many does no harm.
"""

import ast
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

from dtypedoctor.diagnosis import dtype_edits, page, spec_of, value_edits
from dtypedoctor.diagnosis.nonfinite_origin import SDPA, AttentionExperiment, attention_experiment
from dtypedoctor.diagnosis.ops import graph_of
from dtypedoctor.diagnosis.rule import Advice, Edit, Excerpt, Finding, FindingSpec, Severity
from dtypedoctor.diagnosis.scene import Change, Changes, Scene, Source, masked_line, may_be_shown
from dtypedoctor.diagnosis.value_edits import fitting
from dtypedoctor.diagnosis.wording import class_of, limit_of, short, shown_line
from dtypedoctor.errors import DoctorError
from dtypedoctor.foreign_files import working_directory
from dtypedoctor.text import counted, memory
from dtypedoctor.trace.events import Op, ParameterNote
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.records.silent import Updates


def advise(
    findings: Sequence[Finding], trace: Trace, script: str | None, *, began: float, own_files: bool
) -> tuple[tuple[Advice, ...], tuple[Excerpt, ...]]:
    """Say what to do about each finding, in their order, and show the lines of the first.

    Args:
        findings: what was found.
        trace: where.
        script: path of the program; None where there is none.
        began: when it ran: a file that was changed since is not the one that ran.
        own_files: whether the program's files may be read: without them there are neither edits nor lines.
    """

    here = working_directory()
    # The program may have deleted its working directory
    path = Path(script).resolve() if script and (here is not None or Path(script).is_absolute()) else None
    folders = [folder for folder in (here and here.resolve(), path and path.parent) if folder is not None]

    scenes = [Scene(finding, trace, tuple(folders), path, began=began) for finding in findings]
    advice = tuple(_advice(scene, own_files=own_files) for scene in scenes)
    return advice, _excerpts(scenes[0]) if scenes and own_files else ()


def _advice(scene: Scene, *, own_files: bool) -> Advice:
    """What may mend it, each way with its edits; one without any where none is seen."""
    finding, spec = scene.finding, spec_of(scene.finding.id)
    if spec.partly_frozen is not None and _is_partly_frozen(scene) and _trained_by(scene)[0]:
        text, code = (_filled(part, scene) for part in spec.partly_frozen)
        return Advice(finding=finding.id, text=text, code=code)
    if spec.instead is not None and (text := spec.instead(finding)):
        return Advice(finding=finding.id, text=text)
    made = edits_for(scene, spec.edits) if own_files else [((), "")]
    first, *others = [_way(scene, edits, maker) for edits, maker in made]
    return replace(first, others=tuple(others))


def _way(scene: Scene, edits: tuple[Edit, ...], name: str) -> Advice:
    """One way to mend it, in words, and by edits where there are some."""
    finding, spec, maker = scene.finding, spec_of(scene.finding.id), MAKERS.get(name, NO_MAKER)
    instead = maker.of.get(finding.id, maker.instead)
    sentence = instead or (spec.without_edit(finding) if spec.without_edit and not edits else "")
    plain = _text(spec, scene, sentence)
    text = f"{plain} {maker.remark}".rstrip()
    return Advice(finding=finding.id, text=text, edits=edits, maker=name if edits else "", of_a_part=plain)


def _excerpts(scene: Scene) -> tuple[Excerpt, ...]:
    """Show the lines at which a finding shows."""
    raised, line = scene.raised, scene.failing_line()
    is_late = line is not None and spec_of(scene.finding.id).nonfinite  # what raises then only noticed it
    if raised is not None and not raised.caught and len(raised.spans) == len(raised.frames) and not is_late:
        return tuple(_along(scene, list(zip(raised.frames, raised.spans, strict=True))))
    return (_excerpt(line[0], line[1], "", [], scene.shown(line[0].path)),) if line is not None else ()


Frame = tuple[str, list[int]]
"""``/path/of/file.py:line function`` and the span of what it was doing."""


def _along(scene: Scene, frames: list[Frame]) -> Iterator[Excerpt]:
    """The program's innermost line, and the line of the library inside of it where the exception was raised."""
    own = [at for at, (frame, _) in enumerate(frames) if _opened(frame, scene.source) is not None]
    if not own:
        return
    last = own[-1]
    yield _excerpt_of(scene, frames[last], skipped=0)
    inside = range(len(frames) - 1, last, -1)  # files of libraries are long: no more are read than needed
    raised_in = next((at for at in inside if _opened(frames[at][0], scene.installed) is not None), last)
    if raised_in > last:
        yield _excerpt_of(scene, frames[raised_in], skipped=raised_in - last - 1)


def _opened(frame: str, read: Callable[[str], Source | None]) -> Source | None:
    """The file of a frame; None for one that cannot be read, or has no such line."""
    path, _, line = frame.rpartition(" ")[0].rpartition(":")
    source = read(path)
    return source if source is not None and source.has(int(line)) else None


def _excerpt_of(scene: Scene, frame: Frame, *, skipped: int) -> Excerpt:
    at, _, function = frame[0].rpartition(" ")
    line = int(at.rpartition(":")[2])
    own = _opened(frame[0], scene.source)
    source = own or _opened(frame[0], scene.installed)
    assert source is not None
    file = scene.shown(source.path) if own is not None else shown_line(at).rpartition(":")[0]
    return _excerpt(source, line, function, frame[1], file, skipped)


def _excerpt(source: Source, line: int, function: str, span: list[int], file: str, skipped: int = 0) -> Excerpt:
    text = masked_line(source, line)
    begin, end = len(text) - len(text.lstrip()), len(text)
    if len(span) == 4 and span[0] == line:
        raw = source.data.splitlines()[line - 1]
        begin = len(raw[: span[2]].decode("utf-8", "replace"))
        end = len(raw[: span[3]].decode("utf-8", "replace")) if span[1] == line else len(text)
    whole = source.data.splitlines()[line - 1].decode()
    own = "" if text == whole or len(text) != len(whole) else whole
    return Excerpt(
        file=file,
        line=line,
        function=function,
        text=text,
        begin=begin,
        end=min(end, len(text)),
        skipped=skipped,
        own=own,
    )


def _text(spec: FindingSpec, scene: Scene, of_edit: str) -> str:
    """The sentence of the edit that is shown, where it has one of its own; else that of the finding."""
    do_this = of_edit or (spec.of_line if scene.finding.source else "") or spec.do_this
    text = _filled(do_this, scene) if do_this else _first_way(scene.finding)
    milder = scene.finding.severity is Severity.INFO and spec.severity is not Severity.INFO
    return f"It may stay as it is. To change it: {text[:1].lower()}{text[1:]}" if milder else text


def _filled(text: str, scene: Scene) -> str:
    """``text`` with the names and dtypes of the finding."""
    finding = scene.finding
    if finding.fqn is None and finding.phase == "backward":
        module = "the backward pass"
    else:
        module = finding.module.partition(" (")[0] or short(finding.fqn)
    values = {
        "module": module,
        "alike": _all_alike(scene) or module,
        "op": finding.op or "the operator",
        "dtype": finding.dtype or "odd",
        "other": scene.other or "that of the others",
        "device": scene.device,
    }
    if "{bound}" in text:
        bound = value_edits.bound_of(scene)
        values["bound"] = f", e.g. by `{bound}` before it" if bound else ""
    if "{wider}" in text:
        values["wider"] = dtype_edits.wider(scene)
    if "{cost}" in text:
        values["cost"] = _cost_of_float32(scene)
    if "{trained}" in text or "{before_optimizer}" in text:
        values["trained"], values["before_optimizer"] = _trained_by(scene)
    if "{scores}" in text:
        values["scores"] = _other_attention(scene)
    filled = text.format(**values)
    return filled.replace("`the operator`", "the operator")


def _parameters_of(scene: Scene) -> list[ParameterNote]:
    """The parameters of the run, each as it was noted last."""
    notes = {(note.root, note.name): note for note in scene.trace.all(ParameterNote) if not note.buffer}
    return list(notes.values())


def _is_partly_frozen(scene: Scene) -> bool:
    """Whether a line that casts the whole model would widen weights that nobody trains; not of a finding about tensors that are no weights."""
    return bool(fitting(scene, ("set-float32",))) and any(
        not note.requires_grad and note.dtype == scene.finding.dtype for note in _parameters_of(scene)
    )


def _other_attention(scene: Scene) -> str:
    """What else keeps the scores of attention finite, as measured on its own operands, to follow a clause."""
    products = (op for op in scene.trace.all(Op) if (op.op, op.source) == (scene.finding.op, scene.finding.source))
    return next(
        (_measured_of(scene, tried, op) for op in products if (tried := attention_experiment(scene.trace, op))), ""
    )


def _measured_of(scene: Scene, tried: AttentionExperiment, op: Op) -> str:
    fused = f", or call `{SDPA}`, which is finite on the same operands" if tried.is_of_the_scores else ""
    exact = graph_of(scene.trace).replay(op, "float32")
    reached = (exact.absmax if exact is not None else None) or math.inf
    return fused + _scaled_query(scene, reached * abs(tried.what.scale or 1.0))


def _scaled_query(scene: Scene, reached: float) -> str:
    """That the query can be scaled before the product, where what it then reaches fits the dtype."""
    if reached > limit_of(scene.finding.dtype or ""):
        return ""
    return f", or scale the query before the product, which then reaches {reached:,.0f}"


_MOMENTS = {"Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Lion": 1, "Adagrad": 1}
"""Tensors that an optimizer keeps of each parameter, in its dtype; not of SGD and RMSprop, which keep more with momentum."""


def _cost_of_float32(scene: Scene) -> str:
    """What it costs to train in float32 what is trained in half precision, to follow a clause; empty where that is not known."""
    half = [note for note in _parameters_of(scene) if note.requires_grad and note.dtype == scene.finding.dtype]
    elements = sum(math.prod(note.shape) for note in half)
    optimizer = next((seen.what.optimizer for seen in scene.trace.observed(Updates)), "")
    if not elements or optimizer not in _MOMENTS:
        return ""
    tensors = 2 + _MOMENTS[optimizer]  # weight and gradient
    kept = f" and {counted(_MOMENTS[optimizer], 'moment')} of {optimizer}"
    return f" (costs {memory(2 * tensors * elements)} more for {counted(elements, 'trained weight')}: weight, gradient{kept} take 4 bytes each, not 2)"


def _trained_by(scene: Scene) -> tuple[str, str]:
    """What the program gives its optimizer, ``model.parameters()`` or a list, as an expression, and where; empty where that is not known.

    Where a library makes the optimizer, it is what the program calls its model.
    """
    optimizer = next((seen.what.optimizer for seen in scene.trace.observed(Updates)), "")
    source = scene.failing_file()
    if source is None:
        return "", ""
    for call in source.every(ast.Call):
        if given := _given_to(optimizer, call):
            return given, f"Before {optimizer} is made ({scene.shown(source.path)}:{call.lineno}),"
    is_named = any(node.id == "model" and isinstance(node.ctx, ast.Store) for node in source.every(ast.Name))
    return ("model.parameters()", "Before the optimizer is made,") if is_named else ("", "")


def _given_to(optimizer: str, call: ast.Call) -> str:
    """What a call gives an optimizer, as an expression; empty where it makes another thing, or gives neither a list nor ``parameters()``."""
    if not optimizer or ast.unparse(call.func).rpartition(".")[2] != optimizer:
        return ""
    for node in ast.walk(call):
        if isinstance(node, ast.Attribute) and node.attr in ("parameters", "named_parameters"):
            return f"{ast.unparse(node.value)}.parameters()"
    is_list = call.args and isinstance(call.args[0], ast.List | ast.Tuple)
    return ast.unparse(call.args[0]) if is_list else ""


def _all_alike(scene: Scene) -> str:
    """The modules whose parameters are like that of the finding, ``all 7 modules of class Norm``; empty where there is one only."""
    cls = class_of(scene.trace, scene.finding.fqn) if scene.finding.fqn else ""
    notes = [note for note in scene.trace.all(ParameterNote) if note.owner == cls and not note.buffer]
    modules = {(note.root, note.name.rpartition(".")[0]) for note in notes if note.dtype == scene.finding.dtype}
    return f"all {len(modules)} modules of class {cls}" if len(modules) > 1 else ""


_HOW_TO_FIX = re.compile(
    r"^## How to fix it\n+(?:\d+\.|-)\s+(.+?)(?=\n(?:\d+\.|-)\s|\n\n|\Z)", re.MULTILINE | re.DOTALL
)


def _first_way(finding: Finding) -> str:
    """The first way of fixing that the finding's page names; what shows the page where it names none."""
    try:
        found = _HOW_TO_FIX.search(page(finding.id))
    except DoctorError:
        found = None
    if found is None:
        return f"`dtypedoctor explain {finding.id}` lists what to change."
    without_links = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", found[1])
    plain = re.sub(r"(?<![\w*])\*{1,2}(\S[^*]*)\*{1,2}(?![\w*])", r"\1", without_links)  # emphasis, and no product
    return " ".join(plain.replace("`", "").split())


def edits_for(scene: Scene, makers: Sequence[str]) -> Iterator[tuple[tuple[Edit, ...], str]]:
    """The lines that each maker changes which sees what to change, and its name; where none does, no lines, and the name of what would help."""
    shown: dict[tuple[Edit, ...], str] = {}
    for name in value_edits.fitting(scene, tuple(makers)):
        made = MAKERS[name].make(scene) or []
        # One change, or several of which each may be the right one
        for source, changes in [made] if isinstance(made, tuple) else made:
            edits = _with_copies(scene, name, source, changes)
            if edits:
                shown.setdefault(edits, _name_of_cast(scene) if name == "cast-operand" else name)
    yield from sorted(shown.items(), key=lambda way: dtype_edits.changes_most_weights(scene, way[0]))
    if not shown:
        yield (), "cast-written" if _is_a_write(scene) else ""


def _is_a_write(scene: Scene) -> bool:
    """Whether the operator that raised writes to one of its operands, whose dtype stays: so the others are cast, whichever is the odd one."""
    op = scene.rejected
    return op is not None and scene.finding.id == "operand-dtype-mismatch" and (op.inplace or op.out_variant)


def _name_of_cast(scene: Scene) -> str:
    """What a cast of what the failing line gives is called: whether an experiment on the operator has changed the same."""
    if _is_a_write(scene):
        return "cast-written"
    return "cast-operand" if dtype_edits.casts_every_operand(scene) else "cast-argument"


def _with_copies(scene: Scene, name: str, changed: Source, changes: list[Change]) -> tuple[Edit, ...]:
    """The changed lines, with those that keep copies of weights from sharing the storage of the weights, in other files of the program too."""
    maker = MAKERS[name]
    dtypes = dtypes_in(changes) if maker.of_weights else set()
    if maker.elsewhere is not None:  # a key of a table names none
        dtypes.add(name.rpartition("-to-")[2])
    edits = _checked(scene, changed, [*changes, *still_copying(changed, changes, dtypes)])
    for source in scene.imported_files() if edits and dtypes else ():
        if source.path != changed.path:
            also = maker.elsewhere(source) if maker.elsewhere is not None else []
            edits += _checked(scene, source, [*also, *still_copying(source, also, dtypes)])
    return edits


def _checked(scene: Scene, source: Source, changes: list[Change]) -> tuple[Edit, ...]:
    """The changed lines; empty where the file is no Python once they are applied one by one, or has a line that must not be shown."""
    file = scene.shown(source.path)
    # split as bytes: a text has more ends of lines than Python's source has, form feeds for one
    before = [line.decode() for line in source.data.splitlines()]
    after = _lines_after(source.data, changes)
    edits = tuple(
        Edit(file=file, line=number, old=old, new=after[number])
        for number, old in enumerate(before, 1)
        if after.get(number, old) != old
    )
    try:
        ast.parse("\n".join(after.get(number, line) for number, line in enumerate(before, 1)))
    except (SyntaxError, ValueError, RecursionError):
        return ()
    return edits if all(may_be_shown(source, edit.line, edit.old, edit.new) for edit in edits) else ()


def _lines_after(data: bytes, changes: Iterable[Change]) -> Mapping[int, str]:
    """What stands in the place of each line (from 1): a line, several, or nothing; empty where one change lies inside of another.

    What replaces an expression of several lines stands in the first of them, with what follows the last.
    """
    ordered = sorted(dict.fromkeys(changes), key=lambda change: change[:2])
    if any(end > start for (_, end, _), (start, _, _) in pairwise(ordered)):
        return {}
    after: dict[int, str] = {}
    begin = done = 0
    for number, line in enumerate(data.splitlines(keepends=True), 1):
        end = begin + len(line)
        after[number] = ""
        if begin >= done:
            ends = [_end_of_line(data, last) for _, last, _ in _starting(ordered, data, begin, end) if last > end]
            done = max([end, *ends])
            after[number] = _changed(data[begin:done], begin, _starting(ordered, data, begin, done))
        begin = end
    return after


def _starting(changes: Iterable[Change], data: bytes, begin: int, end: int) -> list[Change]:
    """The changes that start between two places; what is added behind a last line that has no end belongs to it."""
    open_end = end == len(data) and not data.endswith(b"\n")
    return [change for change in changes if begin <= change[0] < end + open_end]


def _end_of_line(data: bytes, place: int) -> int:
    """Behind the end of the line that what comes before ``place`` is in."""
    return data.find(b"\n", place - 1) + 1 or len(data)


def _changed(part: bytes, begin: int, changes: Sequence[Change]) -> str:
    """A part of a file, which begins at ``begin``, with its changes, which are ordered; without the last end of a line."""
    for start, end, text in reversed(changes):
        part = part[: start - begin] + text + part[end - begin :]
    return part.decode().rstrip("\r\n").replace("\r\n", "\n")


@dataclass(frozen=True, slots=True)
class Maker:
    """What makes an edit of a kind, and what is said of such edits.

    Attributes:
        make: the changes that it sees to make in a program: none, some, or several ways, the best first.
        instead: the sentence that says what to do, where that of the finding says something else.
        of: the same for a single finding, by its id.
        remark: what the edit costs, or does besides that sentence.
        tried_as: the fix that changes a call or a run as the edit changes the program.
        on_operator: whether it changes on the failing line what an experiment on the operator has changed.
        of_weights: whether it gives weights another dtype.
        elsewhere: of one that changes a whole program, what it changes in the other files, and in the other cells of a notebook.
    """

    make: Callable[[Scene], Changes | list[Changes] | None]
    instead: str = ""
    of: Mapping[str, str] = field(default_factory=dict)
    remark: str = ""
    tried_as: str | None = None
    on_operator: bool = False
    of_weights: bool = False
    elsewhere: Callable[[Source], list[Change]] | None = None


NO_MAKER = Maker(lambda _: None)
"""What is said where there is no edit: the sentence of the finding."""


def _whole_program(narrow: str, wide: str, tried_as: str | None = None) -> Maker:
    """Another dtype in the whole program."""
    to_float32 = wide == "float32"
    drives = "Compute it in float32: rounding may drive it, and not the learning rate."
    return Maker(
        partial(dtype_edits.whole_program, narrow=narrow, wide=wide),
        # what is said of findings in float16 names bfloat16
        instead="Compute it in float32 in the place of float16." if (narrow, wide) == ("float16", "float32") else "",
        of={"divergence": drives} if to_float32 else {},
        remark="The edit computes all of it in float32: the simplest change, and the slowest." if to_float32 else "",
        tried_as=tried_as,
        of_weights=True,
        elsewhere=partial(dtype_edits.whole_file, narrow=narrow, wide=wide),
    )


_HOLDS = "Compute it in {wider}, which holds what {dtype} rounds away or cannot hold."
MAKERS: Mapping[str, Maker] = {
    "cast-operand": Maker(dtype_edits.cast_operand, on_operator=True),
    "cast-written": Maker(
        dtype_edits.cast_operand,
        instead="Cast what `{op}` writes to the dtype of the tensor that it writes to.",
        on_operator=True,
    ),
    "cast-argument": Maker(dtype_edits.cast_operand, remark="The edit casts what this line calls a module with."),
    "in-wider-dtype": Maker(dtype_edits.in_wider_dtype, of={"domain-error": _HOLDS, "rounds-out-of-domain": _HOLDS}),
    "make-in-dtype": Maker(dtype_edits.make_in_dtype),
    "cast-where-set": Maker(dtype_edits.cast_where_set, of_weights=True),
    "cast-met-weights": Maker(
        dtype_edits.cast_met_weights,
        instead="Cast the weights that meet it to {dtype}, on the line that gave them another dtype.",
        of_weights=True,
    ),
    "cast-promoted-output": Maker(dtype_edits.cast_promoted_output),
    "cast-weights-where-set": Maker(
        dtype_edits.cast_where_set,
        instead="Cast the {dtype} weights to {other}, the dtype of what they meet, on the line that made them {dtype}.",
        of_weights=True,
    ),
    "autocast-around": Maker(
        dtype_edits.autocast_around,
        instead="Call the model under autocast, which casts what meets in a product.",
        remark="The edit keeps the dtype of the weights, so they train as before; products in the region are computed in half precision.",
    ),
    "set-float32": Maker(dtype_edits.set_float32, of_weights=True),
    "weights-to-float32": Maker(
        dtype_edits.set_float32,
        instead="Keep the weights in float32, on the line that gave them half precision: the autocast region casts them where it computes.",
        of_weights=True,
    ),
    value_edits.OWN: Maker(
        value_edits.updated_in_float32,
        remark="The edit changes what makes the tensors that this line updates; the weights keep their dtype.",
    ),
    "half-to-bfloat16": _whole_program("float16", "bfloat16", tried_as="bfloat16"),
    "half-to-float32": _whole_program("float16", "float32"),
    "bfloat16-to-float32": _whole_program("bfloat16", "float32"),
    "region-without-cache": Maker(dtype_edits.region_without_cache),
    "region-on-device": Maker(
        dtype_edits.region_on_device, instead="Name the device that the tensors are on in `torch.autocast`."
    ),
    "custom-function-decorators": Maker(dtype_edits.custom_function_decorators),
    "plain-linear-only": Maker(
        dtype_edits.plain_linear_only,
        remark="The edit leaves layers of a subclass of nn.Linear unpacked, so they keep their memory.",
    ),
    "dequantized-weights": Maker(
        dtype_edits.dequantized_weights, remark="The edit unpacks these weights in each call."
    ),
    "shard-apart": Maker(
        dtype_edits.shard_apart, remark="The edit gives these modules a unit, and an all-gather, of their own."
    ),
    "lower-learning-rate": Maker(value_edits.lower_learning_rate, remark="The edit divides it by 100."),
    "keep-in-domain": Maker(
        value_edits.keep_in_domain, remark="Where the edit bounds or replaces what it gets, the result is another one."
    ),
    "finite-mask": Maker(value_edits.finite_mask),
    "finite-fill": Maker(
        value_edits.finite_fill,
        remark="The edit fills in -1e4, which a mean survives: choose a value that fits the scale of yours.",
    ),
    "skip-batch": Maker(
        value_edits.skip_batch,
        remark="The edit leaves such batches out of the training; where their values come from it does not say.",
    ),
    "optimizer-after-model": Maker(value_edits.optimizer_after_model),
    "step-where-gradients": Maker(
        value_edits.step_where_gradients,
        remark="The edit skips an optimizer without gradients, as its step without a scaler does: what it holds is not trained.",
    ),
    "without-scaler": Maker(value_edits.without_scaler),
    "without-compiler": Maker(
        value_edits.without_compiler,
        remark="The edit runs it uncompiled, in plain PyTorch's time.",
        tried_as="compile-off",
    ),
    "compiled-for-any-size": Maker(value_edits.compiled_for_any_size),
    "counter-in-tensor": Maker(
        value_edits.counter_in_tensor,
        remark="The edit keeps the number in a tensor, which is an input of the compiled code and no part of it.",
    ),
}


_CASTS = {"half": "float16", "bfloat16": "bfloat16", "float": "float32", "double": "float64"}
_SHARING = frozenset(
    {"detach", "cpu", "cuda", "to", "view", "reshape", "contiguous", "flatten", "squeeze", "unsqueeze", "t", "requires_grad_"}
)  # fmt: skip
"""Methods that may return a tensor of the same storage."""
_KEEPING = frozenset(
    {"append", "extend", "insert", "add", "setattr", "setdefault", "update", "register_buffer", "register_parameter", "Parameter", "Buffer",
     "ParameterList", "ParameterDict", "list", "tuple", "dict", "OrderedDict", "defaultdict"}
)  # fmt: skip
"""Functions that keep what they get; others are taken to read it."""
_CALLS_OF_WEIGHTS = frozenset({"detach", "data", "grad", "weight", "bias"})
"""Attributes by which a program reads a weight to keep it."""
_LISTS_WEIGHTS = re.compile(r"\.(named_)?(parameters|buffers)\(|state_dict\(")
_DTYPE = re.compile(r"\b(bfloat16|float16|float32|float64|half|float|double)\b")


def still_copying(source: Source, changes: Sequence[Change], of_weights: Collection[str]) -> list[Change]:
    """``.clone()`` behind each cast of weights in the file whose copy is kept, and which may copy nothing more after the changes.

    Args:
        source: the file.
        changes: what is changed in it.
        of_weights: the dtypes that weights get, here or in another file: a cast of them to one of these stops copying.
    """
    parents = {child: node for node in ast.walk(source.tree) for child in ast.iter_child_nodes(node)}
    listed = _listed(source)
    ends = []
    for call in source.every(ast.Call):
        weight = _cast_by(call)
        if weight is None or not _is_kept(call, parents):
            continue
        # a cast whose dtype is a variable may get any
        named = _dtype_of(call)
        touched = any(source.start(call) <= start and end <= source.end(call) for start, end, _ in changes)
        if (touched or not named or named in of_weights) and _is_weight(weight, listed):
            ends.append(source.end(call))
    return [(end, end, b".clone()") for end in ends]


def dtypes_in(changes: Sequence[Change]) -> set[str]:
    """The dtypes that changes write."""
    named = {name for _, _, text in changes for name in _DTYPE.findall(text.decode())}
    return {_CASTS.get(name, name) for name in named}


def _listed(source: Source) -> set[str]:
    """The variables of loops over the parameters of a model, or over its state."""
    loops = (node for node in ast.walk(source.tree) if isinstance(node, ast.For | ast.comprehension))
    targets = [loop.target for loop in loops if _LISTS_WEIGHTS.search(ast.unparse(loop.iter))]
    return {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}


def _cast_by(call: ast.Call) -> ast.expr | None:
    """What a call casts; None where it casts nothing, or copies in any case."""
    function, arguments = call.func, _arguments(call)
    if not isinstance(function, ast.Attribute) or "copy=" in arguments:
        return None
    if ast.unparse(function) in ("torch.as_tensor", "torch.asarray"):
        return call.args[0] if call.args else None
    if function.attr in ("to", "type"):
        return function.value if "dtype" in arguments or _DTYPE.search(arguments) else None
    return function.value if function.attr in _CASTS and not arguments else None


def _arguments(call: ast.Call) -> str:
    return ", ".join(map(ast.unparse, (*call.args, *call.keywords)))


def _dtype_of(call: ast.Call) -> str:
    """The dtype that a cast names itself; empty where it does not."""
    method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    named = [_CASTS.get(name, name) for name in _DTYPE.findall(_arguments(call))]
    return _CASTS.get(method) or next(iter(named), "")


def _is_weight(node: ast.expr, listed: Collection[str]) -> bool:
    """Whether what is cast is a weight: ``p.detach()``, ``layer.weight``, or a variable that goes over parameters."""
    chain = list(_chain(node))
    root = chain[-1]
    return any(isinstance(part, ast.Attribute) and part.attr in _CALLS_OF_WEIGHTS for part in chain) or (
        isinstance(root, ast.Name) and root.id in listed
    )


def _is_kept(node: ast.expr, parents: dict[ast.AST, ast.AST]) -> bool:
    """Whether the value of an expression may be kept or written in place, and is not only computed with."""
    parent = parents.get(node)
    if isinstance(parent, ast.keyword):
        parent = parents[parent]
    if isinstance(parent, ast.Attribute):
        call = parents.get(parent)
        in_place = parent.attr.endswith("_") and not parent.attr.endswith("__")
        return in_place or (parent.attr in _SHARING and isinstance(call, ast.Call) and _is_kept(call, parents))
    if isinstance(parent, ast.Call):
        return ast.unparse(parent.func).rpartition(".")[2] in _KEEPING
    if isinstance(parent, ast.Assign):  # ``p.data = p.data.half()``: what shares its storage is gone
        return ast.unparse(parent.targets[0]) not in map(ast.unparse, _chain(node)) or isinstance(
            parent.targets[0], ast.Name
        )
    return not isinstance(parent, ast.BinOp | ast.UnaryOp | ast.Compare | ast.Subscript | ast.AugAssign)


def _chain(node: ast.expr) -> Iterator[ast.expr]:
    """``a.b().c``, then ``a.b()``, ``a.b`` and ``a``."""
    yield node
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
        yield node
