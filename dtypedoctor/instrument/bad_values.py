"""Follows values that are not finite through the operators outside of module calls, from the operator that makes them to whatever reads them.

An inf or NaN is no failure as such: masks are ``-inf``, a running minimum starts at ``inf``, a ``where`` drops what was computed for rows
that are not there. So each operator that makes, uses or replaces such a value is recorded as an :class:`Op`, and each moment at which one
gets somewhere as a :class:`NonfiniteReached`; what follows from both is for the diagnosis to say.
"""

import ast
import linecache
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import inf, isnan
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from dtypedoctor._torch_private import memory_key
from dtypedoctor.instrument.frames import Line, line_of, own_statement, span_of, users_frame
from dtypedoctor.instrument.module_tree import parameters_in
from dtypedoctor.instrument.naming import dtype_name
from dtypedoctor.instrument.operators import Arguments, address_of, has_out, is_inplace, scalars, tensors_of
from dtypedoctor.instrument.replay import mark_selected_away, replay_wider
from dtypedoctor.instrument.session import Session
from dtypedoctor.instrument.statistics import Extent, extent_of, measurable, out_of_their_sight, real_of
from dtypedoctor.instrument.whereabouts import OUTSIDE
from dtypedoctor.trace.events import Op, TensorNote
from dtypedoctor.trace.records.execution import ComputedInstead, NonfiniteReached
from dtypedoctor.unpatched import to_json

ASSERTED, TESTED, OTHER = "asserted", "guard", "item"
"""A number that an assertion has accepted; one that is asked whether it is finite; any other."""
ASKED = "asked"
"""A tensor that an operator asks which of its elements are finite, and whose answers Python does not read."""
RETURNED = "returned"
"""What an outermost module has returned; and a number that is asked for where it is returned to."""
_ASKING = frozenset({"isfinite", "isinf", "isnan", "isneginf", "isposinf"})
_INFINITY = re.compile(r"\b(neg)?inf(inity|ty)?\b", re.IGNORECASE)
Span = tuple[int, int, int, int]
"""First and last line (from 1), first and last column (bytes, from 0)."""


def use_of_number(frame: FrameType | None) -> str:
    """What becomes of the number that the user's line reads, there or where it is returned to."""
    frame = users_frame(frame)
    while frame is not None:
        use = _use(frame.f_code, frame.f_lasti)
        if use != RETURNED:
            return use
        frame = frame.f_back
    return OTHER


@dataclass(slots=True)
class Branch:
    """The lines that run, or do not, by what a test says of a value that is not finite.

    Attributes:
        about: the value.
        code: in which the test is.
        lines: those that depend on it.
    """

    about: "Bad"
    code: CodeType
    lines: range

    @property
    def is_running(self) -> bool:
        """Whether the program is there now, or in what is called from there."""
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame.f_code is not self.code:
            frame = frame.f_back
        return frame is not None and frame.f_lineno in self.lines


def _branch_of(frame: FrameType | None, about: "Bad") -> Branch | None:
    """What depends on the test in the user's line, there or where its answer is returned to."""
    frame = users_frame(frame)
    while frame is not None:
        tree, span = _tree(frame.f_code.co_filename), span_of(frame.f_code, frame.f_lasti)
        around = list(_around(tree, (span[0], span[1], span[2], span[3]))) if tree is not None and span else []
        lines = _lines_of_branch(around)
        if lines:
            return Branch(about, frame.f_code, lines)
        frame = frame.f_back if any(isinstance(node, ast.Return) for node in around) else None
    return None


def _lines_of_branch(around: Sequence[ast.AST]) -> range:
    """The lines that the innermost of nodes decides on, as a condition does; none where it is part of no condition."""
    for node in around:
        # Python jumps by what it is told of the condition, or of all that depends on it
        if isinstance(node, ast.If | ast.IfExp) and (node is around[0] or node.test in around):
            first = node.body[0].lineno if isinstance(node, ast.If) else node.lineno
            return range(first, (node.end_lineno or first) + 1)
    return range(0)


@lru_cache(maxsize=1024)
def _use(code: CodeType, instruction: int) -> str:
    tree, span = _tree(code.co_filename), span_of(code, instruction)
    if tree is None or not span:
        return OTHER
    around = list(_around(tree, (span[0], span[1], span[2], span[3])))
    name = _name_bound_to(around)
    return _use_of_value(around) if name is None else _use_of_name(name, around, tree)


def _use_of_value(around: Sequence[ast.AST]) -> str:
    """What becomes of a number that gets no name."""
    use = _tested_as(around)
    statement = next((node for node in around if isinstance(node, ast.stmt)), None)
    return RETURNED if isinstance(statement, ast.Return) and use == OTHER else use


def _use_of_name(name: str, around: Sequence[ast.AST], tree: ast.AST) -> str:
    """What becomes of a number wherever its name is read, in the function around it or else in the file."""
    scope = next((node for node in around if isinstance(node, ast.FunctionDef)), tree)
    names = [node for node in ast.walk(scope) if isinstance(node, ast.Name) and node.id == name]
    uses = {_tested_as(_around(tree, _span(node))) for node in names if isinstance(node.ctx, ast.Load)}
    # A number that is asked whether it is finite is meant to be so or not, whatever else it is used for
    return TESTED if TESTED in uses else OTHER if OTHER in uses else min(uses, default=OTHER)


def _name_bound_to(around: Sequence[ast.AST]) -> str | None:
    """The name that the innermost of nodes gets: that of an assignment, or of a loop over what it gives; None where it gets none."""
    for node in around:
        loops = getattr(node, "generators", [node] if isinstance(node, ast.For) else [])
        target = next((loop.target for loop in loops if loop.iter in around), None)
        if isinstance(node, ast.Assign):
            target = node.targets[0]
        if isinstance(target, ast.Name):
            return target.id
    return None


@lru_cache(maxsize=8)
def _tree(file: str) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return None


def _around(node: ast.AST, span: Span) -> Iterator[ast.AST]:
    """The nodes that hold a span, innermost first."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.expr | ast.stmt | ast.keyword):
            yield from _around(child, span)
            continue
        first, last, begin, end = _span(child)
        if (first, begin) <= (span[0], span[2]) and (span[1], span[3]) <= (last, end):
            yield from _around(child, span)
            yield child


def _span(node: ast.expr | ast.stmt | ast.keyword) -> Span:
    return node.lineno, node.end_lineno or node.lineno, node.col_offset, node.end_col_offset or node.col_offset


def _tested_as(around: Iterable[ast.AST]) -> str:
    """Whether the innermost of nodes is asserted by those around it, asked whether it is finite, or compared with an infinity or with itself."""
    use = OTHER
    for node in around:
        name = _name_of(node.func).lower() if isinstance(node, ast.Call) else ""
        if isinstance(node, ast.Assert) or name.startswith("assert"):
            return ASSERTED
        if name in _ASKING or (isinstance(node, ast.Compare) and _asks_for_infinity(node)):
            use = TESTED
        if isinstance(node, ast.stmt):
            break
    return use


def _name_of(called: ast.expr) -> str:
    return called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""


def _asks_for_infinity(comparison: ast.Compare) -> bool:
    compared = [ast.unparse(side) for side in (comparison.left, *comparison.comparators)]
    return len(set(compared)) < len(compared) or any(map(_INFINITY.search, compared))


EACH = 3
"""Records of one operator at one line that does the same with the same kind of values."""
MAX_RECORDS = 2000
"""Records of one run, so that a program in which nothing is finite any more cannot fill a disk."""
MAX_KEPT = 2048
"""Values kept in mind, until those that are gone are looked for and forgotten."""
REPLAYED = 4 << 20
"""Elements of the operands of an operator that is run again in a wider dtype."""
_BACKWARD = "_backward"
"""Part of the names of operators that compute gradients; the one that comes back is their first operand."""
FIRST_ID = 1 << 40
"""Numbers of tensors begin here, so that none is that of a tensor in an op trace."""


_COPIES = frozenset({"aten._to_copy.default", "aten.clone.default"})
_ASKS_FOR_INF = frozenset({"aten.isinf.default", "aten.isposinf.default", "aten.isneginf.default"})
_ASKS = _ASKS_FOR_INF | {"aten.isnan.default"}


class Ends(NamedTuple):
    """The smallest and the largest element of a tensor; both NaN where one of them is."""

    low: float
    high: float

    @property
    def finite(self) -> bool:
        """Whether every element is finite."""
        return -inf < self.low and self.high < inf

    @property
    def kind(self) -> str:
        """``nan``, ``inf``, ``-inf`` or nothing."""
        if isnan(self.low):
            return "nan"
        return "inf" if self.high == inf else "-inf" if self.low == -inf else ""


FINITE = Ends(0.0, 0.0)
"""Stands for the ends of every tensor in which all is finite."""


def ends_of(tensor: Tensor) -> Ends:
    """Measures a dense tensor; waits for its device."""
    tensor = real_of(tensor)
    size = tensor.numel()
    if size == 1:
        value = tensor.item()
        return Ends(value, value) if isinstance(value, float) and not -inf < value < inf else FINITE
    if size == 0:
        return FINITE
    least, most = torch.aminmax(tensor.float() if tensor.element_size() == 1 else tensor)
    low, high = (least.item(), most.item()) if tensor.device.type == "cpu" else torch.stack((least, most)).tolist()
    return FINITE if -inf < low and high < inf else Ends(low, high)


@dataclass(slots=True, eq=False)
class Bad:
    """A value that is not finite, or that says whether another one is.

    Attributes:
        id: its number in the records.
        kind: the worst of its elements, as :attr:`Ends.kind` says it.
        held: its memory.
        recorded: whether the operator that made it is in the trace.
        used: whether another value was computed from it.
        written: whether it was written into memory that was there before.
        says: the value that a truth value, or an index, was computed from; None for what is not finite itself.
        returned: step and number of the call that has returned it; None where no call has, or where that is recorded.
    """

    id: int
    kind: str
    held: StorageWeakRef
    recorded: bool = False
    used: bool = False
    written: bool = False
    says: "Bad | None" = None
    returned: tuple[int, int] | None = None


@dataclass(slots=True)
class Ran:
    """An operator that has run outside of all modules.

    Attributes:
        func: the operator.
        arguments: what it was given, with copies of what it has written to since where ``exact``.
        exact: whether ``arguments`` are what it was given.
        operands, results: the tensors in and out.
        ends: what was measured of each result; None for one that is not floating point or was not measured.
        line: the line of code that it belongs to.
        node: the autograd node that it is part of.
    """

    func: Any
    arguments: Arguments
    exact: bool
    operands: Sequence[Tensor]
    results: Sequence[Tensor]
    ends: Sequence[Ends | None]
    line: Line | None
    node: str | None = None
    sources: list[Bad] = field(default_factory=list)
    used: dict[int, Bad] = field(default_factory=dict)
    """The bad value behind each operand that is not finite, by the operand's place."""

    @property
    def source(self) -> str | None:
        """The line as text."""
        return None if self.line is None else self.line.source


class BadValues:
    """Knows which memory holds something that is not finite.

    Attributes:
        noticed: called when something that is not finite is seen.

        kept: called with an operator that has made something that is not finite of finite operands, which are small.

    Observations of kind ``nonfinite-reached``: ``what`` (``item``: a number in Python; ``asserted``: one that an assertion has accepted; ``guard``: a test of it in Python;
    ``numbers``: a list or an array of numpy; ``asked``: an operator has asked which elements are finite; ``returned``: an outermost module has returned it; ``saved``: a file or another process; ``loss``: a backward pass begins there; ``gradient``; ``call``: an argument of a module; ``alive``: there at the end of the program and
    never used; ``unused``: gone before that, and never used), ``id`` of the tensor in the ops (0 where it is not known), ``value`` (``nan``, ``inf``
    or ``-inf``), ``source``, and for a loss or a gradient the number of its ``sample``.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.known: dict[int, Bad] = {}
        """What is not finite, by the memory that it lies in."""
        self._ids = FIRST_ID
        self._seen: Counter[Any] = Counter()
        self._last_ids: dict[Any, list[int]] = {}
        self._unused: dict[int, Bad] = {}
        self._records = 0
        self.made: int | None = None
        """Number of the record of the operator that has just run, where it has made what is not finite of finite operands."""
        self._branch: Branch | None = None
        self.noticed: Callable[[], None] = lambda: None
        self.kept: Callable[[Ran], None] = lambda ran: None

    @property
    def any(self) -> bool:
        """Whether anything is known not to be finite."""
        return bool(self.known)

    def behind(self, tensor: Tensor) -> Bad | None:
        """What is known of the memory of ``tensor``; part of it may well be finite."""
        try:
            return self.known.get(memory_key(tensor.untyped_storage()))
        except (NotImplementedError, RuntimeError):  # sparse tensors and some wrappers have none
            return None

    def enters(self, arguments: Sequence[Tensor], module: nn.Module) -> None:
        """A module is called: tells of what is not finite among its arguments, and of parameters that were made so."""
        for tensor in arguments:
            bad = self.behind(tensor)
            if bad is not None and bad.says is None:
                self.reached("call", bad)
        if any(bad.written and bad.kind != "-inf" for bad in list(self.known.values())):
            for tensor in parameters_in(module):
                bad = self.behind(tensor)
                if bad is not None and bad.written:
                    self.reached("call", bad)

    def returned(self, tensor: Tensor) -> None:
        """An outermost module has returned a tensor: what becomes of it, if it is not finite, is followed."""
        if measurable(real_of(tensor)) and self._session.readings.affords(tensor):
            with out_of_their_sight():  # the look's modes, too, are on until the call is over
                ends = ends_of(tensor)
            if not ends.finite:
                at = (self._session.position.step, self._session.position.call)
                self._keep(tensor, Bad(self._new_id(), ends.kind, _memory(tensor), recorded=True, returned=at))

    def ran(self, ran: Ran) -> None:
        """An operator has run that was given, or has returned, something that is not finite."""
        self.made = None
        self._find_sources(ran)
        if any(ends is not None and not ends.finite for ends in ran.ends):
            self._passed_on(ran)
        elif ran.sources:
            self._ended(ran)
        elif self._branch is not None:
            self._computed_instead(ran, self._branch)

    def _computed_instead(self, ran: Ran, branch: Branch) -> None:
        """Tells of an operator in float32 or wider with finite results, where it runs because a test has found a value that is not finite."""
        if not branch.is_running:
            self._branch = None
        elif any(ends is FINITE and t.itemsize >= 4 for t, ends in zip(ran.results, ran.ends, strict=True)):
            key = ("instead", branch.about.id, ran.func)
            self._seen[key] += 1
            if self._seen[key] == 1:
                self._session.emit(ComputedInstead(id=branch.about.id, op=str(ran.func)))

    def overwritten(self, tensors: Sequence[Tensor]) -> None:
        """Something that was not measured has been written to ``tensors``: what is in there now is not known."""
        for tensor in tensors:
            bad = self.behind(tensor)
            if bad is not None:
                bad.used = True
                self.known.pop(memory_key(tensor.untyped_storage()), None)

    def read(self, tensor: Tensor, value: object, line: Line | None) -> None:
        """The program has read a number out of a tensor."""
        bad = self.behind(tensor)
        source = None if line is None else line.source
        if isinstance(value, float) and not -inf < value < inf:
            kind = Ends(value, value).kind
            way = use_of_number(sys._getframe())
            self.reached(way, bad if bad is not None and bad.says is None else None, source, value=kind)
        elif bad is not None and bad.says is not None:
            self.reached(ASSERTED if use_of_number(sys._getframe()) == ASSERTED else "guard", bad.says, source)
            is_told = self._seen["guard", source, 0] <= EACH
            self._branch = _branch_of(sys._getframe(), bad.says) if is_told else None

    def left(self, way: str, tensor: Tensor) -> None:
        """A tensor is read as a whole, by something that is no operator."""
        bad = self.behind(tensor)
        if bad is not None and bad.says is None and bad.recorded and self._holds_it(tensor):
            bad.used = True
            line = line_of(sys._getframe(3))
            use = use_of_number(sys._getframe(3))
            self.reached(way if use == OTHER else use, bad, None if line is None else line.source)

    def reached(self, what: str, bad: Bad | None, source: str | None = None, *, value: str | None = None,
                sample: int | None = None) -> None:  # fmt: skip
        """Something that is not finite has got somewhere; recorded a few times for each place."""
        key = (what, source, bad.id if bad is not None and what in ("alive", "unused", ASKED) else 0)
        self._seen[key] += 1
        most = MAX_RECORDS if what == ASSERTED else EACH  # each of many tests may assert it at one line
        if self._seen[key] > most and what not in ("loss", "gradient"):
            return
        found = NonfiniteReached(
            what=what,
            id=bad.id if bad is not None else 0,
            source=source,
            value=bad.kind if bad is not None and value is None else value,
            sample=sample,
        )
        self._session.emit(found)

    def sampled(self, what: str, tensor: Tensor, sample: int) -> None:
        """A ``loss`` or a ``gradient`` has been measured as number ``sample``; what becomes of it, the samples after it say."""
        bad = self.behind(tensor)
        if bad is not None and bad.says is None:
            bad.used = True
            self.reached(what, bad, _line_of_program() if what == "loss" else None, sample=sample)

    def finish(self) -> None:
        """The program has ended: tells of everything that is not finite, there or gone, and that nothing was computed from."""
        for bad in [*self.known.values(), *self._unused.values()]:
            if bad.says is None and not bad.used and bad.recorded:
                self.reached("unused" if bad.held.expired() else "alive", bad)
        self.known.clear()
        self._unused.clear()

    def _find_sources(self, ran: Ran) -> None:
        if not self.known:
            return
        for place, tensor in enumerate(ran.operands):
            bad = self.behind(tensor)
            if bad is None or (bad.says is None and not self._holds_it(tensor)):
                continue
            ran.used[place] = bad
            ran.sources.append(bad)

    def _holds_it(self, tensor: Tensor) -> bool:
        """Whether what is not finite in the memory of ``tensor`` is in that part of it that ``tensor`` is."""
        if tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes():
            return True
        return not measurable(real_of(tensor)) or not ends_of(tensor).finite

    def _passed_on(self, ran: Ran) -> None:
        values = [bad for bad in ran.sources if bad.says is None]
        if not values and ran.exact:
            self._notice_given(ran)
            values = [bad for bad in ran.sources if bad.says is None]
        out = "".join(ends.kind if ends is not None else "." for ends in ran.ends)
        key = (ran.func, ran.line, ran.node, "".join(sorted({bad.kind for bad in values})), out)
        record = self._may_record(key)
        extents = (
            [extent_of(t) if ends is not None else None for t, ends in zip(ran.results, ran.ends, strict=True)]
            if record
            else []
        )
        inputs = self._notes_in(ran) if record else []
        # tolist() of a device's tensor copies what has just left torch: nobody else reads the copy
        known = str(ran.func) in _COPIES and bool(values) and all(bad.used for bad in values)
        for bad in values:
            bad.used = True
        ids = self._ids_of(key, len(ran.results), record)
        for tensor, ends, number in zip(ran.results, ran.ends, ids, strict=True):
            if ends is not None and not ends.finite:
                written = any(tensor is operand for operand in ran.operands)
                bad = Bad(number, ends.kind, _memory(tensor), recorded=True, written=written, used=known)
                self._keep(tensor, bad)
        if record:
            outputs = [_note(t, e, number) for t, e, number in zip(ran.results, extents, ids, strict=True)]
            if ran.exact and sum(t.numel() for t in ran.operands) <= REPLAYED:
                inputs = mark_selected_away(ran.func, ran.arguments, inputs, ran.results)
            n = self._write(ran, inputs, outputs)
            if not values:
                self.made = n
                self._replay(ran, n)

    def _notice_given(self, ran: Ran) -> None:
        """Operands that are not finite already, and that no operator seen here has made: data, or what a module returned."""
        for place, tensor in enumerate(tensors_of(ran.arguments) if ran.operands else ()):
            if place not in ran.used and measurable(real_of(tensor)) and self._session.readings.affords(tensor):
                ends = ends_of(tensor)
                if not ends.finite:
                    bad = Bad(self._new_id(), ends.kind, _memory(ran.operands[place]))
                    ran.used[place] = bad
                    ran.sources.append(bad)

    def _ended(self, ran: Ran) -> None:
        """All results are finite: values are gone, or were only looked at."""
        values = [bad for bad in ran.sources if bad.says is None]
        said = next((bad.says for bad in ran.sources if bad.says is not None), None)
        if any(ends is not None for ends in ran.ends):
            self._replaced(ran, values)
        elif all(t.dtype is torch.bool for t in ran.results):
            self._tested(ran, said or next(iter(values), None))
        else:
            self._looked_at(ran, values, said)

    def _looked_at(self, ran: Ran, values: list[Bad], said: Bad | None) -> None:
        """Whole numbers were computed, which also say what a truth value among the operands said."""
        for bad in values:
            bad.used = True
        if said is None:
            return
        for tensor in ran.results:
            self._keep(tensor, Bad(0, "", _memory(tensor), says=said))

    def _tested(self, ran: Ran, about: Bad | None) -> None:
        """Truth values were computed: of NaN, whatever was asked, and of infinities, where it was asked for them."""
        if about is None:
            return
        first, *others = map(address_of, ran.operands)
        if str(ran.func) in _ASKS or first in others:  # isfinite compares a number with itself
            self.reached(ASKED, about, ran.source)
        # isfinite compares a magnitude with inf
        if str(ran.func) in _ASKS_FOR_INF or _names_infinity(ran.arguments):
            about.used = True
        elif about.kind != "nan" and not any(bad.says is not None for bad in ran.sources):
            return
        for tensor in ran.results:
            self._keep(tensor, Bad(0, about.kind, _memory(tensor), says=about))

    def _replaced(self, ran: Ran, values: list[Bad]) -> None:
        if not values:
            return
        if _BACKWARD in str(ran.func) and 0 not in ran.used:
            for bad in values:
                bad.used = True
            return  # of what the forward pass has kept it may read as little as the shape: no gradient was replaced
        key = (ran.func, ran.line, "".join(sorted({bad.kind for bad in values})))
        record = self._may_record(key)
        inputs = self._notes_in(ran) if record else []
        for bad in values:
            bad.used = True
        for tensor in ran.results:  # written in place: what was bad in there may be gone
            held = self.behind(tensor) is not None
            if held and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes():
                self.known.pop(memory_key(tensor.untyped_storage()), None)
        if record:
            ids = self._ids_of(key, len(ran.results), record)
            self._write(ran, inputs, [_note(t, None, i) for t, i in zip(ran.results, ids, strict=True)])

    def _may_record(self, key: Any) -> bool:
        self._seen[key] += 1
        if self._seen[key] > EACH or self._records >= MAX_RECORDS:
            return False
        self._records += 1
        return True

    def _ids_of(self, key: Any, count: int, fresh: bool) -> list[int]:
        """Numbers for the results; where nothing is recorded any more, those of the last that were, which came about in the same way."""
        known = self._last_ids.get(key, [])
        if fresh or len(known) != count:
            known = self._last_ids[key] = [self._new_id() for _ in range(count)]
        return known

    def _new_id(self) -> int:
        self._ids += 1
        return self._ids

    def _keep(self, tensor: Tensor, bad: Bad) -> None:
        if len(self.known) >= MAX_KEPT:
            self._forget()
        number = memory_key(tensor.untyped_storage())
        before = self.known.get(number)
        if before is not None and not before.used and before.says is None and before.id != bad.id:
            before.used = True  # overwritten by what was computed from it
        self.known[number] = bad
        if bad.says is None:
            self.noticed()

    def _forget(self) -> None:
        for number, bad in list(self.known.items()):
            if bad.held.expired():
                del self.known[number]
                if bad.says is None and not bad.used and bad.recorded:
                    self._unused[bad.id] = bad

    def _notes_in(self, ran: Ran) -> list[TensorNote]:
        notes: list[TensorNote] = []
        numbers: dict[int, int] = {}
        kept = tensors_of(ran.arguments) if ran.exact else []
        in_backward = self._session.position.phase == "backward"
        gradients = set() if in_backward else self._session.names.gradients()
        for place, tensor in enumerate(ran.operands):
            bad = ran.used.get(place)
            extent = extent_of(kept[place]) if place < len(kept) else None
            known = bad.id if bad is not None else 0
            if (
                bad is not None and bad.returned is not None
            ):  # told with the first use that is recorded: others are like those before
                self._session.emit(NonfiniteReached(what=RETURNED, id=bad.id, value=bad.kind), at=bad.returned)
                bad.returned = None
            number = known or numbers.setdefault(address_of(tensor), self._new_id())
            note = _note(tensor, extent, number)
            if gradients and measurable(tensor) and tensor.data_ptr() in gradients:
                note = replace(note, origin="gradient")
            if extent is None and bad is not None and bad.says is None:
                note = _unmeasured(note, bad)
            notes.append(note)
        return notes

    def _replay(self, ran: Ran, n: int) -> None:
        if not ran.exact or torch.Tag.nondeterministic_seeded in ran.func.tags or ran.func.namespace != "aten":
            return
        if ran.operands and sum(t.numel() for t in ran.operands) <= REPLAYED:
            replay_wider(self._session.writer, n, ran.func, *ran.arguments)
            if not _names_infinity(ran.arguments):  # it was not asked for
                self.kept(ran)

    def _write(self, ran: Ran, inputs: list[TensorNote], outputs: list[TensorNote]) -> int:
        writer = self._session.writer
        n, (step, call, phase) = writer.next_n(), self._session.position.moment
        device = next((t.device.type for t in ran.operands if t.device.type != "cpu"), "cpu")
        writer.write(
            Op(
                n=n,
                step=step,
                call=call,
                phase=phase,
                fqn="",
                op=str(ran.func),
                inputs=inputs,
                outputs=outputs,
                source=ran.source,
                inplace=is_inplace(ran.func),
                out_variant=has_out(ran.func),
                autocast=self._session.autocast.dtype(device),
                scalars=scalars(ran.arguments),
                root=OUTSIDE,
                node=ran.node,
                sentinel=True,
            )
        )
        return n


def _line_of_program() -> str | None:
    """The program's own line that is at work; None where only libraries are."""
    statement = own_statement(sys._getframe())
    return None if statement is None else statement.source


def _names_infinity(arguments: Arguments) -> bool:
    """Whether an infinity is among the numbers that an operator was given."""
    return any(text.lstrip("-") == "inf" for text in scalars(arguments))


def _memory(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _note(tensor: Tensor, extent: Extent | None, number: int) -> TensorNote:
    return TensorNote(
        id=number,
        dtype=dtype_name(tensor),
        shape=list(tensor.shape),
        absmax=extent.absmax if extent else None,
        num_nan=extent.num_nan if extent else 0,
        num_posinf=extent.num_posinf if extent else 0,
        num_neginf=extent.num_neginf if extent else 0,
    )


def _unmeasured(note: TensorNote, bad: Bad) -> TensorNote:
    """An operand that was overwritten before it could be counted: at least one of its elements is known to have been bad."""
    return replace(
        note, num_nan=int(bad.kind == "nan"), num_posinf=int(bad.kind == "inf"), num_neginf=int(bad.kind == "-inf")
    )


OPERATOR_CAPSULES = "capsules of operators outside of modules"
MOST_KEPT = 8
"""Operators of one run that are kept."""


class KeptOperators:
    """Leaves capsules of failing operators beside the trace, until it is known which of them is what is found.

    Args:
        session: of the process.
        limit: bytes that a capsule may take.
    """

    def __init__(self, session: Session, limit: int) -> None:
        self._session = session
        self._limit = limit
        self._known: set[Any] = set()

    def made_bad(self, ran: Ran) -> None:
        """An operator has made something that is not finite."""
        self._keep(ran.func, ran.arguments, None, ran.source, ran.results if ran.node is not None else ())

    def rejected(self, func: Any, arguments: Arguments, error: BaseException) -> None:
        """An operator has raised."""
        line = line_of(sys._getframe(4))
        self._keep(func, arguments, error, None if line is None else line.source, ())

    def _keep(
        self,
        func: Any,
        arguments: Arguments,
        error: BaseException | None,
        source: str | None,
        gradients: Sequence[Tensor],
    ) -> None:
        key = (str(func), source)
        size = sum(tensor.numel() for tensor in tensors_of(arguments))
        if key in self._known or len(self._known) >= MOST_KEPT or size > REPLAYED or func.namespace != "aten":
            return
        self._known.add(key)
        from dtypedoctor.instrument.capsule import operator_capsule  # only now: most programs need none

        with self._session.position.mute():
            found = operator_capsule(func, *arguments, error, self._limit)
        if found is None or "why" in found[0]:
            return
        description, data = found
        description["operator"] = {"op": str(func), "source": source, "backward": bool(gradients)}
        name = f"operator-{len(self._known)}"
        self._session.writer.write_beside(f"{name}.safetensors", data)
        self._session.writer.write_beside(f"{name}.json", to_json(description).encode("utf-8"))
