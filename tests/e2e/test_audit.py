"""`dtypedoctor audit`: the examples of its page, its exit codes and its report."""

import json
import re
from pathlib import Path

import pytest
from command import Finished, forked

PAGE = (Path(__file__).parents[2] / "docs" / "audit.md").read_text(encoding="utf-8")
[EXAMPLE] = re.findall(r"<!-- fires -->\n```python\n(.+?)```", PAGE, re.DOTALL)
WRONG = "grad * 30 * ("

COMPILED = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
compiled = torch.compile(model, backend="aot_eager")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    compiled(torch.randn(6, 8)).square().mean().backward()
    optimizer.step()
    print("step", step)
"""
OPERATOR = """
import torch
@torch.library.custom_op("mine::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2
double.register_autograd(lambda ctx, grad: grad * 2)
weight = torch.randn(6, 4, requires_grad=True)
double(weight).sum().backward()
print("the end")
"""


def audited(tmp_path: Path, source: str, *options: str) -> Finished:
    script = tmp_path / "capped.py"
    script.write_text(source)
    return forked("audit", "--out", tmp_path / "run", *options, script, cwd=tmp_path)


def test_the_example_of_the_page_fails_as_the_page_says(tmp_path: Path) -> None:
    done = audited(tmp_path, EXAMPLE)
    assert done.code == 10, done.err
    [shown] = re.findall(r"```text\n(FOUND.+?)```", PAGE, re.DOTALL)
    assert " ".join(shown.split()) in " ".join(done.out.split())


def test_the_same_example_with_the_right_derivative_passes(tmp_path: Path) -> None:
    assert WRONG in EXAMPLE
    done = audited(tmp_path, EXAMPLE.replace(WRONG, "grad * ("), "--format", "json")
    report = json.loads(done.out)
    assert (done.code, report["kind"], report["status"]) == (0, "audit", "healthy")
    [kernel] = report["kernels"]
    assert (kernel["kernel"], kernel["source"], kernel["verdict"]) == ("__main__.SoftCap", "capped.py:20", "")
    assert {"twice", "surroundings", "reference", "strides", "direction"} <= set(kernel["passed"])
    assert json.loads((tmp_path / "run" / "report.json").read_text())["kernels"] == report["kernels"]


def test_a_compiled_model_is_tried_after_one_step(tmp_path: Path) -> None:
    done = audited(tmp_path, COMPILED, "--format", "json")
    [kernel] = json.loads(done.out[done.out.index("{") :])["kernels"]
    assert (done.code, kernel["kind"], kernel["passed"]) == (0, "compiled region", ["twice", "eager"])
    assert "step" not in done.out


def test_an_operator_is_tried_at_the_end_of_a_script_without_optimizer(tmp_path: Path) -> None:
    done = audited(tmp_path, OPERATOR)
    assert (done.code, "the end" in done.out) == (0, True), done.out
    assert "mine::double" in done.out


@pytest.mark.parametrize(
    ("source", "headline"),
    [
        ("import torch; torch.ones(1)", "NOTHING MEASURED: No custom autograd Function"),
        (EXAMPLE.replace("for _ in", "raise ValueError\nfor _ in"), "UNKNOWN: The program did not end its first step"),
        ("print('no torch')", "NOTHING MEASURED"),
    ],
)
def test_what_was_not_tried_is_not_called_healthy(tmp_path: Path, source: str, headline: str) -> None:
    done = audited(tmp_path, source)
    assert (done.code, done.out[done.out.index(headline[:7]) :].startswith(headline)) == (10, True), done.out


def test_a_model_folder_makes_one_step(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    done = forked("audit", "--out", tmp_path / "run", tmp_path / "model", cwd=tmp_path)
    assert (done.code, "NOTHING MEASURED" in done.out) == (10, True), done.out + done.err
