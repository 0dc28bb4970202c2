"""One name for each module in a whole trace, where a model was put inside a larger one on the way."""

from dataclasses import replace
from typing import Any

from dtypedoctor.trace.events import Flow, Op, ParameterNote, Root, Site, TensorNote

__all__ = ["CanonicalNames"]

_OF_A_ROOT = (Flow, ParameterNote, Site, Op)
_OWNED = frozenset({"parameter", "buffer", "attribute"})
"""Origins of tensors that are named as something a module holds."""


class CanonicalNames:
    """Names from the largest root on.

    Args:
        roots: the trace's roots, in the order in which they were seen.
    """

    def __init__(self, roots: list[Root]) -> None:
        self._place: dict[int, tuple[int, str]] = {}
        for root in reversed(roots):  # a larger root comes after those that it absorbs
            number, prefix = self._place.get(root.root, (root.root, ""))
            for inner, name in root.absorbs.items():
                self._place[int(inner)] = (number, _join(prefix, name))

    def __bool__(self) -> bool:
        """Whether there is anything to rename."""
        return bool(self._place)

    def of(self, record: Any) -> Any:
        """The record with the names of the largest root; records that do not tell their root are returned as they are."""
        if not isinstance(record, _OF_A_ROOT) or record.root not in self._place:
            return record
        root, prefix = self._place[record.root]
        if isinstance(record, ParameterNote):
            return replace(record, root=root, name=_join(prefix, record.name))
        if isinstance(record, Op):
            return replace(
                record,
                root=root,
                fqn=_join(prefix, record.fqn),
                inputs=[_renamed(note, prefix) for note in record.inputs],
                outputs=[_renamed(note, prefix) for note in record.outputs],
            )
        if isinstance(record, Site) and record.kind in ("grad", "param", "loss"):
            return record  # named by the optimizer's parameters or by nobody, never from a root
        return replace(record, root=root, fqn=_join(prefix, record.fqn))


def _renamed(note: TensorNote, prefix: str) -> TensorNote:
    return replace(note, name=_join(prefix, note.name)) if note.name and note.origin in _OWNED else note


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name
