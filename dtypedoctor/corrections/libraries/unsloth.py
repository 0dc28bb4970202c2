"""unsloth: what its released kernels get wrong about dtypes, as edits of their source."""

from dtypedoctor.plugins import Correction, Edit

_KERNELS = "unsloth.kernels.utils"

CORRECTIONS = (
    Correction(
        id="unsloth-buffer-of-its-dtype",
        summary="allocate unsloth's dequantization buffer again when a weight of another dtype is dequantized",
        fixes=(("stale-dequant-buffer", ""),),
        proves=("stale-dequant-buffer",),
        prefer="models of several dtypes share a process and unsloth cannot be updated to 2026.3.1",
        library="unsloth",
        seen=("2025.9.1", "2026.1.1", "2026.2.1"),
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
)
