"""unsloth: what its released kernels get wrong about dtypes, as edits of their source."""

from dtypedoctor.plugins import Correction, Edit

_KERNELS = "unsloth.kernels.utils"

_STATE_FOLLOWS = """
if hasattr(W_quant, "state2") and X.dtype in (torch.float16, torch.bfloat16):
    W_quant.dtype = X.dtype  # kernel and memory are chosen by it, here and in the backward pass
"""
_STATE_DIFFERS = (
    'hasattr(W_quant, "state2") and X.dtype in (torch.float16, torch.bfloat16) and W_quant.dtype != X.dtype'
)

CORRECTIONS = (
    Correction(
        id="unsloth-buffer-of-its-dtype",
        summary="allocate unsloth's dequantization buffer again when a weight of another dtype is dequantized",
        fixes=(("stale-dequant-buffer", ""),),
        proves=("stale-dequant-buffer",),
        prefer="models of several dtypes share a process and unsloth cannot be updated to 2026.3.1",
        library="unsloth",
        seen=("2025.9.1", "2025.12.1", "2026.1.1", "2026.2.1"),
        test="unsloth_buffer_of_its_dtype.txt",
        edits=(
            Edit(
                module=_KERNELS,
                function="fast_dequantize",
                parameters=("W", "quant_state", "out", "use_global_buffer"),
                old="if WEIGHT_BUFFER is None:",
                new="if WEIGHT_BUFFER is None or WEIGHT_BUFFER.dtype != dtype:",
                acts="WEIGHT_BUFFER is not None and WEIGHT_BUFFER.dtype != dtype",
            ),
        ),
    ),
    Correction(
        id="unsloth-state-of-input-dtype",
        summary="set quant_state.dtype to the activations' dtype each time unsloth multiplies with a packed weight",
        fixes=(("quant-state-dtype", ""),),
        proves=("quant-state-dtype",),
        prefer="a checkpoint's packed weights say another dtype than the run's, and no one place loads all models",
        library="unsloth",
        seen=("2025.9.1", "2025.12.1", "2026.2.1", "2026.7.6", "2026.9.1", "2026.10.9"),
        test="unsloth_state_of_input_dtype.txt",
        edits=(
            Edit(
                module=_KERNELS,
                function="matmul_lora",
                parameters=("X", "W", "W_quant", "A", "B", "s", "out"),
                old="dtype = X.dtype",
                new=f"dtype = X.dtype{_STATE_FOLLOWS}",
                acts=_STATE_DIFFERS,
            ),
            Edit(
                module=_KERNELS,
                function="fast_linear_forward",
                parameters=("proj", "X", "temp_lora", "out"),
                old="bsz, q_len, in_dim = X.shape",
                new=f"bsz, q_len, in_dim = X.shape{_STATE_FOLLOWS}",
                acts=_STATE_DIFFERS,
            ),
        ),
    ),
)
