"""axolotl: what its released NF4 dequantizer does under ``torch.compile`` and on several CUDA streams, as edits of its source."""

from dtypedoctor.plugins import Correction, Edit

_QUANTIZE = "axolotl.kernels.quantize"
_WHOLE = ("W", "quant_state", "out")

CORRECTIONS = (
    Correction(
        id="axolotl-compiled-dequantize",
        summary="dequantize through bitsandbytes' registered operators where torch.compile traces axolotl's dequantizer",
        fixes=(("compile-graph-break", ""), ("recompile-limit", "")),
        proves=("compile-graph-break", "recompile-limit"),
        prefer="the model is compiled and axolotl cannot be updated to 0.18.0; eager calls keep their fast path",
        library="axolotl",
        seen=("0.16.1", "0.17.0"),
        test="axolotl_compiled_dequantize.txt",
        edits=(
            Edit(
                module=_QUANTIZE,
                function="dequantize",
                parameters=_WHOLE,
                old="if quant_state.offset is None or quant_state.state2 is None:",
                new=(
                    "compiling = out is None and torch.compiler.is_compiling()\n"
                    "if compiling or quant_state.offset is None or quant_state.state2 is None:"
                ),
                acts="torch.compiler.is_compiling()",
            ),
        ),
    ),
    Correction(
        id="axolotl-stream-per-call",
        summary="launch axolotl's dequantizer on the CUDA stream that is current at each call",
        fixes=(("stale-cuda-stream", ""),),
        proves=("stale-cuda-stream",),
        prefer="weights are dequantized on several streams or devices and axolotl cannot be updated to 0.19.0",
        library="axolotl",
        seen=("0.17.0",),
        edits=(
            Edit(
                module=_QUANTIZE,
                function="dequantize",
                parameters=_WHOLE,
                old=(
                    "global CUDA_STREAM\n"
                    "if CUDA_STREAM is None:\n"
                    "    CUDA_STREAM = torch.cuda.current_stream(target_device)"
                ),
                new="CUDA_STREAM = torch.cuda.current_stream(target_device)  # the caller's, not the first",
            ),
        ),
    ),
)
