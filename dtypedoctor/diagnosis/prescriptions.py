"""Which remedies are worth trying for a finding.

A finding that is not named here has no remedy that could be switched on from outside: its page says what to change.
"""

BY_FINDING: dict[str, tuple[str, ...]] = {
    "float16-overflow": ("bfloat16",),
    "attention-score-overflow": ("bfloat16",),
    "norm-square-overflow": ("bfloat16",),
    "backward-overflow": ("bfloat16",),
    "gradient-underflow": ("bfloat16",),
    "optimizer-epsilon-underflow": ("bfloat16",),
    "autocast-bypass": ("autocast-off", "out-of-place-addmm"),
    "adapter-dtype-mismatch": ("cast-at-lora-input",),
    "autocast-contradicts-model": ("autocast-dtype-of-model", "autocast-off"),
    "quant-state-dtype": ("quant-state-dtype", "dequant-float32-kernel"),
    "stale-dequant-buffer": ("dequant-buffer-keyed-by-dtype", "dequant-no-shared-buffer", "fresh-process"),
    "custom-function-autocast": ("backward-autocast-off", "out-of-place-addmm"),
    "norm-promotes-to-float32": ("norm-output-cast",),
    "stale-cuda-stream": ("nf4-stream-per-call",),
}
"""Remedies that fit a finding wherever it originates."""

BY_MODULE: dict[tuple[str, str], tuple[str, ...]] = {
    ("float16-overflow", "Gemma4TextMLP"): ("gemma4-mlp-float32-product",),
    ("float16-overflow", "Gemma4RMSNorm"): ("gemma4-rms-norm-float32",),
    ("norm-square-overflow", "Gemma4RMSNorm"): ("gemma4-rms-norm-float32",),
    ("float16-overflow", "Gemma4TextScaledWordEmbedding"): ("gemma4-scaled-embedding-float32",),
    ("float16-overflow", "Gemma4TextAttention"): ("gemma4-attention-float32",),
    ("attention-score-overflow", "Gemma4TextAttention"): ("gemma4-attention-float32",),
}
"""Remedies written for one class of module."""


def remedies_for(finding: str, cls: str = "") -> tuple[str, ...]:
    """Ids of the remedies for ``finding`` originating in a module of class ``cls``, the most specific first."""
    return BY_MODULE.get((finding, cls), ()) + BY_FINDING.get(finding, ())
