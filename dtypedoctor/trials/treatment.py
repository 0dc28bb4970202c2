"""The whole treatment of a scenario: before, diagnosis, a closer look, trials, reference."""

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dtypedoctor.analysis import analysis_of, ending_of
from dtypedoctor.diagnosis.compile_only import eager_window
from dtypedoctor.diagnosis.distributed import across_ranks
from dtypedoctor.diagnosis.finding import Finding, Severity
from dtypedoctor.diagnosis.window import shows_failure, suspicious_windows
from dtypedoctor.errors import DoctorError, UsageError
from dtypedoctor.runner.launch import Run
from dtypedoctor.scenario.model import Scenario
from dtypedoctor.scenario.request import Request, Window
from dtypedoctor.trace.reader import Trace
from dtypedoctor.trials.caught import said_of_caught, with_caught
from dtypedoctor.trials.conditions import weighed
from dtypedoctor.trials.judge import Yardstick, judge, not_tried
from dtypedoctor.trials.observer import compare_unwatched
from dtypedoctor.trials.preflight import check_checkpoints, joined
from dtypedoctor.trials.ranks import led, rank_of, ranks_of
from dtypedoctor.trials.references import float32_twin, healthy_reference, is_script
from dtypedoctor.trials.remedies import Remedy, remedies
from dtypedoctor.trials.results import Observer, RunSummary, Trial
from dtypedoctor.trials.second_run import another_way, unconfirmed
from dtypedoctor.trials.settle import settled
from dtypedoctor.trials.spawned import led_by_spawned, said_of_spawned
from dtypedoctor.trials.summary import summarise

RunRequest = Callable[[str, Request], Run]
"""Runs a request under a label that is unique within the treatment, e.g. ``before`` or ``remedy-bfloat16``."""


WATCHED_LIVE = "the program was watched while it ran, and is not run again from here (`dtypedoctor exec` does that)"
STOPPED = "the second run was stopped before its end"
ENDED = "a run before it was stopped from outside"
NOT_MADE = "the second run could not be made"
NOT_SEEN_AGAIN = "the failure did not come back in a second run, so no op trace shows it"
MAX_CLOSER_LOOKS = 2
"""Runs with the op trace on; each costs about as much as the first run."""
NOT_COMPARED = Observer(bitwise_equal=None, reason="the script was not run unwatched; --certify does that")


@dataclass(frozen=True, slots=True, kw_only=True)
class Treatment:
    """Everything that was found out about a scenario.

    Attributes:
        before: the untreated run.
        closer: the second look at the same failure with the op trace on, if there was anything to look at.
        no_closer: why there is no second look, where there is none.
        diagnosed: the trace that the findings come from (the closer look's where there is one).
        complete: whether remedies were to be tried, so that the scenario's expectation can be judged.
        refusals: the runs after the first that could not be made, and why.
    """

    scenario: Scenario
    before: Run
    before_summary: RunSummary
    closer: Run | None
    no_closer: str
    diagnosed: Trace
    findings: tuple[Finding, ...]
    observer: Observer
    reference: Run | None
    reference_summary: RunSummary | None
    trials: tuple[Trial, ...]
    complete: bool
    refusals: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How far a treatment goes.

    Attributes:
        closer: look at a failure again with the op trace on.
        certify: run once more unwatched, and compare.
        remedies: try what is proposed, and compare with the reference; False stops after the diagnosis.
        only: ids of the remedies that may be tried; the others are reported as not tried. None allows all.
    """

    closer: bool = True
    certify: bool = True
    remedies: bool = True
    only: frozenset[str] | None = None


def treat(scenario: Scenario, run: RunRequest, plan: Plan | None = None) -> Treatment:
    """Runs ``scenario``, explains it, tries what may cure it and compares with the reference.

    Args:
        scenario: what to run.
        run: runs one request.
        plan: how far to go; everything if left out.

    Raises:
        UsageError: the scenario cannot be run at all. Once it has been run, nothing that comes later raises: what cannot be
            run any more (the disk is full, the script is gone) stands in the treatment's ``refusals``.
    """
    plan = plan or Plan()
    remedies = plan.remedies
    static = check_checkpoints(scenario)
    run = led_by_spawned(led(_judging_caught(run)))
    before = _first(run, Request(scenario=scenario, witness=plan.certify))
    later = _Later(run, before)
    closer, no_closer = _look_closer(scenario, before, later, plan)
    doubt, second = no_closer, later.last if no_closer == NOT_SEEN_AGAIN else None
    if closer is not None and (doubt := another_way(before, closer)):
        closer, second, no_closer = None, closer, f"a second run went another way: {doubt}"
    diagnosed = closer.trace if closer is not None else before.trace
    seen = closer if closer is not None else before
    told = said_of_caught(analysis_of(diagnosed).findings, diagnosed)
    findings = said_of_spawned(across_ranks(joined(told, static), ranks_of(seen), rank_of(seen)), seen)
    observer = _certificate(scenario, before, later) if plan.certify else NOT_COMPARED
    hung = before.exit.timed_out  # so would every other run of it
    failed = bool(findings) or (not ending_of(before).completed and not hung)
    reference = _compared_run("reference", healthy_reference(scenario), later) if remedies and failed else None
    twin = _compared_run("float32-twin", float32_twin(scenario), later) if remedies and failed else None
    exact = twin.trace if twin is not None else None
    before_summary = summarise("before", before, scenario, exact)
    reference_summary = summarise("reference", reference, scenario, exact) if reference is not None else None
    trials: tuple[Trial, ...] = ()
    if remedies:
        yardstick = Yardstick(
            before=before_summary,
            findings=findings,
            reference=(reference_summary, reference.trace) if reference and reference_summary else None,
            twin=exact,
            raised=analysis_of(before.trace).raised,
            failed=before.trace if failed else None,
        )
        trials = tuple(_try(r, scenario, later, yardstick, plan) for r in _proposed(scenario, findings, failed=failed))
    findings = weighed(settled(findings, trials), trials)
    return Treatment(
        scenario=scenario,
        before=before,
        before_summary=before_summary,
        closer=closer,
        no_closer=no_closer,
        diagnosed=diagnosed,
        findings=findings if second is None else unconfirmed(findings, second.trace, doubt),
        observer=observer,
        reference=reference,
        reference_summary=reference_summary,
        trials=trials,
        complete=remedies and plan.only is None,
        refusals=tuple(later.refusals),
    )


def _judging_caught(run: RunRequest) -> RunRequest:
    """``run``, with exceptions that the program caught and did not get past as what it raised."""
    return lambda label, request: with_caught(run(label, request))


def _first(run: RunRequest, request: Request) -> Run:
    try:
        return run("before", request)
    except OSError as error:
        raise UsageError(
            f"it cannot be run here: {error.strerror or error}", "Free some space, or give another --out."
        ) from error


class _Later:
    """Makes the runs that follow the first. That one cannot be made is never raised: the first is over, and is reported."""

    def __init__(self, run: RunRequest, first: Run) -> None:
        self._run = run
        self._ended = _was_asked_to_end(first)
        self.refusals: list[str] = []
        self.last: Run | None = None

    def __call__(self, label: str, request: Request) -> Run | None:
        """The run; where it cannot be made None, and the reason is noted."""
        made = self.attempt(label, request)
        if isinstance(made, Run):
            return made
        self.refusals.append(f"the run {label!r} could not be made: {made}")
        return None

    def attempt(self, label: str, request: Request) -> Run | str:
        """The run, or why it cannot be made, or not be recorded to its end: that a failure is missing in it says nothing."""
        if self._ended:
            return ENDED
        try:
            made = self.last = self._run(label, request)
        except DoctorError as error:
            return error.message
        except OSError as error:
            return error.strerror or str(error)
        self._ended = _was_asked_to_end(made)
        return made if made.trace.stopped is None else os.strerror(made.trace.stopped.errno)


def _certificate(scenario: Scenario, before: Run, run: _Later) -> Observer:
    if before.exit.timed_out:
        return Observer(bitwise_equal=None, reason="the run was stopped at its time limit, so it was not run again")
    request = Request(scenario=scenario, watch=False, repeats="before", witness=True)
    unwatched = run("unwatched", request)
    if unwatched is None:
        return Observer(bitwise_equal=None, reason="the run without the watch could not be made")
    return compare_unwatched(before, unwatched)


def examine(scenario: Scenario, run: Run) -> Treatment:
    """Diagnoses a run that is over and cannot be done again from here.

    Args:
        scenario: stands for the program that was watched.
        run: what was watched of it.
    """
    run = with_caught(run)
    findings = across_ranks(said_of_caught(analysis_of(run.trace).findings, run.trace), ranks_of(run), rank_of(run))
    return Treatment(
        scenario=scenario,
        before=run,
        before_summary=summarise("before", run, scenario),
        closer=None,
        no_closer=WATCHED_LIVE,
        diagnosed=run.trace,
        findings=findings,
        observer=Observer(bitwise_equal=None, reason=WATCHED_LIVE),
        reference=None,
        reference_summary=None,
        trials=tuple(not_tried(remedy, WATCHED_LIVE) for remedy in _proposed(scenario, findings, failed=True)),
        complete=False,
    )


def _look_closer(scenario: Scenario, before: Run, run: _Later, plan: Plan) -> tuple[Run | None, str]:
    """The same run again with the op trace on where the first one failed, or why there is none.

    Where the op trace shows that what looked like a failure got nowhere, the next one is looked at as well.
    """
    if not plan.closer:
        return None, "a second run was not wanted"
    if _was_stopped(before):
        return None, "a run that was stopped is not repeated"
    windows: list[Window] = []
    closer = before
    while len(windows) < MAX_CLOSER_LOOKS and (unsettled := suspicious_windows(closer.trace)):
        windows.append(unsettled[0])
        label = "closer" if closer is before else f"closer-{len(windows)}"
        looked = run(label, Request(scenario=scenario, windows=windows, repeats="before"))
        if looked is None:
            return (None, NOT_MADE) if closer is before else (closer, "")
        closer = looked
        if _was_stopped(closer):
            return None, STOPPED
        if not shows_failure(closer.trace):
            compiled = _look_at_compiled(scenario, before, run) if len(windows) < MAX_CLOSER_LOOKS else None
            return compiled, "" if compiled is not None else NOT_SEEN_AGAIN
    if closer is before:
        return None, "nothing pointed to a moment at which to look closer"
    return closer, ""


def _was_stopped(run: Run) -> bool:
    """Whether somebody, or the time limit, has ended it from outside."""
    return run.exit.timed_out or _was_asked_to_end(run)


def _was_asked_to_end(run: Run) -> bool:
    """Whether somebody wants it all to end, so that nothing more is to be run."""
    return bool(run.exit.asked_to_end) or -run.exit.code in (signal.SIGINT, signal.SIGTERM)


def _look_at_compiled(scenario: Scenario, before: Run, run: _Later) -> Run | None:
    """A failure that went away with the op trace may have been the compiler's: the call is made compiled and in eager mode."""
    window = eager_window(before.trace, analysis_of(before.trace).incidents)
    if window is None:
        return None
    closer = run("closer-eager", Request(scenario=scenario, windows=[window], repeats="before"))
    return closer if closer is not None and shows_failure(closer.trace) else None


def _compared_run(label: str, scenario: Scenario | None, run: _Later) -> Run | None:
    return run(label, Request(scenario=scenario)) if scenario is not None else None


def _proposed(scenario: Scenario, findings: tuple[Finding, ...], *, failed: bool) -> Iterator[Remedy]:
    """What the findings propose, then what the scenario asks for; each once."""
    wanted = [r for f in findings if f.severity is not Severity.INFO for r in f.remedies]
    wanted += scenario.remedies
    if failed:
        wanted += [*scenario.expect.cured_by, *scenario.expect.not_cured_by]
    known = remedies()
    for name in dict.fromkeys(wanted):
        if name in known:
            yield known[name]


def _try(remedy: Remedy, scenario: Scenario, run: _Later, yardstick: Yardstick, plan: Plan) -> Trial:
    changed = remedy.change(scenario)
    reason = _why_not(remedy, scenario, changed, plan)
    condition = changed.conditions != scenario.conditions
    if reason:
        return not_tried(remedy, reason, condition=condition)
    tried = run.attempt(f"remedy-{remedy.id}", Request(scenario=changed, repeats="before"))
    if isinstance(tried, str):  # what can be run untreated may still not be possible with the remedy
        return not_tried(remedy, tried, condition=condition)
    return judge(remedy, changed, tried, yardstick)


def _why_not(remedy: Remedy, scenario: Scenario, changed: Scenario, plan: Plan) -> str:
    """Why the remedy is not to be tried; empty if it is."""
    if is_script(scenario) and changed.steps == scenario.steps and changed != scenario:
        if plan.only is None or remedy.id in plan.only:
            return ""
        use = (
            ", which shows whether the failure needs what it takes away"
            if changed.conditions != scenario.conditions
            else ""
        )
        return f"not asked for: --try {remedy.id} runs the script again with it switched on{use}"
    if is_script(scenario):
        return "only the script itself can do that: it is not switched on from outside"
    return "" if changed != scenario else "it would change nothing in this scenario"
