"""Casts whose result a program keeps: ``p.detach().to(torch.bfloat16)`` copies float32 weights, ``p.detach().to(torch.float32)`` returns ``p``.

Where an edit changes the dtype on one side of such a cast, what was a copy shares its storage with the weights, and what updates it in place changes
them. Nothing raises. So each cast that may stop copying gets ``.clone()``.
"""

import ast
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from dtypedoctor.diagnosis.scene import Change, Source

Span = tuple[int, ...]
"""First and last line, first and last column of an expression, as a parameter's note tells it."""

_METHODS = {"half": "float16", "bfloat16": "bfloat16", "float": "float32", "double": "float64", "to": "", "type": ""}
_SHARING = frozenset(
    {"detach", "cpu", "cuda", "to", "view", "reshape", "contiguous", "flatten", "squeeze", "unsqueeze", "t", "requires_grad_"}
)  # fmt: skip
"""Methods that may return a tensor of the same storage."""
_KEEPING = frozenset(
    {"append", "extend", "insert", "add", "setattr", "setdefault", "update", "register_buffer", "register_parameter", "Parameter", "Buffer",
     "ParameterList", "ParameterDict", "list", "tuple", "dict", "OrderedDict", "defaultdict"}
)  # fmt: skip
"""Functions that keep what they get; others are taken to read it."""
_OF_TENSORS = frozenset({"detach", "data", "grad", "clone", "weight", "bias"})
_OF_MODULES = frozenset(
    {"parameters", "named_parameters", "state_dict", "load_state_dict", "train", "eval", "modules", "children", "named_modules"}
)  # fmt: skip
_LISTS_TENSORS = re.compile(r"\.(named_)?(parameters|buffers)\(|state_dict\(")
_MAKES_MODULES = re.compile(r"(^|\.)(_*[A-Z]\w*|deepcopy|from_\w+|\w*([Mm]odel|net|module)\w*)$")
_DTYPE = re.compile(r"\b(bfloat16|float16|float32|float64|half|float|double)\b")
_KEPT_IN = (
    ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp, ast.GeneratorExp, ast.Yield, ast.Lambda,
    ast.IfExp, ast.Starred, ast.NamedExpr,
)  # fmt: skip


def still_copying(
    source: Source, changes: Sequence[Change], modules: set[Span], of_weights: Collection[str]
) -> list[Change]:
    """``.clone()`` behind each cast in the file whose copy is kept, and which may copy nothing more after the changes.

    Args:
        source: the file.
        changes: what is changed in it.
        modules: the casts that are known to be those of modules, which change in place and have no ``clone``.
        of_weights: the dtypes that weights get, here or in another file: a cast of them to one of these stops copying.
    """
    casts = _Casts(source, changes, of_weights)
    calls = ((call, span_of(call) in modules) for call in source.every(ast.Call))
    found = [call for call, of_module in calls if casts.may_stop(call, surely=of_module)]
    return [(source.end(call), source.end(call), b".clone()") for call in found if casts.is_kept(call)]


def dtypes_in(changes: Sequence[Change]) -> set[str]:
    """The dtypes that changes write."""
    named = {name for _, _, text in changes for name in _DTYPE.findall(text.decode())}
    return {_METHODS.get(name, name) for name in named}


def span_of(node: ast.expr) -> Span:
    """Where an expression stands in its file."""
    return (node.lineno, node.end_lineno or 0, node.col_offset, node.end_col_offset or 0)


@dataclass(frozen=True)
class _Casts:
    """The casts of a file and what is changed in it."""

    source: Source
    changes: Sequence[Change]
    of_weights: Collection[str]

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        """What each part of the file stands in; the call for the value of a keyword."""
        up = {child: node for node in ast.walk(self.source.tree) for child in ast.iter_child_nodes(node)}
        return {child: up[node] if isinstance(node, ast.keyword) else node for child, node in up.items()}

    @cached_property
    def renamed(self) -> set[str]:
        """The variables, attributes and parameters whose value is changed: ``dtype = torch.bfloat16``."""
        return {name for node in ast.walk(self.source.tree) for name, value in _values(node) if self._touched(value)}

    def _touched(self, node: ast.expr) -> bool:
        return any(self.source.start(node) <= start and end <= self.source.end(node) for start, end, _ in self.changes)

    def may_stop(self, call: ast.Call, *, surely: bool) -> bool:
        """Whether a call casts a tensor, ``surely`` or as it seems, and the changes alter its dtype or that of the weights it casts."""
        receiver = _receiver(call)
        if receiver is None:
            return False
        begin, end = self.source.end(receiver), self.source.end(call)
        used = {getattr(one, "id", getattr(one, "attr", "")) for part in _arguments(call) for one in ast.walk(part)}
        if any(begin <= start < end and stop <= end for start, stop, _ in self.changes) or used & self.renamed:
            return self._is_tensor(receiver, surely=surely)
        return _dtype_of(call) in self.of_weights and self._is_tensor(receiver, surely=True)

    def _is_tensor(self, node: ast.expr, *, surely: bool) -> bool:
        """Whether what is cast is a tensor; ``surely`` where nothing else can be meant."""
        if isinstance(node, ast.BinOp | ast.UnaryOp) or _calls_torch(node):
            return False  # made here: nothing else shares its storage
        if _names_tensor(node) or self._is_listed(list(_chain(node))[-1]):
            return True
        return not surely and not self._is_module(node)

    def _is_listed(self, root: ast.expr) -> bool:
        """Whether a variable goes over the parameters of a model, or its state."""
        pairs = (
            (one.target, one.iter) for one in ast.walk(self.source.tree) if isinstance(one, ast.For | ast.comprehension)
        )
        name = ast.unparse(root)
        over = [made for target, made in pairs if name in {ast.unparse(part) for part in ast.walk(target)}]
        return any(_LISTS_TENSORS.search(ast.unparse(made)) for made in over)

    def _is_module(self, node: ast.expr) -> bool:
        """Whether what is cast seems to be a module: it is made by a class, is called, or has its parameters listed."""
        if isinstance(node, ast.Call):
            return _MAKES_MODULES.search(ast.unparse(node.func)) is not None
        text = ast.unparse(node)
        name = text.rpartition(".")[2]
        return (
            name in ("self", "model", "module", "net")
            or self._is_used_as_module(node, text)
            or self._made_by_class(name)
        )

    def _is_used_as_module(self, node: ast.expr, text: str) -> bool:
        uses = [self.parents.get(one) for one in self.source.every(type(node)) if ast.unparse(one) == text]
        called = any(isinstance(use, ast.Call) and ast.unparse(use.func) == text for use in uses)
        return called or any(isinstance(use, ast.Attribute) and use.attr in _OF_MODULES for use in uses)

    def _made_by_class(self, name: str) -> bool:
        pairs = (pair for node in ast.walk(self.source.tree) for pair in _values(node))
        return any(own == name and isinstance(made, ast.Call) and self._is_module(made) for own, made in pairs)

    def is_kept(self, node: ast.expr) -> bool:
        """Whether the value of an expression may be kept or written in place, and is not only computed with; a copy too many does no harm."""
        parent = self.parents.get(node)
        if isinstance(parent, ast.Attribute):
            call = self.parents.get(parent)
            in_place = parent.attr.endswith("_") and not parent.attr.endswith("__")
            return in_place or (parent.attr in _SHARING and isinstance(call, ast.Call) and self.is_kept(call))
        if isinstance(parent, ast.Call):
            return node is not parent.func and _keeps(parent)
        if isinstance(parent, ast.Tuple | ast.Return):
            return _names_tensor(node)
        return isinstance(parent, _KEPT_IN) or any(
            not _is_cast_of(node, target) and (isinstance(target, ast.Attribute) or _names_tensor(node))
            for target in _targets(parent)
        )


def _receiver(call: ast.Call) -> ast.expr | None:
    """What a call casts; None where it casts nothing, or copies in any case."""
    function = call.func
    if not isinstance(function, ast.Attribute) or any(keyword.arg == "copy" for keyword in call.keywords):
        return None
    if ast.unparse(function) in ("torch.as_tensor", "torch.asarray"):
        return call.args[0] if call.args else None
    casts = function.attr in _METHODS and bool(_arguments(call)) is (not _METHODS[function.attr])
    return function.value if casts else None


def _calls_torch(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).startswith(("torch.", "F."))


def _is_cast_of(node: ast.expr, target: ast.expr) -> bool:
    """``p.data = p.data.half()``: what shares its storage is gone."""
    return isinstance(target, ast.Attribute | ast.Subscript) and ast.unparse(target) in map(ast.unparse, _chain(node))


def _names_tensor(node: ast.expr) -> bool:
    """Whether ``p.detach()``, ``p.data`` or the like is a part of an expression."""
    return any(isinstance(one, ast.Attribute) and one.attr in _OF_TENSORS for one in _chain(node))


def _keeps(call: ast.Call) -> bool:
    """Whether a function keeps what it gets."""
    return ast.unparse(call.func).rpartition(".")[2] in _KEEPING


def _targets(statement: ast.AST | None) -> list[ast.expr]:
    """What a statement assigns to; nothing for other statements."""
    if isinstance(statement, ast.AnnAssign):
        return [statement.target]
    return statement.targets if isinstance(statement, ast.Assign) else []


def _arguments(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def _dtype_of(call: ast.Call) -> str:
    """The dtype that a cast names itself; empty where it does not."""
    method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    named = [_METHODS.get(name, name) for part in _arguments(call) for name in _DTYPE.findall(ast.unparse(part))]
    return _METHODS.get(method) or next(iter(named), "")


def _chain(node: ast.expr) -> Iterator[ast.expr]:
    """``a.b().c``, then ``a.b()``, ``a.b`` and ``a``."""
    yield node
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
        yield node


def _values(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """The names that a part of a program gives values, and the values."""
    if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
        yield from ((ast.unparse(target).rpartition(".")[2], node.value) for target in _targets(node))
    elif isinstance(node, ast.keyword):
        yield node.arg or "", node.value
    elif isinstance(node, ast.arguments):
        yield from _defaults(node)


def _defaults(arguments: ast.arguments) -> Iterator[tuple[str, ast.expr]]:
    """The parameters that have a default."""
    given = [*arguments.posonlyargs, *arguments.args][::-1]
    yield from ((one.arg, value) for one, value in zip(given, arguments.defaults[::-1], strict=False))
    pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    yield from ((one.arg, value) for one, value in pairs if value is not None)
