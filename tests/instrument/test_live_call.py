"""A module call is recorded when it is entered and made again later, in the modes and with the random numbers of then."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dtypedoctor.instrument.live_call import LiveCall, copied, tensors_of


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor, *, scale: Tensor) -> dict[str, Tensor]:
        return {"out": self.drop(self.proj(x)) * scale}


def entered(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[LiveCall, Any]:
    """The record of a call, and what it returned."""
    call = LiveCall.entered(module, "block", args, kwargs)
    output = module(*args, **kwargs)
    call.keep_gradients(output)
    return call, output


def test_a_repeated_call_draws_the_same_numbers_and_puts_the_generator_back() -> None:
    """Dropout zeroes the same elements; the program goes on with its own numbers."""
    call, output = entered(Block(), torch.randn(3, 4), scale=torch.ones(4))
    before = torch.get_rng_state()
    again = call.again().output["out"]
    assert torch.equal(again, output["out"])
    assert torch.equal(torch.get_rng_state(), before)


def test_the_upstream_gradient_is_pulled_through_without_touching_grad() -> None:
    """Equal to what the backward pass itself has made."""
    block = Block()
    x = torch.randn(3, 4, requires_grad=True)
    call, output = entered(block, x, scale=torch.ones(4))
    (output["out"].square().sum()).backward()
    assert x.grad is not None
    kept = {name: p.grad.clone() for name, p in block.named_parameters()}
    found = call.again().gradients
    assert torch.equal(found["input.0"], x.grad)
    assert all(torch.equal(found[f"weight.{name}"], grad) for name, grad in kept.items())
    assert all(torch.equal(p.grad, kept[name]) for name, p in block.named_parameters())


def test_autocast_and_grad_mode_are_those_of_entry() -> None:
    """Nothing of the present modes counts."""
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        call = LiveCall.entered(nn.Linear(4, 4), "", [torch.randn(2, 4)], {})
    output = call.again().output
    assert output.dtype is torch.bfloat16
    assert not output.requires_grad


def test_a_call_recorded_without_autocast_is_repeated_without_it() -> None:
    """An enclosing region is switched off."""
    call = LiveCall.entered(nn.Linear(4, 4), "", [torch.randn(2, 4)], {})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert call.again().output.dtype is torch.float32


def test_what_the_module_raises_is_returned() -> None:
    """The error of the repeat is that of the call."""
    call = LiveCall.entered(nn.Linear(4, 4).half(), "", [torch.randn(2, 4)], {})
    with pytest.raises(RuntimeError, match="dtype") as raised:
        call.module(*call.args)
    assert str(call.again().error) == str(raised.value)


def test_inputs_written_to_since_are_named() -> None:
    """They cannot be passed again as they were."""
    x, mask = torch.zeros(2, 4), torch.ones(4)
    call = LiveCall.entered(Block(), "block", [x], {"scale": mask})
    x.add_(1)
    assert call.overwritten() == ["input.0"]


def test_copies_share_nothing_and_keep_what_was_one_tensor_one() -> None:
    """Also inside of objects."""
    x = torch.randn(2, 3).t()
    cache = SimpleNamespace(layers=[SimpleNamespace(keys=x)])
    copy = copied((x, {"cache": cache}))
    copy[1]["cache"].layers[0].keys.zero_()
    assert copy[0] is copy[1]["cache"].layers[0].keys
    assert copy[0].stride() == x.stride()
    assert x.abs().sum() > 0
    assert len(list(tensors_of(copy))) == 2
