"""The ids of all corrections, for those who must not import torch; the corrections themselves are in ``dtypedoctor.corrections``."""

__all__ = ["CORRECTION_IDS"]

CORRECTION_IDS = frozenset({
    "backward-autocast-off", "cast-after-dequantize", "cast-at-lora-input", "decode-in-input-dtype", "dequant-buffer-keyed-by-dtype",
    "dequant-float32-kernel", "dequant-no-shared-buffer", "gemma4-attention-float32", "gemma4-mlp-float32-product",
    "gemma4-rms-norm-float32", "gemma4-scaled-embedding-float32", "keep-float32", "nf4-custom-op", "nf4-stream-per-call",
    "norm-output-cast", "out-of-place-addmm", "quant-state-dtype", "strict",
})  # fmt: skip
"""Every correction's id; a test holds it against the registry."""
