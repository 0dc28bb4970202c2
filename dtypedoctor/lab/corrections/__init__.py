"""Corrective code for live models; here: the corrections that fit any library. The code is imported where one is installed."""

import pkgutil
from collections.abc import Iterator
from importlib import import_module

from dtypedoctor.plugins import Correction

LIBRARIES = f"{__name__}.libraries"
"""Holds a module for each library whose released source is corrected."""


def _of_libraries() -> Iterator[Correction]:
    """The corrections of every module in :data:`LIBRARIES`, which are found by their being there."""
    for module in pkgutil.iter_modules(import_module(LIBRARIES).__path__, f"{LIBRARIES}."):
        yield from import_module(module.name).CORRECTIONS


CORRECTIONS = (
    Correction(
        id="keep-float32",
        summary="run the named modules in float32: parameters, inputs and arithmetic; outputs are cast back to their original dtype",
        install="dtypedoctor.lab.corrections.keep_float32:install_keep_float32",
        needs_modules=True,
    ),
    Correction(
        id="quant-state-dtype",
        summary="set quant_state.dtype of every packed weight to the activations' dtype",
        install="dtypedoctor.lab.corrections.casts:install_quant_state_dtype",
        fixes=(("quant-state-dtype", ""),),
        proves=("quant-state-dtype",),
        prefer="the weights were packed in another dtype than the run's: corrected once, after loading",
        by_hand="after loading, `parameter.quant_state.dtype = dtype` for each of `model.parameters()` that has one",
    ),
    Correction(
        id="norm-output-cast",
        summary="cast the output of the norms back to the dtype of their input; their weights stay in float32",
        install="dtypedoctor.lab.corrections.casts:install_norm_output_cast",
        fixes=(("norm-promotes-to-float32", ""),),
        proves=("norm-promotes-to-float32",),
        prefer="the norms' weights must stay in float32",
        by_hand="`.to(x.dtype)` where the norm's `forward` returns",
    ),
    Correction(
        id="float32-adapters",
        summary="hold peft's trainable adapters in float32, and its trainable copies of float32 modules",
        install="dtypedoctor.lab.corrections.casts:install_float32_adapters",
        fixes=(("head-dtype-mismatch", "ModulesToSaveWrapper"),),
        prefer="the adapters were float32 until a trainer cast them; 2 more bytes for each of their parameters",
        by_hand="after the trainer is made, `parameter.data = parameter.data.float()` for each trainable one of `model.parameters()`",
    ),
    Correction(
        id="bfloat16-weights",
        summary="cast the float16 weights of a live model, and its float16 inputs, to bfloat16",
        install="dtypedoctor.lab.corrections.casts:install_bfloat16_weights",
        prefer="a script loads its model in float16 and is not to be edited",
        by_hand="`dtype=torch.bfloat16` where the model is loaded, and `bf16=True` instead of `fp16=True` in a trainer's arguments",
    ),
    *_of_libraries(),
)
"""The corrections that come with dtypedoctor and are for no ticket."""
