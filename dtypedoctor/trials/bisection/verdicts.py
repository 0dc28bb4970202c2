"""The verdict table: every mode is run, and what it came to is compared with the failure under bisection."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dtypedoctor.errors import UsageError
from dtypedoctor.scenario.model import Scenario
from dtypedoctor.scenario.request import Request
from dtypedoctor.trials.bisection.bench import Bench
from dtypedoctor.trials.bisection.laboratory import Laboratory
from dtypedoctor.trials.bisection.modes import Mode
from dtypedoctor.trials.bisection.probes import describe
from dtypedoctor.trials.bisection.symptoms import Kind, Symptom, refused, symptom_of
from dtypedoctor.trials.bisection.tolerance import Tolerance
from dtypedoctor.trials.reduction import Outcome

__all__ = ["Verdict", "measure"]

OUTERMOST = ""
"""Dotted name of the model itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A row of the table: a mode and what it came to.

    Attributes:
        workload: what was run, in a few words.
        outcome: relative to the failure under bisection.
    """

    mode: str
    workload: str
    outcome: Outcome
    symptom: Symptom


def measure(lab: Laboratory, bench: Bench, wanted: Sequence[Mode], failure: Symptom) -> tuple[Verdict, ...]:
    """Runs every mode.

    Finiteness and exceptions decide. How exact a mode is, is asked only where that is what failed.
    """
    order = sorted(wanted, key=lambda mode: not _compiles(mode))  # the slowest first
    found: dict[str, Symptom] = {}
    for done in lab.run_all([Request(scenario=mode.scenario) for mode in order]):
        mode, run = order[done.index], done.run
        symptom = (
            refused(run.message) if isinstance(run, UsageError) else symptom_of(run, _tolerance(bench, mode, failure))
        )
        found[mode.name] = _as_far_as_seen(symptom, mode)
    return tuple(
        Verdict(
            mode=mode.name,
            workload=describe(mode.scenario),
            outcome=found[mode.name].outcome(failure),
            symptom=found[mode.name],
        )
        for mode in wanted
        if found[mode.name].kind is not Kind.REFUSED  # what the model cannot do is no verdict about it
    )


def _tolerance(bench: Bench, mode: Mode, failure: Symptom) -> Tolerance | None:
    """What is accepted of a mode's run; of another workload only the outputs before any training can be compared."""
    if failure.kind is not Kind.INACCURATE:
        return None
    same = _work(mode.scenario) == _work(bench.workload.scenario)
    return bench.tolerance if same else bench.tolerance.of_first_outputs()


def _work(scenario: Scenario) -> list[dict[str, Any]]:
    """What is done with the models, however many steps of it."""
    return [step.workload.model_dump(exclude={"steps"}) for step in scenario.steps]


def _as_far_as_seen(symptom: Symptom, mode: Mode) -> Symptom:
    """Inside compiled code nothing is watched: what it returns stands for all of it, the model's own name for its module.

    Modules that stay out of it, as those that are kept in float32 do, are watched, and may be what comes nearest to the end of
    its dtype's range; but where it fails they may only have been given what was inf or NaN.
    """
    if not _compiles(mode):
        return symptom
    seen = replace(symptom, absmax=symptom.absmax or None)  # of nothing but NaN it is 0
    if symptom.kind is not Kind.NOT_FINITE:
        return seen
    where = f", step {symptom.step} ({symptom.phase})" if symptom.phase else ""
    return replace(seen, fqn=OUTERMOST, reason=f"inf or NaN in what the compiled code returns{where}")


def _compiles(mode: Mode) -> bool:
    return any(step.compile is not None for step in mode.scenario.steps)
