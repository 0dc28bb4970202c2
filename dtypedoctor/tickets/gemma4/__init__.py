"""Gemma-4's MLP overflows float16 (unsloth-zoo#600): scenarios ``gemma4_*``."""

from dtypedoctor.plugins import Correction, Model

_HERE = "dtypedoctor.tickets.gemma4"

MODELS = (
    Model(
        name="gemma4-tiny",
        build=f"{_HERE}.corrections:gemma4_tiny",
        case="gemma4_grpo_fp16",
        needs=("transformers",),
    ),
)

CORRECTIONS = (
    Correction(
        id="gemma4-mlp-float32-product",
        summary="compute the MLP's gated product in float32 and clamp it to ±65,280",
        install=f"{_HERE}.corrections:install_mlp_float32_product",
        fixes=(("float16-overflow", "Gemma4TextMLP"),),
        proves=("float16-overflow",),
        prefer="the run must stay in float16, e.g. on a GPU without bfloat16; it changes one product per MLP",
    ),
    Correction(
        id="gemma4-rms-norm-float32",
        summary="compute every RMSNorm of Gemma-4 in float32 and clamp its result to ±65,280",
        install=f"{_HERE}.corrections:install_rms_norm_float32",
        fixes=(("float16-overflow", "Gemma4RMSNorm"), ("norm-square-overflow", "Gemma4RMSNorm")),
        proves=("float16-overflow", "norm-square-overflow"),
        prefer="the run must stay in float16 and the norms overflow",
    ),
    Correction(
        id="gemma4-scaled-embedding-float32",
        summary="scale Gemma-4's token embeddings in float32 and clamp them to ±65,280",
        install=f"{_HERE}.corrections:install_scaled_embedding_float32",
        fixes=(("float16-overflow", "Gemma4TextScaledWordEmbedding"),),
        proves=("float16-overflow",),
        prefer="the run must stay in float16 and the scaled embeddings overflow",
    ),
    Correction(
        id="gemma4-attention-float32",
        summary="compute Gemma-4's attention between its projections in float32",
        install=f"{_HERE}.corrections:install_attention_float32",
        fixes=(("float16-overflow", "Gemma4TextAttention"), ("attention-score-overflow", "Gemma4TextAttention")),
        proves=("float16-overflow", "attention-score-overflow"),
        prefer="the run must stay in float16 and the attention scores overflow",
    ),
)
