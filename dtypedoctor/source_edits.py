"""Corrections of released libraries, as edits of their source: checked, shown as a diff, put into the code that runs, undone.

An :class:`~dtypedoctor.plugins.Edit` says which lines of a function become which others. The same edit makes the patch for the
library (:func:`patched`) and the code that runs (:func:`install`), so what was proven is what is proposed. The function object
stays and only its code changes: modules that imported it, before or after, call the corrected code. Lines that an edit was not
written for are never changed; :class:`TargetMismatchError` says how they differ.

Nothing here imports torch or a library.
"""

import __future__

import ast
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.machinery import PathFinder
from pathlib import Path
from textwrap import dedent
from types import CodeType, FunctionType, ModuleType

from dtypedoctor.plugins import Edit

__all__ = [
    "AlreadyCorrectedError",
    "Hit",
    "TargetMismatchError",
    "file_of",
    "files_of",
    "install",
    "patched",
    "release_of",
]

_HIT = "__dtypedoctor_hit__"
"""Name under which corrected code finds what counts its uses."""
_FUTURE = sum(getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
_AnyFunction = (ast.FunctionDef, ast.AsyncFunctionDef)


class TargetMismatchError(Exception):
    """The code that a correction is meant for is not the code that is there; the message gives the difference."""


class AlreadyCorrectedError(TargetMismatchError):
    """The library has the corrected lines itself."""


@dataclass(frozen=True, slots=True)
class _Definition:
    """One definition of a function in a file: its name with its classes, its first line (decorators included) and its last, from 1."""

    qualname: str
    node: ast.FunctionDef | ast.AsyncFunctionDef
    first: int
    last: int


def patched(source: str, edits: Sequence[Edit], file: str) -> str:
    """The text of a library's file with all ``edits``, in every definition of their functions that has the lines.

    Args:
        source: text of the file.
        edits: edits of this file.
        file: how messages name it.

    Raises:
        TargetMismatchError: no definition of a function has the lines that an edit is for.
    """
    for edit in edits:
        lines = source.split("\n")
        starts: list[int] = []
        refusals = [TargetMismatchError(f"{file} defines no {edit.function}")]
        for one in _definitions(ast.parse(source)):
            if one.qualname != edit.function:
                continue
            try:
                starts.append(_checked(one, lines, edit, file))
            except TargetMismatchError as error:
                refusals.append(error)
        if not starts:
            raise next((one for one in refusals if isinstance(one, AlreadyCorrectedError)), refusals[-1])
        for start in reversed(starts):
            lines[start : start + len(_block(edit.old))] = _indented(edit.new, lines[start])
        source = "\n".join(lines)
    return source


Hit = Callable[[bool], None]
"""Is called each time corrected lines run, with whether they change anything (:attr:`Edit.acts`)."""


@dataclass(slots=True)
class _Corrected:
    """A function whose code was changed: the code that it had, and the edits that are in force."""

    original: CodeType
    edits: dict[Edit, Hit | None]


_corrected: dict[FunctionType, _Corrected] = {}


def install(edit: Edit, module: ModuleType, hit: Hit | None = None) -> tuple[str, Callable[[], None]]:
    """Puts ``edit`` into the function that ``module`` runs, beside edits of it that are there.

    Args:
        edit: its ``module`` is the name of ``module``.
        module: has been executed.
        hit: counts. None adds no line to the library's, so the code costs what the library's own correction would.

    Returns:
        Where the corrected lines lie (``file:line``), and what undoes it; undoing twice does no harm.

    Raises:
        TargetMismatchError: the code is not what the edit was written for; nothing has changed.
    """
    found: object = module
    for part in edit.function.split("."):
        found = getattr(found, part, None)
    function = inspect.unwrap(found) if callable(found) else found
    function = getattr(function, "__func__", function)
    if not isinstance(function, FunctionType):
        raise TargetMismatchError(f"{edit.module} has no function {edit.function}")
    state = _corrected.get(function) or _Corrected(original=function.__code__, edits={})
    file = inspect.getsourcefile(module) or ""
    shown = _shown(file)
    if state.original.co_filename != file:
        raise TargetMismatchError(
            f"{edit.module}.{edit.function} now runs code of {state.original.co_filename}: another patch is in place"
        )
    source = Path(file).read_text(encoding="utf-8")
    definition = _definition_of(state.original, source, edit, shown)
    start = _checked(definition, source.split("\n"), edit, shown)
    code = _corrected_code(state.original, source, definition, {**state.edits, edit: hit})
    state.edits[edit] = hit
    _put(function, state, code)

    def undo() -> None:
        if state.edits.pop(edit, undo) is not undo:
            _put(function, state, _corrected_code(state.original, source, definition, state.edits))

    return f"{shown}:{start + 1}", undo


def _put(function: FunctionType, state: _Corrected, code: CodeType) -> None:
    """Gives ``function`` the code of its edits, and what counts where that finds it."""
    counting = function.__globals__.setdefault(_HIT, {})
    for edit, hit in state.edits.items():
        if hit is not None:
            counting[edit.function, edit.old] = hit
    if state.edits:
        _corrected[function] = state
        function.__code__ = code
    else:
        _corrected.pop(function, None)
        function.__code__ = state.original


def file_of(module: str, folders: Sequence[str]) -> Path | None:
    """The source file of ``module`` as it would be found in ``folders``; nothing is imported. None where there is none."""
    top, *rest = module.split(".")
    spec = PathFinder.find_spec(top, list(folders))
    places = [Path(place) for place in (spec.submodule_search_locations or ())] if spec is not None else []
    if spec is not None and not rest and spec.origin is not None:
        return Path(spec.origin)
    for place in places:
        for candidate in (place.joinpath(*rest).with_suffix(".py"), place.joinpath(*rest, "__init__.py")):
            if candidate.is_file():
                return candidate
    return None


def files_of(edits: Sequence[Edit], folders: Sequence[str]) -> Iterator[tuple[Path, str, list[Edit]]]:
    """The files that ``edits`` change, as they would be imported from ``folders``; those that are not there are left out.

    Yields:
        The file, its name from the folder of its package on, and the edits of it.
    """
    for module in dict.fromkeys(edit.module for edit in edits):
        file = file_of(module, folders)
        if file is not None:
            yield file, _shown(str(file)), [edit for edit in edits if edit.module == module]


def release_of(library: str, file: Path) -> str:
    """The version of ``library`` that ``file`` belongs to, as the metadata beside its package says; empty where there is none."""
    for folder in file.parents:
        for metadata in folder.glob(f"{library}-*.dist-info"):
            return metadata.name.removesuffix(".dist-info").rpartition("-")[2]
    return ""


def _definitions(tree: ast.AST, within: str = "") -> Iterator[_Definition]:
    """All definitions of functions that are not inside of other functions."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.ClassDef):
            yield from _definitions(child, f"{within}{child.name}.")
        elif isinstance(child, _AnyFunction):
            first = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
            yield _Definition(f"{within}{child.name}", child, first, child.end_lineno or child.lineno)
        else:
            yield from _definitions(child, within)


def _definition_of(code: CodeType, source: str, edit: Edit, shown: str) -> _Definition:
    """The definition in the file that ``code`` comes from; a file may define a function several times, for several devices."""
    for one in _definitions(ast.parse(source)):
        if one.qualname == edit.function and one.first == code.co_firstlineno:
            return one
    raise TargetMismatchError(f"{shown} has changed since it was imported: no {edit.function} begins where it did")


def _checked(definition: _Definition, lines: Sequence[str], edit: Edit, file: str) -> int:
    """Where the lines of ``edit`` begin, as an index into ``lines``.

    Raises:
        TargetMismatchError: the parameters or the lines are others.
    """
    inside = range(definition.first - 1, definition.last)
    corrected = _occurrences(edit.new, lines, inside)
    if corrected:
        raise AlreadyCorrectedError(f"{file}:{corrected[0] + 1}: {edit.function} has this correction already")
    arguments = definition.node.args
    parameters = [one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    if parameters[: len(edit.parameters)] != list(edit.parameters):
        raise TargetMismatchError(
            f"{file}:{definition.node.lineno}: {edit.function} takes ({', '.join(parameters)}), "
            f"this correction was written for ({', '.join(edit.parameters)})"
        )
    starts = _occurrences(edit.old, lines, inside)
    if len(starts) != 1:
        raise TargetMismatchError(_difference(edit, lines, inside, file, len(starts)))
    return starts[0]


def _occurrences(text: str, lines: Sequence[str], inside: range) -> list[int]:
    """Where the lines of ``text`` begin inside of a definition, as indices into ``lines``."""
    wanted = _block(text)
    last = inside.stop - len(wanted)
    return [
        start
        for start in range(inside.start, last + 1)
        if _block("\n".join(lines[start : start + len(wanted)])) == wanted
    ]


def _block(text: str) -> list[str]:
    """Lines without their common indentation, so that they compare equal wherever they stand."""
    return [line.rstrip() for line in dedent(text.strip("\n")).splitlines()]


def _indented(text: str, like: str) -> list[str]:
    indent = like[: len(like) - len(like.lstrip())]
    return [f"{indent}{line}".rstrip() for line in _block(text)]


def _difference(edit: Edit, lines: Sequence[str], inside: range, file: str, times: int) -> str:
    """How the lines of a function differ from those that ``edit`` is for."""
    if times:
        return f"{file}: {edit.function} has `{edit.old.strip()}` {times} times, this correction was written for one"
    wanted = _block(edit.old)
    present = {lines[index].strip(): index for index in reversed(inside)}
    missing = next((line.strip() for line in wanted if line.strip() not in present), wanted[0].strip())
    if missing in present:
        return f"{file}:{present[missing] + 1}: {edit.function}: other lines follow `{missing}` than this correction was written for"
    close = get_close_matches(missing, present, n=1)
    there = f"; {file}:{present[close[0]] + 1} has `{close[0]}`" if close else ""
    return (
        f"{file}:{inside.start + 1}: {edit.function} has no `{missing}`, which this correction was written for{there}"
    )


def _corrected_code(
    original: CodeType, source: str, definition: _Definition, edits: Mapping[Edit, Hit | None]
) -> CodeType:
    """The code of the corrected definition. Its lines have the numbers that they have in the file, so tracebacks stay readable."""
    lines = source.split("\n")
    numbered = list(enumerate(lines, start=1))
    for edit, hit in edits.items():
        start = _checked(definition, lines, edit, "")
        block = _indented(edit.new, lines[start])
        if hit is not None:
            block = _indented(f"{_HIT}[{(edit.function, edit.old)!r}](bool({edit.acts or True}))", lines[start]) + block
        where = next(index for index, (number, _) in enumerate(numbered) if number == start + 1)
        numbered[where : where + len(_block(edit.old))] = [(start + 1, line) for line in block]
    tree = ast.parse("\n".join(line for _, line in numbered))
    node = next(
        one.node for one in _definitions(tree) if one.first == definition.first and one.qualname == definition.qualname
    )
    node.decorator_list = []  # they are around the function object, which stays
    for part in ast.walk(node):
        if isinstance(part, (ast.stmt, ast.expr, ast.arg, ast.keyword, ast.excepthandler)):
            part.end_lineno = numbered[(part.end_lineno or part.lineno) - 1][0]
            part.lineno = numbered[part.lineno - 1][0]
            if (
                part.lineno == part.end_lineno
            ):  # lines of an edit have one number, so an expression may end left of its start
                part.end_col_offset = max(part.col_offset, part.end_col_offset or 0)
    enclosed = ast.Module([_enclosed(node, definition.qualname, original.co_freevars)], [])
    whole = compile(
        ast.fix_missing_locations(enclosed),
        original.co_filename,
        "exec",
        flags=original.co_flags & _FUTURE,
        dont_inherit=True,
    )
    code = next(code for code in _codes(whole) if code.co_name == original.co_name)
    if code.co_freevars != original.co_freevars:
        raise TargetMismatchError(
            f"{definition.qualname} closes over ({', '.join(original.co_freevars)}), "
            f"its corrected form over ({', '.join(code.co_freevars)})"
        )
    return code.replace(co_qualname=original.co_qualname)


def _enclosed(node: ast.stmt, qualname: str, freevars: Sequence[str]) -> ast.stmt:
    """The definition inside of its classes and of a function that has its free variables, so that it is compiled as it was."""
    around = [f"class {name}: pass" for name in qualname.split(".")[:-1]]
    outside = [name for name in freevars if name != "__class__"]
    if outside:
        around.insert(0, f"def enclosing({', '.join(outside)}): pass")
    for text in reversed(around):
        outer = ast.parse(text).body[0]
        assert isinstance(outer, (ast.ClassDef, ast.FunctionDef))
        outer.body = [node]
        node = outer
    return node


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)


def _shown(file: str) -> str:
    """A library's file as its users know it: from the folder of its package on."""
    path = Path(file)
    while (path.parent / "__init__.py").is_file():
        path = path.parent
    return str(Path(file).relative_to(path.parent))
