"""The op trace in words."""

from collections.abc import Iterable

from dtypedoctor.dtypes import short_name
from dtypedoctor.report.numbers import number
from dtypedoctor.report.picture import OpLine
from dtypedoctor.report.text import one_line
from dtypedoctor.trace.events import Op, Replay, TensorNote
from dtypedoctor.trace.reader import Trace

__all__ = ["MOST_OPS", "op_lines"]

MOST_OPS = 800
"""Ops of one picture; beyond, those nearest to the first that goes wrong are kept."""


def op_lines(trace: Trace) -> tuple[OpLine, ...]:
    """The traced ops in execution order."""
    ops = trace.all(Op)
    replays: dict[int, list[Replay]] = {}
    for replay in trace.all(Replay):
        replays.setdefault(replay.of, []).append(replay)
    wrong = next((i for i, op in enumerate(ops) if _born(op) or op.error), len(ops))
    start = max(0, min(wrong - MOST_OPS // 2, len(ops) - MOST_OPS))
    return tuple(_line(op, replays.get(op.n, ())) for op in ops[start : start + MOST_OPS])


def _line(op: Op, replays: Iterable[Replay]) -> OpLine:
    return OpLine(
        fqn=one_line(op.fqn),
        phase=op.phase,
        step=op.step,
        op=one_line(op.op, 80),
        inputs=tuple(map(_tensor, op.inputs)),
        outputs=tuple(map(_tensor, op.outputs)),
        source=one_line(op.source, 120) if op.source else None,
        notes=tuple(_notes(op, replays)),
        born=_born(op),
    )


def _born(op: Op) -> bool:
    if not op.inputs or any("inf" in scalar for scalar in op.scalars):
        return False  # a mask is filled with -inf on purpose
    return all(t.finite for t in op.inputs) and not all(t.finite for t in op.outputs)


def _notes(op: Op, replays: Iterable[Replay]) -> list[str]:
    notes = [f"raised: {one_line(op.error, 300)}"] if op.error else []
    if op.inplace or op.out_variant:
        notes.append("in place" if op.inplace else "out= variant")
    if op.function:
        notes.append(f"inside {one_line(op.function, 80)}")
    if op.autocast:
        notes.append(f"autocast {op.autocast}")
    for replay in replays:
        outcome = f"finite, absmax {number(replay.absmax)}" if replay.finite else "not finite either"
        notes.append(f"again in {replay.how}: {outcome}")
    return notes


def _tensor(note: TensorNote) -> str:
    shape = "×".join(map(str, note.shape)) or "scalar"
    parts = [short_name(note.dtype), shape]
    if note.absmax is not None:
        parts.append(f"absmax {number(note.absmax)}")
    inf = note.num_posinf + note.num_neginf
    parts += [f"{inf} inf"] if inf else []
    parts += [f"{note.num_nan} NaN"] if note.num_nan else []
    parts += [one_line(note.name, 100)] if note.name else []
    return " ".join(parts)
