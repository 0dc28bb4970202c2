"""Lets the model of the steps before go, as a notebook user would."""

import gc

import torch

from dtypedoctor.workloads.context import Context


def run_unload(context: Context) -> None:
    """``del model``, garbage collection, and the emptying of the CUDA allocator's cache."""
    context.instruments.detach(context.built.model)
    context.holder.built = None
    gc.collect()
    if context.device.type == "cuda":
        torch.cuda.empty_cache()
