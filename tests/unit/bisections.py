"""Bisections as report.json holds them, for tests of what is said about them."""

from typing import Any


def found(**changes: Any) -> dict[str, Any]:
    """One culprit, one correction, two modes."""
    return {
        "end": "found",
        "answer": "Keeping only layers.0.mlp's own operators in float32 is enough.",
        "workload": "one forward pass",
        "candidates": 44,
        "culprits": ["model.layers.0.mlp::self"],
        "corrections": ["mlp-float32"],
        "offered": ["mlp-float32", "norm-float32"],
        "probes": 14,
        "runs": 37,
        "one_minimal": True,
        "monotone": True,
        "flaky": [],
        "unresolved": 0,
        "confirmed": True,
        "note": "",
        "tolerance": 0.01,
        "probe_seconds": 0.2,
        "failure": {"kind": "not-finite", "reason": "inf", "phase": "forward", "step": 1, "fqn": None, "absmax": None},
        "verdicts": [
            verdict("one forward pass", "fail", "one forward pass", phase="forward", step=1, absmax=43392.0),
            verdict("loss scale", "pass", "2 steps of plain training", fqn=None, absmax=None),
        ],
        "cost": {"parameter_bytes": 0, "memory_bytes": 5 << 20, "step_time": 0.012, "step_time_ratio": 1.25},
        "remedy": {"corrections": [{"id": "mlp-float32"}]},
        "reproduction": {"module": "m", "script": "repro.py", "bytes": 65920, "said": "FAILS: inf", "reason": ""},
    } | changes


def verdict(mode: str, outcome: str, workload: str, **changes: Any) -> dict[str, Any]:
    row = {"mode": mode, "workload": workload, "outcome": outcome, "phase": None, "step": None,
           "fqn": "model.layers.0.mlp::self", "absmax": 2.0, "reason": "", "seconds": 0.2}  # fmt: skip
    return row | changes
