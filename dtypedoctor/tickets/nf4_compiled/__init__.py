"""An NF4 fast path through ctypes that neither the compiler nor a second stream can take (axolotl#25): scenarios ``nf4_dequant_*``."""

from dtypedoctor.plugins import Correction, Model

_HERE = "dtypedoctor.tickets.nf4_compiled"

MODELS = (
    Model(
        name="nf4-compiled",
        build=f"{_HERE}.model:nf4_compiled",
        finished=True,
        stream_choosers=(f"{_HERE}.nf4_ctypes:launch_stream",),
        needs=("transformers", "bitsandbytes"),
    ),
)

CORRECTIONS = (
    Correction(
        id="nf4-custom-op",
        summary="register the NF4 fast path as a custom operator, opaque to the compiler",
        install=f"{_HERE}.model:install_custom_op",
        in_scripts=False,
        proves=("compile-graph-break", "recompile-limit"),
        prefer="the call is compiled: it becomes one operator in one graph",
    ),
    Correction(
        id="nf4-stream-per-call",
        summary="launch the NF4 fast path on the stream that is current at each call",
        install=f"{_HERE}.model:install_stream_per_call",
        in_scripts=False,
        fixes=(("stale-cuda-stream", ""),),
        proves=("stale-cuda-stream",),
        prefer="the code runs eagerly on several streams",
    ),
)
