"""The float32 twin of a model: the weights as they were rounded and packed, every operation in float32.

What a 16-bit run computes differs from this only by its own arithmetic, so this is what output errors are measured against.
"""

from typing import Any

import torch
from torch import nn

from dtypedoctor.corrections.module_forward import runs_other_forward


def widen(model: nn.Module) -> None:
    """Makes ``model`` its own float32 twin, in place.

    Floating parameters and buffers become float32, packed weights keep their codes but dequantise to float32, and fused
    modules go back to the forward methods of their class, whose kernels are not under suspicion.
    """
    for module in model.modules():
        if runs_other_forward(module):
            del module.__dict__["forward"]
        if hasattr(module, "compute_dtype"):
            vars(module)["compute_dtype"] = torch.float32
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            state: Any = getattr(tensor, "quant_state", None)
            if state is not None:
                state.dtype = torch.float32
            elif tensor.is_floating_point():
                tensor.data = tensor.data.float()
