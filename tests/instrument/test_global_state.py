"""Settings of the whole process that a library changes while the program runs, and changes that are meant or come to nothing."""

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from watched import watched

from dtypedoctor.diagnosis import diagnose
from dtypedoctor.trace.records.silent import GlobalState

LIBRARY = """
import torch

def to_double():
    torch.set_default_dtype(torch.float64)

def faster():
    torch.set_float32_matmul_precision("medium")

def for_a_moment():
    torch.set_default_dtype(torch.float64)
    torch.set_default_dtype(torch.float32)
"""


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_float32_matmul_precision("highest")


@pytest.fixture
def library(tmp_path: Path) -> ModuleType:
    """A module that lies where installed ones do."""
    path = tmp_path / "site-packages" / "fastlib.py"
    path.parent.mkdir()
    path.write_text(LIBRARY)
    spec = importlib.util.spec_from_file_location("fastlib", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(second: Callable[[], object], *, after: Callable[[], object] = lambda: None) -> None:
    layer = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for step in range(4):
        if step in (1, 2):
            (second, after)[step - 1]()
        layer(torch.randn(8, 4, dtype=torch.float32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_library_that_changes_the_default_dtype_is_named_with_the_line_that_called_it(
    library: ModuleType, tmp_path: Path
) -> None:
    trace = watched(tmp_path, lambda _: train(library.to_double))
    [finding] = [finding for finding in diagnose(trace) if finding.id == "global-state-changed"]
    assert "fastlib:5 has set default dtype from float32 to float64" in finding.summary
    assert (finding.source or "").startswith("test_global_state.py:")


@pytest.mark.parametrize(
    "case", ["own line", "set back at once", "set back later", "before anything runs", "a model is loaded"]
)
def test_what_is_meant_or_comes_to_nothing_is_no_finding(case: str, library: ModuleType, tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    work = {
        "own line": lambda: train(lambda: torch.set_default_dtype(torch.float64)),
        "set back at once": lambda: train(library.for_a_moment),
        "set back later": lambda: train(library.to_double, after=lambda: torch.set_default_dtype(torch.float32)),
        "before anything runs": lambda: (library.to_double(), train(lambda: None)),
        "a model is loaded": lambda: train(lambda: LlamaForCausalLM.from_pretrained(tmp_path / "model")),
    }[case]
    (tmp_path / "run").mkdir()
    trace = watched(tmp_path / "run", lambda _: work())
    assert "global-state-changed" not in {finding.id for finding in diagnose(trace)}


def test_each_setting_is_read_at_the_next_call_with_its_effect_on_this_device(
    library: ModuleType, tmp_path: Path
) -> None:
    """One line changes several; a CPU without such units computes the same product."""
    trace = watched(tmp_path, lambda _: train(library.faster))
    told = {seen.what.setting: seen for seen in trace.observed(GlobalState)}
    seen = told["float32 matmul precision"]
    assert (seen.step, seen.what.before, seen.what.after, seen.what.by_library) == (2, "highest", "medium", True)
    assert "cuda.matmul.allow_tf32" in told
    assert seen.what.error < 0.01


def test_the_functions_of_torch_are_its_own_again_afterwards(library: ModuleType, tmp_path: Path) -> None:
    before = torch.get_default_dtype(), vars(torch._C)["_set_default_dtype"]
    watched(tmp_path, lambda _: train(library.for_a_moment))
    assert (torch.get_default_dtype(), vars(torch._C)["_set_default_dtype"]) == before
