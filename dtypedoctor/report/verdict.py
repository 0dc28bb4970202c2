"""The verdict on a run: its status and its headline, from what was measured. Whatever they claim is decided here."""

import errno
import os
from bisect import bisect
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields

from dtypedoctor.analysis import How, analysis_of, ended_at, ending_of
from dtypedoctor.diagnosis.distributed import not_recorded, size_of
from dtypedoctor.diagnosis.incidents import GRADIENTS, is_expected, looks_like_a_mask
from dtypedoctor.diagnosis.nonfinite_origin import doubt_in_words
from dtypedoctor.diagnosis.ops import all_finite, asked_for, makes_nan, nonfinite
from dtypedoctor.diagnosis.rule import Finding, Severity
from dtypedoctor.diagnosis.wording import ENOUGH, indexed
from dtypedoctor.examination.capsules import is_replay
from dtypedoctor.examination.processes import ranks_of
from dtypedoctor.examination.results import Treatment
from dtypedoctor.report.fixes import cured_sentence
from dtypedoctor.report.run_facts import MEASURED, NO_END, measured_share
from dtypedoctor.report.to_json import Status
from dtypedoctor.runner.run import Run
from dtypedoctor.text import counted, one_line
from dtypedoctor.trace.events import (
    COMPILED_OUTSIDE,
    END_OF_PROGRAM,
    FAILED_THERE,
    LOST_UPDATES,
    NO_PYTHON,
    NO_TORCH,
    NOT_HERE,
    NOT_SEEN,
    NOTHING_WATCHED,
    WORKED_ELSEWHERE,
    Became,
    Coverage,
    Flow,
    NotWatched,
    Op,
    ParameterNote,
    Sample,
    ScalerState,
    Site,
    Stopped,
)
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.records.execution import NonfiniteReached, OptimizerSteps, ParameterEnds

_COUNTED_AS = {"output": "module_calls", "grad": "gradients", "loss": "losses"}
"""What stands for the counts in a trace without them: it is older, or the process left without ending it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was measured of a run.

    Attributes:
        counts: for each kind of thing how many were measured, and how many ran.
        skipped: how many of those that ran were left out on purpose: ``--overhead-budget`` asks for that.
        bad: the first value that is not finite and that the code does not ask for, in words, whether it matters or not.
        expected: that first value stands where a test that passes expects it.
        by_scale: it is a gradient of a step that a loss scaler has skipped.
        asked_for: where all such values are asked for, as in a mask, the first of them in words. Everything measured is finite where both are empty.
        matters: the first one that reaches a loss, gradient, parameter or result, and that no op trace shows to be meant so, in
            words; empty where there is none.
        swallowed: an output of a module that was finite in float16 before and then was not, although no loss shows it, in words; empty where there
            is none.
    """

    counts: Mapping[str, tuple[int, int]]
    skipped: Mapping[str, int] = field(default_factory=dict)
    bad: str = ""
    expected: bool = False
    by_scale: bool = False
    asked_for: str = ""
    matters: str = ""
    swallowed: str = ""

    @property
    def nothing(self) -> bool:
        """Whether nothing at all was measured."""
        return not any(measured for measured, _ in self.counts.values())

    @property
    def ran(self) -> bool:
        """Whether anything ran that could have been measured."""
        return any(total for _, total in self.counts.values())

    def missing(self) -> Iterator[str]:
        """For each kind of which a relevant share was not measured, how much was, e.g. ``0 of 214 module calls``."""
        for name, (measured, total) in self.counts.items():
            due = total - self.skipped.get(name, 0)
            enough = due * ENOUGH if name != "operators" else min(due, 1)
            if measured < enough or (self.skipped.get(name) and name == "module_calls" and not measured):
                yield measured_share(name, measured, total)

    def left_out(self) -> Iterator[str]:
        """For each kind of which a relevant share was left out, how much was measured."""
        for name, (measured, total) in self.counts.items():
            if self.skipped.get(name) or measured < total * ENOUGH:
                yield measured_share(name, measured, total)


def measured_in(traces: Sequence[Trace], diagnosed: Trace | None = None) -> Measured:
    """What was measured of a run.

    Args:
        traces: those of its processes.
        diagnosed: the trace of a second run of one of them that its findings come from, where there is one.
    """
    total: Counter[str] = Counter()
    for trace in traces:
        total.update(_counts(trace))
    seen = [*traces, *([diagnosed] if diagnosed is not None and diagnosed not in traces else [])]
    judged = [diagnosed] if diagnosed is not None and len(traces) == 1 else seen
    return Measured(
        counts={name: (total[f"{name}_measured"], total[name] + total[f"{name}_skipped"]) for name in MEASURED},
        skipped={name: total[f"{name}_skipped"] for name in MEASURED},
        bad=next(filter(None, map(_first_bad, seen)), ""),
        expected=next((_is_expected(trace) for trace in seen if _first_bad(trace)), False),
        by_scale=next((_is_by_scale(trace) for trace in seen if _first_bad(trace)), False),
        asked_for=next(filter(None, map(_first_asked_for, seen)), ""),
        matters=next(filter(None, map(_first_that_matters, judged)), ""),
        swallowed=next(filter(None, (_first_swallowed(trace) for trace in traces if trace.steps_done)), ""),
    )


def _counts(trace: Trace) -> dict[str, int]:
    record = trace.last(Coverage)
    if record is not None:
        return {field.name: getattr(record, field.name) for field in fields(record)}
    found = Counter(_COUNTED_AS.get(trace.sites[sample.site].kind, "") for sample in trace.samples)
    for number, folded in (trace.folded.sites if trace.folded is not None else {}).items():
        found[_COUNTED_AS.get(trace.sites[number].kind if number in trace.sites else "", "")] += folded.count
    return {key: found[name] for name in MEASURED for key in (name, f"{name}_measured")}


def _first_bad(trace: Trace) -> str:
    """Names the first record that is not finite and that the code does not ask for; a gradient that a loss scaler has made so is one too."""
    analysis = analysis_of(trace)
    if analysis.first_bad is not None:
        sample, site = analysis.first_bad
        what = {"loss": "the loss", "param": "parameter "}.get(
            site.kind, "the gradient of " if site.kind in GRADIENTS else ""
        )
        name = "" if site.kind == "loss" else one_line(site.fqn or site.cls, 80)
        return f"{what}{name} in {trace.moment(sample.step)}"
    for metric in analysis.nonfinite_metrics:
        return f"{metric.nonfinite[0]} in step {metric.step}"
    recorded: set[int] = set()
    for op in trace.all(Op):
        # What an earlier record has made is named there, unless the code asks for it: then the first that computes NaN of it is.
        foreign = any(not t.finite and t.id not in recorded for t in op.inputs)
        makes = not asked_for(op) and nonfinite(op.outputs) and (all_finite(op.inputs) or makes_nan(op))
        if foreign or makes:
            return f"{op.op} at {one_line(op.source or 'an unknown line', 80)}"
        recorded.update(t.id for t in op.outputs)
    folded = trace.folded
    steps = (
        [t.first_nonfinite for t in (*folded.sites.values(), *folded.metrics.values())] if folded is not None else []
    )
    return next((f"a value of step {step}" for step in sorted(s for s in steps if s is not None)), "")


def _is_expected(trace: Trace) -> bool:
    first = analysis_of(trace).first_bad
    return first is not None and is_expected(trace, first[0].n)


def _is_by_scale(trace: Trace) -> bool:
    first = analysis_of(trace).first_bad
    skipped = {state.step for state in trace.all(ScalerState) if state.skipped}
    return first is not None and first[1].kind in GRADIENTS and first[0].step in skipped


def _first_asked_for(trace: Trace) -> str:
    """Names the first operator with inf or NaN among its operands and results; masks are made so on purpose."""
    for op in trace.all(Op):
        if nonfinite((*op.inputs, *op.outputs)):
            return f"{op.op} at {one_line(op.source or 'an unknown line', 80)}"
    reached = next(iter(trace.observed(NonfiniteReached)), None)
    return f"read at {one_line(reached.what.source or 'an unknown line', 80)}" if reached is not None else ""


def _first_that_matters(trace: Trace) -> str:
    incident = analysis_of(trace).unexplained
    if incident is not None:
        name = one_line(incident.site.fqn or incident.site.cls, 80) if incident.site is not None else "a value"
        when = f"{trace.moment(incident.step)} ({incident.phase})"
        if looks_like_a_mask(trace, incident):
            return f"{name} outputs inf and no NaN in {when}: masked scores look so, and so does a logarithm of 0; no op trace says which it is"
        return f"{name} in {when} {_UNEXPLAINED}"
    lost = next((metric for metric in analysis_of(trace).nonfinite_metrics if "loss" in metric.nonfinite), None)
    return f"the loss in step {lost.step} {_UNEXPLAINED}" if lost is not None else ""


_UNEXPLAINED = "is not finite, and no rule explains it"


_REPLACED = (
    "overflows float16 and was finite before; something replaces the inf or NaN before the loss, and what that does to the loss was not measured: train for "
    "more steps, or compute this module in bfloat16"
)


def _first_swallowed(trace: Trace) -> str:
    """The first output that overflows float16 while it is trained: a mask is infinite from the beginning."""
    skipped = {state.step for state in trace.all(ScalerState) if state.skipped}
    finite: set[int] = set()
    for sample, site in trace.measured():
        if (site.kind, site.dtype) != ("output", "float16") or sample.step in skipped:
            continue
        if sample.finite:
            finite.add(sample.site)
        elif sample.site in finite:
            return f"{one_line(site.fqn or site.cls, 80)} in {trace.moment(sample.step)}"
    return ""


_WHAT_TO_DO = {
    errno.EFBIG: "raise the process's file size limit (ulimit -f)",
    errno.ENOSPC: "set TMPDIR to a folder on a disk with more room",
    errno.EDQUOT: "set TMPDIR to a folder on a disk with more room",
}
"""What to do about a recording that stopped, by the number of the system's error."""

_KINDS = {"grad_output": "the gradient of", "grad": "the gradient of", "param": "the parameter", "loss": "the loss"}


def last_module(trace: Trace) -> str:
    """A half-sentence that names the module entered last, with its dtypes, and the first non-finite value."""
    where = _where(trace)
    if not where:
        return " before any module was entered"
    raised, before = analysis_of(trace).raised, ""
    if raised is not None:  # before something else has ended the process: on CUDA the one often leads to the other
        before = f"; {raised.type} was raised {trace.when(raised)}: {one_line(raised.message, 160)}"
    return f"; the last module entered was {where}{before}{_first_nonfinite(trace)}"


def missing_end(run: Run) -> str:
    """What a trace without an end record lacks."""
    trace = run.trace
    if trace.stopped is not None:
        return f"{NO_END}the recording stopped before it; the last module entered was {_where(trace) or 'none'}"
    there = (
        f"{counted(len(trace.samples), 'measurement')} up to {trace.moment(trace.samples[-1].step)}"
        if trace.samples
        else "no measurement"
    )
    where = _where(trace)
    last = (
        f"the module entered last was {where}: its work and what followed may be missing"
        if where
        else "no module had been entered"
    )
    return f"{NO_END}{_why(run)}; {there} could be read; {last}{_first_nonfinite(trace)}"


def _where(trace: Trace) -> str:
    """The module entered last, its dtypes, and when; empty before the first."""
    cursor = trace.cursor
    if cursor is None or cursor.site is None:
        return ""
    site = cursor.site
    name = one_line(indexed(site.fqn) or site.cls)
    return f"{name} ({_dtypes(trace, site)}) in {trace.moment(cursor.step)} ({site.phase})"


def _why(run: Run) -> str:
    became = run.trace.last(Became)
    if became is not None:
        return f"the script became another program, which was not measured: exec of {one_line(became.program, 120)}"
    if run.ended_by_program:
        return f"the program has ended spawned process {run.spawned}, as a pool does with its workers"
    if run.spawned is not None and not run.died:
        return f"spawned process {run.spawned} ended without Python's shutdown (os._exit or exec)"
    if run.foreign and not run.died:
        return "the script ended without Python's shutdown (os._exit or exec)"
    return "the process ended without writing an end record"


def _dtypes(trace: Trace, site: Site) -> str:
    """What went into and came out of the module when it was called before, else what it or its model holds."""
    flows = [flow for flow in trace.all(Flow) if (flow.root, flow.fqn) == (site.root, site.fqn)]
    if flows:
        return f"{_listed(flows[-1].inputs)} in, {_listed(flows[-1].outputs)} out"
    parameters = {note.name: note.dtype for note in trace.all(ParameterNote) if note.root == site.root}
    prefix = f"{site.fqn}." if site.fqn else ""
    own = [dtype for name, dtype in parameters.items() if name.startswith(prefix)]
    return f"holds {_listed(own)}" if own else f"in a model of {_listed(list(parameters.values()))}"


def _listed(dtypes: list[str]) -> str:
    return "+".join(dict.fromkeys(dtypes)) or "no tensor"


def _first_nonfinite(trace: Trace) -> str:
    found = analysis_of(trace).first_bad
    if found is None:
        return ""
    sample, site = found
    place = f"{_KINDS.get(site.kind, 'the output of')} {one_line(site.fqn or site.cls)} ({site.dtype})"
    return f"; the first non-finite value was in {place} in {trace.moment(sample.step)}"


_DELETED = "The program deleted the folder with the records of this run, so nothing is known of it: set TMPDIR to a folder that it does not empty."


def verdict(treatment: Treatment, measured: Measured) -> tuple[Status, str]:
    """The status of the baseline, and one sentence that says why. *Healthy* is said only of what was measured.

    Args:
        treatment: what was found out.
        measured: how much of the run was measured, and whether that was finite.
    """
    if treatment.before.deleted:
        return Status.UNKNOWN, _DELETED
    primary = treatment.findings[0] if treatment.findings else None
    found = primary is not None and primary.severity is not Severity.INFO
    if primary is not None and found:
        status = Status.WORKER_DIED if treatment.before.died else Status.FINDINGS
        fixed = cured_sentence(treatment.trials, here=is_replay(treatment.scenario))
        return status, f"{primary.summary}{fixed}{_rerun_differs(treatment)}"
    if treatment.before.died:
        where = last_module(treatment.before.trace)
        if treatment.before.rank is not None:
            who = _one_of(treatment.before).capitalize()
        else:
            who = "The script" if treatment.before.foreign else "The worker"
        return (
            Status.WORKER_DIED,
            f"{who} {treatment.before.last_words()}{where}.{_rerun_differs(treatment)}",
        )
    return _without_findings(treatment, measured, primary)


def _rerun_differs(treatment: Treatment) -> str:
    """A sentence for the headline where another run of the script went another way."""
    return f" The rerun went another way: {one_line(treatment.rerun_differs, 200)}." if treatment.rerun_differs else ""


def _without_findings(treatment: Treatment, measured: Measured, noted: Finding | None) -> tuple[Status, str]:
    trace, ending = treatment.before.trace, ending_of(treatment.before)
    if ending.how is How.INTERRUPTED:
        return Status.ERROR, f"Nothing found before the run was {ending.words}."
    if not ending.completed:
        before, lack = treatment.before, _lack(treatment, measured)
        unseen = f" ({lack})" if lack else ""
        ended = f"{_one_of(before)}: {ended_at(before)}" if before.rank is not None else ending.words
        return Status.ERROR, f"The run failed; nothing precision-related was found{unseen}: {ended}"
    if blind := next((note.why for note in trace.all(NotWatched) if note.what == NOTHING_WATCHED), ""):
        return Status.ERROR, f"Nothing was instrumented: {blind}."
    if measured.matters:
        return Status.UNKNOWN, _capital(f"{measured.matters}.")
    others = (run.trace for run in treatment.before.processes if run.trace is not trace and run.trace.usable)
    traces = [trace, *others]
    # A recording that stopped says so among the damage, too.
    if damaged := [one for one in traces if len(one.damage) > (one.stopped is not None)]:
        return _damaged(damaged[0], trace, measured)
    if stopped := [one.stopped for one in traces if one.stopped is not None]:
        return Status.UNKNOWN, f"Nothing found until {_stop(stopped)}: {_as_far_as_known(trace, measured)}."
    if lack := _lack(treatment, measured):
        return Status.UNKNOWN, f"{_capital(lack)}."
    if part := _part_recorded(treatment):
        return Status.UNKNOWN, f"Nothing found {part}; {_as_far_as_known(trace, measured)}."
    if doubt := _lost_at_the_end(traces) or doubt_in_words(trace):
        return Status.UNKNOWN, f"Nothing found, but {doubt}."
    if measured.swallowed:
        return Status.UNKNOWN, f"{_capital(measured.swallowed)} {_REPLACED}."
    if trace.end is not None and treatment.observer.bitwise_equal is False:
        return Status.UNKNOWN, f"Nothing found, but instrumentation changed the run: {treatment.observer.reason}."
    return Status.HEALTHY, _healthy(treatment, measured, noted)


def _lost_at_the_end(traces: Iterable[Trace]) -> str:
    """What a device did not say any more when the program was over; empty where everything was read."""
    notes = (note for trace in traces for note in trace.all(NotWatched))
    why = next((note.why for note in notes if note.what == END_OF_PROGRAM), "")
    return f"what was computed last could not be read: {one_line(why, 200)}" if why else ""


def _damaged(damaged: Trace, trace: Trace, measured: Measured) -> tuple[Status, str]:
    if measured.nothing:
        return Status.UNKNOWN, f"The trace cannot be read: {one_line('; '.join(damaged.damage), 200)}."
    known = _as_far_as_known(trace, measured).replace("everything measured", "everything that was read")
    return Status.ERROR, f"Nothing found, but only part of the trace is readable: {known}."


def _part_recorded(treatment: Treatment) -> str:
    """Where nothing was found, and which processes were not recorded; empty where all were."""
    before = treatment.before
    if before.exit.left:
        return f"in this process, but not measured: {one_line(before.exit.left, 200)}, left running by the script"
    if elsewhere := [note.what for note in before.trace.all(NotWatched) if note.why == WORKED_ELSEWHERE]:
        return f"in this process, but not measured: {one_line(', '.join(elsewhere), 200)}"
    ranks = ranks_of(before)
    if others := not_recorded(ranks):
        return f"on {counted(len(ranks), 'rank')} of {size_of(ranks)}; not recorded here: {others}"

    # What came after the last record is not known: os._exit leaves so, and exec, and a daemon's parent.
    for run in (before, *before.ranks):
        if run.trace.end is None and not run.ended_by_program:
            recorded_itself = run.others and run.trace.last(Became) is not None
            return "" if recorded_itself else f"before {_why(run)}"
    return ""


def _healthy(treatment: Treatment, measured: Measured, noted: Finding | None) -> str:
    trace = treatment.before.trace
    also = f" Note: {noted.summary}" if noted is not None else ""
    odd = list(filter(None, (_standstill(trace), _idle(trace), _jump(trace))))
    still = f", but {' and '.join(odd)}" if odd else ""
    verdict = (
        f"Nothing found{' that is wrong' if also else ''}: {_done(treatment)}, {_finiteness(measured, noted)}{still}."
    )
    return f"{verdict}{_unchecked(trace)}{also}"


def _unchecked(trace: Trace) -> str:
    failed = [note.what for note in trace.all(NotWatched) if note.why.startswith(FAILED_THERE)]
    why = {"Not checked, because dtypedoctor failed there": failed, "Not checked": list(_unseen(trace))}
    return "".join(f" {reason}: {one_line(', '.join(what), 200)}." for reason, what in why.items() if what)


def _unseen(trace: Trace) -> Iterator[str]:
    for note in trace.all(NotWatched):
        if note.why.startswith(NOT_SEEN) or note.what.startswith(LOST_UPDATES):
            yield note.what
        elif note.what == COMPILED_OUTSIDE and not trace.steps_done:
            yield "optimizer steps inside of compiled functions"


_LOSSES = 5
"""With how many before it a loss is compared."""
_JUMP = 1000.0


def _standstill(trace: Trace) -> str:
    """From when on every gradient that was measured is exactly 0: nothing is learned, for whatever reason."""
    largest: dict[int, float] = {}
    for sample, site in trace.measured():
        if site.kind == "grad":
            largest[sample.step] = max(largest.get(sample.step, 0.0), sample.absmax)
    learned = max((step for step, size in largest.items() if size), default=0)
    if not (still := [step for step in largest if step > learned]):
        return ""
    return f"every gradient is exactly 0{f' from {trace.moment(min(still))} on' if learned else ''}"


def _idle(trace: Trace) -> str:
    """That an optimizer has moved nothing of what is followed; one step or two of a warm-up are ordinary."""
    for ends in (seen.what for seen in trace.observed(ParameterEnds)):
        if ends.steps > 2 and ends.moved and not any(ends.moved):
            followed = counted(sum(ends.sampled), "element")
            return (
                f"none of {followed} of parameters that are followed has changed in {counted(ends.steps, 'step')} of an optimizer: "
                "no gradient reaches them, or its learning rate is 0"
            )
    return ""


def _jump(trace: Trace) -> str:
    """The first loss that is larger than all before it, and a thousand times as large as the last ones: several losses may take turns."""
    largest, last = 0.0, deque[float](maxlen=_LOSSES)
    for sample, site in trace.measured():
        if site.kind != "loss" or not sample.finite:
            continue
        before, loss = max(last, default=0.0), sample.absmax / _scale_of(trace, sample)
        if len(last) == _LOSSES and loss > largest and loss >= _JUMP * before > 0:
            return f"the loss jumps to {loss:.3g} in {trace.moment(sample.step)}, from at most {before:.3g}"
        largest = max(largest, loss)
        last.append(loss)
    return ""


def _scale_of(trace: Trace, loss: Sample) -> float:
    """What a loss was multiplied by before its backward pass; 1 without a gradient scaler."""
    states = trace.all(ScalerState)
    following = bisect(states, loss.n, key=lambda state: state.n)
    is_scaled = following < len(states) and states[following].step == loss.step
    return states[following].scale or 1.0 if is_scaled else 1.0


def _stop(stopped: Sequence[Stopped]) -> str:
    """When, and why, nothing more could be recorded, and what to do about it."""
    lost = sum(one.lost for one in stopped)
    number = stopped[0].errno
    advice = _WHAT_TO_DO.get(number, "")
    return f"recording stopped ({os.strerror(number)}), {lost:,} record(s) before the program ended{advice and f'; {advice}'}"


def _lack(treatment: Treatment, measured: Measured) -> str:
    """What keeps the run from being called healthy because it was not measured; empty where enough was."""
    if measured.nothing and not measured.ran:
        return _nothing_ran(treatment.before.trace)
    missing = list(measured.missing())
    return f"{' and '.join(missing)} could be measured" if missing else ""


def _nothing_ran(trace: Trace) -> str:
    notes = trace.all(NotWatched)
    if not trace.usable:
        what = "the trace holds no record"
    elif any(note.why == NO_TORCH for note in notes):
        what = "this process did not import torch"
    elif any(note.why == NO_PYTHON for note in notes):
        what = "no process could be recorded, because no Python that takes PYTHONPATH from the command was started"
    else:
        what = "no nn.Module ran in this process"
    elsewhere = " and ".join(one_line(note.what, 120) for note in notes if note.why in (NOT_HERE, WORKED_ELSEWHERE))
    return what + (f"; {elsewhere} not measured" if elsewhere else "")


def _finiteness(measured: Measured, noted: Finding | None = None) -> str:
    """What may be said of the values: the one place that says that they are finite."""
    if measured.bad and measured.expected:
        return f"inf or NaN ({measured.bad}) is what a test expects that passes"
    if measured.bad and measured.by_scale:
        return f"inf or NaN ({measured.bad}) is in a step that the gradient scaler skipped"
    if measured.bad:
        unexplained = "" if noted is not None else ", and no rule explains it"
        return f"inf or NaN ({measured.bad}) reaches no loss, used gradient or parameter{unexplained}"
    thinned = ", ".join(measured.left_out())
    everything = f"everything measured{thinned and f' ({thinned})'} is finite"
    return (
        f"{everything} but inf or NaN that the code asks for ({measured.asked_for})"
        if measured.asked_for
        else everything
    )


def _as_far_as_known(trace: Trace, measured: Measured) -> str:
    steps = _of_several(trace)
    done = _in_words(steps) if steps is not None else counted(trace.steps_done, "step")
    return f"{done} completed, {_finiteness(measured)}"


def _of_several(trace: Trace) -> OptimizerSteps | None:
    """The steps of several optimizers; None where there is only one, or where the end of the program did not tell them."""
    return next((seen.what for seen in trace.observed(OptimizerSteps)), None)


def _in_words(steps: OptimizerSteps) -> str:
    return f"{counted(steps.done, 'step')} of {steps.optimizers} optimizers"


def _one_of(run: Run) -> str:
    return f"rank {run.rank} of {size_of(ranks_of(run))}"


def _done(treatment: Treatment) -> str:
    """How far a run that came to its end got, in words."""
    before = treatment.before_summary
    if before.steps_planned:
        return f"{before.steps_completed}/{before.steps_planned} steps completed"
    steps = _of_several(treatment.before.trace)
    if steps is not None:
        skipped, done = steps.skipped, _in_words(steps)
    else:
        skipped = len({state.step for state in treatment.before.trace.all(ScalerState) if state.skipped})
        done = counted(before.steps_completed - skipped, "optimizer step")
    more = f" ({skipped} more skipped by the gradient scaler)" if skipped else ""
    return f"the script completed after {done}{more}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:] if text.startswith("the ") else text
