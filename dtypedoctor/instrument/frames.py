"""Reads Python's own stack: which line of whose code is at work, and inside which custom autograd function."""

import ast
import builtins
import linecache
import math
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from inspect import CO_OPTIMIZED, getattr_static
from itertools import islice
from types import BuiltinMethodType, CodeType, FrameType, ModuleType
from typing import Any, NamedTuple

from torch import Size, Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional

from dtypedoctor._torch_private import OpOverload
from dtypedoctor.interruptions import contained
from dtypedoctor.text import cell_of

_NOT_THE_USERS = (
    "torch.",
    "dtypedoctor.instrument",
    "dtypedoctor.worker",
    "dtypedoctor.lab.audit",
    "dtypedoctor.lab.worker",
    "dtypedoctor.interruptions",
    "dtypedoctor._torch_private",
)
_WORKER = "dtypedoctor.lab.worker.main"
"""What runs a scenario: whatever has called it is no program of the user's."""
_PASSING_ON = frozenset({"__torch_function__", "__torch_dispatch__"})
"""Methods by which a subclass of tensors hands on what somebody else computes with it."""
_OF_GRAPHS = ("<eval_with_key>", "codegen(")
"""In the file names of code that torch generates for the graphs that it compiles."""
_CASTS = frozenset({"float", "half", "bfloat16", "double"})
_DTYPES = frozenset({"float16", "bfloat16", "float32", "float64", *_CASTS})


def source_of(frame: FrameType | None) -> str | None:
    """``package/file.py:line`` of the innermost frame that is neither torch's nor the doctor's; None where there is none.

    What a subclass of tensors only hands on is the line's that asked for it.

    The path begins at the top of the package that the code belongs to; of a script it is the file's name.
    """
    line = line_of(frame)
    return None if line is None else line.source


class Line(NamedTuple):
    """A line of code. Making one takes a third of a microsecond; its text is put together where it is asked for."""

    code: CodeType
    module: str
    number: int

    @property
    def source(self) -> str:
        """``package/file.py:line``; of a script the file's name, of a notebook ``cell In[3]:line``."""
        return f"{cell_of(self.code.co_filename) or _from_package(self.code.co_filename, self.module)}:{self.number}"


def line_of(frame: FrameType | None) -> Line | None:
    """The line of the innermost frame that is neither torch's nor the doctor's; None where there is none."""
    frame = users_frame(frame)
    return None if frame is None else Line(frame.f_code, frame.f_globals.get("__name__", ""), frame.f_lineno)


def is_users(module: str) -> bool:
    """Whether a module is neither torch's nor the doctor's."""
    return module != "torch" and not module.startswith(_NOT_THE_USERS)


def users_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame that is neither torch's nor the doctor's; None where there is none."""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        # :func:`is_users` without the call: asked for each frame of torch's and ours above the program's
        if module != "torch" and not module.startswith(_NOT_THE_USERS):
            code = frame.f_code
            is_of_graph = _OF_GRAPHS[0] in code.co_filename or _OF_GRAPHS[1] in code.co_filename
            if code.co_name not in _PASSING_ON and not is_of_graph:
                return frame
        elif module == _WORKER:
            return None
        frame = frame.f_back
    return None


_DOCTOR = __file__.rpartition("/instrument/")[0] + "/"
_LIBRARIES = (
    *(f"{sysconfig.get_paths()[name]}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    _DOCTOR,
    "<",
)
INSTALLED = ("/site-packages/", "/dist-packages/")


@lru_cache(maxsize=4096)
def is_own_file(file: str) -> bool:
    """Whether a file is the program's, and neither an installed library's nor Python's nor the doctor's."""
    return not file.startswith(_LIBRARIES) and not any(part in file for part in INSTALLED)


class Call(NamedTuple):
    """A call, or another expression, in the program's own code.

    Attributes:
        at: ``/path/of/file.py:line``.
        called: what is called, without its arguments (``model.head.float()``); empty where it is no call, or the source cannot be read.
        span: its first and last line (from 1), first and last column (bytes, from 0); empty where they are not known.
    """

    at: str
    called: str
    span: list[int]


class Statement(NamedTuple):
    """What the program's own code was doing, kept as its code and an instruction of it: cheap to make, read where it is asked for."""

    code: CodeType
    instruction: int
    line: int

    @property
    def source(self) -> str:
        """``file.py:line``; in a notebook ``cell In[3]:line``."""
        file = self.code.co_filename
        return f"{cell_of(file) or file.rpartition('/')[2]}:{self.line}"

    def call(self) -> Call:
        """The call that the instruction is part of."""
        expression = _expression(self.code, self.instruction)
        called = callee(expression) if isinstance(expression, ast.Call) else ""
        file = self.code.co_filename
        return Call(f"{cell_of(file) or file}:{self.line}", called, span_of(self.code, self.instruction))


def callee(node: ast.expr) -> str:
    """What an expression names or calls, without arguments and literals: these may be secrets."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{callee(node.value)}.{node.attr}"
    if isinstance(node, ast.Call):
        return f"{callee(node.func)}()"
    if isinstance(node, ast.Subscript):
        index = node.slice.value if isinstance(node.slice, ast.Constant) else None
        return f"{callee(node.value)}[{index if isinstance(index, int) else '…'}]"
    return "…"


def span_of(code: CodeType, instruction: int) -> list[int]:
    """First and last line (from 1), first and last column (bytes, from 0) of an instruction's expression; empty where they are not known."""
    found = next(islice(code.co_positions(), instruction // 2, None), (None,) * 4)
    return [number for number in found if number is not None] if None not in found else []


def own_line(frame: FrameType | None) -> Line | None:
    """The line of the program's own code that is at work; where only libraries are, that of the innermost which is not torch."""
    own = frame
    while own is not None and not is_own_file(own.f_code.co_filename):
        own = own.f_back
    return line_of(frame) if own is None else Line(own.f_code, own.f_globals.get("__name__", ""), own.f_lineno)


def own_statement(frame: FrameType | None) -> Statement | None:
    """What the program's own code is doing in ``frame`` or the nearest one around it; None where only libraries are at work."""
    while frame is not None:
        if is_own_file(frame.f_code.co_filename):
            return Statement(frame.f_code, frame.f_lasti, frame.f_lineno)
        frame = frame.f_back
    return None


def names_a_dtype(frame: FrameType | None) -> bool:
    """Whether the call that is at work in the innermost frame of the user's names a dtype: ``x.half()``, ``x.to(torch.float16)``.

    False where the dtype comes from a variable or from another tensor, and where the source cannot be read.
    """
    frame = users_frame(frame)
    return frame is not None and _names_a_dtype(frame.f_code, frame.f_lasti)


@lru_cache(maxsize=4096)
def _names_a_dtype(code: CodeType, instruction: int) -> bool:
    called = _expression(code, instruction)
    if not isinstance(called, ast.Call):
        return False
    if isinstance(called.func, ast.Attribute) and called.func.attr in _CASTS:
        return True
    given = [*called.args, *(keyword.value for keyword in called.keywords)]
    named = [node.attr for value in given for node in ast.walk(value) if isinstance(node, ast.Attribute)]
    return not _DTYPES.isdisjoint(named)


def number_given(frame: FrameType) -> Any:
    """What the first argument of the call that is at work in ``frame`` is, computed once more from its source: numbers, lists of them, dicts and tuples.

    None where that would run code of the program, or takes more than arithmetic.
    """
    compiled = _first_argument(frame.f_code, frame.f_lasti)
    if compiled is None:
        return None
    code, paths = compiled
    values = {}
    for path in paths:
        value = _value_at(frame, path)
        if type(value) in _TENSORS:
            value = _Length(value.shape)  # len(batch); of its elements nothing is computed again
        elif not (_is_data(value, [MOST_GIVEN]) or id(value) in _ARITHMETIC or _asks_for_shape(value)):
            return None
        values[path] = _short_range if value is range else value
    with contained():
        # arithmetic on data that is there, and which has just run
        return eval(code, {"__builtins__": {}, **values, _EACH: _each_of_few()})
    return None


_TENSORS = (Tensor, nn.Parameter)
"""Classes of tensors that run no code of the program when they are asked for their shape."""
_SHAPE = frozenset({"numel", "nelement", "size", "dim", "shape", "ndim"})


def _value_at(frame: FrameType, path: str) -> Any:
    """What a name with its attributes is where a frame is at work; None where it is not known, or code of the program would run."""
    name, *attributes = path.split(".")
    value = local_of(frame, name)
    if value is None:
        value = frame.f_globals.get(name, vars(builtins).get(name))
    for attribute in attributes:
        if type(value) in _TENSORS and attribute in _SHAPE:
            value = getattr(value, attribute)
        else:
            value = getattr_static(value, attribute, None)
    return tuple(value) if type(value) is Size else value


def _asks_for_shape(value: Any) -> bool:
    return type(value) is BuiltinMethodType and type(value.__self__) in _TENSORS and value.__name__ in _SHAPE


class _Length:
    """Stands for a tensor in what is computed again: it has a length and nothing else."""

    def __init__(self, shape: Size) -> None:
        self._shape = shape

    def __len__(self) -> int:
        return self._shape[0]


MOST_GIVEN = 4_096
"""Numbers, and what they are kept in, of an argument that is computed again."""
_ARITHMETIC = frozenset(
    map(id, (float, int, range, list, tuple, len, min, max, sum, abs, round, *vars(math).values()))
).difference(map(id, (math.factorial, math.comb, math.perm)))
"""Identities of functions of Python's that compute with numbers, and take a time that the size of these bounds."""
_EACH = "each of"
"""Stands for :func:`_each_of_few` in what is computed again; no name of a program's."""


def _short_range(*ends: int) -> range:
    """A range that is no longer than what is computed again."""
    numbers = range(*ends)
    if len(numbers) > MOST_GIVEN:
        raise ValueError(MOST_GIVEN)
    return numbers


def _each_of_few() -> Callable[[Iterable[Any]], Iterator[Any]]:
    """Goes through what comprehensions go through, and raises where all of them together take more than :data:`MOST_GIVEN` turns."""
    turns = iter(range(MOST_GIVEN))

    def each(items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            next(turns)
            yield item

    return each


_COMPUTES = (ast.Constant, ast.Name, ast.List, ast.Tuple, ast.Subscript, ast.Slice, ast.UnaryOp, ast.BinOp, ast.ListComp, ast.GeneratorExp, ast.Call,
             ast.comprehension, ast.expr_context, ast.operator, ast.unaryop)  # fmt: skip
"""What is computed again."""


class _Paths(ast.NodeTransformer):
    """Makes one name of a name and its attributes, ``self.config.gamma``, and bounds comprehensions."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        value = self.visit(node.value)
        if not isinstance(value, ast.Name):
            return node
        return ast.copy_location(ast.Name(f"{value.id}.{node.attr}", ast.Load()), node)

    def visit_comprehension(self, node: ast.comprehension) -> ast.AST:
        self.generic_visit(node)
        node.iter = ast.Call(ast.Name(_EACH, ast.Load()), [node.iter], [])
        return node


@lru_cache(maxsize=4096)
def _first_argument(code: CodeType, instruction: int) -> tuple[CodeType, Sequence[str]] | None:
    """The first argument of a call, compiled, and the names that it reads; None where it does more than to compute with them."""
    called = _expression(code, instruction)
    if not isinstance(called, ast.Call):
        return None
    given = [*called.args, *(keyword.value for keyword in called.keywords if keyword.arg == "data")]
    nodes = list(ast.walk(argument := _Paths().visit(given[0]))) if given else []
    if not nodes or not all(isinstance(node, _COMPUTES) for node in nodes):
        return None
    compiled = compile(ast.fix_missing_locations(ast.Expression(argument)), code.co_filename, "eval", dont_inherit=True)
    return compiled, _read_by(nodes)


def _read_by(nodes: Sequence[ast.AST]) -> list[str]:
    """The names that an expression reads, and does not make itself as a comprehension does."""
    names = [node for node in nodes if isinstance(node, ast.Name)]
    made = {name.id for name in names if isinstance(name.ctx, ast.Store)} | {_EACH}
    return sorted({name.id for name in names} - made)


def _is_data(value: Any, left: list[int]) -> bool:
    """Whether a value is a number or text, or a list, tuple or dict of some."""
    left[0] -= 1
    if type(value) in (list, tuple):
        return len(value) <= left[0] and all(_is_data(item, left) for item in value)
    if type(value) is dict:
        return len(value) <= left[0] and all(_is_data(item, left) for pair in value.items() for item in pair)
    return type(value) in (int, float, bool, str)


def _expression(code: CodeType, instruction: int) -> ast.expr | None:
    """The expression that an instruction belongs to; None where the source cannot be read, or is something else."""
    lines = linecache.getlines(code.co_filename)
    first, last, begin, end = next(islice(code.co_positions(), instruction // 2, None), (None,) * 4)
    if not lines or first is None or last is None or begin is None or end is None:
        return None
    chosen = [line.encode() for line in lines[first - 1 : last]]
    chosen[-1] = chosen[-1][:end]
    chosen[0] = chosen[0][begin:]
    try:
        return ast.parse(b"(" + b"".join(chosen) + b")", mode="eval").body
    except (SyntaxError, ValueError):
        return None


def _from_package(path: str, module: str) -> str:
    """The end of ``path`` that stands for the dotted name ``module``: one part each, one more for a package's ``__init__``."""
    parts = path.split("/")
    depth = len(module.split(".")) + (parts[-1] == "__init__.py")
    return "/".join(part for part in parts[-depth:] if part)


def imported_files() -> dict[str, str]:
    """The files of the modules that are imported, the script's left out, each with its path from the top of its package on."""
    files: dict[str, str] = {}
    for name, module in list(sys.modules.items()):
        file = vars(module).get("__file__") if isinstance(module, ModuleType) else None
        if isinstance(file, str) and name not in ("__main__", "__mp_main__"):
            files[file] = _from_package(file, name)
    return files


def local_of(frame: FrameType, name: str) -> Any:
    """The local variable ``name`` of a frame at work; None where it has none."""
    return locals_of(frame, name)[0]


def locals_of(frame: FrameType, *names: str) -> list[Any]:
    """Local variables of a frame at work; None for one that it has not.

    Before Python 3.13 a frame that is asked for its variables keeps a copy of them until it ends, and with it tensors that
    the program has let go of. The copy is emptied, unless the program itself holds it (it has called ``locals()``).
    """
    held = frame.f_locals
    values = [held.get(name) for name in names]
    own = 3  # references: the frame's, this function's, and that of the argument of getrefcount
    if type(held) is dict and frame.f_code.co_flags & CO_OPTIMIZED and sys.getrefcount(held) <= own:
        held.clear()
    return values


def raising_operator(error: BaseException) -> str | None:
    """The operator that raised ``error``, e.g. ``aten.mm.default``; None where its kernel was called without a Python frame."""
    innermost = error.__traceback__
    while innermost is not None and innermost.tb_next is not None:
        innermost = innermost.tb_next
    called = local_of(innermost.tb_frame, "self") if innermost is not None else None
    return str(called) if isinstance(called, OpOverload) else None


def function_context(frame: FrameType | None) -> FunctionCtx | None:
    """The context of the innermost custom ``autograd.Function`` whose forward or backward is running, if any.

    Both are handed it first. The frame of ``Function.apply`` would tell as well, but has been in C since torch 2.15.
    """
    while frame is not None:
        code = frame.f_code
        if code.co_name in ("forward", "backward") and code.co_argcount:
            context = local_of(frame, code.co_varnames[0])
            if isinstance(context, FunctionCtx):
                return context
        frame = frame.f_back
    return None


def function_name(context: FunctionCtx) -> str:
    """Name of the custom function that ``context`` belongs to."""
    return type(context).__name__.removesuffix("Backward")


def importable(thing: Any) -> str:
    """``module:qualified.name`` of a class or function that can be imported by it.

    Raises:
        TypeError: it cannot.
    """
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", "")
    if not module or module == "__main__" or "<" in name:
        raise TypeError(f"{name or thing} cannot be imported from anywhere")
    if getattr(functional, name, None) is thing:  # what is written in C names a private module
        module = "torch.nn.functional"
    return f"{module}:{name}"
