"""Frequency tables of rotary embeddings that have been rounded to half precision.

A table is recognised by its values and not by its name: positive, falling, each a constant factor of the one before. One that
was computed in float32 never equals its own rounding to bfloat16 or float16 (unless all its values are powers of two); one
that went through ``model.to(bfloat16)`` does, also after ``float()``.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from dtypedoctor._torch_private import buffers_of
from dtypedoctor.instrument.naming import Names, dtype_name
from dtypedoctor.instrument.position import Position
from dtypedoctor.instrument.silent.look import Seen
from dtypedoctor.instrument.silent.notes import Notes
from dtypedoctor.instrument.statistics import measurable
from dtypedoctor.trace.records.silent import RotaryTable

SHORTEST, LONGEST = 4, 1024
"""Lengths of tables; half the size of an attention head."""
TOLERANCE = 0.012
"""Relative deviation of a factor between neighbours from the usual one; bfloat16's rounding makes up to 0.008."""
USUAL = 0.6
"""Share of neighbours that have the usual factor; tables for long contexts bend in between."""
EXACT = 1e-6
POSITION = 4096
"""Where the angle error is given, if the model has so many positions."""


_Held = tuple[ref[nn.Module], str, torch.dtype]
"""The owner of a buffer, its name there, and the dtype that it had when it was looked at."""


@dataclass(slots=True)
class _Table:
    name: str
    buffer: Tensor
    told: RotaryTable
    memory: int


@dataclass(slots=True)
class RotaryTables:
    """Writes a :class:`RotaryTable` for each rounded table that is read."""

    notes: Notes
    names: Names
    position: Position
    _known: WeakKeyDictionary[nn.Module, list[_Held]] = field(default_factory=WeakKeyDictionary)
    _waiting: list[_Table] = field(default_factory=list)
    _read: set[int] = field(default_factory=set)
    _looked: bool = False

    def before_call(self, module: nn.Module) -> None:
        """An outermost call begins; at the first one of a module, and when it was cast since, its buffers are looked through."""
        held = self._known.get(module)
        if self.position.backward_depth or (held is not None and not any(map(_was_cast, held))):
            return
        with self.position.mute(), torch.no_grad():
            found = list(self._buffers(module))
            self._known[module] = [(ref(owner), name.rpartition(".")[2], b.dtype) for name, b, owner in found]
            last = _last_position(module)
            self._waiting = [t for t in (_rounded(name, b, last) for name, b, _ in found) if t is not None]

    def after_call(self) -> None:
        """The outermost call has ended: tells of tables that were read, or of all where nobody looked."""
        waiting, self._waiting = self._waiting, []
        for table in waiting:
            if self._looked and table.memory not in self._read:
                continue
            told = replace(table.told, read=True if self._looked else None)
            self.notes.once(told, table.name, table.name.rpartition(".")[0])
        self._read.clear()
        self._looked = False

    def saw(self, seen: Seen) -> None:
        """Notes which tables an operator reads."""
        self._looked = True
        if self._waiting:
            self._read.update(_memory(t) for t in seen.operands if measurable(t))

    def end(self) -> None:
        """What was read is judged in :meth:`after_call`."""

    def _buffers(self, module: nn.Module) -> Iterator[tuple[str, Tensor, nn.Module]]:
        """Name, buffer and owner of everything in ``module`` that may be a table by its shape."""
        inside = {id(child) for child in module.modules()}
        for _, name, tensor, owner, is_buffer in self.names.tensors():
            may_be = measurable(tensor) and tensor.dim() == 1 and SHORTEST <= len(tensor) <= LONGEST
            if is_buffer and may_be and id(owner) in inside:
                yield name, tensor, owner


def _was_cast(held: _Held) -> bool:
    owner, name, dtype = held
    module = owner()
    buffer = buffers_of(module).get(name) if module is not None else None
    return buffer is not None and buffer.dtype is not dtype


def _last_position(module: nn.Module) -> int:
    """The position that an angle is given at: none that the model does not have."""
    known = getattr(getattr(module, "config", None), "max_position_embeddings", None)
    return known if isinstance(known, int) and 0 < known < POSITION else POSITION


def _rounded(name: str, buffer: Tensor, position: int) -> _Table | None:
    rounded_to = next(
        (d for d in (torch.bfloat16, torch.float16) if torch.equal(buffer, buffer.to(d).to(buffer.dtype))), None
    )
    values = buffer.double().tolist() if rounded_to is not None else []
    if rounded_to is None or not _is_geometric(values):
        return None
    deviation, error = _off(values)
    if deviation < EXACT:
        return None
    told = RotaryTable(
        name=name,
        dtype=dtype_name(buffer),
        rounded_to=str(rounded_to).removeprefix("torch."),
        length=len(values),
        first=values[0],
        last=values[-1],
        deviation=deviation,
        angle_error=error * position,
        position=position,
    )
    return _Table(name, buffer, told, _memory(buffer))


def _is_geometric(values: list[float]) -> bool:
    if not all(math.isfinite(v) and 0.0 < v <= 1.0 for v in values):
        return False
    factors = [after / before for before, after in pairwise(values)]
    usual = median(factors)
    if max(factors) >= 1.0 or usual < 0.05:
        return False
    return sum(abs(f / usual - 1.0) <= TOLERANCE for f in factors) >= USUAL * len(factors)


def _off(values: list[float]) -> tuple[float, float]:
    """Largest relative and largest absolute deviation from the geometric progression between the first and last value.

    The progression is ``v[i] = v[0] * r**i``. For a table that bends, a deviation below bfloat16's spacing is assumed: what
    half of the last place amounts to.
    """
    count = len(values) - 1
    factor = (values[-1] / values[0]) ** (1.0 / count)
    exact = [values[0] * factor**i for i in range(count + 1)]
    relative = max(abs(v / e - 1.0) for v, e in zip(values, exact, strict=True))
    if relative > TOLERANCE:
        return 2.0**-9, max(values) * 2.0**-9
    return relative, max(abs(v - e) for v, e in zip(values, exact, strict=True))


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
