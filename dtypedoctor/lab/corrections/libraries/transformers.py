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
        id="transformers-opt-float32-scores",
        summary="add the mask to the attention scores of transformers' OPT in float32, in which the softmax is computed anyway",
        fixes=(("fully-masked-row", "OPTAttention"),),
        proves=("fully-masked-row",),
        prefer="an OPT has to stay in float16",
        library="transformers",
        seen=("5.23.0",),
        test="transformers_opt_float32_scores.txt",
        edits=(
            Edit(
                module="transformers.models.opt.modeling_opt",
                function="eager_attention_forward",
                parameters=("module", "query", "key", "value", "attention_mask"),
                old="attn_weights = attn_weights + attention_mask",
                new="attn_weights = attn_weights.float() + attention_mask  # a sum of -inf in a whole row has no softmax",
                acts="attn_weights.dtype is torch.float16",
            ),
        ),
    ),
)
