"""NeMo Automodel: input dtype of its LoRA layers, and values of what it keeps in float32, as edits of its released source."""

from dtypedoctor.plugins import Correction, Edit

_CASTING = "nemo_automodel.components.models.common.utils"

CORRECTIONS = (
    Correction(
        id="nemo-lora-input-dtype",
        summary="cast the input of NeMo Automodel's LoRA layers to the dtype of their base weight, or of the adapter if that is packed",
        safe=False,
        fixes=(("norm-promotes-to-float32", ""), ("adapter-dtype-mismatch", ""), ("operand-dtype-mismatch", "")),
        library="nemo_automodel",
        seen=("0.3.0", "0.4.0", "0.5.0", "0.6.0", "0.7.0"),
        edits=(
            Edit(
                module="nemo_automodel.components._peft.lora",
                function="LinearLoRA.forward",
                parameters=("self", "x"),
                old='if (fwd := getattr(self, "super_fwd", None)) is not None:',
                new=(
                    "base = self.weight if self.weight.is_floating_point() else self.lora_A.weight\n"
                    "x = x.to(base.dtype)\n"
                    'if (fwd := getattr(self, "super_fwd", None)) is not None:'
                ),
                acts="x.dtype != (self.weight if self.weight.is_floating_point() else self.lora_A.weight).dtype",
            ),
            Edit(  # from 0.5.0 on: gate, up and down projection in one autograd function
                module="nemo_automodel.components._peft.lora_mlp",
                function="LoRASwiGLUMLPFunction.forward",
                parameters=("ctx", "x", "gW"),
                old="x2 = x.reshape(-1, orig_shape[-1])",
                new="x2 = x.reshape(-1, orig_shape[-1]).to(gW.dtype)",
                acts="x.dtype != gW.dtype",
            ),
        ),
    ),
    Correction(
        id="nemo-keep-float32-values",
        summary="keep the values, not only the dtype, of what NeMo Automodel's cast_model_to_dtype keeps in float32",
        fixes=(("rounded-rotary-buffer", ""),),
        proves=("rounded-rotary-buffer",),
        prefer="a model names modules to keep in float32 and NeMo Automodel cannot be updated to 0.5.0",
        library="nemo_automodel",
        seen=("0.4.0",),
        test="nemo_keep_float32_values.txt",
        edits=(
            Edit(
                module=_CASTING,
                function="cast_model_to_dtype",
                parameters=("model", "dtype"),
                old="model.to(dtype)",
                new=(
                    "kept = {\n"
                    "    name: tensor.detach().clone()\n"
                    "    for name, tensor in (*model.named_parameters(), *model.named_buffers())\n"
                    "    if tensor.dtype == torch.float32 and any(kw in name.rpartition('.')[0] for kw in fp32_keywords)\n"
                    "}\n"
                    "model.to(dtype)"
                ),
                acts="bool(fp32_keywords)",
            ),
            Edit(
                module=_CASTING,
                function="cast_model_to_dtype",
                parameters=("model", "dtype"),
                old="_restore_fp32_modules(model, fp32_keywords)",
                new=(
                    "_restore_fp32_modules(model, fp32_keywords)\n"
                    "restored = dict(model.named_parameters()) | dict(model.named_buffers())\n"
                    "for name, values in kept.items():\n"
                    "    restored[name].data.copy_(values)"
                ),
                acts="bool(kept)",
            ),
        ),
    ),
)
