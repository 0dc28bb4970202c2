"""Public tickets of the same failures, by finding."""

_GITHUB = "https://github.com/"

_TICKETS: dict[str, tuple[str, ...]] = {
    "operand-dtype-mismatch": ("unslothai/unsloth/issues/4970",),
    "autocast-bypass": ("unslothai/unsloth/pull/4918", "linkedin/Liger-Kernel/issues/501"),
    "autocast-contradicts-model": ("unslothai/unsloth/pull/7534", "OpenPipe/ART/pull/663"),
    "quant-state-dtype": ("unslothai/unsloth/pull/4005", "axolotl-ai-cloud/axolotl/pull/3799"),
    "stale-dequant-buffer": ("unslothai/unsloth/pull/4026",),
    "packed-weight-used-as-dense": ("huggingface/peft/issues/156", "bitsandbytes-foundation/bitsandbytes/issues/963"),
    "norm-promotes-to-float32": ("NVIDIA-NeMo/Automodel/pull/1633", "NVIDIA-NeMo/Automodel/issues/1540"),
    "buffer-promotes-to-float32": ("NVIDIA-NeMo/Automodel/pull/2419",),
    "adapter-dtype-mismatch": ("huggingface/peft/issues/1872", "huggingface/peft/issues/1515"),
    "head-dtype-mismatch": ("huggingface/trl/issues/4634",),
    "attention-dtype-mismatch": ("unslothai/unsloth-zoo/pull/509", "hiyouga/LlamaFactory/issues/539"),
    "kv-cache-dtype": ("huggingface/transformers/issues/39686", "unslothai/unsloth-zoo/pull/424"),
    "merge-dtype-mismatch": ("huggingface/transformers/issues/47689", "hiyouga/LlamaFactory/issues/3807"),
    "model-input-dtype": ("kadirnar/whisper-plus/issues/58",),
    "custom-function-autocast": ("unslothai/unsloth/pull/7020", "axolotl-ai-cloud/axolotl/pull/3805"),
    "recompute-dtype-mismatch": ("pytorch/pytorch/issues/148831", "NVIDIA-NeMo/Automodel/pull/3504"),
    "fsdp-mixed-dtypes": ("axolotl-ai-cloud/axolotl/issues/1494", "huggingface/accelerate/pull/3985"),
    "autocast-wrong-device": ("huggingface/transformers/issues/32648",),
    "unscale-float16-gradients": ("huggingface/transformers/issues/23165", "huggingface/peft/issues/1249"),
    "scaler-bfloat16": ("pytorch/pytorch/issues/127176",),
    "no-inf-checks": ("huggingface/accelerate/issues/328", "huggingface/transformers/issues/24003"),
    "loss-scale-exhausted": ("deepspeedai/DeepSpeed/issues/5426",),
}


def references_of(finding: str) -> tuple[str, ...]:
    """Addresses of tickets of the same failure, the most telling first."""
    return tuple(_GITHUB + path for path in _TICKETS.get(finding, ()))
