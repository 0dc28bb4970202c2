"""Everything that is tried on a scenario: static checks of its files, the baseline, the op trace of what failed, trials, reference."""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dtypedoctor.analysis import analysis_of, ending_of, said_of_caught, with_caught
from dtypedoctor.diagnosis import preflight
from dtypedoctor.diagnosis.advice import advise
from dtypedoctor.diagnosis.checkpoint import Intent, Subject, cached, is_checkpoint, noted, read_checkpoint
from dtypedoctor.diagnosis.distributed import across_ranks
from dtypedoctor.diagnosis.rule import Advice, Confidence, Excerpt, Finding, Severity
from dtypedoctor.diagnosis.wording import class_of_named, named_in
from dtypedoctor.errors import UsageError, WorkerDiedError
from dtypedoctor.foreign_files import reason
from dtypedoctor.runner.run import Run
from dtypedoctor.scenario.model import Model, Request, Scenario, ScenarioStep, Script, Unload
from dtypedoctor.trace.model import Trace
from dtypedoctor.trials.capsules import caught_in, is_replay, require_within_limits
from dtypedoctor.trials.judge import Baselines, apply_ablations, confirm_by_trials, judge, not_tried
from dtypedoctor.trials.plan import Plan, first_run
from dtypedoctor.trials.remedies import (
    ABLATIONS,
    Remedy,
    exec_option,
    float32_twin,
    healthy_reference,
    is_script,
    is_switched_on,
    remedy_named,
)
from dtypedoctor.trials.replayed import look_of
from dtypedoctor.trials.results import NOT_REQUESTED, Observer, Outcome, Treatment, Trial, run_of_fix
from dtypedoctor.trials.runs import (
    INTERRUPTED,
    LaterRuns,
    RunRequest,
    led,
    led_by_spawned,
    rank_of,
    ranks_of,
    said_of_spawned,
)
from dtypedoctor.trials.summary import compare_unwatched, summarise
from dtypedoctor.trials.tried_edits import judge_edits

if TYPE_CHECKING:
    from dtypedoctor.trials.bisection.results import Inside

WATCHED_LIVE = "the program was instrumented while it ran and is not run again from here (of a script, `dtypedoctor exec` does that; in a notebook, run it again with the edit or with dtypedoctor.apply)"
NOT_COMPARED = Observer(bitwise_equal=None, reason="the script was not run without instrumentation; --rerun does that")

CALL_NOT_COMPARED = Observer(
    bitwise_equal=None,
    reason="the call was not made without instrumentation; `dtypedoctor replay CAPSULE --script` prints what does that",
)


def treat(
    scenario: Scenario,
    run: RunRequest,
    plan: Plan | None = None,
    *,
    loads_checkpoints: bool = True,
) -> Treatment:
    """Runs ``scenario``, explains it, tries what may cure it and compares with the reference.

    Args:
        scenario: what to run.
        run: runs one request.
        plan: how far to go; everything if left out.
        loads_checkpoints: False where it has been run already and was given no folder then: one that is there now is its own output.

    Raises:
        UsageError: the scenario cannot be run at all. Once it has been run, nothing that comes later raises: what cannot be
            run any more (the disk is full, the script is gone) stands in the treatment's ``refusals``.
    """
    plan = plan or Plan()
    static = check_checkpoints(scenario) if loads_checkpoints else ()
    run = led_by_spawned(led(_judging_caught(run)))
    before = first_run(run, scenario, plan)
    require_within_limits(scenario, before)
    later = LaterRuns(run, before)
    look = look_of(before)
    findings = _found_in(before, static)
    capsule = caught_in(before, findings, plan.capsule_limit) if is_script(scenario) else None
    failed = _has_failed(before, findings)
    not_compared = CALL_NOT_COMPARED if is_replay(scenario) else NOT_COMPARED
    observer = _certificate(scenario, before, later) if plan.certify else not_compared
    references = _run_references(scenario, later) if plan.remedies and failed else _Compared()
    baselines = _baselines(scenario, before, findings, references, failed=failed)
    trials = _tried(scenario, later, baselines, plan) if plan.remedies else ()
    inside = _inside(scenario, before, later, baselines) if plan.remedies and failed else None
    if inside is not None and inside.trial is not None:
        trials += (inside.trial,)
    explained = look.cap_confidence(apply_ablations(confirm_by_trials(findings, trials), trials))
    advice, excerpts = _advised(explained, before.trace, scenario, before)
    advice = judge_edits(explained, advice, capsule, trials)
    return Treatment(
        scenario=scenario,
        before=before,
        before_summary=baselines.before,
        no_op_trace=look.why_none,
        replayed=look.certificate,
        inside=inside,
        capsule=capsule,
        findings=explained,
        advice=advice,
        excerpts=excerpts,
        observer=observer,
        reference=references.healthy,
        reference_summary=baselines.reference[0] if baselines.reference is not None else None,
        trials=trials,
        complete=plan.remedies and plan.only is None,
        refusals=tuple(later.refusals),
        rerun_differs=_differs_uninstrumented(scenario, observer),
        rerun=_rerun_advice(explained, trials, plan),
    )


def _differs_uninstrumented(scenario: Scenario, observer: Observer) -> str:
    """What a script did otherwise when it was run again without instrumentation; empty where it did the same, or is no script."""
    return observer.reason if is_script(scenario) and observer.bitwise_equal is False else ""


def _rerun_advice(findings: tuple[Finding, ...], trials: tuple[Trial, ...], plan: Plan) -> str:
    """The options with which another run would tell more, and what it would tell; empty where it would tell nothing."""
    if plan.ablations or any(trial.outcome is Outcome.FIXED for trial in trials):
        return ""
    option, fixes, ablations = plan.rerun_option, _to_ask_for("--try", trials), _to_ask_for("--ablate", trials)
    if fixes:
        return f"{option} --try {fixes[0]}: it shows whether {fixes[0]} fixes the failure"
    if ablations and findings[0].confidence is not Confidence.PROVEN:
        return f"{option}: runs without {' and '.join(ablations)} show whether the failure requires it"
    return ""


def _to_ask_for(option: str, trials: tuple[Trial, ...]) -> list[str]:
    """What this option of `exec` could name that was not asked for."""
    named = [exec_option(trial.remedy) for trial in trials if trial.reason.startswith(NOT_REQUESTED)]
    return [value for one, value in named if one == option]


def _judging_caught(run: RunRequest) -> RunRequest:
    """``run``, with exceptions that the program caught and did not get past as what it raised."""
    return lambda label, request: with_caught(run(label, request))


def _certificate(scenario: Scenario, before: Run, run: LaterRuns) -> Observer:
    if before.exit.timed_out:
        return Observer(bitwise_equal=None, reason="the run was stopped at its time limit, so it was not run again")
    of_script = is_script(scenario)
    request = Request(scenario=scenario, watch=False, repeats="before" if of_script else None, witness=of_script)
    unwatched = run("unwatched", request)
    if unwatched is None:
        why = "was stopped before its end" if run.refusals[-1].endswith(INTERRUPTED) else "could not start"
        return Observer(bitwise_equal=None, reason=f"the uninstrumented run {why}")
    if unwatched.exit.timed_out:
        return Observer(bitwise_equal=None, reason="the uninstrumented run was stopped before its end")
    return compare_unwatched(before, unwatched)


def examine(scenario: Scenario, run: Run, *, replay: bool = False, own_files: bool = True) -> Treatment:
    """Diagnoses a run that is over and cannot be done again from here.

    Args:
        scenario: stands for the program that was watched.
        run: what was watched of it.
        replay: the run has made what failed again; the failing call is kept as a capsule.
        own_files: whether the program's source may be read: not where the trace is somebody else's, who could name any file in it.
    """
    run = with_caught(run)
    look = look_of(run)
    seen = run.trace
    found = across_ranks(said_of_caught(analysis_of(seen).findings, seen), ranks_of(run), rank_of(run))
    capsule = caught_in(run, found) if replay else None
    findings = look.cap_confidence(found)
    advice, excerpts = _advised(findings, seen, scenario, run, own_files=own_files)
    advice = judge_edits(findings, advice, capsule, ())
    return Treatment(
        scenario=scenario,
        before=run,
        before_summary=summarise("before", run, scenario),
        no_op_trace=look.why_none if replay and look.why_none else WATCHED_LIVE,
        replayed=look.certificate,
        capsule=capsule,
        findings=findings,
        advice=advice,
        excerpts=excerpts,
        observer=Observer(bitwise_equal=None, reason=WATCHED_LIVE),
        reference=None,
        reference_summary=None,
        trials=tuple(not_tried(remedy, WATCHED_LIVE) for remedy in _proposed(scenario, findings, run.trace)),
        complete=False,
    )


def _advised(
    findings: tuple[Finding, ...], trace: Trace, scenario: Scenario, before: Run, *, own_files: bool = True
) -> tuple[tuple[Advice, ...], tuple[Excerpt, ...]]:
    """Say what to do about findings: whatever a report shows of the program's files is read here."""
    named = [named_in(trace, finding) for finding in findings]
    workload, header = scenario.steps[0].workload, before.trace.header
    script = workload.path if isinstance(workload, Script) else None
    return advise(named, trace, script, began=header.created if header is not None else 0.0, own_files=own_files)


def _found_in(run: Run, static: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """What is found in ``run``, in all of its processes, and, before any run, in its checkpoints."""
    findings = joined(said_of_caught(analysis_of(run.trace).findings, run.trace), static)
    return said_of_spawned(across_ranks(findings, ranks_of(run), rank_of(run)), run)


def _has_failed(before: Run, findings: tuple[Finding, ...]) -> bool:
    """Whether there is something to compare and to cure. A run that hung is not: every other run of it would hang too."""
    return bool(findings) or (not ending_of(before).completed and not before.exit.timed_out)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Compared:
    """What a run is compared with: the scenario's healthy reference, and the trace of its twin in float32."""

    healthy: Run | None = None
    twin: Trace | None = None


def _run_references(scenario: Scenario, later: LaterRuns) -> _Compared:
    """Runs what a failing run is compared with."""
    references = {"reference": healthy_reference(scenario), "float32-twin": float32_twin(scenario)}
    made = {
        label: later(label, Request(scenario=reference))
        for label, reference in references.items()
        if reference is not None
    }
    twin = made.get("float32-twin")
    return _Compared(healthy=made.get("reference"), twin=twin.trace if twin is not None else None)


def _baselines(
    scenario: Scenario, before: Run, findings: tuple[Finding, ...], references: _Compared, *, failed: bool
) -> Baselines:
    """What the trials are compared with."""
    healthy, twin = references.healthy, references.twin
    return Baselines(
        before=summarise("before", before, scenario, twin),
        findings=findings,
        reference=(summarise("reference", healthy, scenario, twin), healthy.trace) if healthy is not None else None,
        twin=twin,
        raised=analysis_of(before.trace).raised,
        failed=before.trace if failed else None,
    )


def _tried(scenario: Scenario, later: LaterRuns, baselines: Baselines, plan: Plan) -> tuple[Trial, ...]:
    """A trial of each remedy that the findings or the scenario propose."""
    proposed = _proposed(scenario, baselines.findings, baselines.failed)
    return tuple(_try(remedy, scenario, later, baselines, plan) for remedy in proposed)


def _inside(scenario: Scenario, before: Run, later: LaterRuns, baselines: Baselines) -> "Inside | None":
    """What a bisection inside the module of a capsule finds; None for any other scenario."""
    if not is_replay(scenario):
        return None
    from dtypedoctor.trials.bisection.inside import bisect_inside

    return bisect_inside(scenario, before, baselines, later)


def _proposed(scenario: Scenario, findings: tuple[Finding, ...], failed: Trace | None) -> Iterator[Remedy]:
    """What the findings propose, then what the scenario asks for; each once. ``failed`` is the untreated run's trace, where that failed."""
    wanted = [r for f in findings if f.severity is not Severity.INFO for r in f.remedies]
    wanted += scenario.remedies
    if failed is not None:
        wanted += [*scenario.expect.cured_by, *scenario.expect.not_cured_by]
    for name in dict.fromkeys(wanted):
        if remedy := remedy_named(name, partial(class_of_named, failed)):
            yield remedy


def _try(remedy: Remedy, scenario: Scenario, run: LaterRuns, baselines: Baselines, plan: Plan) -> Trial:
    changed = remedy.change(scenario)
    reason = _why_not(remedy, scenario, changed, plan)
    condition = changed.conditions != scenario.conditions
    if reason:
        return not_tried(remedy, reason, condition=condition)
    request = Request(scenario=changed, repeats="before" if is_script(changed) else None)
    tried = run.attempt(run_of_fix(remedy.id), request)
    if isinstance(tried, str):  # what can be run untreated may still not be possible with the remedy
        return not_tried(remedy, tried, condition=condition)
    return judge(remedy, changed, tried, baselines)


def _may_try(remedy: str, plan: Plan) -> bool:
    return plan.only is None or remedy in plan.only or (plan.ablations and remedy in ABLATIONS.values())


def _why_not(remedy: Remedy, scenario: Scenario, changed: Scenario, plan: Plan) -> str:
    """Why the remedy is not to be tried; empty if it is."""
    if is_script(scenario) and is_switched_on(changed, scenario):
        if _may_try(remedy.id, plan):
            return ""
        option, value = exec_option(remedy.id)
        if changed.conditions == scenario.conditions:
            return f"{NOT_REQUESTED}: {option} {value} runs the script again with it"
        return f"{NOT_REQUESTED}: {option} {value} runs the script again without it and shows whether the failure requires it"
    if is_script(scenario):
        return f"needs an edit in your script: {remedy.by_hand or remedy.summary}"
    return "" if changed != scenario else "it changes nothing in this scenario"


def check_checkpoints(scenario: Scenario) -> tuple[Finding, ...]:
    """What stands out in the local folders that the scenario loads, or that are among a script's arguments.

    Mere information is left out: it says nothing about a run. A folder that cannot be read is left to the run to complain of.
    """
    found: list[Finding] = []
    for path, intent in dict(_checkpoints(scenario)).items():
        try:
            found += preflight(read_checkpoint(path, intent))
        except UsageError:
            continue
    return tuple(finding for finding in found if finding.severity is not Severity.INFO)


def joined(dynamic: tuple[Finding, ...], static: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """What a run showed, then what its files showed beforehand; what both showed is said once."""
    known = {finding.id for finding in dynamic}
    extra = tuple(finding for finding in static if finding.id not in known)
    errors = tuple(finding for finding in dynamic if finding.severity is Severity.ERROR)
    return (*errors, *extra, *(finding for finding in dynamic if finding.severity is not Severity.ERROR))


def _checkpoints(scenario: Scenario) -> Iterator[tuple[Path, Intent]]:
    for step in scenario.steps:
        if isinstance(step.workload, Script):
            for argument in step.workload.args:
                yield from (
                    (path, Intent()) for path in (Path(argument.partition("=")[2] or argument),) if _there(path)
                )
        elif step.model is not None and _there(Path(step.model.name)):
            yield Path(step.model.name), Intent(dtype=step.model.dtype, scaler=step.grad_scaler)


def _there(path: Path) -> bool:
    try:
        return path.is_dir() and is_checkpoint(path)
    except (OSError, ValueError):  # an argument that is no path at all
        return False


def subject_of(model: str, intent: Intent) -> Subject:
    """The model: from its files, or built by a worker where it has none.

    Raises:
        UsageError: there is no such model.
        WorkerDiedError: the worker died while it built the model.
    """
    path = Path(model)
    try:
        if path.exists():
            return read_checkpoint(path, intent)
    except OSError as error:
        raise UsageError(f"{model}: cannot be read ({reason(error)})", "Check the path and its permissions.") from error
    if ":" in model:
        return _built(model, intent)
    snapshot = cached(model)
    if snapshot is None:
        raise UsageError(
            f"{model}: neither a checkpoint nor a model in the Hugging Face cache",
            "Use a directory, a downloaded hub id, or builtin:NAME.",
        )
    return read_checkpoint(snapshot, intent)


def _built(model: str, intent: Intent) -> Subject:
    scenario = Scenario(
        name="inspect",
        summary="Builds a model.",
        device="cpu",
        steps=[
            ScenarioStep(
                model=Model.model_validate({"name": model, "dtype": intent.dtype or "float32"}),
                workload=Unload(kind="unload"),
            )
        ],
    )
    from dtypedoctor.runner.launch import (
        Launcher,  # which brings the start of processes with it: few commands need it here
    )

    with tempfile.TemporaryDirectory() as folder, Launcher(Path(folder) / "server.log") as launcher:
        run = launcher.run(Request(scenario=scenario), Path(folder) / "built")
    if run.died:
        raise WorkerDiedError(f"{model}: the worker {run.last_words()} while building the model")
    return noted(model, run.trace, intent)
