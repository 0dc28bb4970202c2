"""Installs a corrective kernel into a live model and verifies that it is really in place."""

from dtypedoctor.corrections.contract import Correction
from dtypedoctor.corrections.gemma4 import MLP_FLOAT32_PRODUCT

CORRECTIONS: dict[str, Correction] = {c.id: c for c in (MLP_FLOAT32_PRODUCT,)}
"""Every correction by its id."""
