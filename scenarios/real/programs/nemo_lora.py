"""Trains a bfloat16 Llama of transformers with the LoRA layers and the cast of the NeMo Automodel that is installed.

    python nemo_lora.py norms|rotary|none half|packed [head]

The first word says which modules the model names to stay in float32. ``packed`` packs the linear layers to NF4 first. With ``head`` the head has LoRA
as well, so that every layer after a norm is a LoRA layer. The norms of transformers end with ``weight * x``, those of NeMo Automodel's own models cast
back. Releases before 0.4.0 have no cast of their own; there the modules named are made float32 again by hand. Prints the losses.
"""

import sys

import torch
from nemo_automodel.components._peft.lora import PeftConfig, apply_lora_to_linear_modules
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

try:
    from nemo_automodel.components.models.common.utils import cast_model_to_dtype
except ImportError:

    def cast_model_to_dtype(model: nn.Module, dtype: torch.dtype) -> None:
        """As transformers' loading does: everything, but not what the model names."""
        for name, module in model.named_modules():
            if not any(kept in name for kept in model._keep_in_fp32_modules):
                for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                    tensor.data = tensor.data.to(dtype)


KEPT = {"norms": ["post_attention_layernorm", "input_layernorm", "norm"], "rotary": ["rotary_emb"], "none": []}


def main(kept: str, stored: str, *words: str) -> None:
    """Trains for three steps."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, architectures=["LlamaForCausalLM"], **sizes))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.normal_(parameter, 1.0, 0.1)
    model._keep_in_fp32_modules = KEPT[kept]
    cast_model_to_dtype(model, torch.bfloat16)
    if kept == "norms":  # the rotary table is another matter
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    settings = PeftConfig(target_modules=["*_proj", *(["lm_head"] if "head" in words else [])], dim=4, use_triton=False)
    if stored == "packed":
        pack(model)
        settings.lora_dtype = torch.bfloat16
    apply_lora_to_linear_modules(model, settings)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-3)
    ids = torch.randint(0, 256, (2, 16))
    for _ in range(3):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print("loss", loss.item())


def pack(model: nn.Module) -> None:
    """Puts bitsandbytes' layers in the place of the linear layers but the head, as transformers' loading does."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.Linear) or name == "lm_head":
            continue
        layer = Linear4bit(
            module.in_features, module.out_features, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4"
        )
        layer.weight = Params4bit(module.weight.data, requires_grad=False, quant_type="nf4").to("cpu")
        layer.quant_state = layer.weight.quant_state
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, layer)


main(*sys.argv[1:])
