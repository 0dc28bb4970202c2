"""How far a treatment goes, and its first run: what a script can be started with before anything else is imported."""

from collections.abc import Callable
from dataclasses import dataclass

from dtypedoctor.errors import UsageError
from dtypedoctor.runner.run import Run
from dtypedoctor.scenario.model import Request, Scenario, Script

CAPSULE_LIMIT = 64 << 20
"""Bytes that a capsule may take if nobody says otherwise."""


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
    capsule_limit: int = CAPSULE_LIMIT
    ablations: bool = False
    rerun_option: str = "--rerun"

    @property
    def runs_again(self) -> bool:
        """Whether a script may be run more than once."""
        return self.certify or self.ablations or (self.remedies and self.only != frozenset())


def first_run(run: Callable[[str, Request], Run], scenario: Scenario, plan: Plan) -> Run:
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
