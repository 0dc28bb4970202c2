"""Values that half precision rounds are followed in float64 to where they are used: what is told of, and what is not."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from watched import watched

from dtypedoctor.diagnosis import diagnose
from dtypedoctor.diagnosis.rule import Finding

HALF = torch.bfloat16


def told_of(directory: Path, work: Callable[[], object]) -> list[Finding]:
    """What is found of rounded values."""
    torch.manual_seed(0)
    findings = diagnose(watched(directory, lambda _: work()))
    return [one for one in findings if one.id in ("rounded-result", "rounded-sum", "rounded-indices", "update-stall")]


def line_of(finding: Finding) -> str:
    """The line of this file that a finding names."""
    number = int((finding.source or ":0").rpartition(":")[2])
    return Path(__file__).read_text(encoding="utf-8").splitlines()[number - 1]


def schedule() -> None:
    """A grid of times in which a step looks for itself."""
    sigmas = torch.linspace(1.0, 0.003, 100, dtype=HALF)
    times = 5 * sigmas / (1 + 4 * sigmas)
    for time in times:
        int(torch.argmin((times - time).abs()))


def codes() -> None:
    """Nearest codes by distances that overflow."""
    rows, table = torch.full((4, 8), 300.0).half(), (torch.arange(24).reshape(3, 8).half() * 100).flip(0)
    ((rows[:, None] - table[None]) ** 2).sum(-1).argmin(1)


class Counts(nn.Module):
    """Counts whole numbers in a buffer, which is cast with the model."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, rows: Tensor) -> Tensor:
        """Adds how often each has come."""
        self.seen += torch.bincount(rows, minlength=4)
        return self.seen.float()


def counts() -> None:
    """One step of 16 calls, of which a routine look sees three."""
    model = Counts().to(HALF)
    for _ in range(16):
        model(torch.randint(0, 4, (301,)))


def statistics() -> None:
    """The running variance of a batch norm is beyond float16."""
    norm = nn.BatchNorm1d(8).half()
    for _ in range(2):
        norm(torch.randn(16, 8).half() * 3000)


def merged() -> None:
    """An adapter that is merged into frozen weights and taken out again."""
    model, adapter = nn.Linear(32, 32).to(HALF), torch.randn(32, 32) * 0.03
    for _ in range(3):
        model.weight.data += adapter
        model.weight.data -= adapter.to(HALF)
        adapter = adapter + torch.randn(32, 32) * 0.01


def averaged() -> None:
    """torch's own average of a bfloat16 model, which updates all weights in one operator."""
    model = nn.Linear(32, 32).to(HALF)
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9999)
    )
    for _ in range(6):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
        average.update_parameters(model)


@pytest.mark.parametrize(
    ("work", "id", "line", "says"),
    [
        (schedule, "rounded-result", "torch.argmin((times - time)", " of 100 results"),
        (codes, "rounded-result", ".sum(-1).argmin(1)", "4 of 4 results"),
        (counts, "rounded-sum", "self.seen += ", "bfloat16"),
        (statistics, "rounded-result", "norm(torch.randn(16, 8)", "leaves inf in memory"),
        (merged, "rounded-result", "model.weight.data -= adapter", "does not get back what was there"),
        (averaged, "update-stall", "average.update_parameters(model)", "rounds"),
    ],
)
def test_rounding_that_matters_is_found_where_the_value_is_used(
    tmp_path: Path, work: Callable[[], object], id: str, line: str, says: str
) -> None:
    """One finding, at the line of the program."""
    (finding,) = told_of(tmp_path, work)
    assert finding.id == id
    assert line in line_of(finding)
    assert says in finding.summary


def test_the_operator_that_rounds_first_is_named_with_its_line(tmp_path: Path) -> None:
    """The grid is at fault and not the line that searches it."""
    (finding,) = told_of(tmp_path, schedule)
    assert "linspace at " in finding.summary
    number = int(finding.summary.partition("linspace at ")[2].partition(" ")[0].rpartition(":")[2])
    assert "torch.linspace(1.0" in Path(__file__).read_text(encoding="utf-8").splitlines()[number - 1]
    assert finding.proven_by is not None


def stochastic() -> None:
    """Weights that are rounded at random, and so go where float32 goes on average."""
    weights = torch.randn(64, 64).to(HALF)
    for _ in range(20):
        bits = (weights.float() + 1e-3 * torch.randn(64, 64)).view(torch.int32)
        weights.copy_(((bits + torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32)) & -65536).view(torch.float32))


def compensated() -> None:
    """A sum by Kahan."""
    total, lost = torch.ones(100).to(HALF), torch.zeros(100).to(HALF)
    for _ in range(30):
        term = torch.full((100,), 1e-3).to(HALF) - lost
        new = total + term
        lost = (new - total) - term
        total = new


def quantized() -> None:
    """Codes of eight bits, dithered and not."""
    values = torch.randn(4, 256).to(HALF)
    torch.floor(values * 16 + torch.rand_like(values)).clamp(-128, 127).to(torch.int8)
    (values / (values.abs().amax(-1, keepdim=True) / 127)).round().to(torch.int8)


def sampled() -> None:
    """Tokens by chance, by rank and by size; dropout; masks and counts that half precision has."""
    scores = (torch.randn(200, 1000).to(HALF) * 1.01 + 0.003).softmax(-1)
    torch.multinomial(scores, 1)
    scores.argmax(-1), scores.sort(-1), scores.topk(5, -1)
    kept = (nn.functional.dropout(scores, 0.3) > 0).to(HALF)
    kept[:, :200].cumsum(-1).long()


def nearest() -> None:
    """Codes and bins, of which few are near a border; a short grid."""
    rows, table = torch.randn(512, 8).to(HALF), torch.randn(32, 8).to(HALF)
    ((rows[:, None] - table[None]) ** 2).sum(-1).argmin(-1)
    torch.bucketize(torch.rand(100).to(HALF), torch.linspace(0, 1, 11).to(HALF))
    (torch.rand(100).to(HALF) * 56).long()
    times = torch.linspace(0, 1, 20, dtype=HALF)
    [int((times - time).abs().argmin()) for time in times]


def kept() -> None:
    """A cache, an average that moves, a batch norm, a small count."""
    cache, average, right = torch.zeros(4, 32).to(HALF), torch.zeros(16).to(HALF), torch.zeros((), dtype=HALF)
    norm = nn.BatchNorm1d(8).to(HALF)
    for step in range(20):
        cache[:, step] = torch.randn(4).to(HALF)
        average.mul_(0.9).add_(0.1 * torch.rand(16).to(HALF))
        norm(torch.randn(32, 8).to(HALF))
        right += (torch.rand(10) > 0.5).sum()


@pytest.mark.parametrize("work", [stochastic, compensated, quantized, sampled, nearest, kept])
def test_programs_that_are_right_in_half_precision_are_told_nothing_of(
    tmp_path: Path, work: Callable[[], object]
) -> None:
    """Rounding at random, compensated sums, dithering, sampling, near ties, caches."""
    assert told_of(tmp_path, work) == []
