"""Bisects inside a capsule: the fewest parts of its module that must run in float32 for the one call to pass.

The candidates are the module, the modules in it and each one's own operators, and the search is that of ``bisect``. There is no float32 reference: a capsule
has one call, and what is asked is whether it still raises or outputs inf or NaN.
"""

from pathlib import Path

from dtypedoctor.errors import UsageError
from dtypedoctor.lab.bisect.probes import KEEP, with_kept
from dtypedoctor.lab.bisect.questions import called_modules, plant, suspicion
from dtypedoctor.lab.bisect.results import Inside
from dtypedoctor.lab.bisect.symptoms import part_in_words, symptom_of
from dtypedoctor.lab.scenarios.model import Request, Scenario
from dtypedoctor.lab.trials.judge import Baselines, judge
from dtypedoctor.lab.trials.reduction import BaselineError, Interrupted, Options, Outcome, reduce
from dtypedoctor.lab.trials.treatment import LaterRuns
from dtypedoctor.plugins import Remedy
from dtypedoctor.replay.capsule import MODEL, read_capsule
from dtypedoctor.runner.run import Run

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
