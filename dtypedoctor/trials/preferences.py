"""When to prefer which remedy: several may cure the same failure, and a run cannot tell which of them its owner wants."""

from collections.abc import Mapping

__all__ = ["PREFER"]

PREFER: Mapping[str, str] = {
    "gemma4-mlp-float32-product": "the run has to stay in float16, e.g. on a GPU without bfloat16; it touches one product per MLP",
    "gemma4-rms-norm-float32": "the run has to stay in float16 and the norms overflow",
    "gemma4-scaled-embedding-float32": "the run has to stay in float16 and the scaled embeddings overflow",
    "gemma4-attention-float32": "the run has to stay in float16 and the attention scores overflow",
    "bfloat16": "the GPU knows bfloat16 and 8 bits of precision are enough: nothing has to be patched",
    "autocast-dtype-of-model": "softmax, losses and float32 adapters are to be computed as autocast does it",
    "autocast-off": "everything has one dtype already, or casts are to be seen in the code",
    "quant-state-dtype": "the weights were packed under another dtype than the run's: put right once, after loading",
    "autocast-and-quant-state-dtype": "both the region and the packed weights have another dtype than the activations",
    "dequant-buffer-keyed-by-dtype": "models of several dtypes take turns in one process, and speed matters",
    "dequant-no-shared-buffer": "threads or streams share the process, and an allocation per weight is no matter",
    "dequant-float32-kernel": "the packed weights are to stay float32",
    "fresh-process": "the models need not share a process: no library has to change",
    "norm-output-cast": "the norms' weights are to stay exact in float32",
    "drop-keep-in-fp32": "you own the model's keep list, and rounding the norms' weights is no matter",
    "reconcile-dtypes-ignoring-keep-list": "the keep list belongs to somebody else, and rounding what it names is no matter",
    "nf4-custom-op": "the call is compiled: it stays one operator in one graph",
    "nf4-stream-per-call": "the code runs eagerly on several streams",
}
"""For each remedy that keeps the meaning of the run and changes a dtype, a kernel or a setting: the end of *prefer it when …*."""
