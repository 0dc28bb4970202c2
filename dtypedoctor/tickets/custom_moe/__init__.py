"""A custom decoder whose norms stay in float32 and widen the activations (Automodel#1622): scenarios ``custom_model_rmsnorm_*``."""

from dtypedoctor.plugins import Correction, Model

_HERE = "dtypedoctor.tickets.custom_moe"

MODELS = (Model(name="custom-moe", build=f"{_HERE}.model:custom_moe", finished=True, needs=("transformers",)),)

CORRECTIONS = (
    Correction(
        id="cast-at-lora-input",
        summary="cast the input of every LoRA layer; defensive: the activations are still promoted before it",
        install=f"{_HERE}.layers:install_cast_at_lora_input",
        in_scripts=False,
        safe=False,
        fixes=(("adapter-dtype-mismatch", ""),),
    ),
)
