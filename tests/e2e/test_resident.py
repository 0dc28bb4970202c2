"""A model that stays loaded: runs that follow each other in one process say what runs in new processes say, bit for bit."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from command import dtypedoctor, report_of
from patience import PATIENCE

pytestmark = pytest.mark.release

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

IN_PLACE = {"DTYPEDOCTOR_RESIDENT_IN_PLACE": "1"}
MEASURED = ("seconds", "step_time", "step_time_ratio", "peak_memory", "peak_memory_ratio", "time_ratio", "memory_bytes")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama whose MLP in layer 2 overflows float16, as a folder, and a scenario that calls it."""
    place = tmp_path_factory.mktemp("model")
    subprocess.run([sys.executable, "-c", MODEL, str(place / "llama")], check=True, capture_output=True)
    step = {
        "model": {"name": str(place / "llama"), "dtype": "float16"},
        "workload": {"kind": "forward", "backward": True, "batch_size": 1, "sequence_length": 8},
    }
    (place / "case.yaml").write_text(
        yaml.safe_dump({"name": "case", "summary": "A case.", "remedies": ["eager-attention"], "steps": [step]})
    )
    return place


def unmeasured(value: Any, place: Path) -> Any:
    """A report without what no two runs have in common: times, memory, its own directory."""
    if isinstance(value, dict):
        return {
            key: unmeasured(one, place)
            for key, one in value.items()
            if key not in (*MEASURED, "command", "files", "next_command", "cost", "environment")
        }
    if isinstance(value, list):
        return [unmeasured(one, place) for one in value]
    return value.replace(str(place), "RUN") if isinstance(value, str) else value  # the whole path is in no other word


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


def runs_of(directory: Path) -> dict[str, Path]:
    """The runs in a run directory, by their place."""
    return {str(path.parent.relative_to(directory)): path.parent for path in directory.rglob("events.jsonl")}


def assert_same(resident: Path, fresh: Path) -> None:
    """The same runs with the same records, and the same report."""
    ours, theirs = runs_of(resident), runs_of(fresh)
    assert ours.keys() == theirs.keys()
    for name, directory in ours.items():
        assert records(directory) == records(theirs[name]), name
    assert unmeasured(report_of(resident), resident) == unmeasured(report_of(fresh), fresh)


@pytest.fixture(scope="module")
def fresh(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of the scenario whose runs had a new process each."""
    place = tmp_path_factory.mktemp("fresh") / "run"
    assert dtypedoctor("run", folder / "case.yaml", "--out", place, "--fresh-workers", cwd=folder).code == 10
    assert not (place / "server").exists()
    return place


@pytest.mark.parametrize("where", [IN_PLACE, {}], ids=["in place", "forks"])
def test_runs_in_one_process_say_what_runs_in_new_ones_say(
    where: dict[str, str], folder: Path, fresh: Path, tmp_path: Path
) -> None:
    """Every record of the baseline, the op trace, the references and the fixes; the model was loaded once."""
    resident = tmp_path / "resident"
    finished = dtypedoctor("run", folder / "case.yaml", "--resident-workers", "--out", resident, cwd=folder, **where)
    assert finished.code == 10, finished.err
    assert "loaded again" not in finished.err
    assert_same(resident, fresh)


CHANGED = """
import os, sys
sys.path.insert(0, {root!r})
import torch
from dtypedoctor.models.build import Built
from dtypedoctor.scenario.model import Scenario
from dtypedoctor.worker.stock import NotRestoredError, ResidentStock
scenario = Scenario.model_validate({scenario!r})
stock = ResidentStock()
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
from dtypedoctor.models.build import build
new = build(spec, device, scenario.seed).model
assert new.training == model.training
for (name, one), (_, other) in zip(model.state_dict().items(), new.state_dict().items()):
    assert torch.equal(one, other), name
for change in ("model.lm_head.register_forward_hook(print)", "model.model.layers[0].forward = print", "model.model.norm = torch.nn.Identity()"):
    built = ResidentStock()
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
    program = CHANGED.format(root=str(Path(__file__).parents[2]), scenario=scenario)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "lm_head is not what was built",
        "model.layers.0 is not what was built",
        "model.norm is not what was built",
    ]


STOPPED = """
import os, signal, sys
from pathlib import Path
from dtypedoctor.runner.launch import Launcher, WarmServer, run_to_end
from dtypedoctor.scenario.loading import load_scenario
from dtypedoctor.scenario.model import Request

def main():
    place = Path(sys.argv[2])
    scenario = load_scenario(Path(sys.argv[1]))
    steps = scenario.model_dump()["steps"]
    steps[0]["workload"]["steps"] = 100_000
    endless = scenario.with_changes(steps=steps, time_limit=4)
    with Launcher(place / "log") as launcher, WarmServer(launcher, Request(scenario=scenario), place / "server") as warm:
        assert warm.runs_in_place
        stopped = run_to_end(warm.start(Request(scenario=endless), place / "endless"))
        assert stopped.exit.timed_out, stopped.exit
        run = run_to_end(warm.start(Request(scenario=scenario), place / "next"))
        assert run.trace.end.outcome == "completed", run.exit
        assert (place / "server-2").is_dir()
        os.kill(warm._process.pid, signal.SIGSTOP)  # busy, so that it does not come to the next run
        warm.start(Request(scenario=scenario), place / "unwanted").stop()
        assert not (place / "server-3").exists()

if __name__ == "__main__":  # processes that are started import this file
    main()
"""


def test_a_server_whose_run_is_stopped_is_replaced(folder: Path, tmp_path: Path) -> None:
    """A run that takes too long ends with its server, and the next one finds another; for one that is stopped before it begins none is started."""
    program = tmp_path / "program.py"
    program.write_text(STOPPED)
    command = [sys.executable, str(program), str(folder / "case.yaml"), str(tmp_path)]
    environment = os.environ | IN_PLACE | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr


def test_a_bisection_says_where_jobs_have_no_effect(folder: Path, tmp_path: Path) -> None:
    """The process that holds the model makes one probe at a time; in bfloat16 there is nothing to look for, so that it ends soon."""
    model = ["--model", folder / "llama", "--dtype", "bfloat16", "--workload", "forward"]
    finished = dtypedoctor(
        "bisect", *model, "--resident-workers", "--jobs", "2", "--out", tmp_path / "run", cwd=folder, **IN_PLACE
    )
    assert finished.code == 0, finished.err
    assert "--jobs 2 has no effect" in finished.err
    assert "with --fresh-workers 2 processes run at a time" in finished.err
