"""A model sharded by FSDP2 with modules kept in float32 computes, bit for bit, what the same model computes in one piece."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist

from dtypedoctor._torch_private import leave_forward
from dtypedoctor.corrections.float32_frames import paused
from dtypedoctor.corrections.keep_float32 import install_keep_float32, kept_modules
from dtypedoctor.instrument.capture import Capture
from dtypedoctor.instrument.places import residual_blocks
from dtypedoctor.instrument.session import Position
from dtypedoctor.models.build import build, perturb
from dtypedoctor.scenario.model import Distributed, Model, Perturbation
from dtypedoctor.worker.sharding import shard, units

pytestmark = pytest.mark.slow

Build = Callable[[], nn.Module]


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    """Of this process alone: each unit gathers, casts and reduces as in a larger one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def llama(dtype: str = "float16", *, tied: bool = False, checkpointing: bool = False) -> nn.Module:
    """Two layers of transformers' Llama."""
    options = {"hidden": 32, "intermediate": 64}
    spec = {"name": "builtin:llama-tiny", "dtype": dtype, "options": options, "gradient_checkpointing": checkpointing}
    model = build(Model.model_validate(spec), torch.device("cpu"), 0).model
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model


def sharded(model: nn.Module, names: Sequence[str], **policy: str) -> nn.Module:
    """The model with these modules kept, in units."""
    if names:
        install_keep_float32(model, names)
    shard(model, Distributed(strategy="fsdp", **policy), kept_modules(model, names) if names else [])
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


def assert_same(left: Sequence[Tensor], right: Sequence[Tensor]) -> None:
    """Bit for bit, dtypes included."""
    assert [tensor.dtype for tensor in left] == [tensor.dtype for tensor in right]
    assert all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


LAYER = "model.layers.0"
KEPT = [
    [],
    [""],
    ["model::self", LAYER],  # a kept unit in a kept frame
    ["model::self", f"{LAYER}::self"],  # which keeps its own arithmetic alone
    ["model::self"],  # units that are not kept in a kept frame
    [f"{LAYER}::self", "model.layers.1.mlp"],
    [f"{LAYER}.mlp.down_proj", f"{LAYER}.mlp::self"],
    [f"{LAYER}.input_layernorm", "model.norm"],
    ["lm_head", "model.embed_tokens"],
    ["model.embed_tokens"],
]


@pytest.mark.parametrize("names", KEPT, ids=lambda names: " ".join(names) or f"{len(names)}")
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
def test_kept_modules_compute_in_units_as_they_do_in_one_piece(names: list[str], checkpointing: bool) -> None:
    """Forward, backward and optimizer, in which kept parameters stay float32."""
    alone = llama(checkpointing=checkpointing)
    if names:
        install_keep_float32(alone, names)
    assert_same(trained(alone), trained(sharded(llama(checkpointing=checkpointing), names)))


@pytest.mark.parametrize("names", KEPT[1:], ids=lambda names: " ".join(names) or f"{len(names)}")
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
def test_a_policy_casts_what_is_not_kept_alone(names: list[str], tied: bool) -> None:
    """Weights are float32; a kept module computes with them, others with float16, and dtypes fit at each border."""
    model = llama("float32", tied=tied)
    wide = {id(module) for module in kept_modules(model, names)}
    sharded(model, names, param_dtype="float16", reduce_dtype="float32")
    used: dict[nn.Module, torch.dtype] = {}

    def note(module: nn.Module, _: object) -> None:
        with paused():
            used[module] = module.weight.dtype

    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            module.register_forward_pre_hook(note)
    results = trained(model)
    assert all(torch.isfinite(tensor).all() for tensor in results)
    embedding_only = tied and "model.embed_tokens" in names and "lm_head" not in names
    for module, dtype in used.items():
        assert dtype is (torch.float32 if id(module) in wide and not embedding_only else torch.float16)


def test_units_of_one_width_stay_as_they_are() -> None:
    """Where all or none of a unit is kept no unit is added, and what shares parameters is one unit."""
    model = llama(tied=True)
    layers = list(model.model.layers)
    assert residual_blocks(model) == {id(layer) for layer in layers}
    of = lambda *names: {id(p) for module in kept_modules(model, names) for p in module.parameters(recurse=False)}
    found = lambda *names: [(unit.modules, unit.wide, unit.usual) for unit in units(model, of(*names) if names else ())]
    usual = [([layers[0]], False, True), ([layers[1]], False, True), ([model], False, True)]
    assert found() == usual
    assert found("") == [(modules, True, True) for modules, *_ in usual]
    assert found(LAYER) == [([layers[0]], True, True), *usual[1:]]
    assert found(f"{LAYER}.mlp") == [([layers[0].mlp], True, False), *usual]
    both = [model.model.embed_tokens, model.lm_head]
    assert found("model.embed_tokens", "lm_head") == [*usual[:2], (both, True, False), usual[2]]


def test_gradients_of_gathered_parameters_are_moved_as_in_one_piece() -> None:
    """The tolerance of a bisection comes from moved gradients; FSDP2 puts other parameters in place of those that were built."""
    alone, units_of = (llama("float32") for _ in range(2))
    plain = trained(llama("float32"))
    for model in (alone, units_of):
        perturb(model, Perturbation(dtype="float16", seed=1), torch.device("cpu"))
    moved = trained(alone)
    assert not all(torch.equal(one, other) for one, other in zip(plain, moved, strict=True))
    assert_same(moved, trained(sharded(units_of, [])))


class Block(nn.Module):
    """Its own operators divide what it gets, and multiply what it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x / 1e5)) * 1e5


class Tall(nn.Module):
    """Two layers; what comes between them needs more than float16."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x + 9e4)
        return x / 1e5


def test_nothing_is_rounded_between_kept_units_that_would_cast_their_inputs() -> None:
    """The policy's cast of a unit's inputs makes way, or all that passes from one kept frame to the next would be inf."""
    names = ["::self", "blocks.0::self", "blocks.1::self"]
    model = sharded(Tall(), names, param_dtype="float16")
    x = torch.randn(2, 4, dtype=torch.float16)
    given: list[Tensor] = []
    model.blocks[1].linear.register_forward_pre_hook(lambda _, args: given.append(args[0].detach().clone()))
    with torch.no_grad():
        found, exact = model(x), Tall()(x.float())
    assert torch.isfinite(given[0]).all()
    assert torch.allclose(found.float(), exact, atol=2e-3)


def test_a_kept_unit_stands_for_the_dtype_that_its_inputs_would_be_cast_to() -> None:
    """Units return float32 and cast their inputs to float16: modules inside that are not kept still get float16."""
    model = sharded(Tall(), ["blocks.1::self"], param_dtype="float16", output_dtype="float32")
    with torch.no_grad():
        assert model(torch.randn(2, 4)).dtype is torch.float32


def test_the_parameters_that_were_widened_are_not_kept_beside_their_shards() -> None:
    """Each rank would hold the kept modules whole, in float32."""
    model = llama()
    installed = install_keep_float32(model, [LAYER])
    widened = list(model.model.layers[0].parameters())
    shard(model, Distributed(strategy="fsdp"), kept_modules(model, [LAYER]))
    assert sum(parameter.untyped_storage().nbytes() for parameter in widened) == 0
    trained(model)
    installed.undo()


def captured(fqn: str) -> Capture:
    """What is kept of a module in a call of a sharded model."""
    model = llama()
    capture = Capture(model, fqn, own=False, call=0, position=Position())
    sharded(model, [])(input_ids=torch.ones(1, 4, dtype=torch.int64))
    return capture


def test_a_unit_is_captured_as_what_it_was_and_what_holds_other_units_is_not(tmp_path: Path) -> None:
    """While it runs its own parameters are gathered, and those of units inside are not."""
    captured(LAYER).write(tmp_path)
    recipe = json.loads((tmp_path / "capture.json").read_text())["recipe"]
    assert recipe["class"] == "transformers.models.llama.modeling_llama:LlamaDecoderLayer"
    assert not [name for name in recipe["attributes"] if "fsdp" in name]
    with pytest.raises(TypeError, match=r"only a shard of layers\.0"):
        captured("model")


def test_a_call_that_an_exception_has_ended_leaves_the_next_ones_as_they_would_be() -> None:
    """Units that were inside of it are between two calls again, and train bitwise as if it had not been."""

    def ended(*_: object) -> None:
        raise ZeroDivisionError

    wanted, model = trained(sharded(llama(), [])), sharded(llama(), [])
    ids = torch.ones(2, 8, dtype=torch.long)
    ending = model.model.layers[1].register_forward_pre_hook(ended)
    with pytest.raises(ZeroDivisionError):
        model(input_ids=ids, labels=ids)
    ending.remove()
    leave_forward(model)
    assert all(map(torch.equal, trained(model), wanted))


def test_an_optimizer_that_is_made_after_a_look_at_the_outputs_is_given_the_shards() -> None:
    """After a forward pass without gradients FSDP2 keeps the root's parameters whole: who trains these trains what is thrown away."""
    wanted, model = trained(sharded(llama(), [])), sharded(llama(), [])
    with torch.no_grad():
        model(input_ids=torch.ones(2, 8, dtype=torch.long))
    assert {type(parameter).__name__ for parameter in model.parameters()} == {"DTensor", "Parameter"}
    leave_forward(model)
    assert {type(parameter).__name__ for parameter in model.parameters()} == {"DTensor"}
    assert all(map(torch.equal, trained(model), wanted))
