"""TRL: what its trainers do to the dtypes of adapters, as edits of their source."""

from dtypedoctor.plugins import Correction, Edit

_TRAINERS = {
    "dpo": "DPOTrainer",
    "sft": "SFTTrainer",
    "grpo": "GRPOTrainer",
    "rloo": "RLOOTrainer",
    "reward": "RewardTrainer",
    "kto": "KTOTrainer",
    "distillation": "DistillationTrainer",
}

CORRECTIONS = (
    Correction(
        id="trl-float32-adapters",
        summary="leave float32 adapters, and trainable copies of float32 modules, in float32 when TRL's trainers get a packed model",
        fixes=(("update-stall", ""),),
        prefer="adapters are trained on a packed model, and the script is not to be edited",
        library="trl",
        seen=("1.16.0",),
        test="trl_float32_adapters.txt",
        edits=tuple(
            Edit(
                module=f"trl.trainer.{name}_trainer",
                function=f"{trainer}.__init__",
                parameters=("self", "model"),
                old="param.data = param.data.to(torch.bfloat16)",
                new=(
                    "if param.dtype != torch.float32:  # bfloat16 would round small updates away\n"
                    "    param.data = param.data.to(torch.bfloat16)"
                ),
                acts="param.dtype == torch.float32",
            )
            for name, trainer in _TRAINERS.items()
        ),
    ),
)
