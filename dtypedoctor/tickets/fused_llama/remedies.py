"""Fixes that switch several corrections of the fused kernels on at once, as the ticket's pull request did."""

from dtypedoctor.trials.remedies import Remedy, with_kernels

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
)
