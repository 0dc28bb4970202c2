"""Which of the non-finite values that the watch has seen are failures, and which reach nothing.

A mask of ``-inf``, a running minimum that starts at ``inf``, an embedding row nobody looks up, or the gradients of a step
that the loss scaler skips are not finite and are nobody's fault. A value matters where it gets to a loss, a gradient that is
used, a parameter, the result of a call that is not trained on, or a sampler that rejects it.

Outside of modules the sentinel (``instrument/bad_values.py``) says which values it saw get to a number that the program reads, to a
test or to the end of the program. An infinity that was asked for by name is no failure there, nor is a value that the program
tests for and replaces.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod

from dtypedoctor.diagnosis.ops import (
    OpGraph,
    all_finite,
    ancestry,
    getting_through,
    graph_of,
    has_nan,
    last_bad_before,
    nonfinite,
)
from dtypedoctor.diagnosis.wording import OF_NO_TENSOR, at_line, is_own_statement, own_line, type_of
from dtypedoctor.dtypes import DTYPES, parts_of
from dtypedoctor.trace.events import Caught, Observed, Op, Raised, Sample, ScalerState, Site
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.records.execution import ComputedInstead, NonfiniteReached, TestPassed

ENDS = {
    "item": "is read as a number",
    "guard": "is tested for",
    "numbers": "leaves torch as numbers",
    "saved": "is saved, or sent to another process,",
    "alive": "is left at the end of the program",
    "unused": "is computed and never used",
}
"""Where a value can get to besides losses, gradients and modules, and how that is said."""
LEAVING = frozenset({"numbers", "saved"})
"""Ends at which all of a tensor is read, and nothing is known of what becomes of it."""
_TESTS = frozenset({"guard", "asserted"})
_AFTER_A_TEST = LEAVING | {"alive", "unused"}


@dataclass(frozen=True, slots=True)
class Reached:
    """A value that got somewhere. ``seen`` is what the sentinel saw of it."""

    seen: Observed[NonfiniteReached]

    @property
    def got(self) -> str:
        """Where it got to, in words."""
        where = at_line(self.source)
        return f"{ENDS[self.seen.what.what]}{where}"

    @property
    def source(self) -> str | None:
        """The line that reads it."""
        return self.seen.what.source


def reached(trace: Trace) -> Iterator[Reached]:
    """The values that got to an end that counts, in order."""
    graph, everything = graph_of(trace), _everything_reached(trace)
    tested = {seen.what.id for seen in everything if seen.what.what in _TESTS}
    trained = max((sample.n for sample in _finite_losses(trace)), default=-1)
    for seen in everything:
        # The program tests for it: that it leaves torch, or is still there at the end, is meant then, or the training goes on from finite losses
        end = seen.what.what
        is_meant = seen.what.id in tested if end in _AFTER_A_TEST else end == "guard" and trained > seen.n
        if end in ENDS and not is_meant and _is_failure(graph, seen):
            yield Reached(seen)


def _finite_losses(trace: Trace) -> Iterator[Sample]:
    return (sample for sample, site in trace.measured() if sample.finite and site.kind == "loss")


def is_expected(trace: Trace, n: int) -> bool:
    """Whether record ``n`` was written in a test that expects inf or NaN, or an exception, and passes."""
    return any(since < n < end for since, end in trace.once(_expected))


def _expected(trace: Trace) -> tuple[tuple[int, int], ...]:
    """The first and last records of tests, and parts of tests, that expect what is not finite or have asserted it."""
    accepted = [seen.n for seen in trace.observed(NonfiniteReached) if seen.what.what == "asserted"]
    return tuple(
        (part.what.since, part.n)
        for part in trace.observed(TestPassed)
        if part.what.expects or any(part.what.since < n < part.n for n in accepted)
    )


def _everything_reached(trace: Trace) -> list[Observed[NonfiniteReached]]:
    """What reached an end; an assertion that has ended the program, or a test, has not accepted it, and is a guard."""
    ended = [trace.last(Raised), *(caught for caught in trace.all(Caught) if caught.ending)]
    failed = {own_line(error) for error in ended if error is not None and error.type == "AssertionError"}
    everything = list(trace.observed(NonfiniteReached))
    for number, seen in enumerate(everything):
        if seen.what.what == "asserted" and seen.what.source in failed:
            everything[number] = replace(seen, what=replace(seen.what, what="guard"))
    return everything


def _is_failure(graph: OpGraph, seen: Observed[NonfiniteReached]) -> bool:
    """Whether a value is wrong where it got to; of one that no op is known to have made, only NaN that is read as a number."""
    last, end = behind(graph, seen), seen.what.what
    skipped = {state.step for state in graph.trace.all(ScalerState) if state.skipped}
    is_read = end == "item" and seen.step not in skipped
    if last is None:
        return is_read and seen.what.value == "nan"
    if is_expected(graph.trace, last.n):
        return False

    # A program that tests for 0/0, or computes with it no more, and goes on to its end has meant it, where half precision has not led there;
    # of single numbers in the code it asks what a dtype holds
    raised = graph.trace.last(Raised)
    goes_on = raised is None or (end == "guard" and raised.n < seen.n)  # it has caught what was raised before it tests
    is_idle = goes_on and end in ("guard", "unused")
    if is_idle and (not _saw_half(graph, last) or _is_undefined(graph, last) or _is_of_numbers(graph, last)):
        return False
    # the logarithm of 0 is an infinity in any dtype: a table that is printed, or saved, has it as what it is
    is_exact = seen.what.value in ("inf", "-inf") and not _saw_half(graph, last) and _is_undefined(graph, last)
    if goes_on and end in LEAVING and is_exact:
        return False
    if end == "guard" and goes_on and _was_computed_instead(graph, seen, last):
        return False
    if (
        end in _AFTER_A_TEST
        and _is_undefined(graph, last)
        and (_was_asked(graph.trace, seen) or _is_of_nothing(graph, last) or _is_left_out(graph, last))
    ):
        return False

    found = ancestry(graph, last)
    if not found.computed:
        if found.given and last.step in skipped:
            return False  # of gradients, and the scaler has found it
        if not found.nan_makers:
            return is_read and any(has_nan(tensor) for _, tensor in found.given)
        if seen.what.value != "nan":
            return False
    return end == "item" or end in LEAVING or not _is_replaced(graph, last)


def _is_undefined(graph: OpGraph, last: Op) -> bool:
    """Whether nothing behind ``last`` has a finite result in float32: 0/0 says that there is no value, and says it in any dtype."""
    makers = _makers(graph, last)
    return bool(makers) and not any(map(graph.is_finite_in_float32, makers))


def _is_of_nothing(graph: OpGraph, last: Op) -> bool:
    """Whether the NaN behind ``last`` are means of tensors without elements, which computes nothing that could be wrong."""
    return all(op.inputs and all(0 in tensor.shape for tensor in op.inputs) for op in _makers(graph, last))


def _is_of_numbers(graph: OpGraph, last: Op) -> bool:
    """Whether what is behind ``last`` was computed from single numbers in the code alone."""
    makers = _makers(graph, last)
    programs = [graph.replay(op, "float32-program") for op in makers]
    return bool(makers) and all(program is not None and program.of_numbers for program in programs)


def _makers(graph: OpGraph, last: Op) -> list[Op]:
    found = ancestry(graph, last)
    return [*found.computed, *found.nan_makers]


def _was_computed_instead(graph: OpGraph, seen: Observed[NonfiniteReached], last: Op) -> bool:
    """Whether the program has computed again in float32 what made the value, because its test has found it."""
    instead = {one.what.op for one in graph.trace.observed(ComputedInstead) if one.what.id == seen.what.id}
    return any(op.op in instead for op in _makers(graph, last))


def _was_asked(trace: Trace, seen: Observed[NonfiniteReached]) -> bool:
    """Whether an operator has asked before which elements are finite."""
    asked = (other for other in trace.observed(NonfiniteReached) if other.what.what == "asked" and other.n < seen.n)
    return any(other.what.id == seen.what.id for other in asked)


def _saw_half(graph: OpGraph, last: Op) -> bool:
    """Whether what made the value behind ``last`` used or made less than float32, or what had been computed from that: then a float32 program is known of it.

    Where nothing is known to have made it, any op before counts.
    """
    makers = _makers(graph, last)
    if any(graph.replay(op, "float32-program") is not None for op in makers):
        return True
    ops = makers or [op for op in graph.ops if op.n <= last.n]
    tensors = (tensor for op in ops for tensor in (*op.inputs, *op.outputs))
    return any(DTYPES[parts_of(t.dtype)].bits < DTYPES["float32"].bits for t in tensors if parts_of(t.dtype) in DTYPES)


def behind(graph: OpGraph, seen: Observed[NonfiniteReached]) -> Op | None:
    """The op that made what was seen; None where it is not known."""
    return graph.producer_of(seen.what.id)


def links(trace: Trace, numbers: Collection[int], call: int) -> Iterator[Observed[NonfiniteReached]]:
    """What the sentinel has seen of the losses and gradients with these numbers of samples, and of what went into a module call."""
    for seen in trace.observed(NonfiniteReached):
        what = seen.what.what
        if (what in ("loss", "gradient") and seen.what.sample in numbers) or (
            what == "call" and seen.call == call and seen.n < min(numbers)
        ):
            yield seen


def _is_left_out(graph: OpGraph, last: Op) -> bool:
    """Whether NaN, or what it is a part of, also goes into an operator that computes finite numbers, with the other elements: as ``nanmean`` does."""
    users = (user for op in (last, *_makers(graph, last)) for tensor in op.outputs for user in graph.consumers(tensor))
    return any(user.outputs and all(t.dtype in DTYPES and t.finite for t in user.outputs) for user in users)


def _is_replaced(graph: OpGraph, last: Op) -> bool:
    """Whether the value, or one that it was computed from, also went into an op whose results are all finite."""
    seen: set[int] = set()
    waiting = [last]
    while waiting:
        op = waiting.pop()
        if op.n in seen:
            continue
        seen.add(op.n)
        users = (user for tensor in nonfinite(op.outputs) for user in graph.consumers(tensor))
        if any(all_finite(user.outputs) for user in users):
            return True
        waiting += graph.makers(nonfinite(op.inputs))
    return False


def _selected_away(graph: OpGraph) -> dict[int, bool]:
    """The calls that have returned something not finite, and whether nothing comes of it: of rows of padding, say, that the caller leaves out."""
    seen = [seen for seen in graph.trace.observed(NonfiniteReached) if seen.what.what not in ("asked", "asserted")]
    ends = {one.what.id for one in seen if one.what.what != "returned"}
    calls: dict[int, bool] = {}
    for returned in (one for one in seen if one.what.what == "returned"):
        is_used = bool(graph.users_of(returned.what.id))
        is_left = is_used and ends.isdisjoint(_followed(graph, returned.what.id))
        calls[returned.call] = calls.get(returned.call, True) and is_left
    return calls


def _followed(graph: OpGraph, begin: int) -> set[int]:
    """The numbers of the values that are not finite because that of ``begin`` is not, itself among them."""
    followed, waiting = set[int](), [begin]
    while waiting:
        number = waiting.pop()
        followed.add(number)
        for user in graph.users_of(number):
            if number in {note.id for note in getting_through(user)}:
                waiting += [note.id for note in nonfinite(user.outputs) if note.id not in followed]
    return followed


GRADIENTS = frozenset({"grad_output", "grad", "accumulated"})
MEASURED = GRADIENTS | {"output", "loss", "param"}
"""Kinds of sites that tell a story of their own; inputs of modules only decide who is to blame."""

ASSERTED = "device-side assert triggered"
"""What CUDA says of a sampler that refuses a value, and of an index out of range; other errors only advise such asserts."""

_REJECTED = re.compile(
    rf"(?<![\w./\\-])(nan|inf(?! checks)|infinity|infinities|non-?finite)(?![\w/\\-]|\.\w)|{ASSERTED}", re.IGNORECASE
)
"""What the messages speak of with which samplers and checks reject a value, which is no part of a path; on CUDA a sampler only asserts.

A gradient scaler that has nothing to check ("No inf checks were recorded") speaks of no value.
"""


def rejects_value(raised: Raised) -> bool:
    """Whether an exception may be about values that are not finite, by its type and its words: a reason to look for one, and no evidence by itself."""
    return not issubclass(type_of(raised), (*OF_NO_TENSOR, TypeError)) and _REJECTED.search(raised.message) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """Something not finite that matters.

    Attributes:
        sample, site: the first bad value of its call and phase; None where no module returned one.
        following: the other bad values of the same call and phase, in order.
        raised: the exception with which code outside of all modules refused it; only where there is no sample.
        reached: where a value got to that no module returned and no backward pass began from; only where there is no sample.
    """

    sample: Sample | None = None
    site: Site | None = None
    following: tuple[Sample, ...] = ()
    raised: Raised | None = None
    reached: Reached | None = None

    @property
    def samples(self) -> tuple[Sample, ...]:
        """Everything bad that was measured of it, in order."""
        return (self.sample, *self.following) if self.sample is not None else ()

    @property
    def n(self) -> int:
        """When it was seen."""
        return self._record.n

    @property
    def numbers(self) -> list[int]:
        """When each of its bad values was seen."""
        return [self.n, *(sample.n for sample in self.following)]

    @property
    def last_n(self) -> int:
        """When the last of its bad values was seen."""
        return self.numbers[-1]

    @property
    def step(self) -> int:
        """The training step it was seen in."""
        return self._record.step

    @property
    def call(self) -> int:
        """The outermost call it was seen in."""
        return self._record.call

    @property
    def phase(self) -> str:
        """The phase it was seen in."""
        if self.site is None:
            return self._record.phase if not isinstance(self._record, Sample) else ""
        return self.site.phase

    @property
    def kind(self) -> str:
        """The kind of the site, or ``raised`` or ``reached``."""
        if self.site is not None:
            return self.site.kind
        return "reached" if self.reached is not None else "raised"

    @property
    def _record(self) -> Sample | Raised | Observed[NonfiniteReached]:
        found = self.sample or self.raised or (self.reached.seen if self.reached is not None else None)
        assert found is not None  # one of the three is always given
        return found


def incidents(trace: Trace) -> tuple[Incident, ...]:
    """Everything non-finite that matters, earliest first, one for each call and phase."""
    return trace.once(_incidents)


def _incidents(trace: Trace) -> tuple[Incident, ...]:
    refused = _refused(trace)
    bad = [(sample, site) for sample, site in trace.measured() if not sample.finite and site.kind in MEASURED]
    everything = list(_Consequences(trace, bad, refused).that_matter())
    everything += (Incident(reached=value) for value in reached(trace))
    matter = [incident for incident in everything if not is_expected(trace, incident.n)]
    if not matter and refused is not None and _is_of_a_value(refused):
        return (Incident(raised=refused),)
    return tuple(sorted(matter, key=lambda incident: incident.n))


FAR, MASKED = 0.01, 0.5
"""Share of a dtype's largest number below which finite values are far from an overflow; and of the elements, which are infinite."""


def looks_like_a_mask(trace: Trace, incident: Incident) -> bool:
    """Whether modules output infinities for the most part, no NaN, and finite values far from an overflow, and nothing is known to have suffered.

    Scores that are masked for a sampler look so. What overflows as a whole leaves no finite value.
    """
    for sample in incident.samples:
        site = trace.sites[sample.site]
        if site.kind != "output" or sample.num_nan or site.dtype not in DTYPES:
            return False
        if sample.num_inf < MASKED * prod(site.shape) or not 0 < sample.absmax < FAR * DTYPES[site.dtype].max:
            return False
    return bool(incident.samples) and _refused(trace) is None


def _refused(trace: Trace) -> Raised | None:
    """The exception that ended the run, where it may be about values that are not finite."""
    raised = trace.last(Raised)
    return raised if raised is not None and rejects_value(raised) else None


def _is_of_a_value(refused: Raised) -> bool:
    """Whether the exception alone, without a bad value, says that there was one: it is not the program's own, and an index may be asserted anywhere but in a sampler."""
    if ASSERTED in refused.message:
        return refused.phase == "generate"
    if not refused.by_statement and issubclass(type_of(refused), (ArithmeticError, ValueError)):
        return False  # C code rejects a number, as int(float("inf")) does; of tensors torch raises RuntimeError
    return not is_own_statement(refused)


class _Consequences:
    """What becomes of the bad values of a trace."""

    def __init__(self, trace: Trace, bad: list[tuple[Sample, Site]], refused: Raised | None) -> None:
        self._trace = trace
        self._bad = bad
        self._refused = refused

        # For each step with something bad the gradients that its optimizer was given and when its backward passes began, and for each such call
        # the module that returned last: the outermost one
        self._used: dict[int, list[Sample]] = {sample.step: [] for sample, _ in bad}
        self._losses: dict[int, list[int]] = {sample.step: [] for sample, _ in bad}
        self._backward: dict[int, int] = {}
        self._results: dict[tuple[int, int], tuple[int, str]] = {}
        for sample, site in trace.measured():
            if sample.step not in self._used:
                continue
            if site.kind == "grad":
                self._used[sample.step].append(sample)
            elif site.kind == "loss":
                self._losses[sample.step].append(sample.n)
            elif site.kind == "output":
                self._results[sample.step, sample.call] = (site.root, site.fqn)
            if site.kind in GRADIENTS or site.kind == "loss":
                self._backward[sample.step] = sample.n

    def that_matter(self) -> Iterator[Incident]:
        """The bad values that matter, by call and phase."""
        groups: dict[tuple[int, int, str], list[tuple[Sample, Site]]] = {}
        for sample, site in self._bad:
            key = (sample.step, sample.call, site.phase)
            if key in groups or self._matters(sample, site):
                groups.setdefault(key, []).append((sample, site))
        for (sample, site), *rest in groups.values():
            yield Incident(sample=sample, site=site, following=tuple(later for later, _ in rest))

    def _matters(self, sample: Sample, site: Site) -> bool:
        if site.kind in GRADIENTS:
            # A gradient that a backward pass has left may have been mended when the optimizer gets it
            used = [gradient for gradient in self._used[sample.step] if gradient.n > sample.n]
            is_mended = site.kind == "accumulated" and bool(used) and all(gradient.finite for gradient in used)
            return not is_mended and not self._is_thrown_away(sample)
        if site.kind in ("loss", "param"):
            return True
        later = [(other, where) for other, where in self._bad if other.n > sample.n and other.step == sample.step]
        if self._backward.get(sample.step, -1) > sample.n:  # the step trains on it
            return any(
                where.kind in ("loss", "param") or (where.kind in GRADIENTS and not self._is_thrown_away(other))
                for other, where in later
            )
        # Something bad is in what the outermost call returns, or was refused
        result = self._results.get((sample.step, sample.call))
        is_returned = any(
            other.call == sample.call and where.kind == "output" and (where.root, where.fqn) == result
            for other, where in [(sample, site), *later]
        )
        is_returned = is_returned and (site.root, site.fqn) not in self._selected_away
        return is_returned or (self._refused is not None and self._refused.n > sample.n)

    def _is_thrown_away(self, sample: Sample) -> bool:
        """Whether no optimizer gets what is wrong with a gradient: a scaler skips the step, or the program's own code does,
        which then goes through another backward pass before a step whose gradients are all finite. A step that the program left, by an
        exception about something else, before its scaler had looked at the gradients, is one that nothing has used either."""
        if sample.step in self._healed or sample.step == self._left_to_the_scaler:
            return True
        used = self._used[sample.step]
        if not used and sample.n < self._finite_from:
            return True
        begun = any(sample.n < n < used[0].n for n in self._losses[sample.step]) if used else False
        return begun and all(gradient.finite for gradient in used)

    @cached_property
    def _finite_from(self) -> int:
        """The record from which on all gradients are finite, in a program that tests them and updates the weights by itself; -1 where it does not test them,
        or some stay bad. Had it used bad ones, its weights, and so the gradients of what follows, would be bad, too."""
        if not self._tests_gradients():
            return -1
        gradients = [sample for sample, site in self._trace.measured() if site.kind in GRADIENTS]
        last_bad = max((sample.n for sample in gradients if not sample.finite), default=-1)
        loss = next((sample.n for sample in _finite_losses(self._trace) if sample.n > last_bad), -1)
        return loss if gradients and gradients[-1].n > loss else -1

    def _tests_gradients(self) -> bool:
        graph = graph_of(self._trace)
        tested = (seen for seen in self._trace.observed(NonfiniteReached) if seen.what.what == "guard")
        tests = (last for seen in tested if (last := behind(graph, seen)) is not None)
        return any(tensor.origin == "gradient" for last in tests for _, tensor in ancestry(graph, last).given)

    @cached_property
    def _selected_away(self) -> frozenset[tuple[int, str]]:
        """The modules of whose bad values the caller uses none, as far as it was followed, and which are no fault of a dtype."""
        graph = graph_of(self._trace)
        calls = _selected_away(graph)
        used: set[tuple[int, str]] = set()
        left_out: set[tuple[int, str]] = set()
        for sample, site in self._bad:
            if site.kind != "output" or sample.call not in calls:
                continue
            # Not each call was made again under the op trace; those of one module that were speak for the others
            last = last_bad_before(graph, sample.n, partial(_ran_in, sample.call))
            overflows = last is not None and any(map(graph.is_finite_in_float32, _makers(graph, last)))
            if overflows or not calls[sample.call]:
                used.add((site.root, site.fqn))
            elif last is not None:
                left_out.add((site.root, site.fqn))
        return frozenset(left_out - used)

    @cached_property
    def _left_to_the_scaler(self) -> int | None:
        """The step whose gradients a loss scaler was still to look at when the program raised something that is not about values."""
        raised, states = self._trace.last(Raised), self._trace.all(ScalerState)
        if raised is None or self._refused is not None or not states or states[-1].step >= raised.step:
            return None
        stepped = any(s.step == raised.step and site.kind == "param" for s, site in self._trace.measured())
        return None if stepped else raised.step

    @cached_property
    def _healed(self) -> frozenset[int]:
        """Steps that a loss scaler skipped before it found a scale that fits."""
        states = self._trace.all(ScalerState)
        last_taken = {state.optimizer: state.n for state in states if not state.skipped}
        return frozenset(s.step for s in states if s.skipped and s.n < last_taken.get(s.optimizer, -1))


def _ran_in(call: int, op: Op) -> bool:
    return op.call == call and not op.sentinel


STUCK = 5
"""Steps skipped one after another that a scale which halves takes from 65,536 to 2,048."""
HOPELESS = 20
"""Steps skipped one after another after which halving has gone from 65,536 to less than 1."""


def unsettled(trace: Trace) -> tuple[ScalerState, ...]:
    """The last steps of an optimizer, all skipped, after which its loss scale will not find where the gradients fit; empty where each does.

    A scaler skips a step now and then to find out how large the scale may be. It fails where the scale hardly moves while steps are skipped, where it is 1 or less
    already, and where halving it has led nowhere.
    """
    by_optimizer: dict[int, list[ScalerState]] = {}
    for state in trace.all(ScalerState):
        skipped = by_optimizer.setdefault(state.optimizer, [])
        skipped.append(state) if state.skipped else skipped.clear()
    return next((tuple(skipped) for skipped in by_optimizer.values() if cannot_settle(skipped)), ())


def never_stepped(trace: Trace) -> tuple[ScalerState, ...]:
    """The steps of an optimizer, all of them skipped, in a run that is over: it has trained nothing. Empty where each has stepped, or was to step a few times only."""
    if trace.end is None:
        return ()
    by_optimizer: dict[int, list[ScalerState]] = {}
    for state in trace.all(ScalerState):
        by_optimizer.setdefault(state.optimizer, []).append(state)
    idle = (states for states in by_optimizer.values() if len(states) >= STUCK and all(one.skipped for one in states))
    return tuple(next(idle, ()))


def cannot_settle(skipped: Sequence[ScalerState]) -> bool:
    """Whether the scale of steps that were skipped one after another shows that no step will be taken."""
    if len(skipped) < STUCK:
        return False
    first, last = skipped[0].scale, skipped[-1].scale
    return len(skipped) >= HOPELESS or last > first / 2 or last <= 1.0


def same_call(trace: Trace, sample: Sample) -> list[tuple[Sample, Site]]:
    """The samples of module outputs (or gradients) in the call and phase of ``sample``, in execution order."""
    here = trace.sites[sample.site]
    return [
        (s, site)
        for s in trace.samples
        if s.call == sample.call and (site := trace.sites[s.site]).kind == here.kind and site.phase == here.phase
    ]
