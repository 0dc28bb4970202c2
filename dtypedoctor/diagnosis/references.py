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
    "float16-overflow": ("unslothai/unsloth-zoo/pull/600", "huggingface/transformers/issues/9295"),
    "attention-score-overflow": ("huggingface/transformers/pull/33317", "QwenLM/Qwen3/issues/761"),
    "norm-square-overflow": ("sgl-project/sglang/pull/27540", "openvinotoolkit/openvino/issues/37041"),
    "fully-masked-row": ("huggingface/transformers/pull/17306", "pytorch/pytorch/issues/26098"),
    "backward-overflow": ("unslothai/unsloth-zoo/pull/866", "unslothai/unsloth-zoo/pull/785"),
    "nonfinite-parameters": ("huggingface/transformers/issues/38665", "bitsandbytes-foundation/bitsandbytes/pull/1971"),
    "nonfinite-input": ("huggingface/diffusers/issues/7563",),
    "optimizer-epsilon-underflow": ("NVIDIA/apex/issues/240", "google-deepmind/optax/issues/1754"),
    "rounds-out-of-domain": (
        "pytorch/pytorch/issues/32137",
        "kornia/kornia/issues/3966",
        "lightonai/pylate/issues/239",
    ),
    "divergence": ("OpenNMT/OpenNMT-tf/issues/744", "facebookresearch/detr/issues/285"),
    "domain-error": ("pytorch/pytorch/issues/26098",),
    "gradient-underflow": ("huggingface/transformers/issues/25021", "google/gemma_pytorch/issues/24"),
    "update-stall": ("pytorch/ao/pull/1124", "huggingface/trl/issues/7268", "meta-pytorch/torchtune/issues/2254"),
    "stale-autocast-cache": ("X-GenGroup/Flow-Factory/issues/186", "NVIDIA/apex/issues/132"),
    "float-to-int-cast": ("unslothai/unsloth-zoo/pull/482",),
    "rounded-rotary-buffer": ("huggingface/transformers/issues/25681", "NVIDIA-NeMo/Automodel/pull/2549"),
    "router-flip": ("vllm-project/vllm/pull/14027", "sgl-project/sglang/pull/33764"),
    "silent-rescue": ("unslothai/unsloth-zoo/pull/600", "huggingface/transformers/pull/9487"),
    "patch-not-applied": ("unslothai/unsloth-zoo/pull/600",),
    "logprob-gap": ("huggingface/trl/pull/3867", "sail-sg/Precision-RL/issues/10"),
    "compile-only-nonfinite": ("pytorch/pytorch/issues/168126", "unslothai/unsloth/issues/3385"),
    "compile-graph-break": ("thad0ctor/axolotl/pull/25", "axolotl-ai-cloud/axolotl/pull/3677"),
    "recompile-limit": ("thad0ctor/axolotl/pull/25", "axolotl-ai-cloud/axolotl/pull/3677"),
    "stale-cuda-stream": ("thad0ctor/axolotl/pull/25",),
    "checkpoint-dtype-mismatch": ("huggingface/transformers/pull/34919", "huggingface/transformers/issues/23357"),
}


def references_of(finding: str) -> tuple[str, ...]:
    """Addresses of tickets of the same failure, the most telling first."""
    return tuple(_GITHUB + path for path in _TICKETS.get(finding, ()))
