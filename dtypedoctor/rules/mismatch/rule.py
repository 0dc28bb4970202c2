"""Two dtypes meet in one operator: what that may come from."""

from dtypedoctor.diagnosis.finding import Severity
from dtypedoctor.diagnosis.mismatch.detect import detect_mismatch
from dtypedoctor.diagnosis.rule import DTYPE_MISMATCH, OF_ANY_FINDING, FindingSpec, Rule

OPERAND_DTYPE_MISMATCH = FindingSpec(
    id="operand-dtype-mismatch",
    title="An operator was given two dtypes, and no more specific cause was found",
    family=DTYPE_MISMATCH,
    references=("https://github.com/unslothai/unsloth/issues/4970",),
    ablations=("autocast-off", *OF_ANY_FINDING),
)
AUTOCAST_BYPASS = FindingSpec(
    id="autocast-bypass",
    title="An in-place or out= operator kept its own dtype inside an autocast region",
    family=DTYPE_MISMATCH,
    references=(
        "https://github.com/unslothai/unsloth/pull/4918",
        "https://github.com/linkedin/Liger-Kernel/issues/501",
    ),
    remedies=("autocast-off",),
    settled_by=("autocast-off",),
    ablations=("autocast-off", *OF_ANY_FINDING),
    needs="autocast-off",
    needs_only=True,
)
AUTOCAST_CONTRADICTS_MODEL = FindingSpec(
    id="autocast-contradicts-model",
    title="The autocast dtype is not the half-precision dtype of the model's weights",
    family=DTYPE_MISMATCH,
    references=("https://github.com/unslothai/unsloth/pull/7534", "https://github.com/OpenPipe/ART/pull/663"),
    remedies=("autocast-dtype-of-model", "autocast-off"),
    settled_by=("autocast-dtype-of-model",),
    supported_by=("autocast-off",),
    ablations=("autocast-off", *OF_ANY_FINDING),
    needs="autocast-off",
)
QUANT_STATE_DTYPE = FindingSpec(
    id="quant-state-dtype",
    title="A quantized weight dequantizes to another dtype than the activations have",
    family=DTYPE_MISMATCH,
    references=(
        "https://github.com/unslothai/unsloth/pull/4005",
        "https://github.com/axolotl-ai-cloud/axolotl/pull/3799",
    ),
)
STALE_DEQUANT_BUFFER = FindingSpec(
    id="stale-dequant-buffer",
    title="A dequantization buffer shared by two models still has the first one's dtype",
    family=DTYPE_MISMATCH,
    references=("https://github.com/unslothai/unsloth/pull/4026",),
    remedies=("fresh-process",),
    settled_by=("fresh-process",),
)
PACKED_WEIGHT_USED_AS_DENSE = FindingSpec(
    id="packed-weight-used-as-dense",
    title="A packed integer weight was used as if it were the matrix itself",
    family=DTYPE_MISMATCH,
    references=(
        "https://github.com/huggingface/peft/issues/156",
        "https://github.com/bitsandbytes-foundation/bitsandbytes/issues/963",
    ),
)
NORM_PROMOTES_TO_FLOAT32 = FindingSpec(
    id="norm-promotes-to-float32",
    title="A norm with a float32 weight returned float32 into a half-precision model",
    family=DTYPE_MISMATCH,
    references=(
        "https://github.com/NVIDIA-NeMo/Automodel/pull/1633",
        "https://github.com/NVIDIA-NeMo/Automodel/issues/1540",
    ),
    ablations=("autocast-off", *OF_ANY_FINDING),
)
BUFFER_PROMOTES_TO_FLOAT32 = FindingSpec(
    id="buffer-promotes-to-float32",
    title="A registered float32 buffer promoted half-precision activations",
    family=DTYPE_MISMATCH,
    references=("https://github.com/NVIDIA-NeMo/Automodel/pull/2419",),
    ablations=("autocast-off", *OF_ANY_FINDING),
)
ADAPTER_DTYPE_MISMATCH = FindingSpec(
    id="adapter-dtype-mismatch",
    title="Adapter weights and base activations have different dtypes and nothing casts between them",
    family=DTYPE_MISMATCH,
    references=("https://github.com/huggingface/peft/issues/1872", "https://github.com/huggingface/peft/issues/1515"),
    ablations=("autocast-off", *OF_ANY_FINDING),
)
HEAD_DTYPE_MISMATCH = FindingSpec(
    id="head-dtype-mismatch",
    title="The output head has another dtype than the hidden states it receives",
    family=DTYPE_MISMATCH,
    references=("https://github.com/huggingface/trl/issues/4634",),
    ablations=("autocast-off", *OF_ANY_FINDING),
)
ATTENTION_DTYPE_MISMATCH = FindingSpec(
    id="attention-dtype-mismatch",
    title="Query, key, value or mask reach attention in different or unsupported dtypes",
    family=DTYPE_MISMATCH,
    references=(
        "https://github.com/unslothai/unsloth-zoo/pull/509",
        "https://github.com/hiyouga/LlamaFactory/issues/539",
    ),
    ablations=("autocast-off", *OF_ANY_FINDING),
)
KV_CACHE_DTYPE = FindingSpec(
    id="kv-cache-dtype",
    title="The key/value cache was allocated in another dtype than the keys that go into it",
    family=DTYPE_MISMATCH,
    references=(
        "https://github.com/huggingface/transformers/issues/39686",
        "https://github.com/unslothai/unsloth-zoo/pull/424",
    ),
    ablations=("autocast-off", *OF_ANY_FINDING),
)
MERGE_DTYPE_MISMATCH = FindingSpec(
    id="merge-dtype-mismatch",
    title="Features are merged into a tensor of another dtype through an indexed write",
    family=DTYPE_MISMATCH,
    aliases=("scatter-dtype-mismatch",),
    references=(
        "https://github.com/huggingface/transformers/issues/47689",
        "https://github.com/hiyouga/LlamaFactory/issues/3807",
    ),
)
MODEL_INPUT_DTYPE = FindingSpec(
    id="model-input-dtype",
    title="The batch itself has a dtype that the model's first layer does not accept",
    family=DTYPE_MISMATCH,
    references=("https://github.com/kadirnar/whisper-plus/issues/58",),
    ablations=("autocast-off", *OF_ANY_FINDING),
)
CUSTOM_FUNCTION_AUTOCAST = FindingSpec(
    id="custom-function-autocast",
    title="A custom autograd function runs its backward under another autocast state than its tensors expect",
    family=DTYPE_MISMATCH,
    references=(
        "https://github.com/unslothai/unsloth/pull/7020",
        "https://github.com/axolotl-ai-cloud/axolotl/pull/3805",
    ),
    ablations=("autocast-off", *OF_ANY_FINDING),
    needs="autocast-off",
)
RECOMPUTE_DTYPE_MISMATCH = FindingSpec(
    id="recompute-dtype-mismatch",
    title="Gradient checkpointing recomputed activations in another dtype than the forward had",
    family=DTYPE_MISMATCH,
    references=(
        "https://github.com/pytorch/pytorch/issues/148831",
        "https://github.com/NVIDIA-NeMo/Automodel/pull/3504",
    ),
    ablations=("autocast-off", *OF_ANY_FINDING),
)
FSDP_MIXED_DTYPES = FindingSpec(
    id="fsdp-mixed-dtypes",
    title="One FSDP unit holds parameters of several dtypes",
    family=DTYPE_MISMATCH,
    references=(
        "https://github.com/axolotl-ai-cloud/axolotl/issues/1494",
        "https://github.com/huggingface/accelerate/pull/3985",
    ),
)
AUTOCAST_WRONG_DEVICE = FindingSpec(
    id="autocast-wrong-device",
    title="The autocast region is for another device than the tensors are on",
    family=DTYPE_MISMATCH,
    severity=Severity.WARNING,
    references=("https://github.com/huggingface/transformers/issues/32648",),
    ablations=("autocast-off", *OF_ANY_FINDING),
)

SPECS = (
    OPERAND_DTYPE_MISMATCH,
    AUTOCAST_BYPASS,
    AUTOCAST_CONTRADICTS_MODEL,
    QUANT_STATE_DTYPE,
    STALE_DEQUANT_BUFFER,
    PACKED_WEIGHT_USED_AS_DENSE,
    NORM_PROMOTES_TO_FLOAT32,
    BUFFER_PROMOTES_TO_FLOAT32,
    ADAPTER_DTYPE_MISMATCH,
    HEAD_DTYPE_MISMATCH,
    ATTENTION_DTYPE_MISMATCH,
    KV_CACHE_DTYPE,
    MERGE_DTYPE_MISMATCH,
    MODEL_INPUT_DTYPE,
    CUSTOM_FUNCTION_AUTOCAST,
    RECOMPUTE_DTYPE_MISMATCH,
    FSDP_MIXED_DTYPES,
    AUTOCAST_WRONG_DEVICE,
)

RULES = (Rule(name="mismatch", specs=SPECS, detect=detect_mismatch),)
