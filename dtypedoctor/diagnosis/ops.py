"""The op trace as a graph: who produced a tensor, who used it, and where non-finite values in it come from.

inf counts before NaN: where a NaN was made of infinities (``inf - inf``, ``0 * inf``, a norm's ``rsqrt(inf) * inf``), the
operator that made the first inf is the origin. Infinities that a program asks for by name, as in a mask, are not.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import filterfalse
from math import isfinite

from dtypedoctor.dtypes import DTYPES
from dtypedoctor.trace.events import Op, Replay, TensorNote
from dtypedoctor.trace.model import Trace


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
    def _writers(self) -> dict[int, list[Op]]:
        """The ops that filled some memory, by the number of its storage, in execution order."""
        writers: dict[int, list[Op]] = {}
        for op in self.ops:
            given = {t.storage for t in op.inputs}
            for storage in {t.storage for t in op.outputs} - {0}:
                if storage not in given or writes(op):
                    writers.setdefault(storage, []).append(op)
        return writers

    def last_write(self, tensor: TensorNote, user: Op) -> Op | None:
        """The last op before ``user`` that wrote to the memory of ``tensor``, maybe through a view of it."""
        return next((op for op in reversed(self._writers.get(tensor.storage, [])) if op.n < user.n), None)

    @staticmethod
    def leaves_otherwise(maker: Op, tensor: TensorNote) -> bool:
        """Whether ``tensor``, which is not finite, holds something else where it is used than ``maker`` has left: an op that writes would have made
        another tensor of it.

        The sentinel's ops do not tell views of a tensor apart from it.
        """
        left = next((made for made in maker.outputs if made.id == tensor.id and not maker.sentinel), None)
        if left is None or left.absmax is None:
            return False
        return left.finite or (asked_for(maker) and _held(left) != _held(tensor))

    def assigns_number(self, op: Op) -> bool:
        """Whether ``op`` writes a number of the code that is not finite, as ``x[0] = inf`` does: torch makes a tensor of it first."""
        given = nonfinite(getting_through(op))
        return bool(given) and all(
            not t.shape and any(overload_free(user.op) == "lift_fresh" for user in self.consumers(t)) for t in given
        )

    @cached_property
    def _replays(self) -> dict[tuple[int, str], Replay]:
        return {(r.of, r.how): r for r in self.trace.all(Replay)}

    def producer(self, tensor: TensorNote) -> Op | None:
        """The op that made ``tensor``; None for one that came into the window from outside."""
        return self._producers.get(tensor.id)

    def makers(self, tensors: Iterable[TensorNote]) -> list[Op]:
        """The ops that made ``tensors``, those from outside left out."""
        return [maker for tensor in tensors if (maker := self.producer(tensor)) is not None]

    def producer_of(self, number: int) -> Op | None:
        """The op that made the tensor with this number."""
        return self._producers.get(number)

    def consumers(self, tensor: TensorNote) -> tuple[Op, ...]:
        """The ops that used ``tensor``, in execution order."""
        return self.users_of(tensor.id)

    def users_of(self, number: int) -> tuple[Op, ...]:
        """The ops that used the tensor with this number, in execution order."""
        return tuple(self._consumers.get(number, ()))

    def replay(self, op: Op, *ways: str) -> Replay | None:
        """The first replay of ``op`` in one of the given ways."""
        return next((r for way in ways if (r := self._replays.get((op.n, way))) is not None), None)

    def is_finite_in_float32(self, op: Op) -> bool:
        """Whether ``op`` has a finite result in a wider dtype, or could have one as far as is known, on its own operands or on those of the program in float32."""
        again, program = self.replay(op, "float32", "float64"), self.program(op)
        if again is None or again.note or again.finite:
            return True
        return program is not None and (program.finite or bool(program.note))

    def is_beyond_float32(self, op: Op) -> bool:
        """Whether ``op`` has a result that float64 holds and float32 does not, on its own operands or on those of the program in float64."""
        again = (self.replay(op, way) for way in ("float64", "float64-program"))
        return any((replay.absmax or 0.0) > DTYPES["float32"].max for replay in again if replay is not None)

    def program(self, op: Op) -> Replay | None:
        """``op`` on the operands that it would have, were everything before it that is known in float32; in float64, where that was needed."""
        in_float32, in_float64 = self.replay(op, "float32-program"), self.replay(op, "float64-program")
        if in_float32 is None or (in_float64 is not None and in_float64.finite):
            return in_float64
        return in_float32

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


CONSTANT = re.compile(r"^[-+]?(inf|nan)$", re.IGNORECASE)
UNINITIALIZED = ("aten.empty", "aten.new_empty", "aten.resize_", "aten.set_")
"""Ops whose result is memory that nothing has computed yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ancestry:
    """Where the non-finite values behind an op came from, each list earliest first.

    Attributes:
        computed: ops that made inf or NaN of finite operands.
        asked: ops that made them because they were told to (a fill value, an assigned number), or left memory as it was.
        nan_makers: ops that made NaN of operands without NaN; those among ``computed``, and those fed with infinities.
        given: operands that no op in the window has made, with the op that used them first.
        unseen: operands that held something else when an op had made them than when another used them, though no op had written to them: a kernel of
            Triton, NumPy or an extension module had. With the op that used them first.
    """

    computed: tuple[Op, ...]
    asked: tuple[Op, ...]
    nan_makers: tuple[Op, ...]
    given: tuple[tuple[Op, TensorNote], ...]
    unseen: tuple[tuple[Op, TensorNote], ...] = ()


def _held(tensor: TensorNote) -> tuple[float | None, int, int, int]:
    return tensor.absmax, tensor.num_nan, tensor.num_posinf, tensor.num_neginf


def has_nan(tensor: TensorNote) -> bool:
    """Whether any element is NaN."""
    return tensor.num_nan > 0


def has_inf(tensor: TensorNote) -> bool:
    """Whether any element is infinite."""
    return bool(tensor.num_posinf or tensor.num_neginf)


def all_finite(tensors: Iterable[TensorNote]) -> bool:
    """Whether every element of every tensor is finite."""
    return all(tensor.finite for tensor in tensors)


def getting_through(op: Op) -> list[TensorNote]:
    """The operands of an op without those whose inf and NaN do not get into its result."""
    return [tensor for tensor in op.inputs if not tensor.selected_away]


def nonfinite(tensors: Iterable[TensorNote]) -> list[TensorNote]:
    """The tensors with an element that is not finite."""
    return [tensor for tensor in tensors if not tensor.finite]


def only_negative_inf(tensors: Iterable[TensorNote]) -> bool:
    """Whether the only elements that are not finite are ``-inf``, as in a mask."""
    return not any(has_nan(t) or t.num_posinf for t in tensors)


def last_bad_before(graph: OpGraph, n: int, wanted: Callable[[Op], bool]) -> Op | None:
    """The last op before event ``n`` with a result that is not finite, or that raised over an operand that is not."""
    for op in reversed(graph.ops):
        if op.n < n and wanted(op):
            shown = op.inputs if op.error is not None else op.outputs
            if any(not t.finite for t in shown):
                return op
    return None


def bad_ends(graph: OpGraph, n: int, wanted: Callable[[Op], bool]) -> list[Op]:
    """The wanted ops before event ``n`` with bad results that no other of them uses: gradients, updated parameters.

    A program that only looks at its gradients, to print them or to clip them, does not count as a user.
    """

    counting = [op for op in graph.ops if op.n < n and wanted(op)]
    # The last of them that uses a tensor; one that is transposed twice is the first one again
    last_use: dict[int, int] = {}
    for op in counting:
        last_use |= {tensor.id: op.n for tensor in op.inputs}
    return [
        op
        for op in counting
        if (bad := nonfinite(op.outputs)) and all(last_use.get(tensor.id, -1) <= op.n for tensor in bad)
    ]


_Used = list[tuple[Op, TensorNote]]
"""Operands, each with the op that used it first."""


def ancestry(graph: OpGraph, last: Op) -> Ancestry:
    """The origins of what is not finite in the results of ``last`` (in its operands, if it raised)."""
    nan_ops, *of_nan = _upstream(graph, [last], has_nan)
    makers = list(filter(makes_nan, nan_ops))
    shows_nan = any(map(has_nan, [*last.outputs, *last.inputs]))
    inf_ops, *of_inf = _upstream(graph, makers if shows_nan else [last], has_inf)
    given, unseen = map(_first_used, of_nan, of_inf)
    found = [*makers, *nan_ops, *inf_ops] if shows_nan else [*makers, *inf_ops]
    ends = {op.n: op for op in found if op.error is None}.values()
    origins = [op for op in ends if all_finite(getting_through(op))]
    assigned = [op for op in ends if overload_free(op.op) != "lift_fresh" and graph.assigns_number(op)]
    return Ancestry(
        computed=_in_order(filterfalse(asked_for, origins)),
        asked=_in_order([*filter(asked_for, origins), *assigned]),
        nan_makers=_in_order(filterfalse(asked_for, makers)),
        given=given,
        unseen=unseen,
    )


def _first_used(nan: _Used, inf: _Used) -> tuple[tuple[Op, TensorNote], ...]:
    return tuple(sorted([*nan, *inf], key=lambda pair: pair[0].n))


def makes_nan(op: Op) -> bool:
    """Whether an op has NaN in its results and none in its operands."""
    return any(map(has_nan, op.outputs)) and not any(map(has_nan, getting_through(op)))


def _upstream(graph: OpGraph, starts: Iterable[Op], bad: Callable[[TensorNote], bool]) -> tuple[list[Op], _Used, _Used]:
    """The ops from which bad operands reach ``starts``, these included; the bad operands that no op has made; and those that none has made bad."""
    seen: dict[int, Op] = {}
    given: dict[int, tuple[Op, TensorNote]] = {}
    unseen: dict[int, tuple[Op, TensorNote]] = {}
    waiting = list(starts)
    while waiting:
        op = waiting.pop()
        if op.n in seen:
            continue
        seen[op.n] = op
        for tensor in filter(bad, getting_through(op)):
            maker = graph.producer(tensor)
            if maker is None or maker.n >= op.n:
                wrote = graph.last_write(tensor, op)
                maker = wrote if wrote is not None and any(map(bad, wrote.outputs)) else None
            ends = given
            if maker is not None and graph.leaves_otherwise(maker, tensor):
                maker, ends = None, unseen
            if maker is not None:
                waiting.append(maker)
            elif tensor.id not in ends or op.n < ends[tensor.id][0].n:
                ends[tensor.id] = (op, tensor)
    return list(seen.values()), list(given.values()), list(unseen.values())


ARITHMETIC = frozenset({"add", "sub", "rsub", "mul", "div", "true_divide", "pow"})
"""Ops that compute with a number of the code: ``0 * -inf`` is NaN, which nobody has asked for."""


def is_uninitialized(op: Op) -> bool:
    """Whether its result is memory as it was."""
    return op.op.startswith(UNINITIALIZED)


def asked_for(op: Op) -> bool:
    """Whether what is not finite in its results was asked for by name, as in a mask, or is memory as it was."""
    if is_uninitialized(op):
        return True
    return any(CONSTANT.match(text) for text in op.scalars) and not (
        overload_free(op.op) in ARITHMETIC and any(map(has_nan, op.outputs))
    )


def writes(op: Op) -> bool:
    """Whether an op writes to memory that existed before."""
    return op.inplace or op.out_variant or overload_free(op.op) == "copy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mask:
    """How rows of ``-inf`` came before a softmax.

    Attributes:
        fill: the op that filled a tensor with ``value``.
        value: -inf, or a finite number that became -inf.
        infinite: the op whose result is -inf: ``fill`` itself, or a cast.
        narrowest: of the dtypes that the -inf went through, the one with the smallest range.
    """

    fill: Op
    value: float
    infinite: Op
    narrowest: str


def mask_before(graph: OpGraph, softmax: Op) -> Mask | None:
    """The mask that filled what a softmax got, where it was made with -inf or with a number that a cast made -inf; else None."""
    before = ancestry(graph, softmax)
    infinite = next(iter([*before.asked, *before.computed]), None)
    fill = infinite
    while fill is not None and fill.op.startswith(_KEEPING):  # it only converts or views
        fill = next(iter(graph.makers(fill.inputs[:1])), None)
    value = min(numbers(fill), default=0.0) if fill is not None else 0.0
    if fill is None or infinite is None or value > -MASKING or (infinite is fill and isfinite(value)):
        return None
    return Mask(fill=fill, value=value, infinite=infinite, narrowest=_narrowest(graph, softmax, infinite))


def _narrowest(graph: OpGraph, softmax: Op, infinite: Op) -> str:
    """Of the dtypes that -inf went through to a softmax, the one with the smallest range."""
    through, *_ = _upstream(graph, [softmax], has_inf)
    dtypes = {t.dtype for op in through for t in (*op.inputs, *op.outputs) if t.num_neginf}
    return next((dtype for dtype in ("float16", "bfloat16") if dtype in dtypes), infinite.outputs[0].dtype)


MASKING = 1e4
"""Magnitude from which on a negative number in a fill is taken for a mask's."""
_KEEPING = (
    "aten._to_copy.", "aten.to.", "aten.view", "aten._unsafe_view", "aten.unsqueeze.", "aten.expand.", "aten.slice.", "aten.transpose.",
    "aten.clone.", "aten.squeeze.", "aten.alias.", "aten.detach.", "aten.select.", "aten.permute.",
)  # fmt: skip
"""Ops that only convert, copy or view."""


def numbers(op: Op) -> Iterator[float]:
    """The numbers among the scalar arguments of an op."""
    for text in op.scalars:
        with suppress(ValueError):
            yield float(text)


def _in_order(ops: Iterable[Op]) -> tuple[Op, ...]:
    return tuple(sorted(ops, key=lambda op: op.n))
