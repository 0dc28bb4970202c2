"""Which line of the program gave a parameter or buffer its dtype: ``model.head.float()``, ``from_pretrained(...)``, ``p.data = p.data.float()``.

Followed are what registers parameters and buffers (their construction, loading, adapters) and ``Module._apply``, which every cast of a module
goes through. Nothing is done when a module is called.
"""

import ast
import linecache
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from dtypedoctor._torch_private import buffers_of, follow_casts, parameters_of, register_own
from dtypedoctor.instrument.frames import Call, Statement, callee, own_statement
from dtypedoctor.instrument.module_tree import modules_in
from dtypedoctor.interruptions import contained

_WHAT = "which line has set the dtype of some parameters"
_LOADERS = ("from_pretrained()", "from_config()")
_IN_PLACE = "prepare_model_for_kbit_training"
"""peft's function that casts by assigning to ``.data``."""

MOST_SEARCHES = 50
"""Parameters whose other holders are searched for, each among all modules."""


Shield = Callable[[Callable[..., Any], str], Callable[..., None]]
"""What makes a hook of a callback, as :meth:`Guard.shield` does."""
_Known = dict[int, tuple[ref[nn.Module], dict[str, tuple[torch.dtype, Statement]]]]


class DtypeLines:
    """Remembers, for each module that is alive, the statement that gave each of its own tensors the dtype that it had then.

    Args:
        shield: keeps what a hook raises from the program.
        earlier: what has followed the program before, whose memory is used.
    """

    def __init__(self, shield: Shield, earlier: "DtypeLines | None" = None) -> None:
        self._shield = shield
        self._of: _Known = earlier._of if earlier is not None else {}
        self._undo: list[Callable[[], None]] = []
        self._dtypes_before: dict[tuple[int, str], torch.dtype] = {}
        self._searches = 0

    def start(self) -> None:
        """Begins to follow."""
        hook = self._shield(self._registered, _WHAT)
        for register in (register_module_parameter_registration_hook, register_module_buffer_registration_hook):
            self._undo.append(register_own(register, hook).remove)
        begin = self._shield(self._before_cast, _WHAT)
        end = self._shield(self._after_cast, _WHAT)
        self._undo.append(follow_casts(begin, end))

    def stop(self) -> None:
        """Puts everything back as it was."""
        while self._undo:
            self._undo.pop()()

    def set_by(self, module: nn.Module, name: str, tensor: Tensor) -> Call | None:
        """The statement that gave ``tensor``, which ``module`` holds as ``name``, its dtype; None where none is known."""
        held = self._of.get(id(module))
        known = held[1].get(name) if held is not None and held[0]() is module else None
        if known is None:
            return None
        dtype, statement = known
        call = statement.call()
        if dtype is tensor.dtype or call.called.endswith(_LOADERS):
            return call
        tied = self._tied(tensor)
        if tied is not None:
            return tied.call()
        return _assignment_to_data(statement.code.co_filename)

    def _tied(self, tensor: Tensor) -> Statement | None:
        """The statement that gave a tensor its dtype through another module that holds it."""
        self._searches += 1
        for module, name, (dtype, statement) in self._known() if self._searches <= MOST_SEARCHES else ():
            if dtype is tensor.dtype and parameters_of(module).get(name) is tensor:
                return statement
        return None

    def _known(self) -> Iterator[tuple[nn.Module, str, tuple[torch.dtype, Statement]]]:
        for held, names in list(self._of.values()):
            module = held()
            if module is not None:
                yield from ((module, name, known) for name, known in names.items())

    def _registered(self, module: nn.Module, name: str, tensor: Tensor | None) -> None:
        statement = own_statement(sys._getframe()) if tensor is not None else None
        if tensor is not None and statement is not None:
            self._remember(module, name, tensor.dtype, statement)

    def _remember(self, module: nn.Module, name: str, dtype: torch.dtype, statement: Statement) -> None:
        identity = id(module)
        held = self._of.get(identity)
        if held is None or held[0]() is not module:
            held = self._of[identity] = (ref(module, lambda gone: self._forget(identity, gone)), {})
        held[1][name] = (dtype, statement)

    def _forget(self, identity: int, gone: ref[nn.Module]) -> None:
        held = self._of.get(identity)
        if held is not None and held[0] is gone:
            del self._of[identity]

    def _before_cast(self, module: nn.Module) -> None:
        self._dtypes_before = {(id(child), name): tensor.dtype for child, name, tensor in _tensors(module)}

    def _after_cast(self, module: nn.Module) -> None:
        before, self._dtypes_before = self._dtypes_before, {}
        statement = own_statement(sys._getframe())
        for child, name, tensor in _tensors(module) if statement is not None else ():
            if before.get((id(child), name), tensor.dtype) is not tensor.dtype:
                assert statement is not None
                self._remember(child, name, tensor.dtype, statement)


_notebook: list[DtypeLines] = []
"""What follows a notebook from ``%load_ext`` on: its models are made in cells that nobody watches."""


def follow_notebook() -> None:
    """Begins to follow a notebook; does nothing where that has begun."""
    if not _notebook:
        _notebook.append(DtypeLines(_contained))
        _notebook[0].start()


def leave_notebook() -> None:
    """Puts everything back as it was."""
    while _notebook:
        _notebook.pop().stop()


def lines_of_notebook() -> DtypeLines | None:
    """What follows this process as a notebook; None in any other."""
    return _notebook[0] if _notebook else None


def _contained(callback: Callable[..., Any], _: str) -> Callable[..., None]:
    def hook(*args: Any) -> None:
        if not is_compiling():
            with contained():
                callback(*args)

    return hook


def _tensors(module: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for child in modules_in(module):
        for held in (parameters_of(child), buffers_of(child)):
            yield from ((child, name, tensor) for name, tensor in held.items() if tensor is not None)


@lru_cache(maxsize=64)
def _assignment_to_data(file: str) -> Call | None:
    """The only line of a file that changes parameters in place, by assigning to ``.data`` or by calling peft; None for none or several."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return None
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Assign | ast.Call) and _changes_data(node)]
    if len(found) != 1:
        return None
    node = found[0]
    call = node.value if isinstance(node, ast.Assign) else node  # what the new value comes from is what has to change
    span = [call.lineno, call.end_lineno or call.lineno, call.col_offset, call.end_col_offset or call.col_offset]
    called = callee(node) if isinstance(node, ast.Call) else f"{callee(node.targets[0])} = …"
    return Call(f"{file}:{node.lineno}", called, span)


def _changes_data(node: ast.Assign | ast.Call) -> bool:
    if isinstance(node, ast.Assign):
        return any(isinstance(target, ast.Attribute) and target.attr == "data" for target in node.targets)
    return callee(node.func).endswith(_IN_PLACE)
