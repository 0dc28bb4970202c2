"""What the trace says about the models themselves: which dtype each is in, and what part its modules play.

Parts are told by structure, never by the names that people give: an adapter is a low-rank weight beside a frozen one, a
head is the last layer that holds a weight.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

from dtypedoctor.diagnosis.wording import shown_line
from dtypedoctor.dtypes import DTYPES
from dtypedoctor.trace.events import ParameterNote, Site
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.records.execution import ModelConfig

ADAPTER_LEVELS = 3
"""Levels above a low-rank weight at which the frozen weight that it adapts may sit (peft: two)."""


def owner_of(name: str) -> str:
    """Dotted name of the module that holds the parameter or buffer ``name``."""
    return name.rpartition(".")[0]


@dataclass(frozen=True)
class Census:
    """Parameters, buffers, classes and configurations of every outermost module of a trace."""

    trace: Trace

    @cached_property
    def _notes(self) -> dict[tuple[int, str], ParameterNote]:
        return {(note.root, note.name): note for note in self.trace.all(ParameterNote)}

    @cached_property
    def _classes(self) -> dict[tuple[int, str], str]:
        return {(site.root, site.fqn): site.cls for site in self.trace.all(Site) if site.cls}

    def note(self, root: int, name: str) -> ParameterNote | None:
        """The last note about a parameter or buffer."""
        return self._notes.get((root, name))

    def set_in(self, root: int, name: str, dtype: str) -> tuple[str | None, str]:
        """The program's own line that gave a parameter or buffer ``dtype`` (``train.py:31``), and what it calls; None where it is not known."""
        note = self.note(root, name)
        if note is None or note.dtype != dtype or note.set_at is None:
            return None, ""
        return shown_line(note.set_at), note.set_by

    def notes(self, root: int) -> Iterator[ParameterNote]:
        """All parameters and buffers of an outermost module, in the order in which its modules hold them."""
        return (note for (number, _), note in self._notes.items() if number == root)

    def class_of(self, root: int, fqn: str) -> str:
        """Class name of a module that was called, or an empty string."""
        return self._classes.get((root, fqn), "")

    def dtype_of(self, root: int) -> str | None:
        """The dtype that a model is in: that of most of its weights, packed ones and (where others are frozen) trainables aside.

        None for a model without floating-point parameters, or where two dtypes hold equally much.
        """
        dense = list(filter(_is_dense, self.notes(root)))
        frozen = [note for note in dense if not note.requires_grad]
        elements: Counter[str] = Counter()
        for note in frozen or dense:
            elements[note.dtype] += prod(note.shape)
        ranked = elements.most_common(2)
        if not ranked or (len(ranked) == 2 and ranked[0][1] == ranked[1][1]):
            return None
        return ranked[0][0]

    def weights_in_words(self, root: int) -> str:
        """How many elements of a model's weights are in which dtype: frozen, trainable, and packed ones by what they unpack to."""
        elements: Counter[str] = Counter()
        for note in self.notes(root):
            if note.quant is not None:
                elements[f"packed ({note.quant.get('dtype') or note.dtype} when unpacked)"] += prod(_shape(note))
            elif not note.buffer and note.dtype in DTYPES:
                elements[f"{'trainable' if note.requires_grad else 'frozen'} {note.dtype}"] += prod(note.shape)
        return ", ".join(f"{count:,} {words}" for words, count in elements.most_common())

    def is_head(self, root: int, fqn: str) -> bool:
        """Whether a module holds the model's last weight matrix."""
        owners = [owner_of(note.name) for note in self.notes(root) if not note.buffer and len(note.shape) >= 2]
        return bool(owners) and owners[-1] == fqn

    def is_adapter(self, root: int, name: str) -> bool:
        """Whether a parameter is a low-rank update: trainable beside a larger frozen matrix that shares a dimension with it."""
        note = self.note(root, name)
        if note is None or len(note.shape) != 2 or not note.requires_grad:
            return False
        container = owner_of(name)
        for _ in range(ADAPTER_LEVELS):
            container = owner_of(container)
            if container and any(_adapts(note, other) for other in self._inside(root, container)):
                return True
        return False

    def saved_copy(self, root: int, fqn: str) -> str | None:
        """The peft wrapper that keeps a fully trained copy of a module (``modules_to_save``) and holds ``fqn``, if any."""
        while fqn:
            fqn = owner_of(fqn)
            if self.class_of(root, fqn) == "ModulesToSaveWrapper":
                return fqn
        return None

    def keeper(self, root: int, fqn: str) -> str | None:
        """The entry of the model's keep-in-float32 list that names a module, if any."""
        for seen in self.trace.observed(ModelConfig):
            if seen.what.root != root:
                continue
            prefix = seen.fqn or ""
            if not prefix or fqn == prefix or fqn.startswith(f"{prefix}."):
                entry = next((e for e in seen.what.keep_in_fp32 if e in fqn), None)
                if entry is not None:
                    return entry
        return None

    def loaded_with(self, root: int, fqn: str, dtype: str) -> str:
        """The outermost module around ``fqn``, the model itself aside, whose floating-point parameters are all ``dtype``."""
        found, around = fqn, owner_of(fqn)
        while around and all(
            n.dtype == dtype for n in self._inside(root, around) if not n.buffer and n.dtype in DTYPES
        ):
            found, around = around, owner_of(around)
        return found

    def config_dtype(self, root: int) -> str | None:
        """The dtype that the model's configuration states, where it has one."""
        own = (seen.what for seen in self.trace.observed(ModelConfig) if not seen.fqn)
        return next((config.dtype for config in own if config.root == root and config.dtype), None)

    def packed_in(self, root: int, fqn: str) -> Iterator[ParameterNote]:
        """The packed weights that a module holds itself."""
        return (note for note in self.notes(root) if note.quant is not None and owner_of(note.name) == fqn)

    def _inside(self, root: int, container: str) -> Iterator[ParameterNote]:
        return (note for note in self.notes(root) if note.name.startswith(f"{container}."))


def _is_dense(note: ParameterNote) -> bool:
    """Whether a note is of a floating-point parameter that is not packed."""
    return not note.buffer and note.quant is None and note.dtype in DTYPES


def _shape(note: ParameterNote) -> list[int]:
    return list(note.quant.get("shape") or note.shape) if note.quant is not None else note.shape


def _adapts(adapter: ParameterNote, base: ParameterNote) -> bool:
    shape = _shape(base)
    if base.requires_grad or base.buffer or len(shape) != 2:
        return False
    return bool(set(adapter.shape) & set(shape)) and min(adapter.shape) < min(shape)
