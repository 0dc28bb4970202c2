"""A model that stays loaded: runs that follow each other in one process say what runs in new processes say, bit for bit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from patience import PATIENCE

pytestmark = pytest.mark.slow

MODEL = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, vocab_size=512)
model = LlamaForCausalLM(config).half()
with torch.no_grad():
    for name in ("gate_proj", "up_proj"):
        getattr(model.model.layers[2].mlp, name).weight.mul_(3000)
    model.model.layers[2].mlp.down_proj.weight.mul_(1e-3)
model.save_pretrained(sys.argv[1])
"""

MEASURED = ("seconds", "step_time", "peak_memory")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama whose MLP in layer 2 overflows float16, as a folder, and a scenario that trains it for two steps."""
    place = tmp_path_factory.mktemp("model")
    subprocess.run([sys.executable, "-c", MODEL, str(place / "llama")], check=True, capture_output=True)
    step = {
        "model": {"name": str(place / "llama"), "dtype": "float16"},
        "workload": {"kind": "train", "steps": 2, "batch_size": 1, "sequence_length": 8},
    }
    (place / "case.yaml").write_text(yaml.safe_dump({"name": "case", "summary": "A case.", "steps": [step]}))
    return place


def records(directory: Path) -> list[str]:
    """The lines of a trace without times and memory, and without the line about the process."""
    found = []
    for line in (directory / "events.jsonl").read_text().splitlines():
        record = json.loads(line)
        if isinstance(record, dict):
            if record["e"] == "header":
                continue
            if record["e"] == "environment":
                record["values"].pop("variables")  # a process that has made a run has set what torch reads once
            record.pop("~")
            for values in (record, record.get("values")):
                for key in MEASURED if isinstance(values, dict) else ():
                    values.pop(key, None)
        found.append(json.dumps(record, sort_keys=True))
    return found


def program(tmp_path: Path, folder: Path, text: str) -> None:
    """Runs a program that starts workers, which import its file."""
    (tmp_path / "program.py").write_text(HEAD + text + TAIL)
    command = [sys.executable, str(tmp_path / "program.py"), str(folder / "case.yaml"), str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr


HEAD = """
import os, signal, sys
from pathlib import Path
from dtypedoctor.lab.runner.launch import Launcher, Resident
from dtypedoctor.lab.scenarios.loading import load_scenario
from dtypedoctor.lab.scenarios.model import Request
from dtypedoctor.lab.bisect.probes import reference, with_kept

def main():
    place = Path(sys.argv[2])
    scenario = load_scenario(Path(sys.argv[1]))
    with Launcher(place / "log") as launcher, Resident(launcher, scenario, place / "server", print) as resident:
"""
TAIL = """

if __name__ == "__main__":
    main()
"""
EACH = """
        kept = with_kept(scenario, ["model.layers.2.mlp::self"])
        requests = [Request(scenario=kept), Request(scenario=reference(scenario), watch=False), Request(scenario=scenario, replay=True)]
        for number, request in enumerate(requests):
            launcher.run(request, place / f"fresh-{number}")
            resident.run(request, place / f"resident-{number}")
"""


def test_runs_in_one_process_say_what_runs_in_new_ones_say(folder: Path, tmp_path: Path) -> None:
    """Every record of a training, with a part in float32, in float32 throughout and unwatched, and with what failed made again; the model was loaded once."""
    program(tmp_path, folder, EACH)
    resident = sorted(tmp_path.glob("resident-*"))
    assert len(resident) == 3
    for directory in resident:
        assert records(directory) == records(tmp_path / directory.name.replace("resident", "fresh")), directory.name
    assert (tmp_path / "server").is_dir()
    assert not (tmp_path / "server-2").exists()


CHANGED = """
import os, sys
sys.path.insert(0, {root!r})
import torch
from dtypedoctor.lab.models.build import Built
from dtypedoctor.lab.scenarios.model import Scenario
from dtypedoctor.lab.worker.main import NotRestoredError, Stock
scenario = Scenario.model_validate({scenario!r})
stock = Stock()
device = torch.device("cpu")
stock.fill(scenario, device)
spec = scenario.steps[0].model
model = stock.take(spec, device, scenario.seed).model
with torch.no_grad():
    model.lm_head.weight.add_(1)
    model.model.norm.weight[0] = float("nan")
model.train(not model.training)
model.lm_head.weight.requires_grad_(False)
model.model.embed_tokens.weight.grad = torch.ones_like(model.model.embed_tokens.weight)
stock.put_back()
again = stock.take(spec, device, scenario.seed).model
assert again is model
assert model.lm_head.weight.requires_grad and model.model.embed_tokens.weight.grad is None
from dtypedoctor.lab.models.build import build
new = build(spec, device, scenario.seed).model
assert new.training == model.training
for (name, one), (_, other) in zip(model.state_dict().items(), new.state_dict().items()):
    assert torch.equal(one, other), name
for change in ("model.lm_head.register_forward_hook(print)", "model.model.layers[0].forward = print", "model.model.norm = torch.nn.Identity()"):
    built = Stock()
    built.fill(scenario, device)
    model = built.take(spec, device, scenario.seed).model
    exec(change)
    try:
        built.put_back()
    except NotRestoredError as error:
        print(error)
"""


def test_what_a_run_changes_is_put_back_or_noticed(folder: Path) -> None:
    """Weights, gradients and modes are put back; another hook, method or module is noticed, and the process is given up."""
    scenario = yaml.safe_load((folder / "case.yaml").read_text())
    text = CHANGED.format(root=str(Path(__file__).parents[2]), scenario=scenario)
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "lm_head is not what was built",
        "model.layers.0 is not what was built",
        "model.norm is not what was built",
    ]


STOPPED = """
        steps = scenario.model_dump()["steps"]
        steps[0]["workload"]["steps"] = 100_000
        endless = scenario.with_changes(steps=steps, time_limit=4)
        stopped = resident.run(Request(scenario=endless), place / "endless")
        assert stopped.exit.timed_out, stopped.exit
        run = resident.run(Request(scenario=scenario), place / "next")
        assert run.trace.end.outcome == "completed", run.exit
        assert (place / "server-2").is_dir()
        os.kill(resident._process.pid, signal.SIGKILL)
        run = resident.run(Request(scenario=scenario), place / "after")
        assert run.trace.end.outcome == "completed", run.exit
        assert (place / "server-3").is_dir()
"""


@pytest.mark.release
def test_a_process_that_a_run_has_ended_is_replaced(folder: Path, tmp_path: Path) -> None:
    """A run that takes too long ends with the process that has the model, and so does one that is killed; the next one finds another."""
    program(tmp_path, folder, STOPPED)
