"""What ``dtypedoctor verify`` says of saved models whose truth is known."""

import random
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file
from saved_corpus import CASES, QUERY, Case, llama, saved, small_net
from torch import nn

from dtypedoctor.errors import UsageError
from dtypedoctor.lab.verify.verdicts import FUNCTION, SAME, Verification
from dtypedoctor.lab.verify.verifying import verify_saved


@pytest.mark.release(all_but=16)
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_saved_model_gets_the_verdict_that_it_was_made_for(case: Case, tmp_path: Path) -> None:
    result = verify_saved(*case.make(tmp_path))
    assert (result.differences[0].kind if result.differences else "") == case.kind, result
    assert (result.verdict == SAME) == (not case.kind), result


def test_the_corpus_has_as_many_healthy_models_as_the_page_says() -> None:
    faults = sum(bool(case.kind) for case in CASES)
    page = (Path(__file__).parents[2] / "docs" / "verify.md").read_text(encoding="utf-8")
    assert f"Of {faults} faults" in page
    assert f"{len(CASES) - faults} healthy models" in page


def named(case: str, tmp_path: Path) -> Verification:
    return verify_saved(*next(known for known in CASES if known.name == case).make(tmp_path))


@pytest.mark.parametrize(
    ("case", "tensor", "words"),
    [
        ("a_key_is_renamed", QUERY, "not used: model.layers.0.attn.q_proj.weight"),
        ("two_layers_are_swapped", "q_proj", "it holds the values of model.layers."),
        ("a_square_weight_is_transposed", QUERY, "it is transposed"),
        ("float16_overflows", "model.norm.weight", "1 become inf or NaN"),
        ("merged_twice", "weight", "it holds W + 2 times the update"),
        ("merged_with_another_scale", "weight", "it holds W + 0.5 times the update"),
        ("one_module_is_not_merged", "layers.1.mlp.up_proj", "it holds W + 0 times the update"),
        ("the_head_that_was_trained_is_not_saved_with_the_adapter", "lm_head", "it is 0.667 times the trained one"),
    ],
)
def test_a_difference_is_explained_by_what_the_tensor_holds(case: str, tensor: str, words: str, tmp_path: Path) -> None:
    first = named(case, tmp_path).differences[0]
    assert (tensor in first.tensor, words in first.said) == (True, True), first


def test_the_most_different_tensor_comes_first(tmp_path: Path) -> None:
    folder, live = saved(llama(), tmp_path / "s"), llama()
    with torch.no_grad():
        live.model.layers[0].mlp.up_proj.weight.mul_(1.1)
        live.model.layers[1].mlp.up_proj.weight.mul_(3)
    tensors = [difference.tensor for difference in verify_saved(folder, live).differences]
    assert tensors == [f"model.layers.{layer}.mlp.up_proj.weight" for layer in (1, 0)]


def test_the_live_model_and_its_generators_stay_as_they_were(tmp_path: Path) -> None:
    live = llama().train()
    folder = saved(live, tmp_path / "s")
    before = {name: tensor.clone() for name, tensor in live.state_dict().items()}
    torch.manual_seed(3)
    random.seed(3)
    state, verbosity = torch.get_rng_state(), transformers.logging.get_verbosity()
    verify_saved(folder, live)
    assert transformers.logging.get_verbosity() == verbosity
    assert transformers.utils.logging.is_progress_bar_enabled()
    assert all(torch.equal(tensor, before[name]) for name, tensor in live.state_dict().items())
    assert all(module.training for module in live.modules())
    assert torch.equal(torch.get_rng_state(), state)


def test_a_function_that_no_tensor_holds_is_compared_with_given_inputs(tmp_path: Path) -> None:
    class Capped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.cap = small_net().eval(), 30.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.cap * torch.tanh(self.net(x) / self.cap)

    live = Capped()
    torch.save(live.state_dict(), tmp_path / "net.pt")
    assert verify_saved(tmp_path / "net.pt", live, (torch.randn(4, 8),)).verdict == SAME
    other = verify_saved(tmp_path / "net.pt", live)
    assert (other.verdict, "return (model, inputs)" in " ".join(other.notes)) == (SAME, True)


def test_a_pickle_that_would_run_code_is_not_loaded(tmp_path: Path) -> None:
    class Harm:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (tmp_path / "harm",))

    torch.save({"0.weight": Harm()}, tmp_path / "net.pt")
    result = verify_saved(tmp_path / "net.pt", small_net())
    assert (result.verdict, "weights_only" in result.unknown[0].lower() or "UnpicklingError" in result.unknown[0]) == (
        "unknown",
        True,
    )
    assert not (tmp_path / "harm").exists()


def test_a_config_of_another_kind_of_model_builds_none_of_the_usual_size(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "strange", "architectures": ["Strange"]}')
    save_file({"w": torch.zeros(4)}, tmp_path / "model.safetensors")
    result = verify_saved(tmp_path, llama())
    assert result.verdict == "unknown"
    assert "is of a model 'strange'" in result.unknown[0]


def test_what_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        verify_saved(tmp_path / "nothing", small_net())
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="has no tensors"):
        verify_saved(tmp_path / "empty", small_net())


def test_a_verification_survives_json() -> None:
    result = Verification(saved="a", reference="b", counts={"identical": 1})
    assert Verification.of(result.data()) == result
    assert FUNCTION not in result.data()["differences"]
