"""Installs a corrective kernel into a live model and verifies that it is really in place."""

from dtypedoctor.corrections.contract import Correction
from dtypedoctor.corrections.dequantize import DEQUANTIZE
from dtypedoctor.corrections.fused_lora import FUSED_LORA
from dtypedoctor.corrections.gemma4 import GEMMA4
from dtypedoctor.corrections.keep_float32 import KEEP_FLOAT32
from dtypedoctor.corrections.nf4_dequantize import NF4_DEQUANTIZE
from dtypedoctor.corrections.rms_norm import RMS_NORM

CORRECTIONS: dict[str, Correction] = {
    correction.id: correction
    for correction in (
        KEEP_FLOAT32,
        *GEMMA4,
        *FUSED_LORA,
        *DEQUANTIZE,
        *RMS_NORM,
        *NF4_DEQUANTIZE,
    )
}
"""Every correction by its id."""
