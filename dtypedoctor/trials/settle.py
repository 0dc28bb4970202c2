"""What the trials prove: a cause is settled by the run in which it alone was taken away."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from dtypedoctor.diagnosis.finding import Confidence, Finding
from dtypedoctor.trials.results import Outcome, Trial

__all__ = ["settled"]

COUNTERFACTUALS: Mapping[str, tuple[str, ...]] = {
    "float16-overflow": ("gemma4-mlp-float32-product",),
    "autocast-contradicts-model": ("autocast-dtype-of-model",),
    "quant-state-dtype": ("quant-state-dtype", "dequant-float32-kernel"),
    "stale-dequant-buffer": ("fresh-process", "dequant-buffer-keyed-by-dtype"),
    "norm-promotes-to-float32": ("norm-output-cast",),
    "compile-graph-break": ("nf4-custom-op",),
    "recompile-limit": ("nf4-custom-op",),
}
"""Remedies that change nothing but the cause which a finding names. Casts are not among them: they cure other things too."""


def settled(findings: Iterable[Finding], trials: Iterable[Trial]) -> tuple[Finding, ...]:
    """The findings, those proven whose cause was taken away in a trial and took the failure with it."""
    fixed = {trial.remedy: trial for trial in trials if trial.outcome is Outcome.FIXED}
    return tuple(_settled(finding, fixed) for finding in findings)


def _settled(finding: Finding, fixed: Mapping[str, Trial]) -> Finding:
    trial = next((fixed[name] for name in COUNTERFACTUALS.get(finding.id, ()) if name in fixed), None)
    if trial is None or trial.run is None:
        return finding
    run = trial.run
    sentence = (
        f"The same run with one change, {trial.summary}, does {run.steps_completed} of {run.steps_planned} steps and shows "
        f"nothing of this ({trial.remedy})."
    )
    return replace(finding, confidence=Confidence.PROVEN, evidence=(*finding.evidence, sentence))
