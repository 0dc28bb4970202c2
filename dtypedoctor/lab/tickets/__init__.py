"""The five public tickets that dtypedoctor starts from, as guests: what only they need registers as any other package does.

For each there is the faulty original, the model that carries it and the corrections that fit it, for the scenarios in ``scenarios/`` that show it;
``docs/tickets.md`` tells the stories. No other package imports one of them, and nothing here imports torch.
"""

from collections.abc import Mapping

from dtypedoctor.plugins import Correction, Model

_HERE = "dtypedoctor.lab.tickets"

MODELS = (
    Model(
        name="gemma4-tiny",
        build=f"{_HERE}.gemma4:gemma4_tiny",
        case="gemma4_grpo_fp16",
        needs=("transformers",),
    ),
    Model(name="llama-nf4-fused", build=f"{_HERE}.fused_llama:llama_nf4_fused", needs=("transformers", "bitsandbytes")),
    Model(name="custom-moe", build=f"{_HERE}.custom_moe:custom_moe", finished=True, needs=("transformers",)),
    Model(
        name="nf4-compiled",
        build=f"{_HERE}.nf4_compiled:nf4_compiled",
        finished=True,
        stream_choosers=(f"{_HERE}.nf4_ctypes:launch_stream",),
        needs=("transformers", "bitsandbytes"),
    ),
)

CORRECTIONS = (
    # Gemma-4's MLP overflows float16 (unsloth-zoo#600): scenarios ``gemma4_*``.
    Correction(
        id="gemma4-mlp-float32-product",
        summary="compute the MLP's gated product in float32 and clamp it to ±65,280",
        install=f"{_HERE}.gemma4:install_mlp_float32_product",
        fixes=(("float16-overflow", "Gemma4TextMLP"),),
        proves=("float16-overflow",),
        prefer="the run must stay in float16, e.g. on a GPU without bfloat16; it changes one product per MLP",
    ),
    Correction(
        id="gemma4-rms-norm-float32",
        summary="compute every RMSNorm of Gemma-4 in float32",
        install=f"{_HERE}.gemma4:install_rms_norm_float32",
        fixes=(("float16-overflow", "Gemma4RMSNorm"), ("norm-square-overflow", "Gemma4RMSNorm")),
        proves=("float16-overflow", "norm-square-overflow"),
        prefer="the run must stay in float16 and the norms overflow",
    ),
    Correction(
        id="gemma4-scaled-embedding-float32",
        summary="scale Gemma-4's token embeddings in float32",
        install=f"{_HERE}.gemma4:install_scaled_embedding_float32",
        fixes=(("float16-overflow", "Gemma4TextScaledWordEmbedding"),),
        proves=("float16-overflow",),
        prefer="the run must stay in float16 and the scaled embeddings overflow",
    ),
    Correction(
        id="gemma4-attention-float32",
        summary="compute Gemma-4's attention between its projections in float32",
        install=f"{_HERE}.gemma4:install_attention_float32",
        fixes=(("float16-overflow", "Gemma4TextAttention"), ("attention-score-overflow", "Gemma4TextAttention")),
        proves=("float16-overflow", "attention-score-overflow"),
        prefer="the run must stay in float16 and the attention scores overflow",
    ),
    # A 4-bit Llama with fused LoRA projections: scenarios ``bnb4bit_grpo_*``, ``sequential_loads_*`` and ``quant_state_float32``.
    Correction(
        id="cast-after-dequantize",
        summary="cast each dequantized weight to the activations' dtype",
        install=f"{_HERE}.fused_llama:install_cast_after_dequantize",
        in_scripts=False,
        safe=False,
    ),
    Correction(
        id="backward-autocast-off",
        summary="run the hand-written backward passes without autocast, casting gradients and weights to the input's dtype",
        install=f"{_HERE}.fused_llama:install_backward_autocast_off",
        in_scripts=False,
        safe=False,
        fixes=(("custom-function-autocast", ""),),
    ),
    Correction(
        id="out-of-place-addmm",
        summary="add the LoRA products out of place, so that autocast casts them; the autocast dtype is unchanged",
        install=f"{_HERE}.fused_llama:install_out_of_place_addmm",
        in_scripts=False,
        safe=False,
        fixes=(("autocast-bypass", ""), ("custom-function-autocast", "")),
    ),
    Correction(
        id="decode-in-input-dtype",
        summary="cast everything to the activations' dtype when a single new token is decoded",
        install=f"{_HERE}.fused_llama:install_decode_in_input_dtype",
        in_scripts=False,
        safe=False,
    ),
    Correction(
        id="strict",
        summary="cast nothing: raise where the dtypes of weight, quant_state, activations and autocast disagree",
        install=f"{_HERE}.fused_llama:install_strict",
        in_scripts=False,
        strict=True,
    ),
    Correction(
        id="dequant-buffer-keyed-by-dtype",
        summary="keep one dequantization buffer per device and dtype",
        install=f"{_HERE}.fused_llama:install_dequant_buffer_keyed_by_dtype",
        in_scripts=False,
        fixes=(("stale-dequant-buffer", ""),),
        proves=("stale-dequant-buffer",),
        prefer="models of several dtypes alternate in one process, and speed matters",
    ),
    Correction(
        id="dequant-no-shared-buffer",
        summary="dequantize each weight into newly allocated memory",
        install=f"{_HERE}.fused_llama:install_dequant_no_shared_buffer",
        in_scripts=False,
        fixes=(("stale-dequant-buffer", ""),),
        prefer="several threads or streams dequantize at once, and an allocation per weight is acceptable",
    ),
    Correction(
        id="dequant-float32-kernel",
        summary="dequantize a float32 quant_state with the float32 kernel",
        install=f"{_HERE}.fused_llama:install_dequant_float32_kernel",
        in_scripts=False,
        fixes=(("quant-state-dtype", ""),),
        proves=("quant-state-dtype",),
        prefer="quant_state.dtype must stay float32",
    ),
    # A custom decoder whose norms stay in float32 and widen the activations (Automodel#1622): scenarios ``custom_model_rmsnorm_*``.
    Correction(
        id="cast-at-lora-input",
        summary="cast the input of every LoRA layer; defensive: the activations are still promoted before it",
        install=f"{_HERE}.custom_moe:install_cast_at_lora_input",
        in_scripts=False,
        safe=False,
        fixes=(("adapter-dtype-mismatch", ""),),
    ),
    # An NF4 fast path through ctypes that neither the compiler nor a second stream can take (axolotl#25): scenarios ``nf4_dequant_*``.
    Correction(
        id="nf4-custom-op",
        summary="register the NF4 fast path as a custom operator, opaque to the compiler",
        install=f"{_HERE}.nf4_compiled:install_custom_op",
        in_scripts=False,
        proves=("compile-graph-break", "recompile-limit"),
        prefer="the call is compiled: it becomes one operator in one graph",
    ),
    Correction(
        id="nf4-stream-per-call",
        summary="launch the NF4 fast path on the stream that is current at each call",
        install=f"{_HERE}.nf4_compiled:install_stream_per_call",
        in_scripts=False,
        fixes=(("stale-cuda-stream", ""),),
        proves=("stale-cuda-stream",),
        prefer="the code runs eagerly on several streams",
    ),
)

ENTRY_POINTS: Mapping[str, tuple[str, ...]] = {
    "dtypedoctor.models": (f"{_HERE}:MODELS",),
    "dtypedoctor.corrections": (f"{_HERE}:CORRECTIONS",),
    "dtypedoctor.remedies": (f"{_HERE}.remedies:REMEDIES",),
}
"""What would stand in the metadata of a package of its own: by group of entry points, where the dataclasses are."""
