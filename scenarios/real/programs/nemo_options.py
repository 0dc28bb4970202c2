"""What each way proposed for float32 norms before the LoRA layers of NeMo Automodel does, measured against the model in float32.

    pip install --no-deps --target wheels/nemo_automodel-0.4.0 nemo_automodel==0.4.0
    PYTHONPATH=wheels/nemo_automodel-0.4.0 python scenarios/real/programs/nemo_options.py

Prints a line for each: the relative error of the logits of a tiny Llama, or the message of what was raised.
"""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import bitsandbytes
import torch
from nemo_automodel.components._peft import lora
from nemo_automodel.components.models.common import utils
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

NORMS = ["post_attention_layernorm", "input_layernorm", "norm"]


def adapted(kept: list[str]) -> tuple[nn.Module, nn.Module]:
    """The model cast as its list says, with LoRA layers, and the model in float32."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, architectures=["LlamaForCausalLM"], **sizes))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.normal_(parameter, 1.0, 0.1)
    reference = copy.deepcopy(model)
    model._keep_in_fp32_modules = kept
    utils.cast_model_to_dtype(model, torch.bfloat16)
    lora.apply_lora_to_linear_modules(model, lora.PeftConfig(target_modules=["*_proj"], dim=4, use_triton=False))
    return model, reference


def error(got: Callable[[], Tensor], wanted: Tensor) -> str:
    """The relative error, or what was raised."""
    try:
        with torch.no_grad():
            return f"{float((got().float() - wanted).norm() / wanted.norm()):.5f}"
    except RuntimeError as raised:
        return f"raises: {raised}"


def logits_error(model: nn.Module, reference: nn.Module, region: Any = None) -> str:
    """Of the model within ``region``."""
    ids = torch.randint(0, 256, (4, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = reference(input_ids=ids).logits
    with region or nullcontext():
        return error(lambda: model(input_ids=ids).logits, wanted)


def cast_norm_outputs(model: nn.Module) -> None:
    """Each norm answers in the dtype of its input."""
    for name, module in model.named_modules():
        if name.endswith("norm"):
            module.register_forward_hook(lambda _, inputs, out: out.to(inputs[0].dtype))


def packed_layer_error(x: Tensor, cast: bool) -> str:
    """Of a LoRA layer over a packed weight, with the pull request's cast at its input or without it."""
    torch.manual_seed(0)
    layer = bitsandbytes.nn.Linear4bit(64, 64, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4").to("cpu")
    lora.patch_linear_module(layer, dim=4, use_triton=False, lora_dtype=torch.bfloat16)
    dense = bitsandbytes.functional.dequantize_4bit(layer.weight, layer.weight.quant_state).float()
    return error(lambda: layer(x.to(layer.weight.dtype) if cast else x), x.float() @ dense.t())


def main() -> None:
    """Prints the table."""
    print("norms kept in float32", logits_error(*adapted(NORMS)), sep="\t")
    print("the list emptied", logits_error(*adapted([])), sep="\t")
    print("autocast bfloat16", logits_error(*adapted(NORMS), torch.autocast("cpu", dtype=torch.bfloat16)), sep="\t")
    model, reference = adapted(NORMS)
    cast_norm_outputs(model)
    print("norm outputs cast", logits_error(model, reference), sep="\t")
    model, reference = adapted(NORMS)
    utils.cast_model_to_dtype(model, torch.bfloat16)
    print("cast again, honoring the list", logits_error(model, reference), sep="\t")
    print("cast again, ignoring the list", logits_error(model.to(torch.bfloat16), reference), sep="\t")
    model, reference = adapted(NORMS)
    for module in model.modules():
        if isinstance(module, lora.LinearLoRA):
            module.register_forward_pre_hook(lambda layer, inputs: inputs[0].to(layer.weight.dtype))
    print("cast at the LoRA input", logits_error(model, reference), sep="\t")
    x = torch.randn(8, 64).bfloat16()
    print("packed layer, bfloat16 input", packed_layer_error(x, cast=False), sep="\t")
    print("packed layer, cast at the LoRA input", packed_layer_error(x, cast=True), sep="\t")


main()
