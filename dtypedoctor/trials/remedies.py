"""Remedies: changes of a scenario that may cure a finding."""

from collections.abc import Mapping
from dataclasses import dataclass

from dtypedoctor.plugins import Correction, registered
from dtypedoctor.trials.changes import (
    Change,
    all_of,
    autocast_of_model,
    fresh_process,
    from_outside,
    with_autocast,
    with_conditions,
    with_corrections,
    with_custom_options,
    with_kernels,
    with_model,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A change of a scenario.

    Attributes:
        id: kebab-case id.
        summary: what it changes, one sentence.
        safe: whether it keeps the meaning of the run; an unsafe one casts what disagrees without a word, or takes away what
            the program asks for, so it may hide a failure instead of curing it.
        change: gives the changed scenario.
        strict: it is not there to cure but to raise where the others would cast.
        prefer: the end of *prefer it if …*, where several remedies cure; empty for those that do not keep the meaning of the run.
    """

    id: str
    summary: str
    safe: bool
    change: Change
    strict: bool = False
    prefer: str = ""


_OVERFLOW = (
    Remedy(
        id="gemma4-mlp-float32-product",
        summary="compute the MLP's gated product in float32 and hold it within ±65280",
        safe=True,
        change=with_corrections("gemma4-mlp-float32-product"),
        prefer="the run has to stay in float16, e.g. on a GPU without bfloat16; it touches one product per MLP",
    ),
    Remedy(
        id="gemma4-rms-norm-float32",
        summary="compute every RMSNorm of Gemma-4 in float32 and hold its result within ±65280",
        safe=True,
        change=with_corrections("gemma4-rms-norm-float32"),
        prefer="the run has to stay in float16 and the norms overflow",
    ),
    Remedy(
        id="gemma4-scaled-embedding-float32",
        summary="scale Gemma-4's token embeddings in float32 and hold them within ±65280",
        safe=True,
        change=with_corrections("gemma4-scaled-embedding-float32"),
        prefer="the run has to stay in float16 and the scaled embeddings overflow",
    ),
    Remedy(
        id="gemma4-attention-float32",
        summary="compute Gemma-4's attention between its projections in float32",
        safe=True,
        change=with_corrections("gemma4-attention-float32"),
        prefer="the run has to stay in float16 and the attention scores overflow",
    ),
    Remedy(
        id="bfloat16",
        summary="load the model in bfloat16, which has float32's range",
        safe=True,
        change=with_model(dtype="bfloat16"),
        prefer="the GPU knows bfloat16 and 8 bits of precision are enough: nothing has to be patched",
    ),
)

_AUTOCAST = (
    Remedy(
        id="autocast-dtype-of-model",
        summary="open the autocast region in the dtype of the model's own weights",
        safe=True,
        change=autocast_of_model,
        prefer="softmax, losses and float32 adapters are to be computed as autocast does it",
    ),
    Remedy(
        id="autocast-off",
        summary="open no autocast region",
        safe=True,
        change=from_outside("autocast-off", otherwise=with_autocast(None)),
        prefer="everything has one dtype already, or casts are to be seen in the code",
    ),
    Remedy(
        id="autocast-bfloat16",
        summary="run under bfloat16 autocast, which casts whatever it meets, also what should have been an error",
        safe=False,
        change=with_autocast("bfloat16"),
    ),
)

_FUSED_LORA = (
    Remedy(
        id="quant-state-dtype",
        summary="set quant_state.dtype of every packed weight to the activations' dtype",
        safe=True,
        change=with_corrections("quant-state-dtype"),
        prefer="the weights were packed under another dtype than the run's: put right once, after loading",
    ),
    Remedy(
        id="cast-after-dequantize",
        summary="cast each dequantised weight to the activations' dtype, whatever it was",
        safe=False,
        change=with_kernels("cast-after-dequantize"),
    ),
    Remedy(
        id="backward-autocast-off",
        summary="run the hand-written backward passes without autocast, casting gradients and weights to the input's dtype",
        safe=False,
        change=with_kernels("backward-autocast-off"),
    ),
    Remedy(
        id="out-of-place-addmm",
        summary="add the LoRA products out of place, where autocast casts them; the autocast dtype stays as it is",
        safe=False,
        change=with_kernels("out-of-place-addmm"),
    ),
    Remedy(
        id="decode-in-input-dtype",
        summary="cast everything to the activations' dtype when a single new token is decoded",
        safe=False,
        change=with_kernels("decode-in-input-dtype"),
    ),
    Remedy(
        id="casts-forward-and-backward",
        summary="cast-after-dequantize and backward-autocast-off together (the pull request's first version)",
        safe=False,
        change=with_kernels("cast-after-dequantize", "backward-autocast-off"),
    ),
    Remedy(
        id="casts-everywhere",
        summary="cast-after-dequantize, backward-autocast-off and decode-in-input-dtype together",
        safe=False,
        change=with_kernels("cast-after-dequantize", "backward-autocast-off", "decode-in-input-dtype"),
    ),
    Remedy(
        id="quant-state-dtype-and-casts",
        summary="quant-state-dtype with the casts kept as a fallback (the pull request's second version)",
        safe=False,
        change=with_kernels("quant-state-dtype", "cast-after-dequantize", "backward-autocast-off"),
    ),
    Remedy(
        id="autocast-and-quant-state-dtype",
        summary="autocast-dtype-of-model and quant-state-dtype together",
        safe=True,
        change=all_of(autocast_of_model, with_corrections("quant-state-dtype")),
        prefer="both the region and the packed weights have another dtype than the activations",
    ),
    Remedy(
        id="strict",
        summary="cast nothing: raise where weight, quantisation state, activations and autocast disagree",
        safe=True,
        change=with_kernels("strict"),
        strict=True,
    ),
)

_DEQUANTIZE = (
    Remedy(
        id="dequant-buffer-keyed-by-dtype",
        summary="keep one dequantise buffer per device and dtype",
        safe=True,
        change=with_kernels("dequant-buffer-keyed-by-dtype"),
        prefer="models of several dtypes take turns in one process, and speed matters",
    ),
    Remedy(
        id="dequant-no-shared-buffer",
        summary="dequantise each weight into memory of its own",
        safe=True,
        change=with_kernels("dequant-no-shared-buffer"),
        prefer="threads or streams share the process, and an allocation per weight is no matter",
    ),
    Remedy(
        id="dequant-float32-kernel",
        summary="dequantise a float32 quantisation state with the float32 kernel",
        safe=True,
        change=with_kernels("dequant-float32-kernel"),
        prefer="the packed weights are to stay float32",
    ),
    Remedy(
        id="fresh-process",
        summary="run the last model in a process of its own",
        safe=True,
        change=fresh_process,
        prefer="the models need not share a process: no library has to change",
    ),
)

_NORMS = (
    Remedy(
        id="norm-output-cast",
        summary="cast the output of the norms back to the dtype of their input; their weights stay in float32",
        safe=True,
        change=with_corrections("norm-output-cast"),
        prefer="the norms' weights are to stay exact in float32",
    ),
    Remedy(
        id="drop-keep-in-fp32",
        summary="keep no module in float32; the norms' weights are rounded to the model's dtype",
        safe=True,
        change=with_custom_options(keep_in_fp32=[]),
        prefer="you own the model's keep list, and rounding the norms' weights is no matter",
    ),
    Remedy(
        id="reconcile-dtypes-ignoring-keep-list",
        summary="cast everything to the model's dtype after loading, kept modules too, whose weights are rounded",
        safe=True,
        change=with_custom_options(reconcile="ignore-keep-list"),
        prefer="the keep list belongs to somebody else, and rounding what it names is no matter",
    ),
    Remedy(
        id="reconcile-dtypes-honouring-keep-list",
        summary="cast everything but the kept modules to the model's dtype after loading",
        safe=True,
        change=with_custom_options(reconcile="honour-keep-list"),
    ),
    Remedy(
        id="cast-at-lora-input",
        summary="cast the input of every LoRA layer; defensive: whatever widened the activations still does",
        safe=False,
        change=with_kernels("cast-at-lora-input"),
    ),
)

_COMPILING = (
    Remedy(
        id="nf4-custom-op",
        summary="register the NF4 fast path as an operator that the compiler does not look into",
        safe=True,
        change=with_kernels("nf4-custom-op"),
        prefer="the call is compiled: it stays one operator in one graph",
    ),
    Remedy(
        id="nf4-stream-per-call",
        summary="launch the NF4 fast path on the stream that is current at each call",
        safe=True,
        change=with_kernels("nf4-stream-per-call"),
        prefer="the code runs eagerly on several streams",
    ),
)

_CONDITIONS = (
    Remedy(
        id="eager-attention",
        summary="compute attention in steps, with torch's math backend and transformers' eager code, never in a fused kernel",
        safe=False,
        change=with_conditions("eager-attention"),
    ),
    Remedy(
        id="compile-off",
        summary="run what torch.compile has made as the Python code that it is",
        safe=False,
        change=with_conditions("compile-off"),
    ),
    Remedy(
        id="loss-scale-one",
        summary="hold the scale of every gradient scaler at 1; steps whose gradients are not finite are still skipped",
        safe=False,
        change=with_conditions("loss-scale-one"),
    ),
)

REMEDIES: dict[str, Remedy] = {
    remedy.id: remedy
    for remedy in (*_OVERFLOW, *_AUTOCAST, *_FUSED_LORA, *_DEQUANTIZE, *_NORMS, *_COMPILING, *_CONDITIONS)
}
"""The remedies that come with dtypedoctor, by id."""


def remedies() -> Mapping[str, Remedy]:
    """Every remedy by its id: dtypedoctor's own, and each correction of a plug-in that fixes some finding."""
    plugged_in = {
        one.id: Remedy(
            id=one.id, summary=one.summary, safe=one.safe, change=with_corrections(one.id), prefer=one.prefer
        )
        for one in registered(Correction).values()
        if one.fixes
    }
    return REMEDIES | plugged_in
