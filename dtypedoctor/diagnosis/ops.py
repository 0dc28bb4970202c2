"""The op trace as a graph: who produced a tensor, and where a bad value was born."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from dtypedoctor.trace.events import Op, Replay, Sample, TensorNote
from dtypedoctor.trace.reader import Trace


@dataclass(frozen=True)
class OpGraph:
    """The ops of a trace's window, in execution order, with the replays that were made of them."""

    trace: Trace

    @cached_property
    def ops(self) -> tuple[Op, ...]:
        """Every recorded op, in execution order."""
        return tuple(sorted(self.trace.all(Op), key=lambda op: op.n))

    @cached_property
    def _producers(self) -> dict[int, Op]:
        producers: dict[int, Op] = {}
        for op in self.ops:
            given = {t.id for t in op.inputs}
            for tensor in op.outputs:
                if tensor.id not in given:
                    producers.setdefault(tensor.id, op)
        return producers

    @cached_property
    def _replays(self) -> dict[tuple[int, str], Replay]:
        return {(r.of, r.how): r for r in self.trace.all(Replay)}

    def producer(self, tensor: TensorNote) -> Op | None:
        """The op that made ``tensor``; None for one that came into the window from outside."""
        return self._producers.get(tensor.id)

    def replay(self, op: Op, *ways: str) -> Replay | None:
        """The first replay of ``op`` in one of the given ways."""
        return next((r for way in ways if (r := self._replays.get((op.n, way))) is not None), None)

    def failed(self) -> Op | None:
        """The op that raised, if the window ended with one."""
        return next((op for op in reversed(self.ops) if op.error is not None), None)

    def births_before(self, sample: Sample) -> tuple[Op, ...]:
        """Where the non-finite values of a sample were born: the ops upstream of it that got finite operands only.

        The sample's tensor is the last non-finite result before it; from there the non-finite operands are followed
        back. Values that never reach the sample (a deliberate ``-inf`` behind a ``where``) are not among them.
        """
        last = next((op for op in reversed(self.ops) if op.n < sample.n and not _all_finite(op.outputs)), None)
        return tuple(self.births(last)) if last is not None else ()

    def births(self, last: Op) -> Iterator[Op]:
        """The ops upstream of ``last`` (itself included) with non-finite results of finite operands, earliest first."""
        seen: set[int] = set()
        found: list[Op] = []
        waiting = [last]
        while waiting:
            op = waiting.pop()
            if op.n in seen:
                continue
            seen.add(op.n)
            bad = [t for t in op.inputs if not t.finite]
            if not bad:
                found.append(op)
            waiting += [p for p in map(self.producer, bad) if p is not None]
        yield from sorted(found, key=lambda op: op.n)


def _all_finite(tensors: Iterable[TensorNote]) -> bool:
    return all(t.finite for t in tensors)
