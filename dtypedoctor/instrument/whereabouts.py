"""Where in the program an operator runs: module, source line, custom autograd function; in the backward pass too."""

from dataclasses import dataclass
from types import FrameType

import torch
from torch.autograd.function import FunctionCtx

from dtypedoctor._torch_private import autograd_node, context_facts, next_sequence_number, sequence_number
from dtypedoctor.instrument.autocast import AutocastLog
from dtypedoctor.instrument.frames import function_context, function_name, source_of
from dtypedoctor.instrument.naming import Names
from dtypedoctor.instrument.observing import observe
from dtypedoctor.instrument.position import Position
from dtypedoctor.trace.records.autocast import CustomFunction
from dtypedoctor.trace.writer import TraceWriter


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


class Whereabouts:
    """Knows the place of the operator that is running.

    A backward operator belongs to the module and line whose forward made its autograd node. For each custom function whose
    backward begins, a :class:`CustomFunction` is written.
    """

    def __init__(self, writer: TraceWriter, position: Position, names: Names, autocast: AutocastLog) -> None:
        self._writer = writer
        self._position = position
        self._names = names
        self._autocast = autocast
        self._origins: dict[int, OpPlace] = {}
        self._noted: set[int] = set()

    def here(self, frame: FrameType, device: str) -> OpPlace:
        """The place of the operator that is called from ``frame`` on a tensor of ``device``."""
        autocast = self._autocast.dtype(device)
        source = source_of(frame)
        node = autograd_node()
        if node is not None and not self._position.stack:
            return self._in_backward(node, source, autocast)
        context = function_context(frame)
        function = function_name(context) if context is not None else None
        root, fqn = self._module()
        place = OpPlace(root=root, fqn=fqn, source=source, function=function, autocast=autocast)
        if context is not None:
            self._origins.setdefault(sequence_number(context), place)  # a node too
        # an operator's node is made just before the operator itself is dispatched, and takes the number before the next
        self._origins.setdefault(next_sequence_number() - 1, place)
        return place

    def _module(self) -> tuple[int, str]:
        stack = self._position.stack
        found = self._names.find(stack[-1]) if stack else None
        return found if found is not None else (OUTSIDE, "")

    def _in_backward(self, node: torch.autograd.graph.Node, source: str | None, autocast: str | None) -> OpPlace:
        made = self._origins.get(sequence_number(node), _NOWHERE)
        context = node if isinstance(node, FunctionCtx) else None  # the context of a custom function is its node
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

    def _note(self, context: FunctionCtx, made: OpPlace) -> None:
        facts = context_facts(context)
        dtype = facts["ctx_dtype"]
        function = CustomFunction(
            function=function_name(context),
            decorated=facts["decorated"],
            fwd_used_autocast=facts["fwd_used_autocast"],
            ctx_dtype=str(dtype).removeprefix("torch.") if dtype is not None else None,
            forward_autocast=made.autocast,
            forward_source=made.source,
        )
        observe(self._writer, self._position, function, fqn=made.fqn)
