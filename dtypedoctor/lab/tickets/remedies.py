"""Fixes of the tickets that are no single correction: options of the custom decoder, and several corrections of the fused kernels at once.

Other owners of such a decoder change its keep list or its loading; the pull request for the fused kernels switched corrections on together.
"""

from dtypedoctor.lab.trials.changes import with_kernels, with_options
from dtypedoctor.plugins import Remedy

_MODEL = "builtin:custom-moe"

REMEDIES = (
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
        id="drop-keep-in-fp32",
        summary="keep no module in float32; the norms' weights are rounded to the model's dtype",
        safe=True,
        change=with_options(_MODEL, keep_in_fp32=[]),
        prefer="you own the model's keep list, and rounding the norms' weights is no matter",
        by_hand="`model._keep_in_fp32_modules = []` before the model is cast or loaded",
    ),
    Remedy(
        id="reconcile-dtypes-ignoring-keep-list",
        summary="cast everything to the model's dtype after loading, kept modules too, whose weights are rounded",
        safe=True,
        change=with_options(_MODEL, reconcile="ignore-keep-list"),
        prefer="the keep list belongs to somebody else, and rounding what it names is no matter",
        by_hand="`model.to(dtype)` after loading",
    ),
    Remedy(
        id="reconcile-dtypes-honouring-keep-list",
        summary="cast everything but the kept modules to the model's dtype after loading",
        safe=True,
        change=with_options(_MODEL, reconcile="honour-keep-list"),
    ),
)
