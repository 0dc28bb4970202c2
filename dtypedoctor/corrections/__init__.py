"""Corrective code for live models; here: which corrections there are. The code is imported where one is installed."""

from dtypedoctor.plugins import Correction

CORRECTIONS = (
    Correction(
        id="keep-float32",
        summary="Keeps the named modules in float32: parameters, inputs and arithmetic; their outputs get their dtype back.",
        install="dtypedoctor.corrections.keep_float32:install_keep_float32",
    ),
    Correction(
        id="gemma4-mlp-float32-product",
        summary="Computes act(gate) * up of Gemma-4's MLP in float32 and holds it within ±65280 before down_proj.",
        install="dtypedoctor.corrections.gemma4:install_mlp_float32_product",
    ),
    Correction(
        id="gemma4-rms-norm-float32",
        summary="Computes Gemma-4's RMSNorm and its scale in float32 and holds the result within ±65280.",
        install="dtypedoctor.corrections.gemma4:install_rms_norm_float32",
    ),
    Correction(
        id="gemma4-scaled-embedding-float32",
        summary="Multiplies Gemma-4's token embeddings by their scale in float32 and holds the result within ±65280.",
        install="dtypedoctor.corrections.gemma4:install_scaled_embedding_float32",
    ),
    Correction(
        id="gemma4-attention-float32",
        summary="Computes Gemma-4's attention between its projections in float32 and holds what enters o_proj within ±65280.",
        install="dtypedoctor.corrections.gemma4:install_attention_float32",
    ),
    Correction(
        id="cast-after-dequantize",
        summary="Casts the dequantised weight and the base product of a LoRA projection to the activations' dtype.",
        install="dtypedoctor.corrections.fused_lora:install_cast_after_dequantize",
    ),
    Correction(
        id="quant-state-dtype",
        summary="Sets quant_state.dtype of every packed weight to the dtype of the activations.",
        install="dtypedoctor.corrections.fused_lora:install_quant_state_dtype",
    ),
    Correction(
        id="backward-autocast-off",
        summary="Runs the hand-written backward passes without autocast, gradients and weights cast to the input's dtype.",
        install="dtypedoctor.corrections.fused_lora:install_backward_autocast_off",
    ),
    Correction(
        id="out-of-place-addmm",
        summary="Adds the LoRA products out of place, where autocast reaches them.",
        install="dtypedoctor.corrections.fused_lora:install_out_of_place_addmm",
    ),
    Correction(
        id="decode-in-input-dtype",
        summary="Runs the projections of a single new token in the activations' dtype, without autocast or packed kernel.",
        install="dtypedoctor.corrections.fused_lora:install_decode_in_input_dtype",
    ),
    Correction(
        id="strict",
        summary="Raises where weight, quantisation state, activations and autocast disagree, instead of casting.",
        install="dtypedoctor.corrections.fused_lora:install_strict",
    ),
    Correction(
        id="dequant-buffer-keyed-by-dtype",
        summary="Keeps one dequantise buffer per device and dtype instead of one per device.",
        install="dtypedoctor.corrections.dequantize:install_dequant_buffer_keyed_by_dtype",
    ),
    Correction(
        id="dequant-no-shared-buffer",
        summary="Dequantises each weight into memory of its own.",
        install="dtypedoctor.corrections.dequantize:install_dequant_no_shared_buffer",
    ),
    Correction(
        id="dequant-float32-kernel",
        summary="Dequantises a float32 quantisation state with the float32 kernel instead of the bfloat16 one.",
        install="dtypedoctor.corrections.dequantize:install_dequant_float32_kernel",
    ),
    Correction(
        id="norm-output-cast",
        summary="Casts the output of norms with a wider weight back to the dtype of their input.",
        install="dtypedoctor.corrections.rms_norm:install_norm_output_cast",
    ),
    Correction(
        id="cast-at-lora-input",
        summary="Casts the input of LinearLoRA layers to the dtype of their weights; whoever widened it still does.",
        install="dtypedoctor.corrections.rms_norm:install_cast_at_lora_input",
    ),
    Correction(
        id="nf4-custom-op",
        summary="Runs the NF4 fast path as an operator that Dynamo does not look into, on the current stream.",
        install="dtypedoctor.corrections.nf4_dequantize:install_custom_op",
    ),
    Correction(
        id="nf4-stream-per-call",
        summary="Launches the NF4 fast path on the stream that is current at each call.",
        install="dtypedoctor.corrections.nf4_dequantize:install_stream_per_call",
    ),
)
"""The corrections that come with dtypedoctor."""
