"""The op trace as a graph: who produced a tensor, and who used it."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property

from dtypedoctor.trace.events import Op, Replay, TensorNote
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
    def _consumers(self) -> dict[int, list[Op]]:
        consumers: dict[int, list[Op]] = {}
        for op in self.ops:
            for number in {t.id for t in op.inputs}:
                consumers.setdefault(number, []).append(op)
        return consumers

    @cached_property
    def _replays(self) -> dict[tuple[int, str], Replay]:
        return {(r.of, r.how): r for r in self.trace.all(Replay)}

    def producer(self, tensor: TensorNote) -> Op | None:
        """The op that made ``tensor``; None for one that came into the window from outside."""
        return self._producers.get(tensor.id)

    def producer_of(self, number: int) -> Op | None:
        """The op that made the tensor with this number."""
        return self._producers.get(number)

    def consumers(self, tensor: TensorNote) -> tuple[Op, ...]:
        """The ops that used ``tensor``, in execution order; one that made it by writing to an operand is not among them."""
        maker = self.producer(tensor)
        return tuple(op for op in self._consumers.get(tensor.id, ()) if op is not maker)

    def replay(self, op: Op, *ways: str) -> Replay | None:
        """The first replay of ``op`` in one of the given ways."""
        return next((r for way in ways if (r := self._replays.get((op.n, way))) is not None), None)

    def failed(self) -> Op | None:
        """The op that raised, if the window ended with one."""
        return next((op for op in reversed(self.ops) if op.error is not None), None)

    def downstream(self, op: Op, depth: int, ends: Collection[str] = ()) -> Iterator[Op]:
        """The ops that the results of ``op`` flow into over at most ``depth`` further ops of the same call.

        Args:
            op: where to begin; it is not among them.
            depth: length of the longest path.
            ends: names (without overload) of ops that are not followed beyond.
        """
        seen = {op.n}
        level = [op]
        for _ in range(depth):
            following: list[Op] = []
            for one in level:
                if one is not op and overload_free(one.op) in ends:
                    continue
                for user in (user for tensor in one.outputs for user in self._consumers.get(tensor.id, ())):
                    if user.n > op.n and user.call == op.call and user.n not in seen:
                        seen.add(user.n)
                        following.append(user)
            yield from following
            level = following


def graph_of(trace: Trace) -> OpGraph:
    """The op trace of ``trace`` as a graph; one for all who ask."""
    return trace.once(OpGraph)


def overload_free(name: str) -> str:
    """The name of an op without namespace and overload: ``mul`` for ``aten.mul.Tensor``, ``add`` for ``aten.add_.Scalar``."""
    parts = name.split(".")
    return (parts[1] if len(parts) > 1 else name).rstrip("_")
