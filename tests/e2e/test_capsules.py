"""The failing call of one run is kept as a capsule: the smallest module that still fails, with as little input as that takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command import forked as dtypedoctor
from exec_corpus import treat_forked
from patience import PATIENCE

from dtypedoctor.errors import UsageError
from dtypedoctor.lab.bisect.measurements import run_clean
from dtypedoctor.lab.trials.treatment import Plan
from dtypedoctor.replay.capsule import CAPSULE, CAPSULE_TENSORS, Capsule, NoCapsule, read_capsule
from dtypedoctor.replay.script import capsule_script

ONE_RUN = Plan(certify=False, only=frozenset())

CLASSES = """
import torch
from torch import nn
GAIN = 200.0
class Scores(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.full((4,), GAIN))
    def forward(self, x):
        return x * self.gain
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.scores = nn.Linear(4, 4), Scores()
    def forward(self, x, *, shift):
        return self.scores(self.body(x) + shift)
torch.manual_seed(0)
"""

OVERFLOW = CLASSES + "model = Block().half()\nmodel(torch.full((16, 4), 2000.0).half(), shift=torch.zeros(4).half())\n"
MISMATCH = CLASSES + "model = Block().half()\nmodel(torch.ones(16, 4), shift=torch.zeros(4).half())\n"
BACKWARD = CLASSES + (
    "model = Block().half()\nout = model(torch.full((16, 4), 1.0).half(), shift=torch.zeros(4).half())\n"
    "out.backward(torch.full_like(out, 3000.0))\n"
)


def caught(text: str, folder: Path) -> Capsule | NoCapsule | None:
    """What a run of the script leaves."""
    path = folder / "script.py"
    path.write_text(text, encoding="utf-8")
    return treat_forked(path, folder, ONE_RUN).capsule


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize(
    ("text", "cls", "kind"),
    [(OVERFLOW, "Scores", "nonfinite"), (MISMATCH, "Linear", "raised"), (BACKWARD, "Scores", "backward")],
    ids=["overflow", "mismatch", "backward"],
)
def test_the_smallest_module_that_fails_is_kept(text: str, cls: str, kind: str, tmp_path: Path) -> None:
    """One row of the input is enough, none of it is the script's own, and fixes were tried on it once the program was over."""
    capsule = caught(text, tmp_path)
    assert isinstance(capsule, Capsule), capsule
    assert (capsule.cls, capsule.description["kind"]) == (cls, kind)
    assert capsule.description["cut"] == ["1 of 16"]
    assert capsule.description["data"] == {"synthetic": True, "recorded": []}
    assert capsule.bytes < 10_000
    outcomes = {fix.fix: fix.outcome for fix in capsule.fixes}
    assert outcomes["bfloat16"] == ("not-fixed" if kind == "raised" else "fixed")
    assert "keep-float32" in outcomes


def test_the_main_program_stays_behind(tmp_path: Path) -> None:
    """The class and the constant that it uses are carried along."""
    capsule = caught(OVERFLOW, tmp_path)
    assert isinstance(capsule, Capsule), capsule
    source = capsule.description["source"]
    assert "GAIN = 200.0" in source
    assert "class Block" not in source
    assert "manual_seed" not in source


def test_a_capsule_replays_without_its_script(tmp_path: Path) -> None:
    """In a process of its own: the same finding and operator, a fix that works on the call, and a script that fails alone."""
    capsule = caught(OVERFLOW, tmp_path)
    assert isinstance(capsule, Capsule), capsule
    (tmp_path / "script.py").unlink()
    refused = dtypedoctor("replay", tmp_path, cwd=tmp_path)
    assert refused.code == 2
    assert "--allow-code" in refused.err
    finished = dtypedoctor("replay", tmp_path, "--allow-code", "--out", tmp_path / "again", cwd=tmp_path)
    assert finished.code == 10, finished.err
    said = finished.said
    assert "replay of the call of scores (Scores), script.py:" in said
    assert " in the run, from capsule capsule, float16 on cpu." in said
    assert "Same verdict as in the run: float16-overflow, aten.mul.Tensor." in said
    assert "On this call, fixed by bfloat16 or keep-float32." in said
    assert "vocab_size" not in said
    written = (tmp_path / "again" / "report.json").read_text()
    assert str(tmp_path) not in written
    report = json.loads(written)
    assert report["findings"][0]["fqn"] == "scores"
    assert report["replay"]["verdict"] == "Same verdict as in the run: float16-overflow, aten.mul.Tensor."
    assert {trial["remedy"]: trial["outcome"] for trial in report["trials"]}["bfloat16"] == "fixed"
    inside = report["replay"]["inside"]
    assert (inside["parts"], inside["candidates"]) == (["scores"], 1)
    script = dtypedoctor("replay", tmp_path, "--script", cwd=tmp_path)
    assert script.code == 0
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "repro.py").write_text(script.out)
    status, said, errors = run_clean(tmp_path / "alone" / "repro.py", PATIENCE)
    assert status == 1, errors
    assert "FAILS: the output: 4 of 4 elements are inf or NaN in torch.float16" in said
    assert "dtypedoctor" not in script.out


WEIGHTED = """
import torch
from torch import nn
net = nn.Linear(4, 3).bfloat16()
loss = nn.CrossEntropyLoss(weight=torch.ones(3))
loss(net(torch.ones(2, 4).bfloat16()), torch.tensor([0, 1]))
"""


@pytest.mark.release
def test_a_replay_names_no_line_of_ours_and_no_dtype_that_the_model_has(tmp_path: Path) -> None:
    """Nobody's program makes the call again; and the module is a loss, the model of which is in bfloat16 already."""
    capsule = caught(WEIGHTED, tmp_path)
    assert isinstance(capsule, Capsule), capsule
    finished = dtypedoctor("replay", tmp_path, "--out", tmp_path / "again", cwd=tmp_path)
    assert "dtypedoctor/lab" not in finished.said
    assert "Load the model" not in finished.said
    assert "Cast the module to bfloat16" in finished.said


ATTENTION = """
import torch
from torch import nn
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
    def forward(self, x):
        scores = self.query(x) @ self.key(x).transpose(-1, -2)
        return self.out((scores - scores.amax(-1, keepdim=True)).softmax(-1) @ x)
torch.manual_seed(0)
model = nn.Sequential(nn.Identity(), Attention()).half()
model(torch.full((4, 4), 1000.0).half())
"""


@pytest.mark.release
def test_a_replay_names_the_parts_that_must_run_in_float32(tmp_path: Path) -> None:
    """Of the four parts of the module only its own product of queries and keys overflows."""
    capsule = caught(ATTENTION, tmp_path)
    assert isinstance(capsule, Capsule), capsule
    finished = dtypedoctor("replay", tmp_path, "--allow-code", "--out", tmp_path / "again", cwd=tmp_path)
    report = json.loads((tmp_path / "again" / "report.json").read_text())
    inside = report["replay"]["inside"]
    assert (inside["parts"], inside["one_minimal"], inside["candidates"]) == (["1::self"], True, 4)
    (trial,) = (trial for trial in report["trials"] if trial["remedy"] == "keep-float32")
    assert trial["outcome"] == "fixed"
    said = finished.said
    assert "Smallest set of parts that must run in float32: model[1]'s own operators (no smaller set passes;" in said


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"capsule": 99}', '{"capsule": 1, "fqn": []}'])
def test_a_capsule_that_cannot_be_read_is_refused(text: str, tmp_path: Path) -> None:
    """With the file's name and what to do."""
    (tmp_path / CAPSULE).write_text(text)
    (tmp_path / CAPSULE_TENSORS).write_bytes(b"")
    with pytest.raises(UsageError, match="capsule"):
        read_capsule(tmp_path)


TOKEN = "hf_" + "aBcDeFgHiJ" * 3 + "kLmN"


@pytest.mark.release(all_but=1)
def test_a_capsule_holds_no_secret_of_the_script(tmp_path: Path) -> None:
    """The class that fails names a token; the capsule has the class, and nothing else of the call lies about."""
    text = OVERFLOW.replace("    def forward(self, x):", f"    token = {TOKEN!r}\n    def forward(self, x):")
    (tmp_path / "script.py").write_text(text, encoding="utf-8")
    done = dtypedoctor("exec", "--once", "--out", "run", "script.py", cwd=tmp_path, OMP_NUM_THREADS="1")
    capsule = (tmp_path / "run" / "capsule" / CAPSULE).read_text(encoding="utf-8")
    assert "class Scores" in capsule, done.err
    assert TOKEN not in capsule
    assert list((tmp_path / "run" / "before").glob("capsule-*")) == []


LOCKED = """
import threading, torch
from torch import nn
lock = threading.Lock()
class Locked(nn.Module):
    def forward(self, x):
        with lock:
            return x * x
Locked()(torch.full((2, 4), 300.0).half())
"""


def test_a_capsule_whose_files_alone_do_not_fail_is_not_kept(tmp_path: Path) -> None:
    """It needs what no file holds; nothing is called fixed on it either."""
    capsule = caught(LOCKED, tmp_path)
    assert isinstance(capsule, NoCapsule), capsule
    assert "does not fail as it did in the program" in capsule.why


WHAT_NO_TEXT_MAKES = """
from collections import namedtuple
from dataclasses import dataclass
import torch
from torch import nn
@dataclass
class Config:
    gain: float = 1.0
Pair = namedtuple("Pair", "left right")
config = Config(gain=300.0)
mask = torch.ones(4).half()
class Scores(nn.Module):
    seen = []
    scratch = None
    def __init__(self):
        super().__init__()
        self.weight, self.scale, self.sizes = nn.Parameter(torch.ones(4)), lambda x, by=1: by * x * config.gain, {2, 4}
    def forward(self, pair):
        assert 4 in self.sizes and Scores.scratch.dtype is torch.float16
        return self.scale(pair.left * self.weight) * mask + pair.right + Scores.scratch
torch.manual_seed(0)
Scores.scratch = torch.zeros(4).half()
Scores().half()(Pair(torch.full((2, 4), 2000.0).half(), torch.ones(4).half()))
"""

TIED = """
import torch
from torch import nn
class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight
    def forward(self, ids):
        hidden = self.embedding(ids)
        return hidden.cumsum(1) * 3 @ self.head.weight.t()
torch.manual_seed(0)
model = Tied().half()
model.embedding.weight.data.fill_(5.0)
out = model(torch.arange(8)[None])
out.backward(torch.full_like(out, 900.0))
"""

INVALID_WHEN_CUT = """
import torch
from torch import nn
torch.manual_seed(0)
nn.Conv2d(3, 8, 3).to(torch.bfloat16)(torch.ones(2, 3, 9, 9))
"""


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize(
    ("text", "said"),
    [
        (WHAT_NO_TEXT_MAKES, "elements are inf or NaN in torch.float16"),
        (TIED, "FAILS: the gradient of weight.embedding.weight"),
        (INVALID_WHEN_CUT, "(nothing is raised in float32)"),
    ],
    ids=["state", "tied", "convolution"],
)
def test_the_script_of_a_capsule_fails_alone_as_the_run_did(text: str, said: str, tmp_path: Path) -> None:
    """Also where a lambda expression, objects, tensors of classes and tied weights are needed; cut inputs stay valid."""
    capsule = caught(text, tmp_path)
    assert isinstance(capsule, Capsule), capsule
    names = sorted(set(capsule.description["call"]["state"]) - {"Scores.seen"})
    assert names == (["Scores.scratch", "config", "mask"] if "Scores" in text else [])
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "repro.py").write_text(capsule_script(capsule))
    (tmp_path / "alone" / "repro.safetensors").write_bytes((capsule.directory / CAPSULE_TENSORS).read_bytes())
    status, output, errors = run_clean(tmp_path / "alone" / "repro.py", PATIENCE)
    assert status == 1, output + errors
    assert said in output


OUTSIDE = """
import torch
table = torch.full((6, 4), 300.0).half()
same = torch.zeros(4, requires_grad=True)
def distance(one, other):
    return (one - other).square().sum(-1)
print(distance(table, torch.zeros(4).half()))
"""

REJECTED_OUTSIDE = "import torch\ntorch.ones(5, 4) @ torch.ones(4, 3).half()\n"
LACKING_OUTSIDE = "import torch\ntorch.linalg.cholesky(torch.eye(3).half())\n"


@pytest.mark.release
@pytest.mark.parametrize(
    ("text", "op", "said"),
    [
        (OUTSIDE, "aten.pow.Tensor_Scalar", "elements are inf or NaN in torch.float16"),
        (REJECTED_OUTSIDE, "aten.mm.default", "(nothing is raised in float32)"),
        (LACKING_OUTSIDE, "aten.linalg_cholesky_ex.default", "(nothing is raised in float32)"),
    ],
    ids=["overflow", "mismatch", "lacking"],
)
def test_an_operator_outside_of_modules_is_kept(text: str, op: str, said: str, tmp_path: Path) -> None:
    """It replays to the same verdict, and its script fails alone; nothing of it stays beside the trace."""
    capsule = caught(text, tmp_path)
    assert isinstance(capsule, Capsule), capsule
    assert capsule.cls == op
    assert not list(tmp_path.rglob("operator-*"))
    finished = dtypedoctor("replay", capsule.directory, "--out", tmp_path / "again", cwd=tmp_path)
    assert finished.code == 10, finished.err
    verdict = json.loads((tmp_path / "again" / "report.json").read_text())["replay"]["verdict"]
    assert verdict.startswith("Same verdict as in the run: ")
    assert verdict.endswith(f"{op}.")
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "repro.py").write_text(capsule_script(capsule, inline=True))
    status, output, errors = run_clean(tmp_path / "alone" / "repro.py", PATIENCE)
    assert status == 1, errors
    assert said in output
    assert len((tmp_path / "alone" / "repro.py").read_text().splitlines()) < 100


@pytest.mark.release
def test_what_a_script_uses_of_its_own_package_is_carried_along(tmp_path: Path) -> None:
    """Functions and constants of modules beside the script are not there elsewhere."""
    package = tmp_path / "ours"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "parts.py").write_text("GAIN = 300.0\ndef scaled(x, by):\n    return x * by * GAIN\n")
    (package / "model.py").write_text(
        "import logging\nfrom torch import nn\nfrom . import parts\nlogger = logging.getLogger(__name__)\n"
        "class Net(nn.Module):\n    def forward(self, x):\n        logger.debug('called')\n"
        "        return parts.scaled(x, parts.GAIN)\n"
    )
    capsule = caught("import torch\nfrom ours.model import Net\nNet()(torch.ones(3, 4).half())\n", tmp_path)
    assert isinstance(capsule, Capsule), capsule
    assert "import ours" not in capsule.description["source"]
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "repro.py").write_text(capsule_script(capsule, inline=True))
    status, output, errors = run_clean(tmp_path / "alone" / "repro.py", PATIENCE)
    assert status == 1, errors
    assert "elements are inf or NaN in torch.float16" in output


CONFIG = {
    "config": "transformers.models.llama.configuration_llama:LlamaConfig",
    "values": {"dict": {"num_labels": {"value": 60_000_000}}},
    "chosen": {},
}
NO_WEIGHTS: dict[str, Any] = {"parameters": {}, "buffers": {}, "children": {}}
GREEDY: dict[str, dict[str, Any]] = {
    "labels": {"recipe": {"class": "torch.nn.modules.linear:Identity", "attributes": {"config": CONFIG}} | NO_WEIGHTS, "args": [{"value": 1}]},
    "steps": {"recipe": {"operator": "aten.linspace.default", "class": "", "attributes": {}} | NO_WEIGHTS, "args": [{"value": 0}, {"value": 1}, {"value": 4_000_000_000}]},
}  # fmt: skip


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("name", ["steps", "labels"])
def test_a_small_capsule_that_asks_for_much_memory_ends_with_one_sentence(name: str, tmp_path: Path) -> None:
    """Nobody has trusted it: no fix is tried, and the error says what to do."""
    description = {
        "capsule": 1, "fqn": "", "class": "Call", "kind": "nonfinite", "error": "", "relative_error": None, "requires_grad": [], "random": False,
        "finding": {"id": "float16-overflow", "summary": "It overflows."}, "drawn": {}, "cut": [], "data": {"synthetic": True}, "classes": [], "source": "",
        "call": {"kwargs": {}, "state": {}, "training": True, "grad": True, "autocast": [], "leaving": []} | GREEDY[name],
    }  # fmt: skip
    if name == "steps":
        description["operator"] = {"op": "aten.linspace.default", "source": "train.py:1", "backward": False}
    (tmp_path / "capsule").mkdir()
    (tmp_path / "capsule" / CAPSULE).write_text(json.dumps(description))
    (tmp_path / "capsule" / CAPSULE_TENSORS).write_bytes((2).to_bytes(8, "little") + b"{}")
    finished = dtypedoctor("replay", tmp_path, "--device", "cpu", "--out", tmp_path / "again", cwd=tmp_path)
    assert finished.code == 2, finished.err
    assert "error: the call of the capsule needs more memory than a replay may take\n" in finished.err
    assert "--allow-code" in finished.err
    assert not (tmp_path / "again").exists()


def test_what_exec_has_kept_is_replayed_without_a_question(tmp_path: Path) -> None:
    """Its code is the user's own; the report names the line of the program, and the next command needs no option. A copy that was edited is a stranger's."""
    lines = ["import torch", "class Net(torch.nn.Module):", "    def forward(self, x):", "        return x * x",
             "print(Net()(torch.full((4,), 300.0).half()).isfinite().all())"]  # fmt: skip
    (tmp_path / "work.py").write_text("\n".join(lines))
    home = {"XDG_STATE_HOME": str(tmp_path / "state")}
    dtypedoctor("exec", "--once", "--out", "run", "work.py", cwd=tmp_path, **home)
    assert "--allow-code" not in json.loads((tmp_path / "run" / "report.json").read_text())["next_command"]
    replayed = dtypedoctor("replay", "run", "--out", "again", cwd=tmp_path, **home)
    assert replayed.code == 10, replayed.err
    assert "work.py:4 in the run" in replayed.said
    description = tmp_path / "run" / "capsule" / "capsule.json"
    description.write_text(description.read_text().replace("x * x", "x * x  "))
    refused = dtypedoctor("replay", "run", "--out", "edited", cwd=tmp_path, **home)
    assert (refused.code, "--allow-code" in refused.err) == (2, True)
