"""A 4-bit Llama with fused LoRA projections: scenarios ``bnb4bit_grpo_*``, ``sequential_loads_*`` and ``quant_state_float32``.

Two tickets share this code: mixed dtypes in the hand-written autograd functions (unsloth#4918), and the buffer and kernels that
dequantize (unsloth#4026, axolotl#3799).
"""

from dtypedoctor.plugins import Correction, Model

_HERE = "dtypedoctor.tickets.fused_llama"

MODELS = (
    Model(name="llama-nf4-fused", build=f"{_HERE}.model:llama_nf4_fused", needs=("transformers", "bitsandbytes")),
)

CORRECTIONS = (
    Correction(
        id="cast-after-dequantize",
        summary="cast each dequantized weight to the activations' dtype",
        install=f"{_HERE}.corrections:install_cast_after_dequantize",
        in_scripts=False,
        safe=False,
    ),
    Correction(
        id="backward-autocast-off",
        summary="run the hand-written backward passes without autocast, casting gradients and weights to the input's dtype",
        install=f"{_HERE}.corrections:install_backward_autocast_off",
        in_scripts=False,
        safe=False,
        fixes=(("custom-function-autocast", ""),),
    ),
    Correction(
        id="out-of-place-addmm",
        summary="add the LoRA products out of place, so that autocast casts them; the autocast dtype is unchanged",
        install=f"{_HERE}.corrections:install_out_of_place_addmm",
        in_scripts=False,
        safe=False,
        fixes=(("autocast-bypass", ""), ("custom-function-autocast", "")),
    ),
    Correction(
        id="decode-in-input-dtype",
        summary="cast everything to the activations' dtype when a single new token is decoded",
        install=f"{_HERE}.corrections:install_decode_in_input_dtype",
        in_scripts=False,
        safe=False,
    ),
    Correction(
        id="strict",
        summary="cast nothing: raise where the dtypes of weight, quant_state, activations and autocast disagree",
        install=f"{_HERE}.corrections:install_strict",
        in_scripts=False,
        strict=True,
    ),
    Correction(
        id="dequant-buffer-keyed-by-dtype",
        summary="keep one dequantization buffer per device and dtype",
        install=f"{_HERE}.corrections:install_dequant_buffer_keyed_by_dtype",
        in_scripts=False,
        fixes=(("stale-dequant-buffer", ""),),
        proves=("stale-dequant-buffer",),
        prefer="models of several dtypes alternate in one process, and speed matters",
    ),
    Correction(
        id="dequant-no-shared-buffer",
        summary="dequantize each weight into newly allocated memory",
        install=f"{_HERE}.corrections:install_dequant_no_shared_buffer",
        in_scripts=False,
        fixes=(("stale-dequant-buffer", ""),),
        prefer="several threads or streams dequantize at once, and an allocation per weight is acceptable",
    ),
    Correction(
        id="dequant-float32-kernel",
        summary="dequantize a float32 quant_state with the float32 kernel",
        install=f"{_HERE}.corrections:install_dequant_float32_kernel",
        in_scripts=False,
        fixes=(("quant-state-dtype", ""),),
        proves=("quant-state-dtype",),
        prefer="quant_state.dtype must stay float32",
    ),
)
