"""transformers: products of its models that leave float16's range, as edits of its source."""

from dtypedoctor.plugins import Correction, Edit

CORRECTIONS = (
    Correction(
        id="transformers-gemma4-mlp-product",
        summary="compute the product in transformers' Gemma-4 MLP in float32, and clamp it and the MLP's output to ±65,280",
        prefer="the fix for Gemma-4 is to stay in place for the whole process, or to be proposed to transformers",
        library="transformers",
        seen=("5.17.0", "5.23.0"),
        test="transformers_gemma4_mlp_product.txt",
        edits=(
            Edit(
                module="transformers.models.gemma4.modeling_gemma4",
                function="Gemma4TextMLP.forward",
                parameters=("self", "x"),
                old="down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))",
                new=(
                    "gate, up = self.gate_proj(x), self.up_proj(x)\n"
                    "if gate.dtype is torch.float16:\n"
                    "    limit = 65280.0  # exact in float16 and in bfloat16\n"
                    "    product = (self.act_fn(gate.float()) * up.float()).clamp(-limit, limit).to(gate.dtype)\n"
                    "    down_proj = self.down_proj(product).clamp(-limit, limit)\n"
                    "else:\n"
                    "    down_proj = self.down_proj(self.act_fn(gate) * up)"
                ),
                acts="x.dtype is torch.float16 or torch.is_autocast_enabled(x.device.type)",
            ),
        ),
    ),
    Correction(
        id="transformers-opt-clamped-scores",
        summary="hold the masked attention scores of transformers' OPT within the range of their dtype, so that none is -inf",
        fixes=(("fully-masked-row", "OPTAttention"),),
        proves=("fully-masked-row",),
        prefer="an OPT has to stay in float16",
        library="transformers",
        seen=("5.23.0",),
        test="transformers_opt_clamped_scores.txt",
        edits=(
            Edit(
                module="transformers.models.opt.modeling_opt",
                function="eager_attention_forward",
                parameters=("module", "query", "key", "value", "attention_mask"),
                old="attn_weights = attn_weights + attention_mask",
                new=(
                    "smallest = torch.finfo(attn_weights.dtype).min  # a row of -inf has no softmax\n"
                    "attn_weights = (attn_weights + attention_mask).clamp(min=smallest)"
                ),
                acts="attn_weights.dtype is torch.float16",
            ),
        ),
    ),
)
