"""Two 4-bit Llamas after one another in one process, their projections through a released unsloth's own kernels.

    python unsloth_two_loads.py FOLDER FIRST SECOND [autocast] [saved] [attention|mlp|all] [lora|plain] [train|evaluate|decode [one]]

FOLDER is an unpacked wheel, or ``-`` for the unsloth on ``sys.path``; FIRST and SECOND are the dtypes of the models;
with ``saved`` the quantization states say float16 all the same, as in a checkpoint that was saved in float16. Each model is used as the last word says (two
training steps, one evaluation, four decoded tokens of two texts, or of one) and a line is printed for it: its losses, or the
sum of its logits.
"""

import sys
from contextlib import nullcontext
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from bitsandbytes.nn import Linear4bit, Params4bit
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parent))
import unsloth_kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ATTENTION, MLP = ["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj", "down_proj"]


def main(folder: str, first: str, second: str, *words: str) -> None:
    """Builds and uses one model after the other, each in an autocast region of its own dtype if ``words`` say so."""
    utils, lora = unsloth_kernels.load(folder)
    for name in (first, second):
        dtype = getattr(torch, name)
        region = torch.autocast(DEVICE, dtype=dtype) if "autocast" in words else nullcontext()
        model = llama(dtype, words)
        through_unsloth(model, utils, lora, words)
        with region:
            print(name, *use(model, words))


def llama(dtype: torch.dtype, words: tuple[str, ...], vocabulary: int = 96) -> Any:
    """A tiny Llama of the same weights each time, its projections packed; with LoRA on those that ``words`` name."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=vocabulary, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, initializer_range=0.1)  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    for parameter in model.parameters():  # not model.to(), which would round the rotary table
        parameter.data = parameter.data.to(dtype)
    for name, module in list(model.model.named_modules()):
        if type(module) is nn.Linear:
            parent, _, child = name.rpartition(".")
            setattr(model.model.get_submodule(parent), child, packed(module, dtype))
    if "saved" in words:
        for parameter in model.parameters():
            if hasattr(parameter, "quant_state"):
                parameter.quant_state.dtype = torch.float16
    model.to(DEVICE)
    if "lora" in words:
        model.is_loaded_in_4bit = True
        targets = ([] if "mlp" in words else ATTENTION) + ([] if "attention" in words else MLP)
        model = get_peft_model(model, LoraConfig(r=4, target_modules=targets))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.02)
    return model


def packed(linear: nn.Linear, dtype: torch.dtype) -> nn.Module:
    """The 4-bit form of a linear layer, with packed statistics, as unsloth's kernels expect them."""
    layer = Linear4bit(
        linear.in_features, linear.out_features, bias=False, compute_dtype=dtype, quant_type="nf4", device="meta"
    )
    layer.weight = Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4").to(DEVICE)
    layer.support_avx512bf16_for_cpu = False
    return layer


def through_unsloth(model: nn.Module, utils: Any, lora: Any, words: tuple[str, ...]) -> None:
    """Puts unsloth's functions where it puts them itself: on the projections and MLPs of each layer."""

    def mlp_forward(self: Any, X: Tensor) -> Tensor:
        if X.shape[1] == 1 or not torch.is_grad_enabled():
            gate, up = utils.fast_linear_forward(self.gate_proj, X), utils.fast_linear_forward(self.up_proj, X)
            return utils.fast_linear_forward(self.down_proj, nn.functional.silu(gate) * up)
        weights = (part for name in MLP for part in utils.get_lora_parameters(getattr(self, name)))
        return lora.LoRA_MLP.apply(X, *weights, *_swiglu(lora), True)

    def projection_forward(self: Any, X: Tensor) -> Tensor:
        if X.shape[1] == 1 or not torch.is_grad_enabled():
            return utils.fast_linear_forward(self, X)
        return lora.LoRA_W.apply(X, *utils.get_lora_parameters(self))

    for name, module in model.named_modules():
        if name.endswith(".mlp") and "attention" not in words:
            module.forward = MethodType(mlp_forward, module)
        if name.split(".")[-1] in ATTENTION and "mlp" not in words:
            module.forward = MethodType(projection_forward, module)


def _swiglu(lora: Any) -> tuple[Any, Any]:
    """unsloth's Triton kernels on a GPU; on a CPU what they compute."""
    if DEVICE == "cuda":
        return lora.swiglu_fg_kernel, lora.swiglu_DWf_DW_dfg_kernel

    def forward(e: Tensor, g: Tensor) -> Tensor:
        return (nn.functional.silu(e.float())).to(g.dtype) * g

    def backward(DW: Tensor, e: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        wide = e.float()
        s = torch.sigmoid(wide)
        f = (s * wide).to(g.dtype)
        de = (DW.float() * g.float() * s * (1 + wide * (1 - s))).to(g.dtype)
        return f * g, DW * f, de

    return forward, backward


def use(model: Any, words: tuple[str, ...]) -> list[str]:
    """What is printed of a model: its losses, or the sum of its logits."""
    tokens = torch.arange(24, device=DEVICE).reshape(2, 12) * 5 % 96
    if "train" in words:
        return train(model, tokens)
    with torch.no_grad():
        if "decode" in words:
            return decode(model, tokens[:1] if "one" in words else tokens)
        return [f"{model(input_ids=tokens, labels=tokens).loss.item():.4f}"]


def train(model: Any, tokens: Tensor) -> list[str]:
    """The losses of two steps."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    losses = []
    for _ in range(2):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(f"{loss.item():.4f}")
    return losses


def decode(model: Any, tokens: Tensor) -> list[str]:
    """The sum of the logits' magnitudes over a prompt and three more tokens, the likeliest ones."""
    cache, total = None, 0.0
    for _ in range(4):
        out = model(input_ids=tokens, past_key_values=cache, use_cache=True)
        cache, tokens = out.past_key_values, out.logits[:, -1:].argmax(-1)
        total += float(out.logits[:, -1].float().abs().sum())
    return [f"{total:.2f}"]


if __name__ == "__main__":
    main(*sys.argv[1:])
