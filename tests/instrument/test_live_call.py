"""A module call is recorded when it is entered and made again later, in the modes and with the random numbers of then."""

import random
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from dtypedoctor._torch_private import DisableTorchFunction
from dtypedoctor.instrument.capsule import Failing, Kind, capsule_of
from dtypedoctor.instrument.live_call import LiveCall, Settings, copied, tensors_of


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
    call.keep_gradients(tensors_of(output))
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


def test_an_output_that_nothing_used_has_no_upstream_gradient() -> None:
    """autograd calls its hook with None; that of the other output is kept."""
    linear = nn.Linear(4, 4)
    call = LiveCall.entered(linear, "", [torch.randn(2, 4)], {})
    used, unused = linear(call.args[0]).chunk(2)
    call.keep_gradients((used, unused))
    used.sum().backward()
    assert list(call.gradients) == [0]


def test_autocast_and_grad_mode_are_those_of_entry() -> None:
    """Nothing of the present modes counts."""
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        call = LiveCall.entered(nn.Linear(4, 4), "", [torch.randn(2, 4)], {})
    output = call.again().output
    assert output.dtype is torch.bfloat16
    assert not output.requires_grad


class Settled(nn.Module):
    """Notes the settings that it is called with."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen = (
            torch.get_default_dtype(),
            torch.get_default_device(),
            torch.are_deterministic_algorithms_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
            torch.backends.cuda.matmul.fp32_precision,
            torch.backends.cudnn.benchmark,
            self.training,
            random.random(),
            np.random.rand(),
        )
        return x


def test_the_default_device_of_the_program_is_seen_from_a_hook_of_ours() -> None:
    """Hooks switch modes of functions off, and `with torch.device(…)` is one: calls were made again with tensors on the CPU."""
    with torch.device("meta"), DisableTorchFunction():
        settings = Settings.now()
    assert settings.device == torch.device("meta")


def test_settings_and_generators_are_those_of_entry_and_are_put_back() -> None:
    """A program that sets a default dtype or device, a backend or the mode of a module around a call has changed it by the time of a replay."""
    module = Settled().eval()
    with ExitStack() as stack:
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float64)
        stack.callback(torch.use_deterministic_algorithms, mode=False)
        torch.use_deterministic_algorithms(mode=True, warn_only=True)
        stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        torch.set_float32_matmul_precision("high")
        stack.enter_context(torch.device("meta"))
        stack.enter_context(sdpa_kernel([SDPBackend.FLASH_ATTENTION]))
        stack.enter_context(torch.backends.cudnn.flags(benchmark=True))
        call, _ = entered(module, torch.ones(1, device="cpu"))
        first = module.seen
    module.train()
    module.forward(torch.ones(1))
    present = module.seen
    call.again()
    assert module.seen == first
    module.forward(torch.ones(1))
    assert module.seen[:-2] == present[:-2]
    assert module.training


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


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        hidden = self.body(x)
        logits = self.head(hidden)
        return logits.square().mean() + hidden.abs().mean(), logits, hidden, logits


@pytest.mark.parametrize(
    ("use", "upstream"),
    [(lambda out: out[0], {0}), (lambda out: out[1].sum(), {1}), (lambda out: out[2].sum(), {2})],
    ids=["loss", "logits", "hidden states"],
)
def test_a_gradient_that_came_by_way_of_another_output_counts_once(
    use: Callable[[tuple[Tensor, ...]], Tensor], upstream: set[int]
) -> None:
    """Of a model that returns its loss and what it is computed from, whatever the program goes back from."""
    model = WithLoss()
    call, output = entered(model, torch.randn(2, 4))
    use(output).backward()
    again = call.again()
    assert again.upstream.keys() == upstream
    expected = {f"weight.{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert again.gradients.keys() == expected.keys()
    assert all(torch.equal(again.gradients[name], gradient) for name, gradient in expected.items())


def test_a_capsule_of_a_model_that_returns_its_loss_goes_back_from_the_loss_alone() -> None:
    """The gradient of its logits overflows inside of the call, so it is none that came from outside."""

    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            logits = super().forward(x)
            return (logits.float() * 1e6).sum(), logits

    call, (loss, _) = entered(Scaled(4, 4).half(), torch.ones(2, 4).half())
    loss.backward()
    assert not call.gradients[1].isfinite().all()
    failing = Failing(kind=Kind.BACKWARD)
    assert failing.shows(call)
    description, _ = capsule_of(call, failing, 1 << 20)
    assert [list(one["gradients"]) for one in description["call"]["leaving"]] == [["0"]]


def test_parts_of_one_operator_do_not_stand_for_each_other() -> None:
    """Both halves of a split are outputs of the same node."""

    class Halves(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return super().forward(x).chunk(2, -1)

    module = Halves(4, 4)
    call, (first, second) = entered(module, torch.randn(2, 4))
    (first.sum() + second.sum()).backward()
    assert module.weight.grad is not None
    assert torch.equal(call.again().gradients["weight.weight"], module.weight.grad)


def test_what_the_backward_pass_raises_is_returned() -> None:
    """With the gradients that went into it."""

    class Refusing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            raise RuntimeError("mat1 and mat2 must have the same dtype")

    class Module(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Refusing.apply(x)

    call, output = entered(Module(), torch.randn(2, 4, requires_grad=True))
    with pytest.raises(RuntimeError, match="same dtype"):
        output.sum().backward()
    again = call.again()
    assert str(again.error) == "mat1 and mat2 must have the same dtype"
    assert again.upstream.keys() == {0}
    assert not again.gradients


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
