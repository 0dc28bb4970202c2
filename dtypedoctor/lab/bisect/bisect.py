"""The whole bisection: the case, a workload to probe with, modules, corrections, reproduction, cost, modes. And the one inside of a capsule's module, whose
one call either raises or outputs inf or NaN, or does not."""

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from dtypedoctor.analysis import ending_of
from dtypedoctor.errors import UsageError, WorkerDiedError
from dtypedoctor.examination.fixes import remedies
from dtypedoctor.examination.results import Treatment, Trial
from dtypedoctor.lab.bisect.measurements import ReferenceSetup, measure, measure_cost, reproduce, set_up
from dtypedoctor.lab.bisect.probes import KEEP, cheaper, describe, modes, probe_of, unrounded, with_kept
from dtypedoctor.lab.bisect.questions import (
    Question,
    Watch,
    ask,
    called_modules,
    layers_in,
    offered_corrections,
    plant,
    suspicion,
)
from dtypedoctor.lab.bisect.results import Answer, Bisection, End, Inside, Kind, Symptom
from dtypedoctor.lab.bisect.symptoms import part_in_words, symptom_of
from dtypedoctor.lab.scenarios.model import Request, Scenario, Script
from dtypedoctor.lab.trials.changes import with_corrections
from dtypedoctor.lab.trials.judge import Baselines, judge
from dtypedoctor.lab.trials.reduction import BaselineError, Interrupted, Node, Options, Outcome, reduce
from dtypedoctor.lab.trials.treatment import LaterRuns, Plan, look_steps, treat
from dtypedoctor.plugins import Remedy
from dtypedoctor.replay.capsule import MODEL, read_capsule
from dtypedoctor.runner.run import Run
from dtypedoctor.trace.events import Root

if TYPE_CHECKING:
    from dtypedoctor.lab.bisect.measurements import ProbeRunner


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Callbacks that follow a bisection.

    Attributes:
        stage: a new part begins, in words.
        probe: a probe has ended.
    """

    stage: Callable[[str], None]
    probe: Watch


def bisect(scenario: Scenario, runner: "ProbeRunner", progress: Progress, tolerance: float | None = None) -> Bisection:
    """Finds a smallest set of modules that must be kept in float32, and of corrections, for ``scenario`` to be healthy.

    Args:
        scenario: what fails.
        runner: runs requests.
        progress: is called as it goes on.
        tolerance: the largest accepted root-mean-square difference of log-probabilities (and of the loss) from the float32
            reference; derived from the reference where it is None.

    Raises:
        UsageError: the scenario cannot be run at all.
        WorkerDiedError: the worker died before there was a model.
    """
    if any(isinstance(step.workload, Script) for step in scenario.steps):
        raise UsageError("a script cannot be bisected", "Bisect its model: --model package.module:factory.")
    found = _Bisecting(scenario, runner, progress, tolerance).whole()
    return replace(found, runs=runner.runs)


class _Bisecting:
    def __init__(self, scenario: Scenario, runner: "ProbeRunner", progress: Progress, tolerance: float | None) -> None:
        self._scenario = scenario
        self._runner = runner
        self._progress = progress
        self._given = tolerance

    def whole(self) -> Bisection:
        """From the untreated run to the reproduction."""
        self._progress.stage("reproducing the failure")
        treatment = treat(self._scenario, lambda label, request: self._runner.run(request, label), Plan(remedies=False))
        _require_built(treatment.before)
        try:
            failure, setup = self._failure(treatment)
            found = Bisection(end=End.HEALTHY, treatment=treatment, failure=failure)
            if failure.healthy:
                return found
            ladder = cheaper(self._scenario, failure.phase, failure.step)
            for position, workload in enumerate(ladder):
                whole = position == len(ladder) - 1
                if not whole and not self._shows(workload, failure):
                    continue
                setup = self._set_up(workload)
                found = replace(
                    found, workload=describe(workload), tolerance=next(iter(setup.tolerance.limits.values()), None)
                )
                found = self._on(setup, found)
                if found.end is not End.FOUND or found.confirmed:
                    break  # else the cheap workload has left out a part of the failure
            return self._concluded(found, setup, ladder) if setup is not None else found
        except UsageError as error:  # the disk is full, the model is gone: what is known is reported all the same
            note = f"a run could not be made: {error.message}"
        except KeyboardInterrupt:
            note = "the failure is reproduced; no module had been ruled out yet"
        return Bisection(end=End.INTERRUPTED, treatment=treatment, failure=symptom_of(treatment.before), note=note)

    def _failure(self, treatment: Treatment) -> tuple[Symptom, ReferenceSetup | None]:
        """What the untreated run came to; only where nothing else is wrong its outputs are compared with the reference's."""
        failure = symptom_of(treatment.before)
        if not failure.healthy:
            return failure, None
        self._progress.stage("running the float32 reference")
        setup = self._set_up(self._scenario)
        return setup.judge(treatment.before), setup

    def _set_up(self, workload: Scenario) -> ReferenceSetup:
        return set_up(self._runner, workload, self._given)

    def _shows(self, workload: Scenario, failure: Symptom) -> bool:
        """Whether a cheaper workload fails in the same way at the same place."""
        self._progress.stage(f"trying {describe(workload)}")
        try:
            run = self._runner.run(probe_of(workload))
        except UsageError:
            return False
        seen = symptom_of(run) if failure.kind is not Kind.INACCURATE else self._set_up(workload).judge(run)
        return seen.outcome(failure) is Outcome.FAIL and seen.fqn == failure.fqn

    def _on(self, setup: ReferenceSetup, found: Bisection) -> Bisection:
        """The answers on one workload."""
        if not setup.healthy.healthy:
            return replace(
                found, end=self._fails_throughout(setup, found), note=f"the float32 reference: {setup.healthy.reason}"
            )
        before = found.treatment.before.trace
        untreated = self._runner.run(probe_of(setup.workload)).trace
        called = called_modules([before, untreated], setup.reference)
        forest = plant(called, suspicion(untreated, found.failure.fqn))
        self._progress.stage(f"narrowing down modules by {describe(setup.workload)}")
        question = Question(
            name="modules",
            roots=forest.roots,
            scenario=lambda treated: with_kept(setup.workload, forest.names(treated)),
            names=forest.names,
            failure=found.failure,
        )
        answer = ask(self._runner, setup, question, self._progress.probe)
        kept = forest.names(frozenset(answer.culprits))
        found = replace(found, end=End.FOUND, modules=answer, kept=kept, candidates=len(forest.leaves))
        if answer.interrupted:
            return replace(found, end=End.INTERRUPTED)
        if answer.result is None:
            return self._refused(found, answer)
        try:
            trial, confirmed = self._try(found, KEEP, with_kept(self._scenario, kept), setup)
        except (KeyboardInterrupt, UsageError):
            return replace(found, end=End.INTERRUPTED, note="the whole scenario was not run with them")
        return replace(found, trials=(trial,), confirmed=confirmed)

    def _fails_throughout(self, setup: ReferenceSetup, found: Bisection) -> End:
        """What it means that the float32 reference is not healthy either."""
        if setup.healthy.outcome(found.failure) is not Outcome.FAIL:
            return End.UNRESOLVED
        before_rounding = self._runner.run(probe_of(unrounded(setup.workload)))
        return End.ROUNDED_WEIGHTS if symptom_of(before_rounding).healthy else End.DOMAIN_ERROR

    def _refused(self, found: Bisection, answer: Answer) -> Bisection:
        """Why the reducer would not begin."""
        assert answer.baseline is not None  # neither a result nor an interruption
        tried = max(answer.symptoms, key=len)
        symptom = answer.symptoms[tried]
        if answer.baseline.everything is None:
            note = f"the failure did not recur when the baseline was repeated: {symptom.reason}"
            return replace(found, end=End.UNRESOLVED, note=note)
        if answer.baseline.everything is Outcome.FAIL:
            return replace(found, end=End.OUTSIDE, note=symptom.reason)
        return replace(found, end=End.UNRESOLVED, note=f"with every module in float32: {symptom.reason}")

    def _try(self, found: Bisection, label: str, changed: Scenario, setup: ReferenceSetup) -> tuple[Trial, bool]:
        """The whole scenario, changed: the trial, and whether it is healthy."""
        self._progress.stage(f"running {describe(self._scenario)} with {label}")
        findings = found.treatment.findings
        run = self._runner.run(Request(scenario=changed, look_steps=look_steps(findings)), f"remedy-{label}")
        baselines = Baselines(before=found.treatment.before_summary, findings=findings)
        known = remedies()
        remedy = Remedy(
            id=label,
            summary=_SUMMARIES.get(label, "switch on the corrections that are needed"),
            safe=all(known[name].safe for name in label.split("+") if name in known),
            change=lambda _: changed,
        )
        return judge(remedy, changed, run, baselines), symptom_of(run, setup.tolerance.of_first_outputs()).healthy

    def _concluded(self, found: Bisection, setup: ReferenceSetup, ladder: Sequence[Scenario]) -> Bisection:
        """Corrections, reproduction, cost and modes, where there is a culprit; Ctrl-C, or a run that cannot be made, leaves out the rest."""
        if found.end is not End.FOUND:
            return found
        try:
            found = self._corrected(found, setup, offered_corrections(self._scenario, found.treatment.findings))
            self._progress.stage("writing a minimal reproduction")
            found = replace(found, reproduction=reproduce(self._runner, setup, found.culprits))
            self._progress.stage("measuring cost")
            found = replace(found, cost=measure_cost(self._runner, setup.workload, found.culprits))
            self._progress.stage("running other modes")
            table = modes(setup.workload, ladder, found.culprits, layers=layers_in(setup.reference))
            return replace(found, verdicts=measure(self._runner, setup, table, found.failure))
        except (KeyboardInterrupt, UsageError, OSError):
            return replace(found, end=End.INTERRUPTED, note="the modules are known; what follows was not measured")

    def _corrected(self, found: Bisection, setup: ReferenceSetup, offered: tuple[str, ...]) -> Bisection:
        """Which of the offered corrections are needed; those that do not fit this model are left out."""
        if not offered:
            return found
        self._progress.stage(f"narrowing down {len(offered)} corrections")
        question = Question(
            name="corrections",
            roots=tuple(Node(id=one) for one in offered),
            scenario=lambda treated: with_corrections(*(one for one in offered if one in treated))(setup.workload),
            names=lambda treated: tuple(one for one in offered if one in treated),
            failure=found.failure,
        )
        answer = ask(self._runner, setup, question, self._progress.probe)
        unfit = _not_installed(answer)
        if unfit is not None:
            remaining = tuple(one for one in offered if one != unfit)
            return self._corrected(found, setup, remaining)
        found = replace(found, corrections=answer, offered=offered)
        if answer.interrupted:
            raise KeyboardInterrupt
        if answer.result is None:
            return found
        corrected = with_corrections(*answer.culprits)(self._scenario)
        trial, _ = self._try(found, "+".join(answer.culprits), corrected, setup)
        return replace(found, trials=(*found.trials, trial))


_SUMMARIES = {KEEP: "keep the culprits in float32: parameters, inputs and arithmetic"}


def _require_built(before: Run) -> None:
    """A run that ended before its model was there says nothing about dtypes.

    Raises:
        UsageError: building it raised, or the kernel killed it (which is how it says that memory is short).
        WorkerDiedError: the process died otherwise.
    """
    if before.trace.all(Root) or ending_of(before).completed:
        return
    if before.exit.code < 0 and -before.exit.code != signal.SIGKILL:
        raise WorkerDiedError(
            f"the worker {before.last_words()} before the model was built", f"See {before.directory}."
        )
    if not before.exit.timed_out:
        raise UsageError(
            f"the model cannot be built: {ending_of(before).words}",
            "If it does not fit into memory, a smaller model or a narrower --dtype may.",
        )
    raise UsageError(f"the model {before.exit.describe()} while it was built", "Raise --time-limit.")


def _not_installed(answer: Answer) -> str | None:
    """The correction that kept the fully corrected run from starting, if one did."""
    if answer.baseline is None or answer.baseline.everything is None:
        return None
    symptom = answer.symptoms[max(answer.symptoms, key=len)]
    return symptom.detail if symptom.kind is Kind.NOT_INSTALLED else None


MOST_RUNS = 40
"""Calls that a search may take; what is known by then is reported."""


def bisect_inside(scenario: Scenario, before: Run, baselines: Baselines, later: LaterRuns) -> Inside | None:
    """The parts of the capsule's module that must run in float32; None where the call does not fail, or its capsule is gone.

    Args:
        scenario: makes the call of a capsule.
        before: its run with nothing changed.
        baselines: what the trial of the parts that are found is compared with.
        later: makes the other runs.
    """
    failure = symptom_of(before)
    assert scenario.steps[0].model is not None  # it makes the call of a capsule
    try:
        fqn = read_capsule(Path(scenario.steps[0].model.name.removeprefix(MODEL))).fqn
    except UsageError:
        return None
    forest = plant(called_modules([before.trace], before.trace), suspicion(before.trace, failure.fqn))
    root = next((node for node in forest.tree.walk() if node.id == fqn), None)
    if failure.healthy or root is None:
        return None
    runs: dict[frozenset[str], Run] = {}

    def changed(treated: frozenset[str]) -> Scenario:
        return with_kept(scenario, forest.names(treated))

    def outcome(treated: frozenset[str]) -> Outcome:
        if len(runs) == MOST_RUNS:
            raise UsageError(f"{MOST_RUNS} runs were not enough")
        made = later.attempt(f"inside-{len(runs) + 1}", Request(scenario=changed(treated)))
        if isinstance(made, str):
            raise UsageError(made)
        runs[treated] = made
        return symptom_of(made).outcome(failure)

    size = len(root.leaves())
    minimal, why = False, ""
    try:
        result = reduce(outcome, [root], Options(known=[(frozenset(), Outcome.FAIL)]))
        parts, minimal = frozenset(result.culprits), result.one_minimal
    except BaselineError:
        last = next(iter(runs.values()))
        return Inside(candidates=size, runs=len(runs), why=f"with all of it in float32: {symptom_of(last).reason}")
    except Interrupted as ended:
        parts, why = ended.best or frozenset(), f"the search ended early: {ended.__cause__}"
    if not parts:
        return Inside(candidates=size, runs=len(runs), why=why)
    names = forest.names(parts)
    summary = f"run {' and '.join(map(part_in_words, names))} in float32"
    remedy = Remedy(id=KEEP, summary=summary, safe=True, change=lambda _: changed(parts))
    trial = judge(remedy, changed(parts), runs[parts], baselines)
    return Inside(parts=names, candidates=size, runs=len(runs), one_minimal=minimal, why=why, trial=trial)
