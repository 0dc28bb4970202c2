"""What a run and further runs of it have shown, as values: what a report is made of."""

import math
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dtypedoctor.diagnosis.rule import Advice, Excerpt, Finding
    from dtypedoctor.plugins import Remedy
    from dtypedoctor.replay.capsule import Capsule, NoCapsule
    from dtypedoctor.runner.run import Run

NOT_REQUESTED = "not requested"
"""How the reason of a trial begins that nobody has asked for."""
REPLAYED = "Op trace: "
"""How the sentence begins, among what was not covered, that says how calls which were made again compare with the run."""
NOT_MADE = " could not be made: "
"""Between a run that was asked for and why there is none, among what was not covered."""
WRONG_OUTPUT = 0.25
"""Outputs with a larger relative error are wrong, not rounded: float16 and bfloat16 stay below 0.02 on the builtin models,
weights that were read in another format than they were written in give 0.7 and more."""


class Outcome(StrEnum):
    """Outcome of a trial."""

    FIXED = "fixed"
    NOT_FIXED = "not-fixed"
    NOT_TRIED = "not-tried"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """How far the policy's token log-probabilities are from the reference's on the same inputs, per step.

    The KL divergence is estimated per token with exp(d) - d - 1, d = log p_reference - log p
    (the k3 estimator, http://joschu.net/blog/kl-approx.html), and averaged over the probe batch.
    """

    median_kl: float | None
    p95_kl: float | None
    max_kl: float | None
    total_kl: float | None
    steps_compared: int
    reward_equal_steps: int | None = None
    """Steps whose mean reward differs by less than 0.01; None without rewards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """What one run did, as it stands in the before/after table. None marks a number that is missing or not finite.

    Attributes:
        nonfinite: of each quantity (``loss``) what the numbers are that are not finite (``nan``, ``inf``, ``-inf``), by their place from 0.
        log_filter: class of the Trainer that leaves such losses out of its log; empty where none does.
    """

    label: str
    steps_completed: int
    steps_planned: int
    loss: tuple[float | None, ...] = ()
    grad_norm: tuple[float | None, ...] = ()
    reward: tuple[float | None, ...] = ()
    step_time: float | None = None
    """Median seconds of the steps after the first (of all where there is only one)."""
    peak_memory: int | None = None
    """Bytes over the baseline before the model was built."""
    ended: str = "completed"
    """How it ended, in words."""
    finding_ids: tuple[str, ...] = ()
    output_error: float | None = None
    """Relative error of the outputs before the first step against the float32 twin, where measured."""
    seconds: float | None = None
    """Wall-clock time of the process; None in reports of older versions."""
    nonfinite: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    log_filter: str = ""

    def numbers(self, name: str) -> tuple[float | None, ...]:
        """``loss``, ``grad_norm`` or ``reward`` per step with NaN and inf where they were measured; None where nothing was."""
        finite: tuple[float | None, ...] = getattr(self, name)
        spelled = self.nonfinite.get(name, {})
        return tuple(
            _SPELLED.get(spelled[str(i)], math.nan) if str(i) in spelled else value for i, value in enumerate(finite)
        )


_SPELLED = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


_LONGEST = 100


def run_of_fix(fix: str) -> str:
    """The name of the run, and of its directory, in which a fix is tried: ``remedy-bfloat16``.

    Args:
        fix: its id; of ``keep-float32`` with modules behind a colon, which may be more than fit into the name of a file.
    """
    readable = re.sub(r"[^\w.-]+", "-", fix, flags=re.ASCII)
    if len(readable) > _LONGEST or not fix.isascii():
        readable = f"{readable[:_LONGEST]}-{zlib.crc32(fix.encode(errors='backslashreplace')):08x}"
    return f"remedy-{readable}"


class Bearing(StrEnum):
    """What a run under another condition says about a failure."""

    NEEDED = "needed"
    """It is gone: what was taken away is necessary for it."""
    NOT_NEEDED = "not-needed"
    """It is where it was."""
    MOVED = "moved"
    """The run fails elsewhere, so it does not tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnostic:
    """A run under another condition, which shows whether a failure needs that condition, and cures nothing."""

    effects: int
    """How often the condition made a difference; 0 where it was not tried."""
    bearing: Bearing | None = None
    """None where it was not tried, or the untreated run did not fail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A remedy that was tried by running the changed scenario, or the reason why it was not."""

    remedy: str
    summary: str
    outcome: Outcome
    reason: str
    safe: bool
    run: RunSummary | None = None
    parity: Parity | None = None
    rescued_elements: int | None = None
    clamped_elements: int | None = None
    step_time_ratio: float | None = None
    peak_memory_ratio: float | None = None
    ratio_base: str | None = None
    """Label of the run that the ratios are against."""
    output_error: float | None = None
    """That of the run."""
    as_intended: bool = False
    """Whether a remedy that is there to raise, and not to cure, has raised."""
    never_reached: bool = False
    """Whether the run failed as before without having called any of the remedy's corrections, so that it says nothing of them."""
    remains: tuple[str, ...] = ()
    """Of a fix of the first finding, ids of the warnings that are found as without it: they need fixes of their own."""
    diagnostic: Diagnostic | None = None
    """What it says where a condition was switched from outside, which cures nothing even where the outcome is ``fixed``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observer:
    """Whether the watched run and an unwatched one gave bitwise equal losses, gradients and parameters."""

    bitwise_equal: bool | None
    reason: str
    same_error: bool = False
    """Whether both raised the same error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Treatment:
    """Everything that was found out about a program or a scenario.

    Attributes:
        name: of what was run.
        scenario: what was run, as report.json has it.
        expectation: whether the scenario showed what it says it shows, and that in words; None where it is not judged.
        before: the untreated run.
        no_op_trace: why no failing call was made again with the op trace on; empty where one was.
        advice: what to do about each finding, in their order.
        excerpts: the lines of source at which the first finding shows: the program's own, then that of the library where it raised.
        complete: whether remedies were to be tried, so that the scenario's expectation can be judged.
        replayed: how the calls that were made again compare with the run.
        capsule: the failing call, kept beside the run, or why it is not; None where nothing failed.
        refusals: the runs after the first that could not be made, and why.
        rerun_differs: of a script that was run again, what it did otherwise than in its first run, as a clause; else empty.
        inside: of the call of a capsule, the parts of its module that must run in float32, as report.json has them; None where it was not bisected.
        rerun: options with which `exec` would tell more, and what it would tell; empty where it would tell nothing.
    """

    name: str
    scenario: Mapping[str, Any]
    before: "Run"
    before_summary: RunSummary
    no_op_trace: str
    findings: "tuple[Finding, ...]"
    advice: "tuple[Advice, ...]"
    excerpts: "tuple[Excerpt, ...]"
    observer: Observer
    reference: "Run | None"
    reference_summary: RunSummary | None
    trials: tuple[Trial, ...]
    complete: bool
    refusals: tuple[str, ...] = ()
    rerun: str = ""
    rerun_differs: str = ""
    replayed: str = ""
    inside: Mapping[str, Any] | None = None
    expectation: tuple[bool | None, str] = (None, "")
    capsule: "Capsule | NoCapsule | None" = None


def not_tried(remedy: "Remedy", reason: str, *, condition: bool = False) -> Trial:
    """Make a trial that says why there was none; ``condition`` where it would have been a run under another condition."""
    return Trial(
        remedy=remedy.id,
        summary=remedy.summary,
        outcome=Outcome.NOT_TRIED,
        reason=reason,
        safe=remedy.safe and not condition,
        diagnostic=Diagnostic(effects=0) if condition else None,
    )
