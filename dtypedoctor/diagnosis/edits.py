"""Edits of the program's own source that remove the cause of a finding: made from the line that failed, or from the line that set a dtype.

Each maker reads the syntax tree of a file and gives changes of it, or none where it does not see exactly what to change. What comes out is
checked: it still parses, it changes lines and moves none, and no line of it holds what may be a secret.
"""

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import field
from functools import cached_property
from pathlib import Path

from dtypedoctor.cells import cell_of, cell_source, cells
from dtypedoctor.diagnosis.ops import overload_free
from dtypedoctor.diagnosis.rule import Edit, Finding
from dtypedoctor.diagnosis.wording import differentiated
from dtypedoctor.dtypes import DTYPES
from dtypedoctor.foreign_files import read_file
from dtypedoctor.redaction.secrets import names_a_secret, without_secrets
from dtypedoctor.trace.events import Op, ParameterNote, Raised
from dtypedoctor.trace.model import Trace
from dtypedoctor.values import dataclass

LARGEST_SOURCE = 2 << 20
LONGEST_LITERAL = 40
LONGEST_PROSE = 16
"""Characters of a text in the source that is shown, and of one with spaces in it: longer ones may be data."""

_ATOMS = (ast.Name, ast.Attribute, ast.Call, ast.Subscript)
"""Expressions that a method can be called on without parentheses."""

_DOCTOR = Path(__file__).resolve().parents[1]
_BETWEEN = ("/site-packages/torch/", "/dist-packages/torch/", "/dtypedoctor/instrument/", "/dtypedoctor/corrections/")
"""Folders of code that only carries out what the program's line asks for."""

Change = tuple[int, int, bytes]
"""First and last offset in a file (bytes), and what stands there instead."""
Changes = tuple["Source", list[Change]]


@dataclass(frozen=True)
class Source:
    """A file of the program."""

    path: Path
    data: bytes
    tree: ast.Module

    @cached_property
    def _starts(self) -> list[int]:
        starts = [0]
        for line in self.data.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        return starts

    def at(self, line: int, column: int) -> int:
        """The offset of a line (from 1) and column (bytes, from 0)."""
        return self._starts[line - 1] + column

    def start(self, node: ast.expr | ast.stmt) -> int:
        """Where ``node`` begins."""
        return self.at(node.lineno, node.col_offset)

    def end(self, node: ast.expr | ast.stmt) -> int:
        """Where ``node`` ends."""
        return self.at(node.end_lineno or node.lineno, node.end_col_offset or 0)

    def text(self, node: ast.expr | ast.stmt) -> str:
        """The source of ``node``."""
        return self.data[self.start(node) : self.end(node)].decode()

    def has(self, line: int) -> bool:
        """Whether there is such a line (from 1): a file that is shorter is not the one that ran."""
        return 0 < line < len(self._starts)

    def spanned(self, span: Sequence[int]) -> ast.expr | None:
        """The expression that stands at first and last line, first and last column; None where there is none."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.expr):
                here = [node.lineno, node.end_lineno, node.col_offset, node.end_col_offset]
                if here == list(span):
                    return node
        return None

    def on_line(self, line: int) -> Iterator[ast.expr]:
        """The expressions that begin on a line, outer ones first."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.expr) and node.lineno == line:
                yield node

    def after(self, node: ast.expr, text: str) -> list[Change]:
        """``text`` behind ``node``, in parentheses where it needs them."""
        end = self.end(node)
        if isinstance(node, _ATOMS):
            return [(end, end, text.encode())]
        start = self.start(node)
        return [(start, start, b"("), (end, end, f"){text}".encode())]

    def instead(self, node: ast.expr, text: str) -> Change:
        """``text`` in the place of ``node``."""
        return (self.start(node), self.end(node), text.encode())


@dataclass(frozen=True)
class Scene:
    """A finding, the trace that shows it, and the program's files.

    Attributes:
        finding: what was found.
        trace: where it was seen.
        folders: files below these may be read, and no others; the first is what paths are told relative to.
        script: the program's own file, where it has one.
        began: when the run began (seconds since the epoch); a file that was written later is not the one that ran. 0 where that is not known.
    """

    finding: Finding
    trace: Trace
    folders: tuple[Path, ...]
    script: Path | None
    began: float = 0.0
    _read: dict[str, Source | None] = field(default_factory=dict)

    def source(self, path: str | Path) -> Source | None:
        """A file of the program, read once; None for what is no Python file of it, or cannot be read."""
        key = str(path)
        if key not in self._read:
            self._read[key] = self._opened(Path(key))
        return self._read[key]

    def _opened(self, path: Path) -> Source | None:
        if (text := cell_source(str(path))) is not None:
            return _cell(cell_of(str(path)) or str(path), text)
        whole = path.resolve()
        installed = {"site-packages", "dist-packages"} & set(whole.parts) or whole.is_relative_to(_DOCTOR)
        if whole.suffix != ".py" or installed or not any(whole.is_relative_to(folder) for folder in self.folders):
            return None
        return self._parsed(whole)

    def _parsed(self, path: Path) -> Source | None:
        """A file as it was when the run began; None where it has changed since, or is no Python in UTF-8."""
        try:
            if self.began and path.stat().st_mtime > self.began:
                return None
            data = read_file(path, LARGEST_SOURCE)
            return Source(path, data, ast.parse(data.decode()))  # decoded here: columns are told in bytes of UTF-8
        except (OSError, ValueError, SyntaxError, RecursionError):
            return None

    def shown(self, path: Path) -> str:
        """How a path is told."""
        return str(path.relative_to(self.folders[0])) if path.is_relative_to(self.folders[0]) else str(path)

    @cached_property
    def raised(self) -> Raised | None:
        """The exception that ended the run."""
        return self.trace.last(Raised)

    @cached_property
    def rejected(self) -> Op | None:
        """The operator that raised it."""
        raised = self.raised
        ops = (op for op in reversed(self.trace.all(Op)) if op.error is not None)
        return next(
            (op for op in ops if raised is not None and op.error is not None and op.error in raised.message), None
        )

    @property
    def other(self) -> str | None:
        """The dtype that the odd operand meets."""
        met = [link.dtype_out for link in self.finding.met if link.dtype_out]
        if met:
            return met[-1]
        op = self.rejected
        dtypes = [t.dtype for t in op.inputs if t.dtype in DTYPES] if op is not None else []
        return next((dtype for dtype in dtypes if dtype != self.finding.dtype), None)

    def failing_frame(self) -> tuple[Source, int, Sequence[int], bool] | None:
        """The innermost frame of the program's: its file, line and span, and whether a library other than torch is at work inside of it."""
        raised = self.raised
        if raised is None or len(raised.spans) != len(raised.frames):
            return None
        others = False
        for frame, span in zip(reversed(raised.frames), reversed(raised.spans), strict=True):
            path, _, line = frame.rpartition(" ")[0].rpartition(":")
            source = self.source(path)
            if source is not None:
                return (source, int(line), span, others) if source.has(int(line)) else None
            others = others or not any(part in path for part in _BETWEEN)
        return None

    def failing_line(self) -> tuple[Source, int] | None:
        """The file and line that the finding names."""
        return self.line_at(self.finding.source or "")

    def installed(self, path: str) -> Source | None:
        """A file of an installed library, read once; None for any other, or where it cannot be read."""
        key = f"installed {path}"
        if key not in self._read:
            whole = Path(path)
            known = whole.suffix == ".py" and {"site-packages", "dist-packages"} & set(whole.parts)
            self._read[key] = self._parsed(whole) if known else None
        return self._read[key]

    def failing_file(self) -> Source | None:
        """The file that the finding names, or else that of the innermost frame of the program's, or else the script."""
        at = self.failing_line() or self.failing_frame()
        if at is not None:
            return at[0]
        return self.source(self.script) if self.script is not None else None

    def dtype_files(self) -> Iterator[Source]:
        """The files in which the program may set its dtype: the one that failed, and in a notebook its cells, the latest first."""
        first = self.failing_file()
        others = (self.source(name) for name in cells())
        yield from (source for source in (first, *others) if source is not None)

    def line_at(self, place: str) -> tuple[Source, int] | None:
        """The file and line of ``train.py:31``; None for a place in none of the program's files, or in one of several of that name."""
        name, _, line = place.rpartition(":")
        named = {str(Path(file).resolve()) for file in self._files() if f"/{file}".endswith(f"/{name}")}
        if cell_source(name) is not None:
            named = {name}
        if len(named) != 1 or not line.isdigit():
            return None
        source = self.source(*named)
        return (source, int(line)) if source is not None and source.has(int(line)) else None

    def _files(self) -> Iterator[str]:
        if self.script is not None:
            yield str(self.script)
        places = [note.set_at for note in self.trace.all(ParameterNote) if note.set_at is not None]
        frames = self.raised.frames if self.raised is not None else []
        yield from dict.fromkeys(place.rpartition(" ")[0].rpartition(":")[0] for place in frames)
        yield from dict.fromkeys(place.rpartition(":")[0] for place in places)


def _cell(name: str, text: str) -> Source | None:
    """A cell of a notebook, whose path is its name; None where it is no Python."""
    try:
        return Source(Path(name), text.encode(), ast.parse(text))
    except (ValueError, SyntaxError, RecursionError):
        return None


def edits_for(scene: Scene, makers: Iterable[str]) -> tuple[tuple[Edit, ...], str]:
    """The lines that the first maker changes which sees what to change, none where none does; and a remark about them, which may be empty."""
    for name in makers:
        made = MAKERS[name](scene)
        if made is not None and (edits := _checked(scene, *made)):
            return edits, REMARKS.get(name, "")
    return (), ""


def _checked(scene: Scene, source: Source, changes: list[Change]) -> tuple[Edit, ...]:
    """The changed lines; empty where the result is no Python, has other lines, or a line that must not be shown."""
    data = _changed(source.data, changes)
    try:
        ast.parse(data.decode())
    except (SyntaxError, ValueError, RecursionError):
        return ()
    # split as bytes: a text has more ends of lines than Python's source has, form feeds for one
    before, after = ([line.decode() for line in each.splitlines()] for each in (source.data, data))
    if len(before) != len(after):
        return ()
    lines = [i for i, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]
    if not all(_may_be_shown(source, i + 1, before[i]) for i in lines):
        return ()
    file = scene.shown(source.path)
    return tuple(Edit(file=file, line=i + 1, old=before[i], new=after[i]) for i in lines)


def _changed(data: bytes, changes: list[Change]) -> bytes:
    """The file with the changes; as it is where one of them lies inside of another."""
    changed, done = data, len(data)
    for start, end, text in sorted(set(changes), reverse=True):
        if end > done:
            return data
        changed, done = changed[:start] + text + changed[end:], start
    return changed


def _may_be_shown(source: Source, line: int, content: str) -> bool:
    """Whether a line holds nothing that may be a secret or data, and no part of a text of several lines, whose end cannot be told from the line alone."""
    if safe_line(content) != content:
        return False
    texts = (node for node in ast.walk(source.tree) if isinstance(node, ast.expr) and _is_text(node))
    spans = ((node.lineno, node.end_lineno or node.lineno) for node in texts)
    return not any(first <= line <= last for first, last in spans if first != last)


def masked_line(source: Source, line: int) -> str:
    """A line of a file with the inside of each text masked, letter by letter: texts may be secrets or data, and are not needed to find a line."""
    raw = source.data.splitlines()[line - 1]
    shown = list(raw.decode())
    for node in ast.walk(source.tree):
        if _is_text(node) and isinstance(node, ast.expr) and node.lineno <= line <= (node.end_lineno or node.lineno):
            begin = len(raw[: node.col_offset].decode("utf-8", "ignore")) if node.lineno == line else 0
            end = len(raw[: node.end_col_offset].decode("utf-8", "ignore")) if node.end_lineno == line else len(shown)
            shown[begin:end] = "*" * (end - begin)
    return without_secrets("".join(shown))


_HARMLESS_TEXT = re.compile(r"[A-Za-z_]{1,12}|[a-z]{1,8}\d{1,2}")


def _is_text(node: ast.AST) -> bool:
    """Whether a node is a text that may be a secret or data, and not a word such as ``cpu``, ``float16`` or ``gelu``."""
    if isinstance(node, ast.JoinedStr):
        return True
    if not isinstance(node, ast.Constant) or not isinstance(node.value, str | bytes):
        return False
    return isinstance(node.value, bytes) or not _HARMLESS_TEXT.fullmatch(node.value)


_TEXT = re.compile(
    r"""(?P<key>\w+)?(?P<sign>["']?\s*\]?\s*[=:,(]\s*)?(?P<quote>["'])(?P<text>(?:\\.|(?!(?P=quote)).)*)(?P=quote)"""
)


def safe_line(line: str) -> str:
    """A line of source without what may be a secret or data: long texts, and texts that are given a secret's name."""

    def elided(match: re.Match[str]) -> str:
        is_prose = len(match["text"]) > LONGEST_PROSE and " " in match["text"]
        if len(match["text"]) <= LONGEST_LITERAL and not is_prose and not names_a_secret(match["key"] or ""):
            return match[0]
        return f"{match['key'] or ''}{match['sign'] or ''}{match['quote']}…{match['quote']}"

    return without_secrets(_TEXT.sub(elided, line))


def _cast(dtype: str) -> str:
    return f".to(torch.{dtype})"


def _has_torch(source: Source) -> bool:
    return any(
        isinstance(node, ast.Import) and any(alias.name == "torch" and not alias.asname for alias in node.names)
        for node in source.tree.body
    )


def cast_operand(scene: Scene) -> Changes | None:
    """Casts what the failing call gets, where the program itself makes that call."""
    found, op = scene.failing_frame(), scene.rejected
    if found is None or op is None:
        return None
    source, _, span, inside_library = found
    node = source.spanned(span) if span else None
    if node is None or inside_library or not _has_torch(source):
        return None
    held = next((t.dtype for t in op.inputs if t.origin == "parameter" and t.dtype in DTYPES), None)
    if isinstance(node, ast.Subscript):
        return _stored_value(source, node)
    if isinstance(node, ast.BinOp):
        return _side(source, node, op, scene)
    if not isinstance(node, ast.Call):
        return None
    if _is_module_call(scene) and held is not None and node.args:
        changes = source.after(node.args[0], _cast(held))
        given = next((t.dtype for t in op.inputs if t.dtype in DTYPES and t.dtype != held), None)
        if held == scene.finding.dtype and given is not None and scene.finding.id not in _KEEPS_DTYPE:
            changes += source.after(node, _cast(given))  # what follows is in the dtype of the activations
        return source, changes
    if op.inplace and isinstance(node.func, ast.Attribute):
        return _into_destination(source, node, source.text(node.func.value), op)
    out = next((keyword.value for keyword in node.keywords if keyword.arg == "out"), None)
    if out is not None:
        into = f".to({source.text(out)}.dtype)"
        return source, [change for argument in _positional(node) for change in source.after(argument, into)]
    return _odd_arguments(source, node, op, scene)


_KEEPS_DTYPE = frozenset({"head-dtype-mismatch", "model-input-dtype"})
"""Findings about the last layer, or the first: nothing follows that needs the dtype of the activations."""


def _is_module_call(scene: Scene) -> bool:
    """Whether the program's innermost frame calls a module of torch's."""
    raised, found = scene.raised, scene.failing_frame()
    assert raised is not None
    assert found is not None
    frames = [frame.rpartition(" ")[2] for frame in raised.frames]
    own = max((i for i, frame in enumerate(raised.frames) if frame.startswith(f"{found[0].path}:")), default=-1)
    return frames[own + 1 : own + 2] == ["_wrapped_call_impl"]


def _stored_value(source: Source, target: ast.Subscript) -> Changes | None:
    """``x[rows] = value``: the value in the dtype of ``x``; so too where the same function writes to the same rows of something else."""
    rows = ast.unparse(target.slice)
    assignments = (node for node in ast.walk(_function_around(source, target)) if isinstance(node, ast.Assign))
    changes = []
    for node in assignments:
        written = node.targets[0]
        if isinstance(written, ast.Subscript) and ast.unparse(written.slice) == rows:
            changes += source.after(node.value, f".to({source.text(written.value)}.dtype)")
    return (source, changes) if changes else None


def _function_around(source: Source, node: ast.expr) -> ast.AST:
    """The innermost function that ``node`` stands in; the whole file outside of all."""
    around = [
        one
        for one in ast.walk(source.tree)
        if isinstance(one, ast.FunctionDef) and one.lineno <= node.lineno <= (one.end_lineno or one.lineno)
    ]
    return max(around, key=lambda one: one.lineno, default=source.tree)


def _into_destination(source: Source, node: ast.Call, into: str, op: Op) -> Changes | None:
    """``out.index_add_(0, rows, values)``: what is written, in the dtype of ``out``."""
    floats = len([t for t in op.inputs[1:] if t.dtype in DTYPES])
    arguments = [arg for arg in node.args if not isinstance(arg, ast.Constant)][-floats:] if floats else []
    changes = [change for arg in arguments for change in source.after(arg, f".to({into}.dtype)")]
    return (source, changes) if changes else None


def _side(source: Source, node: ast.BinOp, op: Op, scene: Scene) -> Changes | None:
    """``left @ right``: the odd side in the dtype of the other."""
    dtypes = [t.dtype for t in op.inputs if t.dtype in DTYPES]
    if len(dtypes) != 2 or scene.finding.dtype not in dtypes:
        return None
    odd = dtypes.index(scene.finding.dtype)
    return source, source.after((node.left, node.right)[odd], _cast(dtypes[1 - odd]))


def _odd_arguments(source: Source, node: ast.Call, op: Op, scene: Scene) -> Changes | None:
    """``function(a, b, c)``: the arguments of the odd dtype in that of the others."""
    wanted = _wanted_dtype(op, scene)
    if wanted is None:
        return None
    given = _given_operands(node, op)
    if len(given) != len(op.inputs):  # which of them is which operand is not known
        return None
    odd = _operands_unlike(op, wanted)
    return source, [change for i in odd for change in source.after(given[i], _cast(wanted))]


def _given_operands(node: ast.Call, op: Op) -> list[ast.expr]:
    """What a call gives that may be tensors, in the order of the operands of ``op``."""
    named = [keyword.value for keyword in node.keywords if not isinstance(keyword.value, ast.Constant)]
    given = [*_method_of(node), *_positional(node)]
    if len(given) < len(op.inputs):
        given += named
    called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    if called == "linear" and overload_free(op.op) == "addmm":  # addmm(bias, input, weight)
        return [*given[-1:], *given[:-1]]
    return given


def _operands_unlike(op: Op, dtype: str) -> list[int]:
    """Which floating-point operands have another dtype."""
    return [i for i, tensor in enumerate(op.inputs) if tensor.dtype in DTYPES and tensor.dtype != dtype]


def _wanted_dtype(op: Op, scene: Scene) -> str | None:
    """The dtype of the parameter among the operands, unless that is the odd one; else the one that the odd operand meets."""
    held = next((t.dtype for t in op.inputs if t.origin == "parameter" and t.dtype in DTYPES), None)
    return held if held is not None and held != scene.finding.dtype else scene.other


def _positional(node: ast.Call) -> list[ast.expr]:
    """The positional arguments that may be tensors."""
    return [argument for argument in node.args if not isinstance(argument, ast.Constant)]


def _method_of(node: ast.Call) -> list[ast.expr]:
    """What a method is called on; empty for a function."""
    if isinstance(node.func, ast.Attribute) and not _names_a_module(node.func.value):
        return [node.func.value]
    return []


def _names_a_module(node: ast.expr) -> bool:
    """Whether an expression is that of a namespace of functions: ``torch``, ``F``, ``nn.functional``, ``torch.nn.functional``."""
    return ast.unparse(node) in ("torch", "F", "fn", "nn.functional", "torch.nn.functional", "functional")


_FACTORIES = frozenset({"zeros", "ones", "empty", "full", "randn", "rand", "arange", "eye", "linspace"})


def make_in_dtype(scene: Scene) -> Changes | None:
    """Names the dtype where the odd tensor is made: ``torch.zeros(n)`` is float32 whatever it is used with."""
    made = _factory_of(scene)
    if made is None:
        return None
    source, call, wanted = made
    calls = [node for node in ast.walk(_function_around(source, call)) if isinstance(node, ast.Call)]
    text = f"dtype=torch.{wanted}"
    return source, [change for node in calls if _is_factory(node) for change in _with_keyword(source, node, text)]


def _factory_of(scene: Scene) -> tuple[Source, ast.expr, str] | None:
    """The call that made one of the two operands, and the dtype of the other."""
    for links, wanted in ((scene.finding.provenance, scene.other), (scene.finding.met, scene.finding.dtype)):
        last = links[-1] if links else None
        made = _factory_at(scene, last.source or "") if last is not None and last.op.startswith("factory") else None
        if made is not None and wanted is not None:
            return *made, wanted
    return None


def _factory_at(scene: Scene, place: str) -> tuple[Source, ast.expr] | None:
    at = scene.line_at(place)
    if at is None:
        return None
    source, line = at
    return next(((source, node) for node in source.on_line(line) if _is_factory(node)), None)


def _is_factory(node: ast.AST) -> bool:
    """Whether a call makes a tensor and names no dtype."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    named = any(keyword.arg == "dtype" for keyword in node.keywords)
    return node.func.attr in _FACTORIES and ast.unparse(node.func.value) == "torch" and not named


def cast_where_set(scene: Scene) -> Changes | None:
    """Casts the odd parameter or buffer to the dtype that it meets, on the line that gave it its own."""
    return _set_to(scene, scene.other)


def set_float32(scene: Scene) -> Changes | None:
    """Makes the parameters of the finding float32, on the line that gave them their dtype."""
    return _set_to(scene, "float32")


def _set_to(scene: Scene, dtype: str | None) -> Changes | None:
    notes = [note for note in _odd_notes(scene) if note.set_span and note.dtype != dtype]
    source = scene.source(_file_of(notes[0])) if notes else None
    if source is None or dtype is None:
        return None
    changes = _recasts(source, notes, dtype)
    return (source, changes) if changes and _has_torch(source) else None


def _recasts(source: Source, notes: Sequence[ParameterNote], dtype: str) -> list[Change]:
    """The changes of the lines of one file that gave parameters their dtype."""
    here = [source.spanned(note.set_span) for note in notes if _file_of(note) == _file_of(notes[0])]
    return [change for node in here for change in _recast(source, node, dtype)]


def _file_of(note: ParameterNote) -> str:
    """The file of the line that gave a parameter its dtype."""
    return (note.set_at or "").rpartition(":")[0]


def _odd_notes(scene: Scene) -> Iterator[ParameterNote]:
    """The parameters and buffers that the finding is about, the one that it names first, then those of modules beside it in the same dtype."""
    notes = {note.name: note for note in scene.trace.all(ParameterNote)}
    links = [link.op.partition(": ")[2].partition(" (")[0] for link in scene.finding.provenance[-1:]]
    named = [notes[name] for name in links if name in notes]
    if not named:
        inside = f"{scene.finding.fqn}." if scene.finding.fqn else ""
        named = [n for n in notes.values() if n.name.startswith(inside) and n.dtype in DTYPES and n.set_at][:1]
    for first in named:
        owner = first.name.rpartition(".")[0]
        parent = owner.rpartition(".")[0]
        yield first
        for note in notes.values():
            beside = note.name.rpartition(".")[0] == owner or (parent and note.name.startswith(f"{parent}."))
            if (
                beside
                and note.buffer == first.buffer
                and note.dtype == first.dtype
                and note.set_at
                and note.requires_grad == first.requires_grad
            ):
                yield note


def cast_promoted_output(scene: Scene) -> Changes | None:
    """Casts what a norm returns to the dtype of its input, where it returns it on the line that promotes."""
    found = _promoting_line(scene)
    value = _returned_on(*found) if found is not None else None
    if found is None or value is None or not _has_torch(found[0]):
        return None
    source = found[0]
    into = _dtype_of_input(source, value) or f"torch.{scene.other}"
    return source, _cast_of_product(source, value, into)


def _promoting_line(scene: Scene) -> tuple[Source, int] | None:
    """Where an operator of mixed dtypes returned the wider one, nearest to the origin of that dtype."""
    places = [link.source for link in scene.finding.provenance if link.dtype_in and link.dtype_out]
    return scene.line_at(places[-1] or "") if places and scene.other else None


def _returned_on(source: Source, line: int) -> ast.expr | None:
    """The value of the ``return`` that a line is a part of."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Return) and node.lineno <= line <= (node.end_lineno or node.lineno):
            return node.value
    return None


def _dtype_of_input(source: Source, value: ast.expr) -> str:
    """``x.dtype`` for the input ``x`` of the ``forward(self, x)`` that returns ``value``; empty where ``x`` is assigned to."""
    function = _function_around(source, value)
    if not isinstance(function, ast.FunctionDef) or function.name != "forward" or len(function.args.args) < 2:
        return ""
    name = function.args.args[1].arg
    names = [node for node in ast.walk(function) if isinstance(node, ast.Name) and node.id == name]
    return "" if any(isinstance(node.ctx, ast.Store) for node in names) else f"{name}.dtype"


def _cast_of_product(source: Source, value: ast.expr, into: str) -> list[Change]:
    """``self.weight * h.to(x.dtype)``: the cast comes after the product, not before it."""
    cast = f".to({into})"
    sides = [value.left, value.right] if isinstance(value, ast.BinOp) else []
    casts = [side for side in sides if source.text(side).endswith(cast)]
    before = [(source.end(side) - len(cast.encode()), source.end(side), b"") for side in casts]
    return [*source.after(value, cast), *before]


_METHODS = frozenset({"half", "float", "bfloat16", "double"})


def _recast(source: Source, node: ast.expr | None, dtype: str) -> list[Change]:
    """Changes the call that set a dtype: the method's name, the dtype that it names, or a cast of its result."""
    if isinstance(node, ast.Attribute):  # self.weight = nn.Parameter(...)
        return _parameter(source, node, dtype)
    if not isinstance(node, ast.Call):
        return []
    method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    if method in _METHODS:
        return [_other_method(source, node, method, f"to(torch.{dtype})")]
    if (named := _named_dtype(node)) is not None:
        return [source.instead(named, f"torch.{dtype}")]
    if method == "register_buffer":
        return [change for value in node.args[1:2] for change in source.after(value, _cast(dtype))]
    return source.after(node, _cast(dtype))


def _other_method(source: Source, node: ast.Call, method: str, text: str) -> Change:
    """``x.half()``: what stands behind the point."""
    return (source.end(node.func) - len(method), source.end(node), text.encode())


def _named_dtype(node: ast.Call) -> ast.Attribute | None:
    """The argument ``torch.float16`` of a call."""
    given = [*node.args, *(keyword.value for keyword in node.keywords)]
    named = [value for value in given if isinstance(value, ast.Attribute) and value.attr in DTYPES]
    return next((value for value in named if ast.unparse(value.value) == "torch"), None)


def _parameter(source: Source, target: ast.Attribute, dtype: str) -> list[Change]:
    """``self.weight = nn.Parameter(values)``: the values in another dtype."""
    assignments = (node for node in ast.walk(source.tree) if isinstance(node, ast.Assign))
    made = next((node.value for node in assignments if any(one is target for one in node.targets)), None)
    if isinstance(made, ast.Call) and source.text(made.func).endswith("Parameter") and made.args:
        return source.after(made.args[0], _cast(dtype))
    return []


def half_to_bfloat16(scene: Scene) -> Changes | None:
    """float16 becomes bfloat16 in the program's file, a gradient scaler is switched off."""
    return _half_to(scene, "bfloat16")


def bfloat16_to_float32(scene: Scene) -> Changes | None:
    """bfloat16 becomes float32 in the program's file, autocast regions are switched off."""
    source = scene.failing_file()
    if source is None:
        return None
    changes = [change for node in ast.walk(source.tree) for change in _without_bfloat16(source, node)]
    return (source, changes) if changes else None


def _without_bfloat16(source: Source, node: ast.AST) -> list[Change]:
    if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.bfloat16":
        return [source.instead(node, "torch.float32")]
    if isinstance(node, ast.Call) and source.text(node.func).endswith(".bfloat16") and not node.args:
        return [_other_method(source, node, "bfloat16", "float()")]
    if isinstance(node, ast.Call) and source.text(node.func).endswith("autocast"):
        return _with_keyword(source, node, "enabled=False")
    return []


def lower_learning_rate(scene: Scene) -> Changes | None:
    """A hundredth of each learning rate that is a number."""

    def lowered(source: Source, call: ast.Call) -> list[Change]:
        rates = [keyword.value for keyword in call.keywords if keyword.arg in ("lr", "learning_rate")]
        numbers = [rate for rate in rates if isinstance(rate, ast.Constant) and isinstance(rate.value, float | int)]
        return [source.instead(rate, f"{float(str(rate.value)) / 100:g}") for rate in numbers]

    return _in_calls(scene, "", lowered)


def half_to_float32(scene: Scene) -> Changes | None:
    """float16 becomes float32 in the program's file, a gradient scaler is switched off."""
    return _half_to(scene, "float32")


def _half_to(scene: Scene, dtype: str) -> Changes | None:
    made = next((made for source in scene.dtype_files() if (made := _without_halves(source, dtype))), None)
    if made is None:
        return None
    source, changes = made
    scalers = _in_calls(scene, "GradScaler", lambda source, call: _with_keyword(source, call, "enabled=False"))
    if scalers is not None and scalers[0] is source:
        changes += scalers[1]
    return source, changes


def _without_halves(source: Source, dtype: str) -> Changes | None:
    changes = [change for node in ast.walk(source.tree) for change in _without_half(source, node, dtype)]
    return (source, changes) if changes else None


def _without_half(source: Source, node: ast.AST, dtype: str) -> list[Change]:
    """The change of a node that names float16: ``torch.float16``, ``.half()``, or an option."""
    if isinstance(node, ast.Attribute) and ast.unparse(node) in ("torch.float16", "torch.half"):
        return [source.instead(node, f"torch.{dtype}")]
    if isinstance(node, ast.Call):
        return _call_without_half(source, node, dtype)
    if isinstance(node, ast.keyword) and isinstance(node.value, ast.Constant):
        return _option_without_half(source, node.arg or "", node.value, dtype)
    return []


def _option_without_half(source: Source, name: str, value: ast.Constant, dtype: str) -> list[Change]:
    """``dtype="float16"``, ``mixed_precision="fp16"``; not ``variant="fp16"``, which names a file."""
    if value.value == "float16" and "dtype" in name:
        return [source.instead(value, repr(dtype))]
    if value.value == "fp16" and "precision" in name:
        return [source.instead(value, repr("bf16" if dtype == "bfloat16" else "no"))]
    return []


def _call_without_half(source: Source, call: ast.Call, dtype: str) -> list[Change]:
    """``x.half()``; ``fp16=True``, which becomes ``bf16=True``, or ``fp16=False`` for float32."""
    if source.text(call.func).endswith(".half") and not call.args:
        return [_other_method(source, call, "half", "float()" if dtype == "float32" else f"{dtype}()")]
    options = {keyword.arg: keyword for keyword in call.keywords}
    half = options.get("fp16")
    if half is None or ast.unparse(half.value) != "True":
        return []
    if dtype == "float32":
        return [source.instead(half.value, "False")]
    if "bf16" in options:
        return [source.instead(half.value, "False"), source.instead(options["bf16"].value, "True")]
    start = source.at(half.lineno, half.col_offset)
    return [(start, start + len("fp16"), b"bf16")]


_ARGUMENT = {
    "log": ".clamp_min(1e-6)", "log2": ".clamp_min(1e-6)", "log10": ".clamp_min(1e-6)", "sqrt": ".clamp_min(1e-12)",
    "rsqrt": ".clamp_min(1e-12)", "acos": ".clamp(-1 + 1e-6, 1 - 1e-6)", "asin": ".clamp(-1 + 1e-6, 1 - 1e-6)",
    "exp": ".clamp(max=80)", "norm": "", "linalg_vector_norm": "",
}  # fmt: skip
"""What keeps the argument of a function inside of its domain."""


def keep_in_domain(scene: Scene) -> Changes | None:
    """Keeps the argument of the function that returned NaN or inf inside of its domain, on the line that the finding names."""
    found = scene.failing_line()
    if found is None:
        return None
    source, line = found
    names = _names_of_operator(scene)
    for node in source.on_line(line):
        changes = _bounded(source, node, names)
        if changes:
            return source, changes
    return None


def _names_of_operator(scene: Scene) -> set[str]:
    """What the failing operator is called in Python, or the one that it differentiates."""
    family = overload_free(scene.finding.op or "").rstrip("_")
    here = [op for op in scene.trace.all(Op) if op.source == scene.finding.source]
    derived = {name for op in here if (name := differentiated(op))}
    of_division = {"sqrt"} if family == "div" else set()  # the backward pass of a square root divides by it
    return {family, family.removesuffix("_backward"), *derived, *of_division}


def _bounded(source: Source, node: ast.expr, names: set[str]) -> list[Change]:
    """The change of one expression; empty where it is not the one that left its domain."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and "div" in names:
        return source.after(node.right, ".clamp_min(1e-6)")
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return _bounded_call(source, node, node.func, names)
    return []


def _bounded_call(source: Source, node: ast.Call, function: ast.Attribute, names: set[str]) -> list[Change]:
    name = function.attr
    if name == "std" and names & {"std", "var", "sqrt"}:
        return _with_keyword(source, node, "correction=0")
    if name == "cross_entropy" and len(node.args) == 2:
        return _mean_of_labels(source, node)
    argument = node.args[0] if _names_a_module(function.value) and node.args else function.value
    bound = _ARGUMENT.get(name, "") if name in names else ""
    return source.after(argument, bound) if bound else []


def _mean_of_labels(source: Source, node: ast.Call) -> list[Change]:
    """``cross_entropy(logits, labels)``: the mean over no label at all is 0 / 0."""
    if node.keywords:
        return []
    count = f"({source.text(node.args[1])} != -100).sum().clamp_min(1)"
    return [*_with_keyword(source, node, 'reduction="sum"'), *source.after(node, f" / {count}")]


_INFINITIES = frozenset({"float('-inf')", "-float('inf')", "-torch.inf", "-math.inf", "-np.inf", "-inf"})


def finite_mask(scene: Scene) -> Changes | None:
    """``masked_fill(mask, -inf)`` with the smallest finite number of the dtype instead, so that a row without any key stays finite."""
    source = scene.failing_file()
    if source is None or not _has_torch(source):
        return None
    changes = []
    for node in ast.walk(source.tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr.startswith("masked_fill")
        ):
            value = node.args[-1] if node.args else None
            if value is not None and ast.unparse(value) in _INFINITIES:
                filled = source.text(node.func.value)
                whole = filled if isinstance(node.func.value, _ATOMS) else f"({filled})"
                changes.append(source.instead(value, f"torch.finfo({whole}.dtype).min"))
        for keyword in node.keywords if isinstance(node, ast.Call) else ():
            if keyword.arg == "key_padding_mask" and isinstance(keyword.value, ast.Name):
                changes += source.after(keyword.value, f" & ~{keyword.value.id}.all(-1, keepdim=True)")
    return (source, changes) if changes else None


def region_in_dtype_of_model(scene: Scene) -> Changes | None:
    """The autocast region gets the dtype of the model's weights."""
    wanted, short = scene.other, {"float16": "fp16", "bfloat16": "bf16"}
    return _in_calls(
        scene,
        "autocast",
        lambda source, call: [source.instead(k.value, f"torch.{wanted}") for k in call.keywords if k.arg == "dtype"],
    ) or _in_calls(
        scene,
        "",
        lambda source, call: [
            source.instead(k.value, repr(short.get(wanted or "", "no")))
            for k in call.keywords
            if k.arg == "mixed_precision"
        ],
    )


def region_without_cache(scene: Scene) -> Changes | None:
    """The autocast region keeps no cast copies of weights."""
    return _in_calls(scene, "autocast", lambda source, call: _with_keyword(source, call, "cache_enabled=False"))


def region_on_device(scene: Scene) -> Changes | None:
    """Autocast regions and custom functions are for the device that the tensors are on."""
    device = str(scene.trace.environment.get("device", "cpu")).partition(":")[0]

    def moved(source: Source, call: ast.Call) -> list[Change]:
        values = [*call.args[:1], *(k.value for k in call.keywords if k.arg == "device_type")]
        named = [v for v in values if isinstance(v, ast.Constant) and v.value in ("cuda", "cpu") and v.value != device]
        return [source.instead(value, repr(device).replace("'", '"')) for value in named]

    return _in_calls(scene, ("autocast", "custom_fwd", "custom_bwd"), moved)


def without_scaler(scene: Scene) -> Changes | None:
    """The gradient scaler is switched off."""
    return _in_calls(scene, "GradScaler", lambda source, call: _with_keyword(source, call, "enabled=False"))


def without_compiler(scene: Scene) -> Changes | None:
    """The model is called as it is, and not compiled."""

    def plain(source: Source, call: ast.Call) -> list[Change]:
        return [source.instead(call, source.text(call.args[0]))] if call.args else []

    return _in_calls(scene, "torch.compile", plain)


def compiled_for_any_size(scene: Scene) -> Changes | None:
    """The model is compiled once for all sizes."""
    return _in_calls(scene, "torch.compile", lambda source, call: _with_keyword(source, call, "dynamic=True"))


def _with_keyword(source: Source, call: ast.Call, text: str) -> list[Change]:
    name, _, value = text.partition("=")
    given = next((keyword.value for keyword in call.keywords if keyword.arg == name), None)
    if given is not None:
        return [source.instead(given, value)]
    end = source.end(call) - 1
    return [(end, end, (f", {text}" if call.args or call.keywords else text).encode())]


def _in_calls(
    scene: Scene, names: str | tuple[str, ...], change: Callable[[Source, ast.Call], list[Change]]
) -> Changes | None:
    """Changes of each call in the script whose function's name ends in one of ``names``; None where there is nothing to change."""
    source = scene.source(scene.script) if scene.script is not None else None
    if source is None:
        return None
    calls = [node for node in ast.walk(source.tree) if isinstance(node, ast.Call)]
    changes = [one for call in calls if source.text(call.func).endswith(names) for one in change(source, call)]
    return (source, changes) if changes else None


REMARKS = {
    "half-to-float32": "The edit computes all of it in float32: the simplest change, and the slowest.",
    "bfloat16-to-float32": "The edit computes all of it in float32: the simplest change, and the slowest.",
    "lower-learning-rate": "The edit divides it by 100.",
    "cast-weights-where-set": "The edit makes the weights themselves {other} instead, on the line that made them {dtype}.",
}
"""What has to be said of an edit that does more, or less, than the sentence above it."""

Maker = Callable[[Scene], Changes | None]
MAKERS: dict[str, Maker] = {
    "cast-operand": cast_operand,
    "make-in-dtype": make_in_dtype,
    "cast-where-set": cast_where_set,
    "cast-promoted-output": cast_promoted_output,
    "cast-weights-where-set": cast_where_set,
    "set-float32": set_float32,
    "half-to-bfloat16": half_to_bfloat16,
    "half-to-float32": half_to_float32,
    "bfloat16-to-float32": bfloat16_to_float32,
    "lower-learning-rate": lower_learning_rate,
    "keep-in-domain": keep_in_domain,
    "finite-mask": finite_mask,
    "region-in-dtype-of-model": region_in_dtype_of_model,
    "region-without-cache": region_without_cache,
    "region-on-device": region_on_device,
    "without-scaler": without_scaler,
    "without-compiler": without_compiler,
    "compiled-for-any-size": compiled_for_any_size,
}
