"""Log-probabilities that are rounded to half precision before a loss compares them, and those that are not: small scripts, each as somebody would write it."""

import runpy
from pathlib import Path
from types import FrameType

import pytest
from watched import watched

from dtypedoctor._torch_private import MODES_CAN_IGNORE_COMPILED
from dtypedoctor.diagnosis import diagnose
from dtypedoctor.diagnosis.rule import Finding, Severity
from dtypedoctor.instrument.frames import Line
from dtypedoctor.instrument.frames import line_of as line_of_frame
from dtypedoctor.instrument.silent import logprobs
from dtypedoctor.trace.events import NOT_SEEN, NotWatched
from dtypedoctor.trace.model import Trace

BEGINNING = """import torch
from torch import nn
import torch.nn.functional as F
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64))
with torch.no_grad():
    model[3].weight.mul_(4)
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
prompt, answer = torch.randint(0, 64, (16, 32)), torch.randint(0, 64, (16, 32))
adv = torch.randn(16, 32)
def update(loss):
    opt.zero_grad(); loss.backward(); opt.step()
def logprobs(m=None):
    return (m or model)(prompt).float().log_softmax(-1).gather(-1, answer[..., None])[..., 0]
def clip(ratio):
    return -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
"""
"""What each script begins with: a policy over 64 tokens, and PPO's clipped loss."""

ROUNDED = {
    "stored cast": """
for turn in range(2):
    with torch.no_grad():
        old = logprobs().to(torch.bfloat16)
    for epoch in range(2):
        update(clip(torch.exp(logprobs() - old)))
""",
    "stored half upcast": """
for turn in range(2):
    with torch.no_grad():
        old = logprobs().half()
    for epoch in range(2):
        update(clip(torch.exp(logprobs() - old.float())))
""",
    "quotient": """
with torch.no_grad():
    old = logprobs().bfloat16()
for epoch in range(3):
    update(clip(torch.exp(logprobs()) / torch.exp(old)))
""",
    "sums of a preference": """
def chosen_over_rejected(m):
    logits = m(prompt).bfloat16()
    sums = logits.log_softmax(-1).gather(-1, answer[..., None])[..., 0].sum(-1)
    return sums[:8] - sums[8:]
reference = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64))
reference.load_state_dict(model.state_dict())
for epoch in range(4):
    with torch.no_grad():
        ref = chosen_over_rejected(reference)
    update(-F.logsigmoid(0.1 * (chosen_over_rejected(model) - ref).float()).mean())
""",
    "both in bfloat16": """
model.bfloat16()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
def lp():
    return F.log_softmax(model(prompt), dim=-1).gather(-1, answer[..., None])[..., 0]
with torch.no_grad():
    old = lp()
for epoch in range(3):
    update(clip(torch.exp(lp() - old).float()))
""",
    "both in bfloat16 late float": """
model.bfloat16()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
def lp():
    return model(prompt).log_softmax(-1).float().gather(-1, answer[..., None])[..., 0]
with torch.no_grad():
    old = lp()
for epoch in range(3):
    update(clip(torch.exp(lp() - old)))
""",
    "preallocated buffer": """
buffer = torch.empty(2, 16, 32, dtype=torch.bfloat16)
with torch.no_grad():
    for turn in range(2):
        buffer[turn] = logprobs()
for epoch in range(2):
    for turn in torch.randperm(2):
        update(clip((logprobs() - buffer[turn].float()).exp()))
""",
    "minibatches": """
with torch.no_grad():
    old = logprobs().bfloat16()
for epoch in range(2):
    for rows in torch.randperm(16).split(8):
        now = model(prompt[rows]).float().log_softmax(-1).gather(-1, answer[rows][..., None])[..., 0]
        ratio = (now - old[rows]).clamp(-20, 20).exp()
        update(-torch.min(ratio * adv[rows], ratio.clamp(0.8, 1.2) * adv[rows]).mean())
""",
    "through numpy list": """
with torch.no_grad():
    rows = logprobs().bfloat16().tolist()
old = torch.tensor(rows)
for epoch in range(2):
    update(clip((logprobs() - old).exp()))
""",
    "dpo reference sum": """
import copy
reference = copy.deepcopy(model).eval()
with torch.no_grad():
    before = logprobs(reference).sum(-1).bfloat16()
for epoch in range(3):
    now = logprobs().sum(-1)
    logits = 0.1 * ((now - before)[:8] - (now - before)[8:])
    update(-F.logsigmoid(logits).mean())
""",
    "cross entropy": """
def nll():
    return F.cross_entropy(model(prompt).flatten(0, 1), answer.flatten(), reduction="none")
with torch.no_grad():
    old = nll().to(torch.bfloat16)
for epoch in range(2):
    ratio = torch.exp(old.float() - nll())
    update(-(ratio * adv.flatten()).mean())
""",
    "loss module": """
class PolicyLoss(nn.Module):
    def forward(self, new, old):
        return clip((new - old).exp())
criterion = PolicyLoss()
with torch.no_grad():
    old = logprobs().bfloat16()
for epoch in range(2):
    update(criterion(logprobs(), old))
""",
    "policy returns logprobs": """
class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = model
    def forward(self, ids, answers):
        return self.net(ids).log_softmax(-1).gather(-1, answers[..., None])[..., 0]
policy = Policy().bfloat16()
opt = torch.optim.SGD(policy.parameters(), lr=0.1)
with torch.no_grad():
    old = policy(prompt, answer)
for epoch in range(3):
    update(clip((policy(prompt, answer) - old).exp().float()))
""",
    "divergence of near distributions": """
import copy
model.bfloat16()
teacher = copy.deepcopy(model).eval()
opt = torch.optim.SGD(model.parameters(), lr=1e-3)
for turn in range(3):
    with torch.no_grad():
        target = teacher(prompt).log_softmax(-1)
    update(F.kl_div(F.log_softmax(model(prompt), -1), target, log_target=True, reduction="batchmean"))
""",
    "bfloat16 autocast on a cpu": """
for turn in range(2):
    def lp():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(prompt).log_softmax(-1).gather(-1, answer[..., None])[..., 0]
    with torch.no_grad():
        old = lp()
    for epoch in range(2):
        update(clip(torch.exp(lp() - old)))
""",
}
"""Scripts that train on rounded log-probabilities."""

NAMED = {
    "model that names them": """
class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = model
    def forward(self, ids, answers):
        return {"logprobs": self.net(ids).float().log_softmax(-1).gather(-1, answers[..., None])[..., 0]}
policy = torch.compile(Policy(), backend="aot_eager")
old = (logprobs().detach() - 0.01).bfloat16().tolist()
for epoch in range(3):
    update(clip((policy(prompt, answer)["logprobs"] - torch.tensor(old)).exp()))
""",
}
ROUNDED |= NAMED

HEALTHY = {
    "sums of a preference": """
def chosen_over_rejected(m):
    sums = m(prompt).bfloat16().float().log_softmax(-1).gather(-1, answer[..., None])[..., 0].sum(-1)
    return sums[:8] - sums[8:]
reference = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64))
reference.load_state_dict(model.state_dict())
for epoch in range(4):
    with torch.no_grad():
        ref = chosen_over_rejected(reference)
    update(-F.logsigmoid(0.1 * (chosen_over_rejected(model) - ref)).mean())
""",
    "float32": """
for turn in range(2):
    with torch.no_grad():
        old = logprobs()
    for epoch in range(2):
        update(clip(torch.exp(logprobs() - old)))
""",
    "bf16 model float32 logprobs": """
model.bfloat16()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for turn in range(2):
    with torch.no_grad():
        old = logprobs()
    for epoch in range(2):
        update(clip(torch.exp(logprobs() - old)))
""",
    "metric only": """
for turn in range(2):
    with torch.no_grad():
        old = logprobs()
    stored = old.bfloat16()
    for epoch in range(2):
        now = logprobs()
        with torch.no_grad():
            kl = (stored - now).mean()
        update(clip(torch.exp(now - old)))
        print(float(kl))
""",
    "entropy bonus bf16": """
model.bfloat16()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for turn in range(4):
    lp = model(prompt).log_softmax(-1)
    entropy = -(lp.exp() * lp).sum(-1)
    chosen = lp.gather(-1, answer[..., None])[..., 0]
    update(-(chosen.float() * adv).mean() - 0.01 * entropy.float().mean())
""",
    "on policy detached": """
model.bfloat16()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for turn in range(4):
    now = model(prompt).log_softmax(-1).gather(-1, answer[..., None])[..., 0]
    update(clip((now - now.detach()).exp().float()))
""",
    "classification bf16": """
model.bfloat16()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for turn in range(4):
    update(F.cross_entropy(model(prompt).flatten(0, 1), answer.flatten()))
""",
    "divergence in float32": """
import copy
model.bfloat16()
teacher = copy.deepcopy(model).eval()
opt = torch.optim.SGD(model.parameters(), lr=1e-3)
for turn in range(3):
    with torch.no_grad():
        target = teacher(prompt).log_softmax(-1, dtype=torch.float32)
    update(F.kl_div(F.log_softmax(model(prompt).float(), -1), target, log_target=True, reduction="batchmean"))
""",
    "divergence of distant distributions in bf16": """
import copy
model.bfloat16()
teacher = copy.deepcopy(model).eval()
for p in teacher.parameters(): p.data.add_(torch.randn_like(p) * 0.1)
opt = torch.optim.SGD(model.parameters(), lr=1e-3)
for turn in range(3):
    with torch.no_grad():
        target = teacher(prompt).log_softmax(-1)
    update(F.kl_div(F.log_softmax(model(prompt), -1), target, log_target=True, reduction="batchmean"))
""",
    "dpo float32": """
import copy
reference = copy.deepcopy(model).eval()
for epoch in range(3):
    with torch.no_grad():
        before = logprobs(reference).sum(-1)
    now = logprobs().sum(-1)
    logits = 0.1 * ((now - before)[:8] - (now - before)[8:])
    update(-F.logsigmoid(logits).mean())
""",
    "value head in bf16 autocast": """
class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = model, nn.Linear(64, 1)
    def forward(self, input_ids):
        return self.head(self.body(input_ids)).squeeze(-1)
critic = Critic()
opt = torch.optim.AdamW(critic.parameters(), lr=1e-3)
target, mask = torch.randn(16, 32) * 0.3, torch.ones(16, 32)
for turn in range(4):
    with torch.autocast("cpu", torch.bfloat16):
        values = critic(prompt)
    update((((values.float() - target) ** 2) * mask).sum() / mask.sum())
""",
    "critic below zero beside a policy": """
critic = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 1), nn.Flatten(-2))
with torch.no_grad():
    critic[1].bias.fill_(-8)
opt = torch.optim.AdamW([*model.parameters(), *critic.parameters()], lr=1e-3)
with torch.no_grad():
    old, before = logprobs(), critic(input=prompt).bfloat16()
for turn in range(3):
    values = critic(input=prompt)
    moved = (values - before.float()).clamp(-0.2, 0.2)
    update(clip((logprobs() - old).exp()) + (values + 7.9).square().mean() + moved.square().mean())
""",
    "linex loss on ratings": """
net = nn.Linear(8, 1)
opt = torch.optim.SGD(net.parameters(), lr=1e-3)
rating = torch.randint(1, 11, (64,)) / 2
x = torch.cat([torch.randn(64, 7) * 0.01, rating[:, None]], 1)
with torch.no_grad():
    net.weight.zero_(); net.weight[0, 7] = 0.97; net.bias.zero_()
for sign in (1, -1, 1, -1):
    d = sign * net(x).squeeze(-1) - sign * rating
    update((d.exp() - d - 1).mean())
""",
    "flooding in bf16": """
model.bfloat16()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
weight, b = torch.ones(16 * 32, dtype=torch.bfloat16), torch.tensor(3.0, dtype=torch.bfloat16)
for turn in range(8):
    nll = F.cross_entropy(model(prompt).flatten(0, 1), answer.flatten(), reduction="none")
    loss = (nll * weight).mean()
    update((loss - b).abs() + b)
""",
    "loss kept in bf16": """
kept = []
for turn in range(3):
    loss = -(logprobs() * adv).mean()
    kept.append(loss.detach().to(torch.bfloat16))
    kept.append(logprobs().sum().detach().half())
    update(loss)
""",
}
"""Scripts that do not."""


def run(script: str, directory: Path) -> Trace:
    file = directory / "train.py"
    file.write_text(BEGINNING + script)
    (directory / "run").mkdir()
    return watched(directory / "run", lambda _: runpy.run_path(str(file)))


def gaps(trace: Trace) -> list[Finding]:
    """The findings about log-probabilities."""
    assert trace.end is not None
    assert trace.end.outcome == "completed"
    assert not [note for note in trace.all(NotWatched) if "failed" in note.why]
    return [finding for finding in diagnose(trace) if finding.id == "logprob-gap"]


def line_of(script: str, text: str) -> str:
    """Where a text stands in a script for the first time."""
    lines = (BEGINNING + script).splitlines()
    return f"train.py:{next(number for number, line in enumerate(lines, 1) if text in line)}"


@pytest.mark.release(all_but=2)
@pytest.mark.parametrize("name", ROUNDED)
def test_rounded_log_probabilities_are_found_with_a_line_of_the_script(name: str, tmp_path: Path) -> None:
    """One finding, a warning, at a line of the script."""
    if name == "model that names them" and not MODES_CAN_IGNORE_COMPILED:
        pytest.skip("beside compiled code no operator outside of modules is seen with this torch (2.9.1)")
    (found,) = gaps(run(ROUNDED[name], tmp_path))
    assert found.severity is Severity.WARNING
    assert found.source is not None
    assert found.source.startswith("train.py:")


@pytest.mark.release(all_but=2)
@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_said_of_log_probabilities_that_keep_their_digits(name: str, tmp_path: Path) -> None:
    """Neither a finding, nor a word that something was not checked."""
    trace = run(HEALTHY[name], tmp_path)
    assert gaps(trace) == []
    assert not [note for note in trace.all(NotWatched) if note.why.startswith(NOT_SEEN)]


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize(
    ("name", "cast"),
    [
        ("stored cast", "logprobs().to(torch.bfloat16)"),
        ("stored half upcast", "logprobs().half()"),
        ("minibatches", "logprobs().bfloat16()"),
        ("cross entropy", "nll().to(torch.bfloat16)"),
        ("loss module", "logprobs().bfloat16()"),
        ("dpo reference sum", ".sum(-1).bfloat16()"),
    ],
)
def test_a_cast_that_was_seen_is_named_and_proven(name: str, cast: str, tmp_path: Path) -> None:
    """The differences are computed again with the values before the cast, which alone has changed."""
    (found,) = gaps(run(ROUNDED[name], tmp_path))
    assert found.source == line_of(ROUNDED[name], cast)
    assert found.proven_by is not None
    assert "before the rounding" in found.proven_by


UNSEEN = {
    "FusedLinearGRPOFunction": """
class FusedLinearGRPOFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, old):
        p = torch.log_softmax(logits.float(), -1)
        ratio = (p.gather(-1, answer[..., None])[..., 0] - old).exp()
        ctx.save_for_backward(p.exp())
        return clip(ratio)
    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0], None
with torch.no_grad():
    old = logprobs().bfloat16()
for epoch in range(2):
    update(FusedLinearGRPOFunction.apply(model(prompt), old))
""",
}
"""Losses whose operators pass no instrument, or have no node of their own in the graph."""


@pytest.mark.parametrize("name", UNSEEN)
def test_a_loss_that_cannot_be_looked_into_is_named(name: str, tmp_path: Path) -> None:
    """It is not healthy in silence: what was not checked has a name."""
    trace = run(UNSEEN[name], tmp_path)
    assert gaps(trace) == []
    assert any(note.why.startswith(NOT_SEEN) and name in note.what for note in trace.all(NotWatched))


@pytest.mark.release
def test_a_compiled_loss_is_looked_into(tmp_path: Path) -> None:
    """Its call is made once more in eager mode, in which the comparison is seen."""
    script = """
@torch.compile(backend="aot_eager")
def loss_of(logits, old):
    new = logits.float().log_softmax(-1).gather(-1, answer[..., None])[..., 0]
    return clip((new - old).exp())
with torch.no_grad():
    old = logprobs().bfloat16()
for epoch in range(2):
    update(loss_of(model(prompt), old))
"""
    (found,) = gaps(run(script, tmp_path))
    assert "compares them" in found.summary


def test_rounded_log_probabilities_that_meet_nothing_are_named(tmp_path: Path) -> None:
    """They may be compared in a process or a kernel that nobody sees."""
    script = "\nwith torch.no_grad():\n    old = logprobs().bfloat16()\nupdate(model(prompt).square().mean())\n"
    trace = run(script, tmp_path)
    assert gaps(trace) == []
    told = [note.what for note in trace.all(NotWatched) if note.why.startswith(NOT_SEEN)]
    assert told == [f"log-probabilities rounded to bfloat16 at {line_of(script, 'bfloat16()')}"]


ALIVE = """
import gc, weakref
class Mark: pass
marks = []
class Marked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark = Mark(); marks.append(weakref.ref(ctx.mark))
        return x * 1
    @staticmethod
    def backward(ctx, g):
        return g
old = logprobs().detach().bfloat16()
def evaluate():
    now = Marked.apply(logprobs())
    values = Marked.apply(model(prompt).mean(-1))
    return (now - old).exp().mean().item() + (values - torch.randn(16, 32)).abs().mean().item()
evaluate(); evaluate(); gc.collect()
assert not any(mark() is not None for mark in marks)
"""


def test_no_graph_outlives_an_evaluation_that_forgot_no_grad(tmp_path: Path) -> None:
    """Differences that nothing differentiates are let go of with the program's own references."""
    assert gaps(run(ALIVE, tmp_path)) == []


def test_operators_on_what_is_unknown_cost_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither before the first log-probabilities nor after them is the stack read for anything else."""
    lines: list[str] = []

    def read(frame: FrameType | None) -> Line | None:
        line = line_of_frame(frame)
        lines.append("" if line is None else line.source)
        return line

    monkeypatch.setattr(logprobs, "line_of", read)
    script = """
a, b = torch.randn(8), torch.randn(8)
def work():
    for _ in range(20):
        torch.cat([a * b, a - b]).sum(); a.half().float().exp()
work()
kept = torch.log_softmax(a, -1)
work()
"""
    assert gaps(run(script, tmp_path)) == []
    assert lines == [line_of(script, "torch.log_softmax")]


def test_a_full_memory_is_searched_for_what_is_gone_only_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While all are alive most are only counted; when they are gone others are known again."""
    searches = []
    forget = logprobs.LogprobCheck._forget_gone
    monkeypatch.setattr(logprobs.LogprobCheck, "_forget_gone", lambda self: (searches.append(1), forget(self)))
    monkeypatch.setattr(logprobs, "MOST_KNOWN", 16)
    script = """
kept = [torch.randn(4, 4).log_softmax(-1) for _ in range(640)]
kept.clear()
for _ in range(64):
    torch.randn(4, 4).log_softmax(-1)
"""
    trace = run(script + ROUNDED["stored cast"], tmp_path)
    assert len(searches) <= 20
    assert len(gaps(trace)) == 1
