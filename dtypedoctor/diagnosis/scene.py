"""A program's files as the makers of edits read them, with the finding and the trace that show what to change; and which lines may be shown."""

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from dtypedoctor.diagnosis.rule import Finding
from dtypedoctor.dtypes import DTYPES
from dtypedoctor.foreign_files import read_file
from dtypedoctor.redaction.secrets import names_a_secret, without_secrets
from dtypedoctor.text import cell_of, cell_source, cells
from dtypedoctor.trace.events import Op, ParameterNote, Raised, TensorNote
from dtypedoctor.trace.model import Trace

LARGEST_SOURCE = 2 << 20
MOST_IMPORTED = 50
LONGEST_LITERAL = 40
LONGEST_PROSE = 16
"""Characters of a text in the source that is shown, and of one with spaces in it: longer ones may be data."""

ATOMS = (ast.Name, ast.Attribute, ast.Call, ast.Subscript)
"""Expressions that a method can be called on without parentheses."""

_DOCTOR = Path(__file__).resolve().parents[1]
_BETWEEN = ("/site-packages/torch/", "/dist-packages/torch/", "/dtypedoctor/instrument/", "/dtypedoctor/corrections/")
"""Folders of code that only carries out what the program's line asks for."""

Change = tuple[int, int, bytes]
"""First and last offset in a file (bytes), and what stands there instead."""
Changes = tuple["Source", list[Change]]


_Node = TypeVar("_Node", bound=ast.stmt)
_Any = TypeVar("_Any", bound=ast.AST)


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
        """``text`` behind ``node``, in parentheses where it needs them: a method binds to an operand alone, an operator to what follows as well."""
        start, end = self.start(node), self.end(node)
        if not text.startswith((".", "[")):
            around = ("", "") if self._is_apart(node) else ("(", ")")
            return [(start, start, around[0].encode()), (end, end, f"{text}{around[1]}".encode())]
        if isinstance(node, ATOMS):
            return [(end, end, text.encode())]
        if not self._is_apart(node) and self.data[start - 1 : start] + self.data[end : end + 1] == b"()":
            return [(end + 1, end + 1, text.encode())]
        return [(start, start, b"("), (end, end, f"){text}".encode())]

    def instead(self, node: ast.expr, text: str) -> Change:
        """``text`` in the place of ``node``, in parentheses where what is around it would take a part of it."""
        new = ast.parse(text.strip(), mode="eval").body
        whole = isinstance(new, (*ATOMS, ast.Constant, ast.Tuple, ast.List, ast.ListComp)) or self._is_apart(node)
        return (self.start(node), self.end(node), (text if whole else f"({text})").encode())

    def _is_apart(self, node: ast.expr) -> bool:
        """Whether ``node`` is an argument, an element or a whole statement, so that no operator or method stands beside it."""
        parent = self.parents.get(node)
        if isinstance(parent, ast.Call):
            return parent.func is not node
        if isinstance(parent, ast.Subscript):
            return parent.value is not node
        return isinstance(parent, (ast.stmt, ast.keyword, ast.Tuple, ast.List, ast.Dict))

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        """What each part of the file is a part of."""
        return {child: parent for parent in ast.walk(self.tree) for child in ast.iter_child_nodes(parent)}

    def every(self, kind: type[_Any]) -> Iterator[_Any]:
        """The parts of a kind that the file has."""
        return (node for node in ast.walk(self.tree) if isinstance(node, kind))

    def around(self, node: ast.expr | ast.stmt, *kinds: type[_Node]) -> list[_Node]:
        """The statements of some kinds that ``node`` is a part of, outer ones first."""
        start, end = self.start(node), self.end(node)
        found = (one for one in ast.walk(self.tree) if isinstance(one, kinds))
        return sorted((one for one in found if self.start(one) <= start and end <= self.end(one)), key=self.start)

    def before(self, statement: ast.stmt, *lines: str) -> list[Change]:
        """Lines before a statement, as far to the right; none where something else stands before it on its line."""
        begin = self.at(statement.lineno, 0)
        indent = self.data[begin : self.start(statement)]
        text = b"".join(indent + line.encode() + b"\n" for line in lines)
        return [(begin, begin, text)] if text and not indent.strip() else []

    def indented(self, statement: ast.stmt, line: str) -> list[Change]:
        """``line`` before a statement, which stands below it, further to the right."""
        lines = range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)
        before = self.before(statement, line)
        return [*before, *((self.at(number, 0), self.at(number, 0), b"    ") for number in lines)] if before else []

    def without(self, node: ast.expr | ast.stmt) -> Change:
        """Nothing in the place of the lines of ``node``."""
        last = node.end_lineno or node.lineno
        return (self.at(node.lineno, 0), self.at(last + 1, 0), b"")


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
        return self.trace.rejected

    @property
    def device(self) -> str:
        """The type of device that the program computes on."""
        return str(self.trace.environment.get("device", "cpu")).partition(":")[0]

    @property
    def other(self) -> str | None:
        """The dtype that the odd operand meets."""
        met = [link.dtype_out for link in self.finding.met if link.dtype_out]
        if met:
            return met[-1]
        dtypes = floats(self.rejected.inputs) if self.rejected is not None else [self.most_weights]
        return next((dtype for dtype in dtypes if dtype != self.finding.dtype), None)

    @cached_property
    def most_weights(self) -> str | None:
        """The dtype that most parameters of a floating-point dtype have."""
        dtypes = [note.dtype for note in self.parameters.values() if note.dtype in DTYPES and not note.buffer]
        return max(dict.fromkeys(dtypes), key=dtypes.count, default=None)

    @cached_property
    def parameters(self) -> dict[str, ParameterNote]:
        """The parameters and buffers by their names, as they were last."""
        return {note.name: note for note in self.trace.all(ParameterNote)}

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

    def failing_node(self) -> tuple[Source, ast.expr, bool] | None:
        """The expression of that frame, and whether a library other than torch is at work inside of it."""
        found = self.failing_frame()
        if found is None or not found[2]:
            return None
        node = found[0].spanned(found[2])
        return (found[0], node, found[3]) if node is not None else None

    def own_node(self) -> tuple[Source, ast.expr] | None:
        """That expression; None where a library other than torch is at work inside of it."""
        found = self.failing_node()
        return found[:2] if found is not None and not found[2] else None

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

    def program_files(self) -> Iterator[Source]:
        """The program's files: the one that failed, the script, and in a notebook its cells, the latest first."""
        named: list[str | Path] = [*([self.script] if self.script else []), *cells()]
        opened = [self.failing_file(), *(self.source(name) for name in named)]
        yield from {source.path: source for source in opened if source is not None}.values()

    def imported_files(self) -> Iterator[Source]:
        """The program's files, and those beside them that they import, at most :data:`MOST_IMPORTED`."""
        waiting, seen = list(self.program_files()), set[Path]()
        while waiting and len(seen) < MOST_IMPORTED:
            source = waiting.pop(0)
            if source.path not in seen:
                seen.add(source.path)
                yield source
                beside = (folder / name for name in _imports(source) for folder in (source.path.parent, *self.folders))
                waiting += [one for path in beside if path.is_file() and (one := self.source(path)) is not None]

    def line_at(self, place: str) -> tuple[Source, int] | None:
        """The file and line of ``train.py:31``; None for a place in none of the program's files, or in one of several of that name."""
        name, _, line = place.rpartition(":")
        named = {str(Path(file).resolve()) for file in self._files(name) if f"/{file}".endswith(f"/{name}")}
        if cell_source(name) is not None:
            named = {name}
        if len(named) != 1 or not line.isdigit():
            return None
        source = self.source(*named)
        return (source, int(line)) if source is not None and source.has(int(line)) else None

    def _files(self, name: str) -> Iterator[str]:
        """The files that the run tells of, and one of that name in a folder of the program."""
        yield from (str(folder / name) for folder in self.folders if name and (folder / name).is_file())
        if self.script is not None:
            yield str(self.script)
        places = [note.set_at for note in self.trace.all(ParameterNote) if note.set_at is not None]
        frames = self.raised.frames if self.raised is not None else []
        yield from dict.fromkeys(place.rpartition(" ")[0].rpartition(":")[0] for place in frames)
        yield from dict.fromkeys(place.rpartition(":")[0] for place in places)


def _imports(source: Source) -> Iterator[str]:
    """The files that the modules which a file imports would be in, below its folder."""
    for node in ast.walk(source.tree):
        named = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        if isinstance(node, ast.ImportFrom):
            named = [node.module] if node.module else named
        yield from (f"{name.replace('.', '/')}.py" for name in named)


def _cell(name: str, text: str) -> Source | None:
    """A cell of a notebook, whose path is its name; None where it is no Python."""
    try:
        return Source(Path(name), text.encode(), ast.parse(text))
    except (ValueError, SyntaxError, RecursionError):
        return None


def may_be_shown(source: Source, line: int, *contents: str) -> bool:
    """Whether neither a line nor what replaces it holds what may be a secret or data; nor a part of a text of several lines, whose end cannot be told from the line alone."""
    if any(safe_line(content) != content for content in contents):
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


_HARMLESS_TEXT = re.compile(r"[-+]?[A-Za-z_]{1,12}|[a-z]{1,8}\d{1,2}")


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


def cast(dtype: str) -> str:
    """The call that casts a tensor."""
    return f".to(torch.{dtype})"


def some(source: Source, changes: list[Change]) -> Changes | None:
    """The changes of a file; None where there are none."""
    return (source, changes) if changes else None


def floats(tensors: Iterable[TensorNote]) -> list[str]:
    """The dtypes of those tensors that have a floating-point dtype."""
    return [tensor.dtype for tensor in tensors if tensor.dtype in DTYPES]


def has_torch(source: Source) -> bool:
    """Whether a file can say ``torch``; a cell of a notebook, whether any cell has imported it."""
    sources = [source]
    if cell_source(str(source.path)) is not None:
        sources += filter(None, (_cell(name, cell_source(name) or "") for name in cells()))
    return any(
        isinstance(node, ast.Import) and any(alias.name == "torch" and not alias.asname for alias in node.names)
        for one in sources
        for node in one.tree.body
    )


def function_around(source: Source, node: ast.expr) -> ast.AST:
    """The innermost function that ``node`` stands in; the whole file outside of all."""
    return next(reversed(source.around(node, ast.FunctionDef)), source.tree)


def names_a_module(node: ast.expr) -> bool:
    """Whether an expression is that of a namespace of functions: ``torch``, ``F``, ``nn.functional``, ``torch.fft``."""
    namespaces = ("torch", "F", "fn", "nn", "functional")
    return isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node).split(".")[0] in namespaces


def other_method(source: Source, node: ast.Call, method: str, text: str) -> Change:
    """``x.half()``: what stands behind the point."""
    return (source.end(node.func) - len(method), source.end(node), text.encode())


def with_keyword(source: Source, call: ast.Call, text: str) -> list[Change]:
    """``text``, such as ``enabled=False``, among the arguments of a call."""
    name, _, value = text.partition("=")
    given = next((keyword.value for keyword in call.keywords if keyword.arg == name), None)
    if given is not None:
        return [source.instead(given, value)]
    end = source.end(call) - 1
    given_last = max((source.end(one) for one in [*call.args, *(k.value for k in call.keywords)]), default=end)
    if b"," in source.data[given_last:end]:
        end = given_last
    return [(end, end, (f", {text}" if call.args or call.keywords else text).encode())]


def in_calls(
    scene: Scene, names: str | tuple[str, ...], change: Callable[[Source, ast.Call], list[Change]]
) -> Changes | None:
    """Changes of each call whose function's name ends in one of ``names``, in the first of the program's files that has any."""
    for source in scene.program_files():
        calls = [node for node in ast.walk(source.tree) if isinstance(node, ast.Call)]
        changes = [one for call in calls if source.text(call.func).endswith(names) for one in change(source, call)]
        if changes:
            return source, changes
    return None


def scalers(source: Source) -> list[ast.Call]:
    """The calls that make a gradient scaler which is on, whatever the file calls the class."""
    names = {"GradScaler"}
    for one in source.every(ast.ImportFrom):
        names |= {alias.asname or "" for alias in one.names if alias.name == "GradScaler"}
    made = [call for call in source.every(ast.Call) if source.text(call.func).rpartition(".")[2] in names]
    return [call for call in made if "enabled=False" not in map(ast.unparse, call.keywords)]
