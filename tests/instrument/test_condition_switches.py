"""Conditions of a whole process: whose code they reach, and that they leave nothing behind."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaConfig, LlamaForCausalLM

from dtypedoctor.lab.corrections.interventions import CONDITIONS
from dtypedoctor.lab.scenarios.model import ConditionName


@contextmanager
def under(condition: str) -> Iterator[list[str]]:
    """Inside, the condition is in force; the list grows each time it takes effect."""
    effects: list[str] = []
    with ExitStack() as stack:
        for switch in CONDITIONS[condition].switches.values():
            stack.enter_context(switch(lambda: effects.append(condition)))
        yield effects


def product() -> torch.dtype:
    """The dtype in which two float32 matrices are multiplied."""
    return torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype


def test_every_condition_that_can_be_asked_for_exists() -> None:
    """The ids of a scenario are those of the catalogue."""
    assert set(get_args(ConditionName)) == set(CONDITIONS)


class Doubled(torch.autograd.Function):
    """A custom function that carries its region over to its backward."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        Doubled.dtype = product()
        return 2 * grad

    dtype = torch.float64


def of_a_block() -> torch.dtype:
    """A with statement."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return product()


@torch.autocast("cpu", dtype=torch.bfloat16)
def of_a_decorator() -> torch.dtype:
    """A function in a region of its own."""
    return product()


def of_a_backward() -> torch.dtype:
    """What custom_bwd restores."""
    x = torch.ones(2, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = Doubled.apply(x)
    y.sum().backward()
    return Doubled.dtype


def of_accelerate() -> torch.dtype:
    """A model that accelerate has prepared, as it does for transformers' Trainer."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)  # one of another test in this process would forbid this precision

    class Net(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.dtype = super().forward(x).dtype
            return x

    net = Net(2, 2)
    Accelerator(mixed_precision="bf16", cpu=True).prepare(net)(torch.ones(2, 2))
    return net.dtype


def of_a_graph() -> torch.dtype:
    """A region inside compiled code."""
    torch.compiler.reset()
    found = torch.compile(lambda: torch.mm(torch.ones(2, 2), torch.ones(2, 2)), backend="eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return found().dtype


@pytest.mark.parametrize("region", [of_a_block, of_a_decorator, of_a_backward, of_accelerate, of_a_graph])
def test_no_region_casts_whoever_opens_it(region: Callable[[], torch.dtype]) -> None:
    """Each time counts; afterwards it casts again."""
    with under("autocast-off") as effects:
        assert region() is torch.float32
        once = len(effects)
        assert region() is torch.float32
    assert 0 < once < len(effects)
    assert region() is torch.bfloat16


def test_a_region_that_casts_nothing_is_no_effect() -> None:
    """It was disabled already."""
    with under("autocast-off") as effects, torch.autocast("cpu", enabled=False):
        assert product() is torch.float32
    assert effects == []


def test_attention_is_computed_in_steps_even_where_a_kernel_is_named() -> None:
    """A program that asks for the fused kernel does not get it; the math backend's own choice is no effect."""
    q = torch.randn(1, 2, 8, 16)
    attention = torch.nn.functional.scaled_dot_product_attention
    with under("eager-attention") as effects:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION), torch.profiler.profile() as profile:
            torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        assert len(effects) == 1
        with sdpa_kernel(SDPBackend.MATH):
            torch.nn.functional.scaled_dot_product_attention(q, q, q)
        assert len(effects) == 1
        with pytest.raises(RuntimeError):
            torch.nn.functional.scaled_dot_product_attention(q, q.half(), q)
    ran = {event.name for event in profile.events()}
    assert "aten::_scaled_dot_product_attention_math" in ran
    assert not any("flash" in name for name in ran)
    assert torch.nn.functional.scaled_dot_product_attention is attention


def test_models_of_transformers_are_built_for_eager_attention() -> None:
    """With the mask that goes with it; one that asks for it already is no effect."""
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    torch.manual_seed(0)
    with torch.no_grad():
        net = LlamaForCausalLM(config)
        fused = net(torch.arange(8)[None]).logits
        torch.manual_seed(0)
        with under("eager-attention") as effects:
            eager = LlamaForCausalLM(LlamaConfig(**config.to_diff_dict()))
            assert eager.config._attn_implementation == "eager"
            assert effects
            assert torch.allclose(eager(torch.arange(8)[None]).logits, fused, atol=1e-5)
            before = len(effects)
            LlamaForCausalLM._from_config(config, attn_implementation="eager")
            assert len(effects) == before


def test_compiled_functions_run_as_python() -> None:
    """The backend is never asked; modules, functions and decorators alike."""
    asked: list[str] = []

    def backend(graph: Any, examples: Any) -> Any:
        asked.append("compiled")
        return graph

    torch.compiler.reset()
    with under("compile-off") as effects:
        torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
        net = torch.compile(nn.Linear(2, 2), backend=backend)
        net(torch.ones(2))
        net(torch.ones(2))
    assert (asked, len(effects)) == ([], 3)
    net(torch.ones(2))
    assert asked == ["compiled"]


def scaled(scaler: torch.amp.GradScaler, steps: int = 3) -> list[float]:
    """The scale after each step of a small training."""
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    found = []
    for _ in range(steps):
        scaler.scale((weight * 2).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        found.append(scaler.get_scale())
    return found


def test_the_loss_scale_is_one_and_stays_there() -> None:
    """Through growth, a saved state and a scale that the program names; outside it grows as it should."""
    saved = torch.amp.GradScaler("cpu", init_scale=8.0).state_dict()
    with under("loss-scale-one") as effects:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
        assert scaled(scaler) == [1.0, 1.0, 1.0]
        scaler.update(64.0)
        scaler.load_state_dict(saved)
        assert scaled(scaler) == [1.0, 1.0, 1.0]
        assert len(effects) == 1
        scaled(torch.amp.GradScaler("cpu", enabled=False))
        assert len(effects) == 1
    assert scaled(torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)) == [16.0, 32.0, 64.0]
