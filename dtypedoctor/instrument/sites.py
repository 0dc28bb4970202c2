"""Describes each measuring place once, so that a sample is only numbers."""

from typing import Any

from torch import Tensor

from dtypedoctor.instrument.naming import dtype_name
from dtypedoctor.trace.events import Site
from dtypedoctor.trace.writer import TraceWriter

MAX_SHAPES = 4
"""Shapes that a place is described with before its shape is given as varying; keeps the trace of a long run bounded."""


class Sites:
    """Numbers places (module, phase, kind, path in a structure, dtype, shape, autocast)."""

    def __init__(self, writer: TraceWriter) -> None:
        self._writer = writer
        self._ids: dict[tuple[Any, ...], int] = {}
        self._shapes: dict[tuple[Any, ...], int] = {}
        self._next = 1

    def id_of(self, root: int, fqn: str, cls: str, phase: str, kind: str, index: str, tensor: Tensor,
              autocast: str | None) -> int:  # fmt: skip
        """The number of the place that ``tensor`` is measured at, written to the trace when it is new."""
        place = (root, fqn, phase, kind, index, tensor.dtype, autocast)
        key: tuple[Any, ...] = (*place, tensor.shape)
        found = self._ids.get(key)
        if found is not None:
            return found
        shapes = self._shapes.get(place, 0)
        if shapes >= MAX_SHAPES:
            found = self._ids.get((*place, None))
            shape = [-1] * tensor.dim()
            key = (*place, None)
        else:
            shape = list(tensor.shape)
            self._shapes[place] = shapes + 1
        if found is None:
            found = self._ids[key] = self._next
            self._next += 1
            self._writer.write(
                Site(id=found, root=root, fqn=fqn, cls=cls, phase=phase, kind=kind, index=index,
                     dtype=dtype_name(tensor), shape=shape, device=tensor.device.type, autocast=autocast)
            )  # fmt: skip
        return found

    def entry(self, root: int, fqn: str, cls: str, phase: str) -> int:
        """The number that stands for entering a module, for the cursor."""
        key = (root, fqn, phase, "entered")
        found = self._ids.get(key)
        if found is None:
            found = self._ids[key] = self._next
            self._next += 1
            self._writer.write(
                Site(id=found, root=root, fqn=fqn, cls=cls, phase=phase, kind="entered", index="", dtype="", shape=[])
            )
        return found
