"""Modules whose inside no hook sees, and moments at which nothing may be measured."""

import torch
from torch import nn

from dtypedoctor._torch_private import is_compiled_module, tracing_state


def why_opaque(module: nn.Module) -> str:
    """Why the inside of ``module`` is not watched; empty if it is."""
    if isinstance(module, torch.jit.ScriptModule):
        return "TorchScript runs no module hooks"
    if is_compiled_module(module):
        return "compiled code runs no module hooks; what goes in and comes out was watched"
    return ""


def being_recorded() -> bool:
    """Whether torch is writing down what runs now (``torch.jit.trace``), so that a measurement would become part of it."""
    return tracing_state() is not None
