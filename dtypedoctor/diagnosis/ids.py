"""The ids of all findings. The same strings stand in YAML, in ``report.json`` and as names of the pages in ``docs/findings``."""

__all__ = ["FAMILIES", "FINDING_IDS"]

FAMILIES: dict[str, tuple[str, ...]] = {
    "dtype-mismatch": (
        "operand-dtype-mismatch",
        "autocast-bypass",
        "autocast-contradicts-model",
        "quant-state-dtype",
        "stale-dequant-buffer",
        "packed-weight-used-as-dense",
        "norm-promotes-to-float32",
        "buffer-promotes-to-float32",
        "adapter-dtype-mismatch",
        "head-dtype-mismatch",
        "attention-dtype-mismatch",
        "kv-cache-dtype",
        "merge-dtype-mismatch",
        "model-input-dtype",
        "custom-function-autocast",
        "recompute-dtype-mismatch",
        "fsdp-mixed-dtypes",
        "autocast-wrong-device",
    ),
    "loss-scaling": (
        "unscale-float16-gradients",
        "scaler-bfloat16",
        "no-inf-checks",
        "loss-scale-exhausted",
    ),
    "non-finite": (
        "float16-overflow",
        "attention-score-overflow",
        "norm-square-overflow",
        "fully-masked-row",
        "backward-overflow",
        "nonfinite-parameters",
        "nonfinite-input",
        "optimizer-epsilon-underflow",
        "rounds-out-of-domain",
        "divergence",
        "domain-error",
    ),
    "silent": (
        "gradient-underflow",
        "update-stall",
        "stale-autocast-cache",
        "float-to-int-cast",
        "rounded-rotary-buffer",
        "router-flip",
        "silent-rescue",
        "patch-not-applied",
        "logprob-gap",
    ),
    "compile-and-load": (
        "compile-graph-break",
        "recompile-limit",
        "compile-only-nonfinite",
        "stale-cuda-stream",
        "checkpoint-dtype-mismatch",
    ),
}
"""Finding ids by family; within a family in the order of the documentation's index."""

FINDING_IDS: frozenset[str] = frozenset(finding for ids in FAMILIES.values() for finding in ids)
"""Every finding id."""
