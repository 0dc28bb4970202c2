"""Counterfactuals on one op, made while its operands are at hand: in a wider dtype, in equal dtypes, attention in one fused kernel."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from dtypedoctor._torch_private import (
    OpOverload,
    schema_of,
    tree_flatten,
    without_autocast,
)
from dtypedoctor.instrument.naming import dtype_name, short_name
from dtypedoctor.instrument.operators import (
    Arguments,
    bytes_of,
    fits,
    flat,
    for_wider,
    in_wider,
    is_unfinished,
    tensors_of,
    tree_map,
    written,
)
from dtypedoctor.instrument.readable import values_of
from dtypedoctor.instrument.session import Session
from dtypedoctor.instrument.statistics import (
    HALF,
    extent_of,
    holds_whole_numbers,
    is_spread,
    measurable,
    measure,
    real_of,
)
from dtypedoctor.interruptions import contained
from dtypedoctor.redaction.messages import elided
from dtypedoctor.trace.events import Replay, TensorNote
from dtypedoctor.trace.records.execution import AttentionReplayed
from dtypedoctor.trace.writer import TraceWriter

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float8_e5m2, torch.float8_e4m3fn)
_COMPLEX = (torch.complex32, torch.complex64)
_WIDER = frozenset({"float32", "float64"})
"""Experiments of which the values count; of the others, whether they raise."""
_UNREAD = "its result cannot be measured"


def replay_wider(writer: TraceWriter, of: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Runs op ``of`` on the same operands in float32 (in float64 where they were float32) and records whether it is finite; and on other numbers.

    Complex operands become complex ones with parts of that dtype. An op that cannot be replayed, or whose result cannot be measured, is recorded
    with the reason in ``note`` and ``finite`` False.
    """
    leaves = [t for t in tree_flatten((args, kwargs))[0] if _is_read(t)]
    wide = torch.float64 if all(t.dtype.to_real() is torch.float32 for t in leaves) else torch.float32
    copies: dict[int, Tensor] = {}  # one for an operand that is given twice

    def widen(value: Any) -> Any:
        if _is_read(value):
            if id(value) not in copies:
                copies[id(value)] = value.to(wide.to_complex() if value.is_complex() else wide)
            return copies[id(value)]
        return _wider_dtype(value, wide) if isinstance(value, torch.dtype) else value

    widened = for_wider(func, tree_map(widen, (args, kwargs)))
    run_again(writer, of, short_name(wide), func, widened)
    if not any(t.is_complex() for t in leaves):
        run_again(writer, of, "other-values", func, tree_map(_with_other_values, widened))


def _with_other_values(value: Any) -> Any:
    """Different numbers between 0 and 1 in the place of those of a tensor, where every function is defined."""
    if not _is_read(value):
        return value
    return torch.linspace(0.25, 0.75, value.numel(), dtype=value.dtype, device=value.device).view(value.shape)


def mark_selected_away(
    func: Any, arguments: Arguments, notes: Sequence[TensorNote], results: Sequence[Tensor]
) -> list[TensorNote]:
    """Marks the operands of which no inf or NaN gets into the result of an operator, as of the side of a ``where`` that is not taken.

    Such an operand makes no difference in two experiments: with finite numbers in its place, the same elements of the result are not finite; and with
    finite numbers in the place of all others, the result is finite. They are made where several operands, or one and a number of the code, are not finite.

    Args:
        func: the operator.
        arguments: what it was given, with copies of what it has written to.
        notes: about the tensors among them, in order.
        results: what it gave.
    """
    bad = [note for note in notes if not note.finite]
    literal = any(isinstance(value, float) and not isfinite(value) for value in flat(arguments))
    operands = tensors_of(arguments)
    if (
        not bad
        or len(bad) + literal < 2
        or not _may_run_again(func)
        or not fits(2 * bytes_of(operands), operands[0].device)
    ):
        return list(notes)

    def bad_places(is_kept: Callable[[object], bool]) -> list[Tensor]:
        """Where the result is not finite, if only those operands that are kept may not be finite."""

        def replaced(value: Any) -> Any:
            if isinstance(value, float):
                return value if isfinite(value) or is_kept(value) else 1.0
            if not _is_read(value):
                return value
            return value.clone() if is_kept(value) else value.nan_to_num(1.0, 1.0, 1.0)

        again: Arguments = tree_map(replaced, arguments)
        result = func(*again[0], **again[1])
        return [~t.isfinite() for t in tensors_of(result) or written(func, again) if _is_read(t)]

    def makes_no_difference(operand: Tensor) -> bool:
        alone, others = bad_places(lambda value: value is operand), bad_places(lambda value: value is not operand)
        return not any(map(torch.any, alone)) and all(map(torch.equal, others, as_it_was))

    marked = list(notes)
    with contained(), torch.no_grad(), without_autocast():  # what cannot be run again stays as it is
        as_it_was = [~t.isfinite() for t in results if _is_read(t)]
        for place, operand in enumerate(operands):
            if not notes[place].finite and makes_no_difference(operand):
                marked[place] = replace(notes[place], selected_away=True)
    return marked


def _may_run_again(func: Any) -> bool:
    return (
        isinstance(func, OpOverload) and func.namespace == "aten" and torch.Tag.nondeterministic_seeded not in func.tags
    )


def _is_read(value: object) -> bool:
    """Whether ``value`` is a tensor, real or complex, that can be measured."""
    return isinstance(value, Tensor) and measurable(real_of(value))


def _wider_dtype(dtype: torch.dtype, wide: torch.dtype) -> torch.dtype:
    """The dtype that an operator is asked for where it is asked for ``dtype`` and everything is to be in ``wide``."""
    if dtype in _COMPLEX:
        return wide.to_complex()
    return wide if dtype in _FLOATS else dtype


def run_again(
    writer: TraceWriter, of: int, how: str, func: Any, arguments: tuple[tuple[Any, ...], dict[str, Any]]
) -> None:
    """Runs ``func`` outside of autograd and autocast and records how it went as a replay of op ``of``."""
    args, kwargs = arguments
    with contained() as trial, torch.no_grad(), without_autocast():
        result = func(*args, **kwargs)
    if trial.error is not None:  # an experiment: whatever goes wrong is its result
        writer.write(
            Replay(n=writer.next_n(), of=of, how=how, finite=False, absmax=None, note=elided(str(trial.error))[:200])
        )
        return
    results = [t for t in tree_flatten(result)[0] if isinstance(t, Tensor)]
    if not results and isinstance(
        func, OpOverload
    ):  # as the optimizers' operators on lists of tensors, which write to them
        results = written(func, arguments)
    note_replay(writer, of, how, results)


def note_replay(writer: TraceWriter, of: int, how: str, results: list[Tensor]) -> None:
    """Records what op ``of`` gives when it is run in the way ``how``; it is finite only where that was measured, or there is nothing to measure."""
    floats = [t for t in results if t.is_floating_point() or t.is_complex()]
    extents = list(filter(None, map(extent_of, floats)))
    unread = len(extents) < len(floats) and how in _WIDER
    writer.write(
        Replay(
            n=writer.next_n(),
            of=of,
            how=how,
            finite=not unread and all(extent.finite for extent in extents),
            absmax=max((extent.absmax for extent in extents), default=None),
            dtype=dtype_name(floats[0]) if extents else None,
            note=_UNREAD if unread else "",
        )
    )


def replay_refused(writer: TraceWriter, of: int, func: Any, arguments: Arguments) -> None:
    """Runs an op that refused its operands again with other dtypes, unless it needs the other ranks.

    Where all are in one dtype narrower than float32, ``all-as-float32`` shows whether the op lacks that dtype; ``as-real`` shows the same of complex ones, ``whole-as-int64`` of whole numbers of fewer bits. Whole numbers are cast where there is nothing else, and
    where all others are in one dtype, since most of them are indices; of other equal dtypes there is nothing to try.
    Where they differ:

    * ``equal-dtypes``: all in float32 (in float64 where one is), which shows that the dtypes alone were the reason.
    * ``all-as-DTYPE`` for each dtype among them: what would have happened had the region, the weights or the input agreed.
    """
    leaves = [t for t in tree_flatten(arguments)[0] if isinstance(t, Tensor)]
    dtypes = _dtypes(leaves)
    is_operator = isinstance(func, OpOverload)  # a function may do more than compute
    if is_operator and is_unfinished(func):
        return
    is_known = is_operator or is_of_torch(func)
    if any(leaf.is_complex() for leaf in leaves):
        run_again(writer, of, "as-real", func, tree_map(_real_copy, arguments))
    elif not dtypes and is_known and any(map(holds_whole_numbers, leaves)):
        run_again(writer, of, "all-as-float32", func, tree_map(_whole_as_float32, arguments))
    if is_known and any(map(_is_short, leaves)):
        run_again(writer, of, "whole-as-int64", func, tree_map(lambda v: v.long() if _is_short(v) else v, arguments))
    if len(dtypes) == 1 and is_operator and any(map(holds_whole_numbers, leaves)):
        _replay_whole(writer, of, func, arguments, dtypes[0])
    if len(dtypes) == 1 and is_narrow(dtypes[0]) and is_known:
        run_again(writer, of, "all-as-float32", func, _cast(arguments, torch.float32))
    if len(dtypes) < 2:
        return
    wide = torch.float64 if torch.float64 in dtypes else torch.float32
    run_again(writer, of, "equal-dtypes", func, _cast(arguments, wide))
    for dtype in dtypes:
        run_again(writer, of, f"all-as-{short_name(dtype)}", func, _cast(arguments, dtype))


def is_narrow(dtype: torch.dtype) -> bool:
    """Whether float32 holds every number of a floating-point dtype, and others between them."""
    return dtype.is_floating_point and dtype.itemsize < torch.float32.itemsize


def is_of_torch(func: Any) -> bool:
    """Whether a function is torch's own, which computes from its arguments, or a method of its tensors."""
    func = getattr(func, "__wrapped__", func)  # one of those by which values leave torch
    return str(getattr(func, "__module__", None) or getattr(func, "__objclass__", func).__module__).startswith("torch")


def _is_short(value: Any) -> bool:
    return holds_whole_numbers(value) and value.dtype not in (torch.int64, torch.bool)


def _whole_as_float32(value: Any) -> Any:
    return value.float() if holds_whole_numbers(value) else value


def _real_copy(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.view_as_real(value.detach().clone()) if value.is_complex() else value.detach().clone()


def _replay_whole(writer: TraceWriter, of: int, func: Any, arguments: Arguments, dtype: torch.dtype) -> None:
    """Runs an op that refused whole numbers beside floating-point ones, all in one dtype, again with all operands in that dtype."""

    def cast(value: Any) -> Any:
        return value.detach().to(dtype, copy=True) if holds_whole_numbers(value) or measurable(value) else value

    for how in ("equal-dtypes", f"all-as-{short_name(dtype)}"):
        run_again(writer, of, how, func, tree_map(cast, arguments))


def _dtypes(tensors: Iterable[Any]) -> list[torch.dtype]:
    """The dtypes of those that can be cast, each once and in order."""
    return list(dict.fromkeys(t.dtype for t in tensors if _can_be_cast(t)))


def replay_promotion(writer: TraceWriter, of: int, func: Any, arguments: Arguments, outputs: list[Tensor]) -> bool:
    """Where an op of mixed dtypes returned the widest of them, runs it again with all operands in the narrowest.

    The dtype of that result shows that the wider operand alone made it wide. Recorded as ``narrowest-dtype``.

    Returns:
        Whether there was anything to try.
    """
    if schema_of(func).is_mutable or torch.Tag.nondeterministic_seeded in func.tags:
        return False
    dtypes = _dtypes(tree_flatten(arguments)[0])
    if len({d.itemsize for d in dtypes}) < 2:
        return False
    narrow = min(dtypes, key=lambda d: d.itemsize)
    wider = {dtype for dtype in dtypes if dtype.itemsize > narrow.itemsize}
    if wider.isdisjoint(_dtypes(outputs)):
        return False
    run_again(writer, of, "narrowest-dtype", func, _cast(arguments, narrow))
    return True


def _cast(arguments: Arguments, dtype: torch.dtype) -> Arguments:
    """The arguments with every floating tensor copied, so that an op that writes to one changes nothing of the user's."""
    return tree_map(lambda v: v.detach().to(dtype, copy=True) if _can_be_cast(v) else v, arguments)


def _can_be_cast(value: Any) -> bool:
    """Whether ``value`` is a floating-point tensor whose values are there, dense or sparse."""
    if type(value) is not Tensor or value.layout is torch.strided:
        return measurable(value)
    return value.is_floating_point() and values_of(value) is not None


MAX_BETWEEN = 24
"""Ops from the product of queries and keys to that with the values."""
MAX_REPLAYS = 4
"""Experiments of one window: each needs a few matrices of the size of the scores."""
MASKING = 1e4
"""Magnitude from which on what is added to a score is a mask and no bias."""
FAR = 1024.0
"""A score at which a soft cap would have bent the line."""
AFFINE = 1e-2
"""Relative difference of the slopes up to 1 and up to :data:`FAR`, and between entries, that is rounding."""

_PRODUCTS = frozenset({"aten.bmm.default", "aten.mm.default"})
_SOFTMAX = frozenset({"aten._softmax.default", "aten._safe_softmax.default"})


@dataclass(frozen=True, slots=True)
class Ran:
    """An operator that has run: its number in the trace, its arguments as they were, its results, and the notes about both."""

    n: int
    func: Any
    arguments: Arguments
    inputs: Sequence[TensorNote]
    results: Sequence[Tensor]
    outputs: Sequence[TensorNote]


@dataclass(slots=True)
class _Scores:
    """A product of two activations and what was made of it so far; ``derived`` holds the numbers of all that."""

    product: Ran
    before_softmax: list[Ran] = field(default_factory=list)
    softmax: Ran | None = None
    derived: set[int] = field(init=False)
    length: int = 0

    def __post_init__(self) -> None:
        self.derived = {note.id for note in self.product.outputs}

    @property
    def held(self) -> int:
        """Bytes that are kept alive for it, whoever else does so."""
        return bytes_of(tensor for ran in (self.product, *self.before_softmax) for tensor in ran.results)


class AttentionReplay:
    """Writes an :class:`AttentionReplayed` where the softmax of attention scores made NaN.

    Two causes look alike from behind: scores that left their dtype's range, and rows in which the mask
    leaves nothing. The experiment tells them apart: the same queries, keys, values and mask in one fused kernel. What the program did to the
    scores between their product and the softmax (scale, masks, casts) is an affine function of the scores; it is found out by doing the same to
    scores of 0, 1 and 1024.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._open: deque[_Scores] = deque(maxlen=2)
        self._replays = 0

    def forget(self) -> None:
        """The window has closed."""
        self._open.clear()
        self._replays = 0

    def saw(self, ran: Ran) -> None:
        """Follows products of activations to a softmax, and from one that made NaN to the product with the values."""
        if not ran.results or self._replays >= MAX_REPLAYS or any(map(is_spread, ran.results)):
            return
        for scores in self._open.copy():
            if not scores.derived.isdisjoint(note.id for note in ran.inputs):
                self._advance(scores, ran)
        if _is_product_of_activations(ran):
            self._open.append(_Scores(ran))
        if not fits(sum(scores.held for scores in self._open), ran.results[0].device):
            self._open.clear()

    def _advance(self, scores: _Scores, ran: Ran) -> None:
        """An operator takes scores, or what was made of them."""
        if scores.softmax is not None and str(ran.func) in _PRODUCTS:
            self._open.remove(scores)
            found = None
            with contained(), torch.no_grad(), without_autocast():  # what cannot be computed again is not judged
                found = _experiment(scores, scores.softmax, tensors_of(ran.arguments)[-1])
            if found is None:
                return
            self._replays += 1
            self._session.emit(found)
        elif not _follow(scores, ran):
            self._open.remove(scores)


def _is_product_of_activations(ran: Ran) -> bool:
    return str(ran.func) in _PRODUCTS and all(note.origin != "parameter" for note in ran.inputs)


def _follow(scores: _Scores, ran: Ran) -> bool:
    """Adds an op to what became of the scores; whether there is still something to be found out."""
    scores.length += 1
    scores.derived.update(note.id for note in ran.outputs)
    if scores.softmax is None and str(ran.func) in _SOFTMAX:
        scores.softmax = ran
        return any(note.num_nan for note in ran.outputs)
    if scores.softmax is None:
        scores.before_softmax.append(ran)
    return scores.length < MAX_BETWEEN


def _experiment(scores: _Scores, softmax: Ran, value: Tensor) -> AttentionReplayed | None:
    """What is to be told; None where the program does something else to its scores than scaling and masking them."""
    query, key = tensors_of(scores.product.arguments)
    exact = query.float() @ key.float()
    zero, one, far = (_until_softmax(scores, softmax, torch.full_like(exact, c)) for c in (0.0, 1.0, FAR))
    scale = _slope(zero, one, far)
    if scale is None or softmax.arguments[0][1] not in (-1, zero.dim() - 1) or value.dtype is not query.dtype:
        return None
    wrong = softmax.results[0].isnan().any(-1)
    least = torch.finfo(query.dtype).min
    fused = scaled_dot_product_attention(
        query, key.transpose(-1, -2), value, attn_mask=zero.reshape(exact.shape).to(query.dtype), scale=scale
    )
    (extent,) = measure([fused])
    return AttentionReplayed(
        scores=scores.product.n,
        softmax=softmax.n,
        scale=scale,
        nan_rows=int(wrong.sum()),
        unattended=int((wrong & (zero <= least).all(-1)).sum()),
        exact_finite=_is_finite(_until_softmax(scores, softmax, exact).softmax(-1)),
        unmasked_finite=_is_finite((exact * scale).softmax(-1)),
        sdpa_finite=extent.finite,
        sdpa_absmax=extent.absmax,
    )


def _until_softmax(scores: _Scores, softmax: Ran, start: Tensor) -> Tensor:
    """What the softmax would have been given for these float32 scores."""
    values = {scores.product.outputs[0].id: start}
    for ran in scores.before_softmax:
        pairs = zip(tensors_of(ran.arguments), ran.inputs, strict=True)
        stand_ins = {id(t): values[note.id].clone() for t, note in pairs if note.id in values}
        results = in_wider(ran.func, ran.arguments, torch.float32, HALF, stand_ins)
        values.update({note.id: result for note, result in zip(ran.outputs, results, strict=True)})
    return values[softmax.inputs[0].id]


def _slope(zero: Tensor, one: Tensor, far: Tensor) -> float | None:
    """The factor between scores and softmax, where there is one: the same for all entries and all scores; else None."""
    free = zero.abs() < MASKING
    slopes = (one - zero)[free]
    if not slopes.numel():
        return None
    scale = float(slopes.median())
    rounding = AFFINE * abs(scale)
    even = bool((slopes - scale).abs().max() <= rounding)
    straight = bool(((far - zero)[free] / FAR - slopes).abs().max() <= rounding)
    return scale if scale > 0 and even and straight else None


def _is_finite(tensor: Tensor) -> bool:
    return all(extent.finite for extent in measure([tensor]))
