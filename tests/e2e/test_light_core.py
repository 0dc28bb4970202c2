"""dtypedoctor with the core dependencies of ``pyproject.toml`` alone: no transformers, no trainer, no bitsandbytes."""

import json

import pytest
import torch
from command import report_of
from light_environment import PROJECT, Light
from packaging.requirements import Requirement
from safetensors.torch import save_file

HF = ("transformers", "bitsandbytes", "peft", "trl", "accelerate", "datasets")

NETWORK = """
from types import SimpleNamespace

import torch
from torch import nn


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(8, 8), nn.Linear(8, 8)
        nn.init.constant_(self.gate.weight, 30.0)
        nn.init.constant_(self.up.weight, 30.0)

    def forward(self, x):
        return self.gate(x) * self.up(x)


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(vocab_size=64)
        self.embed, self.mlp, self.head = nn.Embedding(64, 8), Gated(), nn.Linear(8, 64)
        nn.init.constant_(self.embed.weight, 2.0)

    def forward(self, input_ids, labels=None):
        logits = self.head(self.mlp(self.embed(input_ids)))
        loss = None
        if labels is not None:
            loss = nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 64).float(), labels[:, 1:].reshape(-1))
        return SimpleNamespace(logits=logits, loss=loss)


def language_model():
    return LanguageModel()
"""

TRAINING = """
import torch

from network import language_model

torch.manual_seed(0)
model = language_model().half()
tokens = torch.randint(0, 64, (2, 8))
model(tokens, labels=tokens).loss.backward()
"""

WATCHED = """
import torch

import dtypedoctor
from network import language_model

model = language_model().half()
tokens = torch.randint(0, 64, (2, 8))
with dtypedoctor.watch(model) as watched:
    model(tokens, labels=tokens)
print(watched.report.findings[0].id)
"""

SCENARIO = """
name: gated
summary: A factory's model overflows float16.
steps:
  - model: {name: "network:language_model", dtype: float16}
    workload: {kind: forward}
remedies: [bfloat16]
"""


FILES = {"network.py": NETWORK, "train.py": TRAINING, "watched.py": WATCHED, "gated.yaml": SCENARIO}


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> Light:
    """One environment for all tests, checked to lack the libraries."""
    environment = Light(tmp_path_factory.mktemp("light"))
    for name, text in FILES.items():
        (environment.folder / name).write_text(text, encoding="utf-8")
    found = environment(
        "-c", f"import dtypedoctor, importlib.util as u; print([n for n in {HF} if u.find_spec(n) is not None])"
    )
    assert found.out == "[]\n", found.err
    return environment


@pytest.fixture(scope="module")
def checkpoint(light: Light) -> str:
    folder = light.folder / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"dtype": "float16"}), encoding="utf-8")
    save_file({"weight": torch.ones(2, dtype=torch.float16)}, folder / "model.safetensors")
    return folder.name


def test_the_extra_names_what_the_core_lacks() -> None:
    """`hf` holds them, and `dev` brings `hf`."""
    names = {Requirement(one).name for one in PROJECT["optional-dependencies"]["hf"]}
    assert names == set(HF)
    assert "hf" in Requirement(PROJECT["optional-dependencies"]["dev"][0]).extras


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize(("executor", "extra"), [("ray", "ray"), ("slurm", "slurm"), ("submitit-local", "slurm")])
def test_an_executor_that_is_not_installed_is_named_with_its_extra(light: Light, executor: str, extra: str) -> None:
    """One sentence, before anything heavy is imported."""
    program = (
        "import sys; from dtypedoctor.cli.main import main\n"
        "try: main()\n"
        "finally: print([name for name in ('torch', 'rich', 'yaml') if name in sys.modules])"
    )
    done = light("-c", program, "run", "gated.yaml", "--executor", executor)
    assert (done.code, done.out) == (2, "[]\n"), done.err
    assert f"--executor {executor} needs " in done.err
    assert f"pip install 'dtypedoctor[{extra}]'" in done.err
    assert not (light.folder / "runs").exists()


def test_a_script_is_diagnosed_and_its_call_replayed(light: Light) -> None:
    """`exec` and `replay`; `report` draws what was found."""
    done = light.dtypedoctor("exec", "--once", "--out", "script", "train.py")
    assert done.code == 10, done.err
    (finding,) = report_of(light.folder / "script")["findings"]
    assert (finding["id"], finding["fqn"], finding["confidence"]) == ("float16-overflow", "mlp", "proven")
    replayed = light.dtypedoctor("replay", "script/capsule", "--allow-code", "--out", "replayed")
    assert replayed.code == 10, replayed.err
    assert report_of(light.folder / "replayed")["findings"][0]["id"] == "float16-overflow"
    shown = light.dtypedoctor("report", "script", "--format", "html")
    assert shown.code == 0, shown.err
    assert "float16-overflow" in shown.out


@pytest.mark.release
def test_a_block_is_watched(light: Light) -> None:
    """`watch()` finds what `exec` finds."""
    done = light("watched.py")
    assert done.code == 0, done.err
    assert done.out == "float16-overflow\n"


@pytest.mark.release
def test_a_scenario_of_a_factory_is_fixed(light: Light) -> None:
    """`run` builds, breaks, fixes and compares a model of plain torch."""
    done = light.dtypedoctor("run", "gated.yaml", "--allow-code", "--out", "gated")
    assert done.code == 10, done.err
    outcomes = {trial["remedy"]: trial["outcome"] for trial in report_of(light.folder / "gated")["trials"]}
    assert outcomes["bfloat16"] == "fixed"


def test_files_of_a_checkpoint_are_inspected(light: Light, checkpoint: str) -> None:
    """`inspect` reads a checkpoint's files."""
    done = light.dtypedoctor("inspect", checkpoint, "--dtype", "float16", "--format", "json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["census"]["tensors"] == {"float16": {"tensors": 1, "elements": 2}}


@pytest.mark.release(all_but=1)
@pytest.mark.usefixtures("checkpoint")
@pytest.mark.parametrize(
    ("arguments", "needed"),
    [
        (("run", "gemma4_grpo_fp16"), "the workload grpo needs trl, transformers, accelerate, datasets"),
        (("run", "gated.yaml", "--allow-code", "--model", "builtin:llama-tiny"), "builtin:llama-tiny needs transformers"),
        (("run", "gated.yaml", "--allow-code", "--model", "checkpoint"), "checkpoint needs transformers, accelerate"),
        (("bisect", "--model", "builtin:gemma4-tiny"), "the workload grpo needs trl"),
        (("inspect", "builtin:llama-nf4-fused"), "builtin:llama-nf4-fused needs transformers, bitsandbytes"),
    ],
)  # fmt: skip
def test_a_verb_says_which_libraries_and_which_extra_it_lacks(
    arguments: tuple[str, ...], needed: str, light: Light
) -> None:
    """Exit 2, the packages by name, and the command that installs them."""
    done = light.dtypedoctor(*arguments)
    assert done.code == 2, done.err
    assert f"error: {needed}" in done.err
    assert done.err.endswith("hint: Install them: pip install 'dtypedoctor[hf]'\n")


def test_the_callback_says_what_it_needs(light: Light) -> None:
    """An ImportError with the same command."""
    done = light("-c", "import dtypedoctor; dtypedoctor.DtypeDoctorCallback()")
    assert "ImportError: DtypeDoctorCallback needs transformers, which is not installed" in done.err
    assert "pip install 'dtypedoctor[hf]'" in done.err
