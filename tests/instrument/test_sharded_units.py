"""A model sharded by FSDP2 computes, bit for bit, what the same model computes in one piece, also after it was looked at."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from dtypedoctor._torch_private import leave_forward
from dtypedoctor.instrument.session import Position
from dtypedoctor.lab.models.build import build
from dtypedoctor.lab.scenarios.model import Distributed, Model
from dtypedoctor.lab.worker.stage import Capture, shard

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("group")]


def llama() -> nn.Module:
    """Two layers of transformers' Llama."""
    spec = {"name": "builtin:llama-tiny", "dtype": "float16", "options": {"hidden": 32, "intermediate": 64}}
    return build(Model.model_validate(spec), torch.device("cpu"), 0).model


def sharded(model: nn.Module) -> nn.Module:
    shard(model, Distributed(strategy="fsdp"))
    return model


def trained(model: nn.Module) -> list[Tensor]:
    """Losses, outputs, gradients and weights of two steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.Generator().manual_seed(3)
    found: list[Tensor] = []
    for _ in range(2):
        ids = torch.randint(4, 60, (2, 8), generator=tokens)
        result = model(input_ids=ids, labels=ids)
        result.loss.backward()
        found += [result.loss, result.logits, *(whole(p.grad) for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return [tensor.detach() for tensor in (*found, *map(whole, model.parameters()))]


def whole(tensor: Tensor) -> Tensor:
    """Of a DTensor all of it, of its own memory."""
    gathered: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return gathered.detach().clone()


def test_each_layer_is_a_unit_and_computes_as_the_whole_model_does() -> None:
    """Forward, backward and optimizer, bit for bit, dtypes included."""
    model = sharded(llama())
    units = [name for name, module in model.named_modules() if hasattr(module, "unshard")]
    assert units == ["", "model.layers.0", "model.layers.1"]
    for left, right in zip(trained(llama()), trained(model), strict=True):
        assert left.dtype is right.dtype
        assert torch.equal(left, right)


def captured(fqn: str) -> Capture:
    """What is kept of a module in a call of a sharded model."""
    model = llama()
    capture = Capture(model, fqn, call=0, position=Position())
    sharded(model)(input_ids=torch.ones(1, 4, dtype=torch.int64))
    return capture


def test_a_unit_is_captured_as_what_it_was_and_what_holds_other_units_is_not(tmp_path: Path) -> None:
    """While it runs its own parameters are gathered, and those of units inside are not."""
    captured("model.layers.0").write(tmp_path)
    recipe = json.loads((tmp_path / "capture.json").read_text())["recipe"]
    assert recipe["class"] == "transformers.models.llama.modeling_llama:LlamaDecoderLayer"
    assert not [name for name in recipe["attributes"] if "fsdp" in name]
    with pytest.raises(TypeError, match=r"only a shard of layers\.0"):
        captured("model")


def test_a_call_that_an_exception_has_ended_leaves_the_next_ones_as_they_would_be() -> None:
    """Units that were inside of it are between two calls again, and train bitwise as if it had not been."""

    def ended(*_: object) -> None:
        raise ZeroDivisionError

    wanted, model = trained(sharded(llama())), sharded(llama())
    ids = torch.ones(2, 8, dtype=torch.long)
    ending = model.model.layers[1].register_forward_pre_hook(ended)
    with pytest.raises(ZeroDivisionError):
        model(input_ids=ids, labels=ids)
    ending.remove()
    leave_forward(model)
    assert all(map(torch.equal, trained(model), wanted))


def test_an_optimizer_that_is_made_after_a_look_at_the_outputs_is_given_the_shards() -> None:
    """After a forward pass without gradients FSDP2 keeps the root's parameters whole: who trains these trains what is thrown away."""
    wanted, model = trained(sharded(llama())), sharded(llama())
    with torch.no_grad():
        model(input_ids=torch.ones(2, 8, dtype=torch.long))
    assert {type(parameter).__name__ for parameter in model.parameters()} == {"DTensor", "Parameter"}
    leave_forward(model)
    assert {type(parameter).__name__ for parameter in model.parameters()} == {"DTensor"}
    assert all(map(torch.equal, trained(model), wanted))
