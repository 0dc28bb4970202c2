"""Two models of the same weights in different dtypes, called on the same tokens: found in either order; averages, quantized copies and equals are not."""

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from watched import watched

from dtypedoctor.diagnosis import diagnose
from dtypedoctor.diagnosis.rule import Finding, Severity
from dtypedoctor.trace.records.silent import Twins

HALF = torch.bfloat16
TOKENS = torch.randint(1, 32, (6, 10), generator=torch.Generator().manual_seed(1))


class Speaker(nn.Module):
    """Scores the next token; with ``labels`` it returns log-probabilities of the tokens alone, as trainers do that never hold all scores."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(32, 48)
        self.body = nn.Sequential(nn.Linear(48, 48), nn.Tanh(), nn.Dropout(dropout))
        self.head = nn.Linear(48, 32)
        nn.init.normal_(self.head.weight, std=0.6)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> Tensor | dict[str, Tensor]:
        scores = self.head(self.body(self.embed(input_ids)))
        if labels is None:
            return scores
        said = scores[:, :-1].float().log_softmax(-1).gather(-1, input_ids[:, 1:, None])[..., 0]
        return {"log_probs": said * (labels[:, 1:] >= 0)}


def answer(model: nn.Module, tokens: Tensor, *, alone: bool = False, trained: bool) -> Tensor:
    """Log-probabilities of tokens, computed from all scores or by the model itself."""
    mask = (tokens != 0).long()
    with torch.set_grad_enabled(trained):
        if alone:
            return model(input_ids=tokens, attention_mask=mask, labels=tokens.masked_fill(mask == 0, -100))["log_probs"]
        return (
            model(input_ids=tokens, attention_mask=mask)
            .float()
            .log_softmax(-1)[:, :-1]
            .gather(-1, tokens[:, 1:, None])[..., 0]
        )


def findings(tmp_path: Path, program: Callable[[], None]) -> tuple[Finding, ...]:
    found = diagnose(watched(tmp_path, lambda _: program()))
    return tuple(finding for finding in found if finding.id == "logprob-gap")


def train(
    policy: nn.Module,
    reference: nn.Module,
    *,
    policy_first: bool = False,
    alone: bool = False,
    order: Tensor | None = None,
    after: Callable[[], None] = lambda: None,
) -> None:
    optimizer = torch.optim.SGD(policy.parameters(), lr=1e-2)
    rows = TOKENS if order is None else TOKENS[order]
    for _ in range(2):
        ours = answer(policy, rows, alone=alone, trained=True) if policy_first else None
        theirs = answer(reference, TOKENS, alone=alone, trained=False)
        if ours is None:
            ours = answer(policy, rows, alone=alone, trained=True)
        (theirs if order is None else theirs[order]).float().sub(ours.float()).exp().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        after()


@pytest.mark.release(all_but=2)
@pytest.mark.parametrize("policy_first", [False, True])
@pytest.mark.parametrize("alone", [False, True], ids=["all scores", "tokens alone"])
@pytest.mark.parametrize("narrow", ["policy", "reference"])
def test_a_reference_in_another_dtype_is_proven_in_either_order(
    tmp_path: Path, *, policy_first: bool, alone: bool, narrow: str
) -> None:
    """The wider one, called again in the dtype of the other, outputs the same."""
    policy = Speaker()
    reference = copy.deepcopy(policy)
    (policy if narrow == "policy" else reference).to(HALF)
    (found,) = findings(tmp_path, lambda: train(policy, reference, policy_first=policy_first, alone=alone))
    assert (found.confidence, found.severity, found.step) == ("proven", Severity.WARNING, 1)
    assert found.dtype == "bfloat16"


def test_rows_are_recognised_in_another_order_and_with_other_padding(tmp_path: Path) -> None:
    """As GRPO shuffles completions between the reference's call and the policy's, and DPO's precomputed ones come from other batches."""
    policy = Speaker()
    reference = copy.deepcopy(policy).to(HALF)

    def program() -> None:
        for batch in TOKENS.split(2):
            answer(reference, batch, alone=True, trained=False)
        padded = torch.cat([torch.zeros(6, 3, dtype=torch.int64), TOKENS], 1)[torch.tensor([5, 2, 0])]
        answer(policy, padded, alone=True, trained=True).mean().backward()

    (found,) = findings(tmp_path, program)
    assert found.confidence == "proven"


def test_a_reference_outside_of_the_policys_autocast_region_is_found(tmp_path: Path) -> None:
    """Both are float32; only the policy is called under autocast."""
    policy = Speaker()
    reference = copy.deepcopy(policy)

    def program() -> None:
        with torch.autocast("cpu", dtype=HALF):
            ours = answer(policy, TOKENS, trained=True)
        (ours - answer(reference, TOKENS, trained=False)).mean().backward()

    (found,) = findings(tmp_path, program)
    assert found.confidence == "proven"
    assert "float32 in bfloat16 autocast" in found.summary


def test_a_region_that_the_policys_own_forward_opens(tmp_path: Path) -> None:
    """As accelerate has it do, where the reference was not prepared; buffers of a cast copy are cast with it."""
    policy = Speaker()
    reference = copy.deepcopy(policy)
    policy.forward = torch.autocast("cpu", dtype=HALF)(policy.forward)
    (found,) = findings(tmp_path, lambda: train(policy, reference))
    assert (found.confidence, found.severity) == ("proven", Severity.WARNING)
    assert "(float32 in bfloat16 autocast)" in found.summary


def test_what_a_policy_said_before_its_last_step_is_not_compared(tmp_path: Path) -> None:
    """A new copy of it in bfloat16 is called on tokens that the policy saw with other weights."""
    policy = Speaker()
    optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)

    def program() -> None:
        for _ in range(3):
            actor = copy.deepcopy(policy).to(HALF)
            answer(actor, TOKENS, trained=False)
            answer(policy, TOKENS, trained=True).mean().backward()
            optimizer.step()

    trace = watched(tmp_path, lambda _: program())
    assert {seen.what.largest_gap < 0.1 for seen in trace.observed(Twins)} == {True}


def averaging(policy: nn.Module, average: nn.Module) -> Callable[[], None]:
    """What an exponential moving average does after each step."""

    @torch.no_grad()
    def update() -> None:
        for ours, theirs in zip(policy.parameters(), average.parameters(), strict=True):
            theirs.lerp_(ours.to(theirs.dtype), 0.01)

    return update


def quiet_pairs() -> dict[str, Callable[[], None]]:
    """Programs in which a second model is as it should be."""
    policy = Speaker().to(HALF)
    average = copy.deepcopy(policy).float()
    torch.manual_seed(5)
    teacher = Speaker().to(HALF)
    nn.init.normal_(teacher.body[0].weight, std=0.3)
    noisy = Speaker(0.3)
    return {
        "the same dtype": lambda: train(Speaker(), Speaker()),
        "the same dtype, dropped at random": lambda: train(noisy, copy.deepcopy(noisy)),
        "an average in float32": lambda: train(policy, average, after=averaging(policy, average)),
        "a teacher of other weights": lambda: train(Speaker(), teacher),
        "other tokens": lambda: [
            answer(copy.deepcopy(Speaker()).to(HALF), TOKENS % 8, trained=False),
            answer(Speaker(), TOKENS % 8 + 8, trained=True).mean().backward(),
        ],
    }


@pytest.mark.release(all_but=2)
@pytest.mark.parametrize("name", quiet_pairs())
def test_pairs_that_are_as_they_should_be(tmp_path: Path, name: str) -> None:
    """None of them is a finding."""
    assert findings(tmp_path, quiet_pairs()[name]) == ()


def test_calling_a_model_again_changes_nothing_of_the_program(tmp_path: Path) -> None:
    """Counters, buffers, random numbers and versions of parameters are what they are without."""

    class Counting(Speaker):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            self.calls += 1
            self.seen += 1
            return super().forward(input_ids) + 0 * torch.rand(())

    def program() -> list[object]:
        policy = Counting()
        reference = copy.deepcopy(policy).to(HALF)
        train(policy, reference)
        return [policy.calls, float(policy.seen), reference.calls, float(reference.seen), float(torch.rand(()))]

    torch.manual_seed(3)
    expected = program()
    torch.manual_seed(3)
    got: list[object] = []
    assert len(findings(tmp_path, lambda: got.extend(program()))) == 1
    assert got == expected


class Denoiser(nn.Module):
    """Gets noise and a time step; what it outputs depends on both."""

    def __init__(self) -> None:
        super().__init__()
        self.times, self.net = nn.Embedding(4, 8), nn.Linear(8, 8)

    def forward(self, noise: Tensor, times: Tensor) -> Tensor:
        return self.net(noise.to(self.net.weight.dtype) + self.times(times)[:, None])


def test_calls_with_other_content_beside_equal_whole_numbers_are_not_compared(tmp_path: Path) -> None:
    """The same time steps with other noise; images beside a prompt are the same case."""
    student = Denoiser()
    teacher = copy.deepcopy(student).to(HALF)

    def program() -> None:
        times = torch.arange(4)
        with torch.no_grad():
            teacher(torch.randn(4, 5, 8), times)
        student(torch.randn(4, 5, 8, requires_grad=True), times).sum().backward()

    assert diagnose(watched(tmp_path, lambda _: program())) == ()


def test_nothing_is_kept_of_models_that_are_gone_or_have_been_compared(tmp_path: Path) -> None:
    """Of one of other shapes it is let go of when the next model is called."""
    policy = Speaker()
    reference = copy.deepcopy(policy).to(HALF)

    def is_kept_after(program: Callable[[Tensor], object]) -> bool:
        tokens = TOKENS.clone()
        kept = ref(tokens)
        program(tokens)
        del tokens
        nn.Embedding(32, 8)(TOKENS)
        gc.collect()
        return kept() is not None

    def pair(tokens: Tensor) -> None:
        for model in (reference, policy, reference, policy):
            model(tokens)

    seen: list[bool] = []
    watched(tmp_path, lambda _: seen.extend([is_kept_after(lambda tokens: Speaker()(tokens)), is_kept_after(pair)]))
    assert seen == [False, False]
