"""Everything that is tried on a scenario: static checks of its files, the baseline, trials of fixes, the reference."""

import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtypedoctor.analysis import analysis_of, ending_of
from dtypedoctor.diagnosis import spec_of
from dtypedoctor.diagnosis.checkpoint import Intent, Subject, noted
from dtypedoctor.diagnosis.rule import SILENT, Finding
from dtypedoctor.errors import DoctorError, UsageError, WorkerDiedError
from dtypedoctor.examination.capsules import caught_in
from dtypedoctor.examination.examine import (
    NOT_COMPARED,
    Attempt,
    EditTrials,
    advised,
    checkpoints_among,
    findings_of,
    is_ablation,
    judge_edits,
    look_of,
    proposed,
    rerun_advice,
    stand_out,
    untried,
)
from dtypedoctor.examination.processes import Leading
from dtypedoctor.examination.results import NOT_MADE, Observer, Treatment, Trial, not_tried, run_of_fix
from dtypedoctor.lab.scenarios.loading import require_builtin
from dtypedoctor.lab.scenarios.model import Model, Request, Scenario, ScenarioStep, Script, Unload, is_limited
from dtypedoctor.lab.trials.changes import (
    change_of,
    float32_twin,
    healthy_reference,
    is_capsule,
    is_script,
    is_switched_on,
)
from dtypedoctor.lab.trials.judge import (
    Baselines,
    apply_ablations,
    compare_unwatched,
    confirm_by_trials,
    expected,
    judge,
    summarise_against,
)
from dtypedoctor.plugins import Remedy
from dtypedoctor.replay.capsule import UNLIMITED
from dtypedoctor.runner.run import Run

RunRequest = Callable[[str, Request], Run]
"""Runs a request under a label that is unique within the treatment, e.g. ``before`` or ``remedy-bfloat16``."""

ENDED = "a run before it was stopped from outside"
INTERRUPTED = "interrupted before its end"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How far a treatment goes.

    Attributes:
        certify: run once more without instrumentation, and compare.
        remedies: try what is proposed, and compare with the reference; False stops after the diagnosis.
        capsule_limit: bytes that the capsule of a failing call may take.
        only: ids of the remedies that may be tried; the others are reported as not tried. None allows all.
        ablations: also try every ablation that the findings propose.
        rerun_option: how `exec` is asked for another run.
    """

    certify: bool = True
    remedies: bool = True
    only: frozenset[str] | None = None
    capsule_limit: int = 64 << 20
    ablations: bool = False
    rerun_option: str = "--rerun"

    @property
    def runs_again(self) -> bool:
        """Whether a script may be run more than once."""
        return self.certify or self.ablations or (self.remedies and self.only != frozenset())


def first_run(run: RunRequest, scenario: Scenario, plan: Plan) -> Run:
    """The run that everything else is compared with.

    Raises:
        UsageError: the scenario cannot be run at all.
    """
    is_script = any(isinstance(step.workload, Script) for step in scenario.steps)
    try:
        return run(
            "before",
            Request(
                scenario=scenario,
                witness=plan.certify and is_script,
                repeatable=plan.runs_again and is_script,
                replay=True,
                capsule_limit=plan.capsule_limit if is_script else None,
            ),
        )
    except OSError as error:
        raise UsageError(
            f"it cannot be run here: {error.strerror or error}", "Free some space, or give another --out."
        ) from error


class LaterRuns:
    """Makes the runs that follow the first. That one cannot be made is never raised: the first is over, and is reported."""

    def __init__(self, run: RunRequest, first: Run) -> None:
        self._run = run
        self._ended = was_asked_to_end(first)
        self.refusals: list[str] = []

    def __call__(self, label: str, request: Request) -> Run | None:
        """The run; where it cannot be made None, and the reason is noted."""
        made = self.attempt(label, request)
        if isinstance(made, Run):
            return made
        self.refusals.append(f"the run {label!r}{NOT_MADE}{made}")
        return None

    def attempt(self, label: str, request: Request) -> Run | str:
        """The run, or why it cannot be made, or did not come to its own end, or was not recorded to it: how it went says nothing then."""
        if self._ended:
            return ENDED
        try:
            made = self._run(label, request)
        except DoctorError as error:
            return error.message
        except OSError as error:
            return error.strerror or str(error)
        self._ended = was_asked_to_end(made)
        if self._ended:
            return INTERRUPTED
        return made if made.trace.stopped is None else os.strerror(made.trace.stopped.errno)


def was_asked_to_end(run: Run) -> bool:
    """Whether somebody wants it all to end, so that nothing more is to be run."""
    return bool(run.exit.asked_to_end) or -run.exit.code in (signal.SIGINT, signal.SIGTERM)


if TYPE_CHECKING:
    from dtypedoctor.lab.bisect.results import Inside

CALL_NOT_COMPARED = Observer(
    bitwise_equal=None,
    reason="the call was not made without instrumentation; `dtypedoctor replay CAPSULE --script` prints what does that",
)


Search = Callable[[Scenario, Run, Baselines, LaterRuns], "Inside | None"]


def treat(
    scenario: Scenario,
    run: RunRequest,
    plan: Plan | None = None,
    search: Search | None = None,
    attempt: Attempt | None = None,
) -> Treatment:
    """Runs ``scenario``, explains it, tries what may cure it and compares with the reference.

    Args:
        scenario: what to run.
        run: runs one request.
        plan: how far to go; everything if left out.
        search: of a capsule's call, looks for the parts of its module that must run in float32.
        attempt: runs the program of a script with an edit; None where edits are not tried so.

    Raises:
        UsageError: the scenario cannot be run at all. Once it has been run, nothing that comes later raises: what cannot be
            run any more (the disk is full, the script is gone) stands in the treatment's ``refusals``.
    """
    plan = plan or Plan()
    static = stand_out(checkpoints_of(scenario))
    leading = Leading()

    def led(label: str, request: Request) -> Run:
        return leading(run(label, request))

    before = first_run(led, scenario, plan)
    _require_within_limits(scenario, before)
    later = LaterRuns(led, before)
    look = look_of(before)
    findings = findings_of(before, static)
    capsule = caught_in(before, findings, plan.capsule_limit) if is_script(scenario) else None
    # A run that hung is not compared or cured: every other run of it would hang too.
    failed = bool(findings) or (not ending_of(before).completed and not before.exit.timed_out)
    not_compared = CALL_NOT_COMPARED if is_capsule(scenario) else NOT_COMPARED
    observer = _certificate(scenario, before, later) if plan.certify else not_compared
    compare = plan.remedies and failed
    baselines, healthy = _baselines(scenario, before, findings, later, failed=failed, compare=compare)
    asked_for = [*scenario.remedies, *(scenario.expect.cured_by + scenario.expect.not_cured_by if failed else ())]
    fixes = proposed(findings, asked_for, baselines.failed) if plan.remedies else ()
    if is_capsule(scenario):
        fixes = (replace(fix, summary=_ON_A_CALL.get(fix.id, fix.summary)) for fix in fixes)
    trials = tuple(_try(remedy, scenario, later, baselines, plan) for remedy in fixes)
    inside: Inside | None = None
    if compare and search is not None:
        inside = search(scenario, before, baselines, later)
    if inside is not None and inside.trial is not None:
        trials += (inside.trial,)
    explained = look.cap_confidence(apply_ablations(confirm_by_trials(findings, trials), trials))
    workload = scenario.steps[0].workload
    advice, excerpts = advised(explained, before, workload.path if isinstance(workload, Script) else None)
    advice = judge_edits(explained, advice, EditTrials(before, capsule, trials, attempt))
    return Treatment(
        name=scenario.name,
        scenario=scenario.model_dump(mode="json", exclude_defaults=True),
        before=before,
        before_summary=baselines.before,
        no_op_trace=look.why_none,
        replayed=look.certificate,
        inside=_facts(inside) if inside is not None else None,
        capsule=capsule,
        findings=explained,
        advice=advice,
        excerpts=excerpts,
        observer=observer,
        reference=healthy,
        reference_summary=baselines.reference[0] if baselines.reference is not None else None,
        trials=trials,
        complete=plan.remedies and plan.only is None,
        refusals=tuple(later.refusals),
        rerun_differs=observer.reason if is_script(scenario) and observer.bitwise_equal is False else "",
        rerun="" if plan.ablations else rerun_advice(explained, trials, plan.rerun_option),
        expectation=expected(
            scenario.expect, before, explained, trials if plan.remedies and plan.only is None else None
        ),
    )


_ON_A_CALL = {"bfloat16": "cast the module to bfloat16"}
"""What a fix of a model does to the module of a capsule, which is a loss or a layer of a model in another dtype as often."""


def _facts(inside: "Inside") -> dict[str, Any]:
    """``replay.inside`` of report.json."""
    facts = {name: value for name, value in asdict(inside).items() if name != "trial"}
    return facts | {"parts": list(inside.parts)}


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


def _baselines(
    scenario: Scenario, before: Run, findings: tuple[Finding, ...], later: LaterRuns, *, failed: bool, compare: bool
) -> tuple[Baselines, Run | None]:
    """What the trials are compared with: the run, and if it is to be the healthy reference and a twin in float32; and the run of the reference."""
    healthy, exact = None, None
    if compare and (reference := healthy_reference(scenario)) is not None:
        healthy = later("reference", Request(scenario=reference, look_steps=look_steps(findings)))
    if compare and (twin := float32_twin(scenario)) is not None:
        run = later("float32-twin", Request(scenario=twin))
        exact = run.trace if run is not None else None
    baselines = Baselines(
        before=summarise_against("before", before, scenario, exact),
        findings=findings,
        reference=(summarise_against("reference", healthy, scenario, exact), healthy.trace)
        if healthy is not None
        else None,
        twin=exact,
        raised=analysis_of(before.trace).raised,
        failed=before.trace if failed else None,
    )
    return baselines, healthy


def look_steps(findings: Sequence[Finding]) -> int | None:
    """Up to which step later runs look for what stays finite: as long as the first where that is what failed, else in their first step."""
    return None if any(spec_of(finding.id).family is SILENT for finding in findings) else 1


def _try(remedy: Remedy, scenario: Scenario, run: LaterRuns, baselines: Baselines, plan: Plan) -> Trial:
    changed = change_of(remedy)(scenario)
    reason = _why_not(remedy, scenario, changed, plan)
    condition = changed.conditions != scenario.conditions
    if reason:
        return not_tried(remedy, reason, condition=condition)
    repeats = "before" if is_script(changed) else None
    request = Request(scenario=changed, repeats=repeats, look_steps=look_steps(baselines.findings))
    tried = run.attempt(run_of_fix(remedy.id), request)
    if isinstance(tried, str):  # what can be run untreated may still not be possible with the remedy
        return not_tried(remedy, tried, condition=condition)
    return judge(remedy, changed, tried, baselines)


def _why_not(remedy: Remedy, scenario: Scenario, changed: Scenario, plan: Plan) -> str:
    """Why the remedy is not to be tried; empty if it is."""
    if is_script(scenario) and is_switched_on(changed, scenario):
        may_try = plan.only is None or remedy.id in plan.only or (plan.ablations and is_ablation(remedy))
        return "" if may_try else untried(remedy)
    if is_script(scenario):
        return f"needs an edit in your script: {remedy.by_hand or remedy.summary}"
    return "" if changed != scenario else "it changes nothing in this scenario"


def checkpoints_of(scenario: Scenario) -> Iterator[tuple[Path, Intent]]:
    """The local folders that a scenario loads, or that are among a script's arguments."""
    for step in scenario.steps:
        if isinstance(step.workload, Script):
            yield from checkpoints_among(step.workload.args)
        elif step.model is not None:
            for path, _ in checkpoints_among([step.model.name]):
                yield path, Intent(dtype=step.model.dtype, scaler=step.grad_scaler)


def _require_within_limits(scenario: Scenario, run: Run) -> None:
    """Rejects the capsule of a stranger whose call had to be stopped: with each fix it would take as long, or as much memory.

    Raises:
        UsageError: it took too long, or the system has ended it, which it does where memory ends.
    """
    killed = run.exit.code in (-signal.SIGKILL, -signal.SIGABRT)  # a thread of C++ that gets no memory aborts
    if is_limited(scenario.steps[0].model) and (run.exit.timed_out or killed):
        raise UsageError(f"the call of the capsule {run.exit.describe()}", UNLIMITED)


def built_subject(model: str, intent: Intent) -> Subject:
    """The model of a scenario, built by a worker.

    Raises:
        UsageError: there is no such model.
        WorkerDiedError: the worker died while it built the model.
    """
    require_builtin(model)
    if ":" not in model:
        raise UsageError(
            f"{model}: neither a checkpoint nor a model in the Hugging Face cache",
            "Use a directory, a downloaded hub id, or builtin:NAME.",
        )
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
    from dtypedoctor.lab.runner.launch import Launcher

    with tempfile.TemporaryDirectory() as folder, Launcher(Path(folder) / "server.log") as launcher:
        run = launcher.run(Request(scenario=scenario), Path(folder) / "built")
    if run.died:
        raise WorkerDiedError(f"{model}: the worker {run.last_words()} while building the model")
    return noted(model, run.trace, intent)
