"""``eager-attention``: attention is computed in steps, by torch's math backend and by transformers' own eager code."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from dtypedoctor._torch_private import attention_choice
from dtypedoctor.worker.conditions.contract import Condition, TookEffect
from dtypedoctor.worker.conditions.patching import replaced

EAGER = "eager"


@contextmanager
def _in_steps(took_effect: TookEffect) -> Iterator[None]:
    """torch's function chooses a fused kernel by itself, or one that the program names; here neither is asked."""
    fused = functional.scaled_dot_product_attention

    @wraps(fused, assigned=("__doc__",), updated=())
    def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and _would_be_fused(*args, **kwargs):
            took_effect()
        with sdpa_kernel(SDPBackend.MATH):
            return fused(*args, **kwargs)

    with replaced(functional, "scaled_dot_product_attention", scaled_dot_product_attention):
        yield


def _would_be_fused(*args: Any, **kwargs: Any) -> bool:
    with suppress(RuntimeError, TypeError):  # operands that are refused are refused by the call itself
        return bool(attention_choice(*args, **kwargs) != SDPBackend.MATH.value)
    return False


@contextmanager
def _eager_models(took_effect: TookEffect) -> Iterator[None]:
    """A model of transformers asks its configuration which attention to run, and makes its masks for that one."""
    from transformers.modeling_utils import PreTrainedModel

    build = PreTrainedModel.__init__

    @wraps(build)
    def __init__(model: PreTrainedModel, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        build(model, *args, **kwargs)
        if model.config._attn_implementation not in (None, EAGER):
            model.config._attn_implementation = EAGER
            took_effect()

    with replaced(PreTrainedModel, "__init__", __init__):
        yield


EAGER_ATTENTION = Condition(
    id="eager-attention",
    switches={"torch": _in_steps, "transformers.modeling_utils": _eager_models},
    without_effect="no fused attention was called, and no model of transformers was built for one (calls inside compiled code "
    "are not counted)",
)
