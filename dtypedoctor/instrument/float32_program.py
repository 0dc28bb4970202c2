"""The float32 program beside the real one: what a value would be had everything before it been computed in float32.

An operator run again on the operands that it got says whether that operator needs a wider dtype. It does not say whether those
operands are what they should be: an epsilon of 1e-12 is 0 in float16, and 0/0 is NaN in every dtype. So each operator that takes part in
half precision is remembered with its operands, as long as there is room. Where one makes inf or NaN, what led to it is computed again in
float32, back to the last exact values. If that is finite, the operators behind it are taken away again from the far end: the last one
without which it is not finite is the one that rounds.

What is not finite in float32 either may be finite in float64: the difference of two means of squares is negative where float32 has rounded
them. So within a call that is made again the float64 program is remembered, too, in which float32 is a narrow dtype as half precision is in
the other.
"""

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from dtypedoctor._torch_private import (
    OpOverload,
    buffers_of,
    has_no_memory,
    is_wrapped,
    memory_key,
    parameters_of,
    without_autocast,
)
from dtypedoctor.instrument.module_tree import ByModule
from dtypedoctor.instrument.naming import dtype_name, short_name
from dtypedoctor.instrument.operators import (
    Arguments,
    address_of,
    bytes_of,
    for_wider,
    is_unfinished,
    keep_written,
    leaves_memory_as_it_was,
    scalars,
    tensors_of,
    tree_map,
    uncollected,
    written,
)
from dtypedoctor.instrument.session import Session
from dtypedoctor.instrument.statistics import extent_of, measurable
from dtypedoctor.interruptions import contained
from dtypedoctor.trace.events import Replay
from dtypedoctor.trace.records.execution import RoundedBefore

MAX_HELD = {"cpu": 16 << 20, "cuda": 256 << 20}
"""Bytes of operands that are kept on a device; those of the oldest operators go first."""
_SHARE = {torch.float32: 1, torch.float64: 4}
"""What these are divided by for a wide dtype: float64 is needed for what rounds a few operators before."""
MAX_STEPS = 1024
"""Operators that are remembered."""
MAX_EXPLAINED = 64
"""Operators of one window, or of one run outside of modules, of which it is asked what makes them fail."""
SMALL = 4096
"""Elements of the largest tensor whose float32 original is kept when it is cast and elements of it are lost."""

HALF = (torch.float16, torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn)
_NARROW = {torch.float32: HALF, torch.float64: (*HALF, torch.float32)}
"""What is narrow beside a wide dtype."""
_FLOAT32_MAX = torch.finfo(torch.float32).max


class Originals:
    """The float32 values of small tensors that a cast to half precision has rounded to 0 or to inf.

    Attributes:
        outside: how values came about outside of modules, before an op trace began.
    """

    def __init__(self) -> None:
        self.outside: Programs | None = None
        self._of: ByModule[dict[str, Tensor]] = ByModule()

    def cast(self, original: Tensor, result: Tensor, owner: nn.Module, name: str) -> None:
        """``result``, which ``owner`` has under ``name``, is to hold ``original`` in its own, narrower dtype."""
        wide = measurable(original) and original.dtype in (torch.float32, torch.float64)
        if not (wide and measurable(result) and result.dtype in HALF and 0 < original.numel() <= SMALL):
            return
        exact = original.detach().float()
        rounded = exact.to(result.dtype).float()
        if bool(((rounded == 0) & (exact != 0) | (rounded.isinf() & exact.isfinite())).any()):
            self._of.setdefault(owner, {})[name] = uncollected(exact.clone())

    def left(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The parameters and buffers that still hold what a cast has left of their original, with the original."""
        for owner, originals in self._of.items():
            held = {**parameters_of(owner), **buffers_of(owner)}
            for name, original in originals.items():
                tensor = held.get(name)
                if tensor is None or not measurable(tensor) or tensor.shape != original.shape:
                    continue
                there = original.to(tensor.device)
                if torch.equal(there.to(tensor.dtype), tensor.detach()):
                    yield tensor, there


Layout = tuple[Any, Any, Any, torch.dtype]
"""Shape, strides and offset of a tensor in its memory, and its dtype."""


@dataclass(slots=True, eq=False)
class Step:
    """An operator that has run.

    Attributes:
        func, arguments: the operator and its arguments, which share the program's memory; None where nothing is known of it.
        makers: the results of other steps that its operands are, or views of, each with how it reads them, by the operand's identity.
        order: steps with a lower one came before it.
        size: bytes of its operands.
        name: of the parameter that is its result, where it is the cast of one.
        source, fqn, n: its line, its module, and the number of its record, where it has one.
        is_of_numbers: whether its operand is no tensor of the program's, but numbers in its code.
    """

    func: Any
    arguments: Arguments | None
    order: int
    size: int = 0
    makers: dict[int, tuple["Result", Layout]] = field(default_factory=dict)
    name: str = ""
    source: str | None = None
    fqn: str | None = None
    n: int = 0
    is_of_numbers: bool = False

    @property
    def operands(self) -> list[Tensor]:
        """The tensors among its arguments."""
        return tensors_of(self.arguments) if self.arguments is not None else []

    def forget(self) -> None:
        """Lets go of the operands: the float32 program begins after this step."""
        self.arguments = None
        self.makers.clear()


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """A tensor that a step has made: the how-manieth, and how it lies in its memory."""

    step: Step
    index: int
    held: StorageWeakRef
    layout: Layout
    is_whole: bool

    def read_as(self, value: Tensor, layout: Layout) -> Tensor | None:
        """Reads ``value``, which stands for this result, as a view of it is read; None where the view holds more than the result."""
        if layout[:3] == self.layout[:3]:
            return value
        if not self.is_whole or layout[3] is not self.layout[3]:
            return None
        flat = value.new_empty(value.numel())
        flat.as_strided(*self.layout[:3]).copy_(value)
        return flat.as_strided(*layout[:3])


class Float32Program:
    """Remembers how values came about, and computes them again in float32 from the last exact ones.

    Args:
        session: where what is found goes.
        most: elements of the operands and results of an operator that is remembered; None for any number.
        before: another one, which knows what was made before this one began.
        wide: what values are computed in again: float32, or float64, where float32 counts as narrow.
    """

    def __init__(
        self,
        session: Session,
        most: int | None = None,
        before: "Float32Program | None" = None,
        wide: torch.dtype = torch.float32,
    ) -> None:
        self._session, self._most, self._before, self._wide = session, most, before, wide
        self._made: dict[int, Result] = {}
        self._steps: deque[Step] = deque()
        self._bytes = 0
        self._explained = 0

    def forget(self) -> None:
        """The window is closed."""
        self._made.clear()
        self._steps.clear()
        self._bytes = self._explained = 0

    def learn(self, tensor: Tensor, value: Tensor, name: str = "") -> None:
        """``tensor`` is what a cast has left of ``value``; it is the parameter ``name``, where it has a name."""
        self._keep(Step(_CAST, ((value, tensor.dtype), {}), next(_ORDER), value.nbytes, name=name), [tensor])

    def lifted(self, tensor: Tensor, numbers: Tensor, source: str | None) -> Step:
        """``tensor`` has been made, at the line ``source``, of Python's ``numbers``, which it may not hold as they are."""
        cast: Arguments = ((numbers, tensor.dtype), {})
        step = Step(_CAST, cast, next(_ORDER), numbers.nbytes, source=source, is_of_numbers=True)
        self._keep(step, [tensor])
        return step

    def begins_with(self, tensors: Iterable[Tensor]) -> None:
        """Nothing is known of how ``tensors`` came about: a module has returned them, or operators that cannot be run again."""
        self._keep(Step(None, None, next(_ORDER)), [t for t in tensors if _is_plain(t)])

    def ran(self, func: Any, given: Arguments, kept: Arguments, results: Sequence[Tensor], *,
            source: str | None, fqn: str | None, n: int = 0) -> Step | None:  # fmt: skip
        """Remembers an operator that has run.

        Args:
            func: the operator.
            given: its arguments.
            kept: the same with copies of what it has written to.
            results: what it returned (or wrote to).
            source, fqn, n: see :class:`Step`.

        Returns:
            What to ask :meth:`explain` about; None where no narrow dtype was involved, so that its operands are all that matters.
        """
        operands = tensors_of(given)
        addresses = [address_of(tensor) for tensor in operands]
        makers = [self._maker(address) for address in addresses]
        narrow = _NARROW[self._wide]
        if not any(makers) and not any(t.dtype in narrow for t in (*operands, *results)):
            return None
        memories = set(addresses) - {address_of(tensor) for tensor in written(func, given)}
        if any(address_of(tensor) in memories for tensor in results):
            return None  # a view is known by the memory that it reads
        if not results or leaves_memory_as_it_was(func) or not self._may_be_repeated(func, [*operands, *results]):
            self.begins_with(results)
            return Step(None, None, 0)
        # Aliases keep the memory and neither the tensors nor their graph, which the program may want to die or to swap.
        copies = operands if kept is given else tensors_of(kept)
        aliases = {id(tensor): uncollected(tensor.detach()) for tensor in copies}
        step = Step(
            func,
            tree_map(lambda value: aliases.get(id(value), value), kept),
            next(_ORDER),
            bytes_of(copies),
            source=source,
            fqn=fqn,
            n=n,
        )
        for made, tensor, copy in zip(makers, operands, copies, strict=True):
            if made is not None:
                step.makers[id(aliases[id(copy)])] = made, _layout(tensor)
        self._keep(step, results)
        return step

    def explain(self, step: Step | None, n: int) -> bool:
        """Says what operator ``n``, which has made inf or NaN, gives in the wide program, and which operator before it rounds too much.

        Returns:
            Whether it is finite there.
        """
        if step is None:
            return False
        self._explained += 1
        behind, exact = self._behind(step) if self._explained <= MAX_EXPLAINED else ({}, False)
        results = _computed(step, behind, self._wide) if behind else []
        extents = list(filter(None, map(extent_of, results)))
        if not extents:
            self._write(n, finite=False, note="what came before it was not kept")
            return False
        absmax = max(e.absmax for e in extents)
        # What is finite in float32 and not in float64 is the rounding error of a sum: x - x.mean() of equal numbers.
        finite = _is_finite(results) and _is_finite(_computed(step, behind, torch.float64) or results)
        finite &= absmax <= _FLOAT32_MAX
        of_numbers = _is_of_numbers(results, behind)
        self._write(n, finite=finite, absmax=absmax, dtype=short_name(self._wide), exact=exact, of_numbers=of_numbers)
        if finite and (rounding := _rounding(step, behind, self._wide)) is not None:
            self._tell(rounding, n)
        return finite

    def _write(self, of: int, *, absmax: float | None = None, **how: Any) -> None:
        writer = self._session.writer
        program = f"{short_name(self._wide)}-program"
        writer.write(Replay(n=writer.next_n(), of=of, how=program, absmax=absmax, **how))

    def _tell(self, step: Step, n: int) -> None:
        narrow, wide = _run(step, {}, None), _run(step, {}, self._wide)
        pairs = [(real, other) for real, other in zip(narrow, wide, strict=True) if measurable(real)]
        if not pairs:
            return
        given = scalars(step.arguments) if step.arguments is not None else []
        if step.is_of_numbers and pairs[0][1].numel() == 1:
            given = [f"{float(pairs[0][1]):.7g}"]
        rounded = RoundedBefore(
            of=n,
            n=step.n,
            op=str(step.func),
            source=step.source,
            module=step.fqn,
            parameter=step.name,
            dtype=dtype_name(pairs[0][0]),
            scalars=given,
            elements=sum(real.numel() for real, _ in pairs),
            zeros=sum(int(((real == 0) & (other != 0)).sum()) for real, other in pairs),
            ones=sum(int(((real.abs() == 1) & (other.abs() != 1)).sum()) for real, other in pairs),
            overflows=sum(int((~real.isfinite() & other.isfinite()).sum()) for real, other in pairs),
        )
        self._session.emit(rounded)

    def _behind(self, last: Step) -> tuple[dict[Step, int], bool]:
        """The steps that lead to ``last``, with how far they are from it, and whether they begin with exact values only.

        A step counts where it gives again what the program had from it; else something has written to its operands since.
        """
        parameters = {
            address_of(tensor) for _, _, tensor, _, is_buffer in self._session.names.tensors() if not is_buffer
        }
        distance, exact = {last: 0}, True
        again: dict[Step, list[Tensor]] = {}
        waiting = deque([last])
        while waiting:
            step = waiting.popleft()
            for operand in step.operands:
                if id(operand) not in step.makers:
                    exact &= operand.dtype not in HALF or address_of(operand) in parameters
                    continue
                made, layout = step.makers[id(operand)]
                if made.step not in again:
                    again[made.step] = _run(made.step, {}, None)
                values = again[made.step]
                value = made.read_as(values[made.index], layout) if len(values) > made.index else None
                if not (value is not None and value.dtype is operand.dtype and torch.equal(value, operand)):
                    exact = False
                    step.makers.pop(id(operand))
                elif made.step not in distance:
                    distance[made.step] = distance[step] + 1
                    waiting.append(made.step)
        return distance, exact

    def _maker(self, address: int) -> Result | None:
        made = self._made.get(address)
        return made if made is not None or self._before is None else self._before._maker(address)

    def _may_be_repeated(self, func: Any, tensors: Sequence[Tensor]) -> bool:
        if not isinstance(func, OpOverload) or func.namespace != "aten" or is_unfinished(func):
            return False
        if torch.Tag.nondeterministic_seeded in func.tags:
            return False  # it would draw from the program's random numbers
        if self._most is not None and sum(t.numel() for t in tensors) > self._most:
            return False
        return all(map(_is_plain, tensors))

    def _keep(self, step: Step, results: Sequence[Tensor]) -> None:
        if len(self._made) > 2 * MAX_STEPS:
            self._made = {number: made for number, made in self._made.items() if not made.held.expired()}
        for index, tensor in enumerate(results):
            storage = tensor.untyped_storage()
            is_whole = tensor.numel() * tensor.element_size() == storage.nbytes()
            self._made[memory_key(storage)] = Result(step, index, StorageWeakRef(storage), _layout(tensor), is_whole)
        self._steps.append(step)
        self._bytes += step.size
        room = MAX_HELD.get(results[0].device.type if results else "cpu", 0) // _SHARE[self._wide]
        while self._steps and (self._bytes > room or len(self._steps) > MAX_STEPS):
            gone = self._steps.popleft()
            self._bytes -= gone.size
            gone.forget()


class Programs:
    """The float32 program and the float64 program of the same operators, and what gave their results the dtype.

    Args:
        session, most: see :class:`Float32Program`.
        before: those of what was made before these began.
    """

    def __init__(self, session: Session, most: int | None = None, before: "Programs | None" = None) -> None:
        earlier: Float32Program | None = before.in_float32 if before is not None else None
        self.in_float32: Float32Program = Float32Program(session, most, earlier)
        self._in_float64 = Float32Program(session, most, wide=torch.float64)
        self._dtypes: dict[int, tuple[StorageWeakRef, torch.dtype, str, str]] = {}

    def forget(self) -> None:
        """The window is closed."""
        self.in_float32.forget()
        self._in_float64.forget()

    def begins_with(self, tensors: Sequence[Tensor]) -> None:
        """Nothing is known of how ``tensors`` came about."""
        self.in_float32.begins_with(tensors)
        self._in_float64.begins_with(tensors)

    def ran(self, func: Any, given: Arguments, kept: Arguments, results: Sequence[Tensor], *,
            source: str | None, fqn: str | None, n: int = 0) -> tuple[Step | None, Step | None]:  # fmt: skip
        """Remembers an operator: see :meth:`Float32Program.ran`."""
        self.made(results, tensors_of(given), str(func), source)
        told: dict[str, Any] = {"source": source, "fqn": fqn, "n": n}
        programs = self.in_float32, self._in_float64
        first, second = (program.ran(func, given, kept, results, **told) for program in programs)
        return first, second

    def made(self, results: Iterable[Tensor], operands: Sequence[Tensor], by: str, source: str | None) -> None:
        """Remembers what gave ``results`` their dtype: an operand that has it, or else ``by``, an operator or a module, at a line of the program."""
        if len(self._dtypes) > 2 * MAX_STEPS:
            self._dtypes = {number: made for number, made in self._dtypes.items() if not made[0].expired()}
        for tensor in filter(_is_plain, results):
            by_which, at = self._made_by(tensor, operands) or (by, source)
            if at and len(self._dtypes) <= 2 * MAX_STEPS:
                storage = tensor.untyped_storage()
                self._dtypes[memory_key(storage)] = StorageWeakRef(storage), tensor.dtype, by_which, at

    def _made_by(self, tensor: Tensor, operands: Sequence[Tensor]) -> tuple[str, str] | None:
        """What gave an operand the dtype of a result; None where none has it, or one that came from elsewhere has promoted others."""
        alike = next((operand for operand in operands if operand.dtype is tensor.dtype), None)
        made_by = self.dtype_by(alike) if alike is not None else None
        is_promoted = any(o.is_floating_point() and o.dtype is not tensor.dtype for o in operands)
        return None if made_by is not None and not made_by[1] and is_promoted else made_by

    def dtype_by(self, tensor: Tensor) -> tuple[str, str]:
        """The operator or module that gave a tensor its dtype, and its line; empty texts where they are not known."""
        held, dtype, by, source = self._dtypes.get(address_of(tensor), (None, None, "", ""))
        return (by, source) if held is not None and not held.expired() and dtype is tensor.dtype else ("", "")

    def explain(self, steps: "tuple[Step | None, Step | None]", n: int) -> None:
        """Says what operator ``n``, which has made inf or NaN, gives in float32; and in float64, where it is not finite in float32."""
        if not self.in_float32.explain(steps[0], n):
            self._in_float64.explain(steps[1], n)


_ORDER = count()
_CAST = torch.ops.aten.to.dtype


def _is_plain(tensor: Tensor) -> bool:
    """Whether the tensor has memory of its own kind, which may be read and kept; integers and truth values may, too."""
    if tensor.device.type not in MAX_HELD:
        return False
    return measurable(tensor) or (
        type(tensor) is Tensor and not tensor.is_floating_point() and not tensor.is_complex() and tensor.layout is torch.strided
        and not is_wrapped(tensor) and not has_no_memory(tensor)
    )  # fmt: skip


def _layout(tensor: Tensor) -> Layout:
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype


def _rounding(last: Step, behind: dict[Step, int], wide: torch.dtype) -> Step | None:
    """The nearest step that has to be in a wide dtype, with those between, for ``last`` to be finite; None where ``last`` alone has to."""

    def is_enough(steps: Collection[Step]) -> bool:
        return _is_finite(_computed(last, steps, wide))

    def within(distance: int) -> list[Step]:
        return [step for step, far in behind.items() if far <= distance]

    least, most = -1, max(behind.values())
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (least, middle) if is_enough(within(middle)) else (middle, most)
    if most == 0:
        return None
    nearer = within(most - 1)
    there = [step for step, far in behind.items() if far == most]
    enough = next((step for step in there if is_enough([*nearer, step])), None)
    # Several may have to be wide at once: the first without which the others are not enough
    others = ((step, [other for other in there if other is not step]) for step in sorted(there, key=lambda s: s.order))
    return enough or next((step for step, rest in others if not is_enough([*nearer, *rest])), there[0])


def _is_of_numbers(last: Sequence[Tensor], steps: Collection[Step]) -> bool:
    """Whether steps compute single numbers from those in the code alone, and with no tensor that came from elsewhere: a program asks so what a dtype holds."""
    pairs = [(step, operand) for step in steps for operand in step.operands]
    known = all(step.is_of_numbers or id(operand) in step.makers for step, operand in pairs)
    return known and all(tensor.numel() == 1 for tensor in (*last, *(operand for _, operand in pairs)))


def _computed(last: Step, steps: Collection[Step], dtype: torch.dtype) -> list[Tensor]:
    """What ``last`` returns if it and ``steps`` are computed in ``dtype``; the other operands are what the program had. Empty where it cannot be had."""
    values: dict[Step, list[Tensor]] = {}
    for step in sorted({*steps, last}, key=lambda step: step.order):
        stand_ins = {}
        for number, (made, layout) in step.makers.items():
            if made.step in values and len(values[made.step]) > made.index:
                value = made.read_as(values[made.step][made.index], layout)
                if value is not None:
                    stand_ins[number] = value
        values[step] = _run(step, stand_ins, dtype)
    return values[last]


def _run(step: Step, stand_ins: dict[int, Tensor], dtype: torch.dtype | None) -> list[Tensor]:
    """Runs a step again, in ``dtype`` where it is not None; empty where it cannot be run."""
    if step.arguments is None or not all(map(_is_there, step.operands)):
        return []

    def widened(value: Any) -> Any:
        if isinstance(value, Tensor) and id(value) in stand_ins:
            return stand_ins[id(value)]
        if dtype is None:
            return value
        if isinstance(value, Tensor):
            return value.to(dtype) if value.dtype in _NARROW[dtype] else value
        return dtype if isinstance(value, torch.dtype) and value in _NARROW[dtype] else value

    arguments = tree_map(widened, step.arguments)
    args, kwargs = keep_written(step.func, arguments if dtype is None else for_wider(step.func, arguments))
    with contained() as trial, torch.no_grad(), without_autocast():
        result = step.func(*args, **kwargs)
    if trial.error is not None:  # an operator without a form in this dtype: the real value stands for its result
        return []
    return tensors_of(result) or written(step.func, (args, kwargs))


def _is_there(tensor: Tensor) -> bool:
    """FSDP takes the memory of a parameter away while the tensors that use it live on. One that is expanded takes less than its elements would."""
    last = tensor.storage_offset() + sum((n - 1) * by for n, by in zip(tensor.shape, tensor.stride(), strict=True))
    return not tensor.numel() or tensor.untyped_storage().nbytes() > last * tensor.element_size()


def _is_finite(results: Sequence[Tensor]) -> bool:
    return bool(results) and all(bool(t.isfinite().all()) for t in results if t.is_floating_point())
