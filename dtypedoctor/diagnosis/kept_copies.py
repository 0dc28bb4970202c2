"""Casts whose result a program keeps: ``p.detach().to(torch.bfloat16)`` copies float32 weights, ``p.detach().to(torch.float32)`` returns ``p``.

Where an edit changes the dtype on one side of such a cast, what was a copy shares its storage with the weights, and what updates it in place changes
them. Nothing raises, and the trial of the edit need not show it. So each cast that may stop copying gets ``.clone()``: a copy too many does no harm.
"""

import ast
import re
from collections.abc import Collection, Iterator, Sequence

from dtypedoctor.diagnosis.scene import Change, Source

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
_OF_WEIGHTS = frozenset({"detach", "data", "grad", "weight", "bias"})
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
    return any(isinstance(part, ast.Attribute) and part.attr in _OF_WEIGHTS for part in chain) or (
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
