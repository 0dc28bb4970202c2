"""What the trials prove: a cause is settled by the run in which it alone was taken away."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from dtypedoctor.diagnosis.finding import Confidence, Finding
from dtypedoctor.trials.results import Outcome, RunSummary, Trial

__all__ = ["settled"]

COUNTERFACTUALS: Mapping[str, tuple[str, ...]] = {
    "float16-overflow": (
        "gemma4-mlp-float32-product",
        "gemma4-rms-norm-float32",
        "gemma4-scaled-embedding-float32",
        "gemma4-attention-float32",
    ),
    "norm-square-overflow": ("gemma4-rms-norm-float32",),
    "attention-score-overflow": ("gemma4-attention-float32",),
    "autocast-bypass": ("autocast-off",),
    "autocast-contradicts-model": ("autocast-dtype-of-model",),
    "quant-state-dtype": ("quant-state-dtype", "dequant-float32-kernel"),
    "stale-dequant-buffer": ("fresh-process", "dequant-buffer-keyed-by-dtype"),
    "norm-promotes-to-float32": ("norm-output-cast",),
    "compile-graph-break": ("nf4-custom-op",),
    "recompile-limit": ("nf4-custom-op",),
    "stale-cuda-stream": ("nf4-stream-per-call",),
}
"""Remedies that change nothing but the cause which a finding names. Casts are not among them: they cure other things too."""

CORROBORATIONS: Mapping[str, tuple[str, ...]] = {"autocast-contradicts-model": ("autocast-off",)}
"""Remedies that take away more than the cause which a finding names: what came of them is worth saying, and proves nothing."""


def settled(findings: Iterable[Finding], trials: Iterable[Trial]) -> tuple[Finding, ...]:
    """The findings, those proven whose cause was taken away in a trial and took the failure with it."""
    fixed = {t.remedy: t for t in trials if t.outcome is Outcome.FIXED and t.diagnostic is None}
    return tuple(_settled(finding, fixed) for finding in findings)


def _settled(finding: Finding, fixed: Mapping[str, Trial]) -> Finding:
    proving = next((fixed[name] for name in COUNTERFACTUALS.get(finding.id, ()) if name in fixed), None)
    if proving is None or proving.run is None:
        return finding
    others = [fixed[name] for name in CORROBORATIONS.get(finding.id, ()) if name in fixed]
    said = [
        f"The same run with {proving.remedy} ({proving.summary}) does {_steps(proving.run)} and shows nothing of this.",
        *(f"So does the run with {t.remedy} ({t.summary}): {_steps(t.run)}." for t in others if t.run),
    ]
    proof = f"the same run with only {proving.remedy} changed ({proving.summary}) shows nothing of this"
    return replace(finding, confidence=Confidence.PROVEN, proven_by=proof, evidence=(*finding.evidence, *said))


def _steps(run: RunSummary) -> str:
    return f"{run.steps_completed} of {run.steps_planned} steps"
