"""A gradient scaler that raises, or that finds no scale."""

from dtypedoctor.diagnosis.rule import LOSS_SCALING, OF_ANY_FINDING, FindingSpec, Rule
from dtypedoctor.diagnosis.scaling import detect_exhausted_scale, detect_scaling

UNSCALE_FLOAT16_GRADIENTS = FindingSpec(
    id="unscale-float16-gradients",
    title="A gradient scaler is used with trainable parameters in float16",
    family=LOSS_SCALING,
    references=(
        "https://github.com/huggingface/transformers/issues/23165",
        "https://github.com/huggingface/peft/issues/1249",
    ),
)
SCALER_BFLOAT16 = FindingSpec(
    id="scaler-bfloat16",
    title="A gradient scaler is used with trainable parameters in bfloat16",
    family=LOSS_SCALING,
    references=("https://github.com/pytorch/pytorch/issues/127176",),
)
NO_INF_CHECKS = FindingSpec(
    id="no-inf-checks",
    title="The optimizer's parameters have no gradients",
    family=LOSS_SCALING,
    references=(
        "https://github.com/huggingface/accelerate/issues/328",
        "https://github.com/huggingface/transformers/issues/24003",
    ),
)
LOSS_SCALE_EXHAUSTED = FindingSpec(
    id="loss-scale-exhausted",
    title="The loss scale keeps halving because every step overflows",
    family=LOSS_SCALING,
    references=("https://github.com/deepspeedai/DeepSpeed/issues/5426",),
    ablations=(*OF_ANY_FINDING, "loss-scale-one"),
)

RULES = (
    Rule(name="scaling", specs=(UNSCALE_FLOAT16_GRADIENTS, SCALER_BFLOAT16, NO_INF_CHECKS), detect=detect_scaling),
    Rule(name="loss-scale", specs=(LOSS_SCALE_EXHAUSTED,), detect=detect_exhausted_scale),
)
