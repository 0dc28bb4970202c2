"""Where in the program something happens: where an operator runs (module, source line, custom autograd function; in the backward pass too),
where the tensors come from that it finds already there, which autocast regions are entered, and where an exception is raised, for nothing that
reaches the top tells of one that somebody catches.
"""

import sys
import traceback
from collections import Counter, UserDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from dis import opmap
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from dtypedoctor._torch_private import (
    CALL_CODE,
    HELD_APART,
    autograd_node,
    context_facts,
    next_sequence_number,
    sequence_number,
)
from dtypedoctor.instrument.frames import (
    function_context,
    function_name,
    locals_of,
    raising_operator,
    source_of,
    span_of,
)
from dtypedoctor.instrument.module_tree import held_in, named_modules
from dtypedoctor.instrument.naming import Names
from dtypedoctor.instrument.operators import TensorIds
from dtypedoctor.instrument.session import Session
from dtypedoctor.redaction.messages import message_of
from dtypedoctor.text import cell_of
from dtypedoctor.trace.events import Caught, Raised
from dtypedoctor.trace.records.execution import AutocastRegion, CustomFunction


@dataclass(frozen=True, slots=True, kw_only=True)
class OpPlace:
    """Where an operator runs.

    Attributes:
        root: number of the outermost module; -1 outside of all.
        fqn: dotted name of the module, empty for the outermost one and outside of all.
        source: ``file.py:line``; for a backward operator that torch wrote, the line that it differentiates.
        function: name of the custom autograd function that it runs in, if any.
        autocast: the autocast dtype in force for the operands' device, if any.
    """

    root: int
    fqn: str
    source: str | None
    function: str | None
    autocast: str | None


OUTSIDE = -1
"""Stands for the root of an operator that runs outside of every module call."""

_NOWHERE = OpPlace(root=OUTSIDE, fqn="", source=None, function=None, autocast=None)


MAX_LEVELS = 4
"""Nodes that one operator is taken to have made: one, and one for each transformation around it that differentiates."""


class Whereabouts:
    """Knows the place of the operator that is running.

    A backward operator belongs to the module and line whose forward made its autograd node. For each custom function whose
    backward begins, a :class:`CustomFunction` is written.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._origins: dict[int, OpPlace] = {}
        self._next: int | None = None
        self._noted: set[int] = set()
        self.is_inside: Callable[[int], bool] = lambda _: False
        """Says whether a module call has made the autograd node of that number."""

    def here(self, frame: FrameType, device: str) -> OpPlace:
        """The place of the operator that is called from ``frame`` on a tensor of ``device``."""
        autocast = self._session.autocast.dtype(device)
        source = source_of(frame)
        node = autograd_node()
        if node is not None and not self._session.position.stack:
            return self._in_backward(node, source, autocast)
        context = function_context(frame)
        function = function_name(context) if context is not None else None
        root, fqn = self._session.names.of_call(self._session.position.stack) or (OUTSIDE, "")
        place = OpPlace(root=root, fqn=fqn, source=source, function=function, autocast=autocast)
        if context is not None:
            self._origins.setdefault(sequence_number(context), place)  # a node too
        # An operator's node is made just before the operator itself is dispatched, and takes the number before the
        # next. In transformations that differentiate (`torch.func.grad`) it has a node in each, the outermost last
        number, known = next_sequence_number(), self._next
        self._next = number
        first = number - 1 if known is None else max(known, number - MAX_LEVELS)
        for made in range(min(first, number - 1), number):
            self._origins.setdefault(made, place)
        return place

    def note_function(self) -> None:
        """Writes the custom function whose backward begins: its first operator, which may be rejected, is to have a later number."""
        node = autograd_node()
        is_custom = isinstance(node, FunctionCtx)
        if node is not None and is_custom and not self._session.position.stack:
            self._in_backward(node, None, None)

    def line_and_module(self, frame: FrameType) -> tuple[str | None, str | None]:
        """``file:line`` of the operator that is called from ``frame``, and the dotted name of its module; None outside of modules."""
        place = self.here(frame, "cpu")
        return place.source, place.fqn if place.root != OUTSIDE else None

    def _in_backward(self, node: torch.autograd.graph.Node, source: str | None, autocast: str | None) -> OpPlace:
        context = node if isinstance(node, FunctionCtx) else None  # the context of a custom function is its node
        made = self._origins.get(sequence_number(node)) or (_NOWHERE if context is None else self._module_of(node))
        if context is not None and sequence_number(node) not in self._noted:
            self._noted.add(sequence_number(node))
            self._note(context, made)
        return OpPlace(
            root=made.root,
            fqn=made.fqn,
            source=source if context is not None else made.source or source,
            function=function_name(context) if context is not None else None,
            autocast=autocast,
        )

    def _module_of(self, node: torch.autograd.graph.Node) -> OpPlace:
        """The module that has called a custom function which nobody saw run: the one that holds the parameter it was given, else the outermost one."""
        if not self.is_inside(sequence_number(node)):
            return _NOWHERE
        known = self._session.names.parameters()
        given = [id(getattr(before, "variable", None)) for before, _ in node.next_functions]
        root, name = next((known[key] for key in given if key in known), (0, ""))
        return replace(_NOWHERE, root=root, fqn=name.rpartition(".")[0])

    def _note(self, context: FunctionCtx, made: OpPlace) -> None:
        facts = context_facts(context)
        function = CustomFunction(
            function=function_name(context),
            decorated=facts["decorated"],
            fwd_used_autocast=facts["fwd_used_autocast"],
            forward_autocast=made.autocast,
            forward_source=made.source,
        )
        self._session.emit(function, fqn=made.fqn)


MAX_REGIONS = 100
"""Different regions that are told of."""


class RegionLog:
    """Writes each different region that is entered."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._told: set[AutocastRegion] = set()

    @property
    def any(self) -> bool:
        """Whether any region was entered."""
        return bool(self._told)

    def tell(self, region: AutocastRegion) -> None:
        """A region is entered."""
        if region in self._told or len(self._told) >= MAX_REGIONS:
            return
        self._told.add(region)
        self._session.emit(region)


MAX_DEPTH = 4
"""How deep objects that hold tensors (caches, batches, lists of them) are searched."""
MAX_HELD = 2000
"""Values looked at in one search, so that an attribute that is half the program costs nothing."""

_OWN = HELD_APART | {"training"}
_OPAQUE = (str, bytes, int, float, complex, bool, type, nn.Module)


class KnownTensors:
    """Names for memory that existed before an op trace began, or was handed to the model.

    Args:
        names: knows the modules.
        ids: numbers memory; the same as the op trace's.
    """

    def __init__(self, names: Names, ids: TensorIds) -> None:
        self._names = names
        self._ids = ids
        self._known: dict[tuple[Any, ...], tuple[str, str]] = {}

    def refresh(self) -> None:
        """Looks at all modules again; what was known stays known."""
        for _, name, tensor, _, is_buffer in self._names.tensors():
            self._learn(tensor, name, "buffer" if is_buffer else "parameter")
        for root in self._names.roots:
            for prefix, module in named_modules(root):
                held = {k: v for k, v in vars(module).items() if k not in _OWN and not k.endswith("_hooks")}
                for path, tensor in tensors_held(held):
                    self._learn(tensor, f"{prefix}.{path}" if prefix else path, "attribute")

    def note_inputs(self, args: Any, kwargs: Any) -> None:
        """The arguments of an outermost module call."""
        for path, tensor in tensors_held({"args": args, "kwargs": kwargs}):
            self._learn(tensor, path, "input")

    def of(self, tensor: Tensor) -> tuple[str | None, str]:
        """Name and origin of the memory of ``tensor``; None and an empty string where it is not known."""
        whole = self._ids.whole(tensor)
        return self._known.get(whole, (None, "")) if whole is not None else (None, "")

    def _learn(self, tensor: Tensor, name: str, origin: str) -> None:
        whole = self._ids.whole(tensor)
        if whole is not None:
            self._known.setdefault(whole, (name, origin))


def tensors_held(value: Any) -> Iterator[tuple[str, Tensor]]:
    """Every tensor inside containers and plain objects, with its path; modules are not entered."""
    waiting: list[tuple[str, Any, int]] = [("", value, 0)]
    seen: set[int] = set()
    while waiting and len(seen) < MAX_HELD:
        path, item, depth = waiting.pop()
        if isinstance(item, Tensor):
            yield path, item
        elif depth < MAX_DEPTH and id(item) not in seen and not isinstance(item, _OPAQUE):
            seen.add(id(item))
            waiting += [(f"{path}.{key}" if path else str(key), inner, depth + 1) for key, inner in _inside(item)]


def _inside(item: Any) -> list[tuple[Any, Any]]:
    if isinstance(item, (dict, list, tuple)):
        return held_in(item)
    held = getattr(item, "__dict__", None)
    if isinstance(held, dict) and isinstance(item, UserDict):
        held = held.get("data")
    return list(dict.items(held)) if isinstance(held, dict) else []


def call_arguments(module: nn.Module) -> tuple[Any, Any]:
    """Positional and keyword arguments of the call of ``module`` that is being entered; empty where it is not found.

    torch's global pre-hook gets the positional arguments only, so they are read from the frame of the call itself.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == CALL_CODE.co_name:
            called, args, kwargs = locals_of(frame, "self", "args", "kwargs")
            if called is module:
                return args or (), kwargs or {}
        frame = frame.f_back
    return (), {}


MAX_FRAMES = 40
MAX_PLACES = 100
MAX_TIMES = 10
"""Different places that are recorded, and how often each."""
_CONTROL_FLOW = (StopIteration, StopAsyncIteration, MemoryError)
"""Exceptions with which a program or a library controls itself, and no failure of torch's."""
_RUNNERS = ("/_pytest/runner.py", "/unittest/case.py", "/doctest.py")
"""Files on the stack of whatever a test calls."""


def raised_record(error: BaseException, session: Session, modules: list[str], phase: str) -> Raised:
    """The record of an exception.

    Args:
        error: was raised.
        session: tells the moment.
        modules: dotted names of the module calls that were open, outermost first.
        phase: in which it was raised.
    """
    links = list(_links(error.__traceback__))
    return Raised(
        n=session.writer.next_n(),
        step=session.position.step,
        call=session.position.call,
        phase=phase,
        type=type(error).__name__,
        message=message_of(error),
        frames=[_described(tb.tb_frame, tb.tb_lineno) for tb in links][-MAX_FRAMES:],
        modules=modules,
        op=raising_operator(error),
        spans=[span_of(tb.tb_frame.f_code, tb.tb_lasti) for tb in links][-MAX_FRAMES:],
        by_statement=bool(links) and links[-1].tb_frame.f_code.co_code[links[-1].tb_lasti] == _RAISES,
    )


_RAISES = opmap["RAISE_VARARGS"]


class CaughtLog:
    """Records exceptions where they are raised, at each place a few times."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._times: Counter[tuple[object, ...]] = Counter()
        self._last: tuple[int, int, tuple[object, ...]] = (0, 0, ())
        self.operator: tuple[int, str | None] = (0, None)
        """Identity of the exception that was recorded last, and the operator that raised it."""

    def note(
        self,
        error: BaseException,
        modules: list[str],
        phase: str,
        *,
        root: int = -1,
        ending: bool = False,
        thread: bool = False,
        fresh: bool = False,
    ) -> int | None:
        """Records an exception; the same one is recorded once, however many calls it leaves.

        Args:
            error: was raised.
            modules: dotted names of the module calls that were open, outermost first.
            phase: in which it was raised.
            root: number of the outermost module; -1 outside of all.
            ending: whether the program, or with ``thread`` this thread of it, is about to end because of it.
            thread: see ``ending``.
            fresh: whether it has just been raised, so that it cannot be one that was recorded before.

        Returns the number of the record; None where none is made.
        """
        if not isinstance(error, Exception) or isinstance(error, _CONTROL_FLOW):
            return None
        place = (*_place(error), ending)
        last = (id(error), self._session.position.call, place)  # an address is soon another exception's
        if (last == self._last and not fresh) or self._times[place] >= MAX_TIMES:
            return None
        if place not in self._times and len(self._times) >= MAX_PLACES:
            return None
        self._last = last
        self._times[place] += 1
        found = raised_record(error, self._session, modules, phase)
        self.operator = (id(error), found.op)
        around = _around(error.__traceback__)
        found = replace(
            found,
            frames=[*around, *found.frames][-MAX_FRAMES:],
            spans=[*([] for _ in around), *found.spans][-MAX_FRAMES:],
        )
        tested = any(frame.f_code.co_filename.endswith(_RUNNERS) for frame, _ in traceback.walk_stack(None))
        self._session.writer.write(Caught.of(found, ending=ending, tested=tested, root=root, thread=thread))
        return found.n


def behind(error: BaseException | None) -> Iterator[BaseException]:
    """The exceptions that ``error`` was raised from, or while handling, the nearest first."""
    seen = {id(error)}
    while error is not None:
        error = error.__cause__ if error.__suppress_context__ else error.__context__
        if error is None or id(error) in seen:
            return
        seen.add(id(error))
        yield error


def _place(error: BaseException) -> tuple[object, ...]:
    """Equal for two exceptions of one type from the same line; who looks on there makes no difference."""
    last: tuple[object, ...] = ()
    for frame, line in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__", "").startswith("dtypedoctor.instrument"):
            break
        if "/torch/_dynamo/" not in frame.f_code.co_filename:  # around a mode of ours once the compiler is there
            last = (frame.f_code.co_filename, line)
    return type(error), *(last or _around(error.__traceback__)[-1:])


def _around(found: TracebackType | None) -> list[str]:
    """The frames that an exception has not left yet, outermost first, without those that start a program."""
    around: list[str] = []
    for frame, line in (
        traceback.walk_stack(found.tb_frame.f_back) if found is not None and found.tb_frame.f_back else ()
    ):
        ours = frame.f_globals.get("__name__", "").startswith("dtypedoctor.")
        if not (ours or frame.f_code.co_filename.startswith("<frozen")) and len(around) < MAX_FRAMES:
            around.append(_described(frame, line))
    return around[::-1]


def _described(frame: FrameType, line: int) -> str:
    code = frame.f_code
    return f"{cell_of(code.co_filename) or code.co_filename}:{line} {code.co_name}"


def _links(found: TracebackType | None) -> Iterator[TracebackType]:
    """The links of a traceback, outermost first, without those of what watches, as a wrapped ``Tensor.numpy`` is."""
    while found is not None:
        if not found.tb_frame.f_globals.get("__name__", "").startswith("dtypedoctor.instrument"):
            yield found
        found = found.tb_next
