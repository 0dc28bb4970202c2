"""Tokens that a model gets one at a time and all at once: rounding is no finding, a path of its own with other weights is."""

import linecache
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from watched import watched

from dtypedoctor.diagnosis import diagnose, spec_of
from dtypedoctor.diagnosis.rule import Finding
from dtypedoctor.trace.model import Trace

HALF = torch.bfloat16
PROMPTS = torch.tensor([[0, 0, 5, 9, 3], [7, 2, 6, 4, 8], [7, 2, 6, 4, 8]])


class KeepsItsCopy(nn.Module):
    """An adapter on a linear layer, cast once for single tokens, as a fast path may do; ``fresh`` casts it each time."""

    def __init__(self, base: nn.Linear, *, fresh: bool) -> None:
        super().__init__()
        self.base, self.fresh = base.requires_grad_(False), fresh
        self.low = nn.Parameter(torch.randn(4, base.in_features) * 0.1)
        self.high = nn.Parameter(torch.zeros(base.out_features, 4))

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] == 1:
            if self.fresh or not hasattr(self, "copies"):
                self.copies = [self.low.detach().to(x.dtype, copy=True), self.high.detach().to(x.dtype, copy=True)]
            low, high = self.copies
        else:
            low, high = self.low.to(x.dtype), self.high.to(x.dtype)
        return self.base(x) + x @ low.T @ high.T


def llama(dtype: torch.dtype = HALF, dropout: float = 0.0, *, fresh: bool | None = None) -> LlamaForCausalLM:
    """A tiny model, with adapters on its MLP unless ``fresh`` is None."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, initializer_range=0.2,
        pad_token_id=0, eos_token_id=63, attention_dropout=dropout,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(dtype)
    if fresh is not None:
        model.requires_grad_(requires_grad=False)
        for layer in model.model.layers:
            layer.mlp.up_proj = KeepsItsCopy(layer.mlp.up_proj, fresh=fresh)
    return model


def grpo(
    model: LlamaForCausalLM, *, rate: float = 0.02, steps: int = 3, **sampling: object
) -> Callable[[object], None]:
    """Samples, trains on what was sampled, and so on."""

    def program(_: object) -> None:
        torch.manual_seed(1)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate)
        for _step in range(steps):
            mask = (PROMPTS != 0).long()
            texts = model.generate(
                PROMPTS, attention_mask=mask, max_new_tokens=8, min_new_tokens=8, do_sample=True, **sampling
            )
            mask = torch.cat([mask, torch.ones(3, 8, dtype=torch.int64)], 1)
            model.train()
            logits = model(input_ids=texts, attention_mask=mask).logits[:, 4:-1].float() / sampling.get(
                "temperature", 1.0
            )
            said = logits.log_softmax(-1).gather(-1, texts[:, 5:, None])[..., 0]
            (said * torch.tensor([[1.0], [-1.0], [0.5]])).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    return program


def gaps(trace: Trace) -> list[Finding]:
    """The findings about log-probabilities."""
    return [finding for finding in diagnose(trace) if finding.id == "logprob-gap"]


def test_a_decode_path_that_keeps_a_copy_of_the_adapters_is_found_once_they_are_trained(tmp_path: Path) -> None:
    """In step 1 the copy is right; float32 says how much of the difference rounding makes, and decoding again with the copies made anew what they make."""
    model = llama(fresh=False)
    (found,) = gaps(watched(tmp_path, grpo(model)))
    assert (found.phase, found.step > 1, found.confidence) == ("generate", True, "proven")
    assert any("float32" in line for line in found.evidence)
    assert found.fqn == "model.layers.0.mlp.up_proj"
    assert re.fullmatch(r"(\w+/)*test_decoding.py:\d+", found.source)
    assert "self.copies = " in linecache.getline(__file__, int(found.source.rpartition(":")[2]))
    assert found.source in spec_of("logprob-gap").instead(found)


@pytest.mark.release
def test_no_tokens_are_decoded_again_after_the_last_step_that_is_looked_at(tmp_path: Path) -> None:
    """A run that tries a fix for another failure does not pay for calls that would show what that fix is not about."""
    calls: list[int] = []
    for place, look_steps in ((tmp_path / "all", None), (tmp_path / "first", 1)):
        place.mkdir()
        model, counted = llama(fresh=True), []
        model.register_forward_hook(lambda *_, counted=counted: counted.append(1))
        watched(place, grpo(model, steps=2), look_steps=look_steps)
        calls.append(len(counted))
    assert calls[1] < calls[0]
    assert gaps(watched(tmp_path, grpo(llama(fresh=False), steps=2), look_steps=1)) == []


@pytest.mark.release
def test_stale_copies_that_decoding_does_not_take_are_not_the_reason(tmp_path: Path) -> None:
    """The finding names no module and no line, and is not proven."""
    model = llama(fresh=False)
    for layer in model.model.layers:
        decoded = layer.mlp.up_proj
        layer.mlp.gate_proj.old = layer.mlp.gate_proj.weight.detach() * 0.5
        decoded.forward = through_closure(decoded)
    (found,) = gaps(watched(tmp_path, grpo(model)))
    assert (found.fqn, found.source, found.confidence) == (None, None, "likely")
    assert "after each optimizer step" in spec_of("logprob-gap").instead(found)


def through_closure(layer: KeepsItsCopy) -> Callable[[Tensor], Tensor]:
    """Its ``forward``, with the copies where no attribute holds them."""
    kept: list[Tensor] = []

    def forward(x: Tensor) -> Tensor:
        if x.shape[1] == 1 and not kept:
            kept.extend(weight.detach().to(x.dtype, copy=True) for weight in (layer.low, layer.high))
        low, high = kept if x.shape[1] == 1 else (layer.low.to(x.dtype), layer.high.to(x.dtype))
        return layer.base(x) + x @ low.T @ high.T

    return forward


HEALTHY = {
    "bfloat16": lambda: grpo(llama()),
    "float16": lambda: grpo(llama(torch.float16), rate=1e-4),
    "float32": lambda: grpo(llama(torch.float32)),
    "adapters cast each time": lambda: grpo(llama(fresh=True)),
    "another temperature and the likeliest tokens": lambda: grpo(llama(), temperature=0.5, top_p=0.8, top_k=20),
    "without a cache": lambda: grpo(llama(), use_cache=False),
    "dropout": lambda: grpo(llama(dropout=0.3)),
}


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("name", HEALTHY)
def test_rounding_sampling_and_dropout_are_no_finding(tmp_path: Path, name: str) -> None:
    """The cache rounds otherwise than one long call; that is all."""
    assert gaps(watched(tmp_path, HEALTHY[name]())) == []


def test_texts_of_another_policy_are_not_compared(tmp_path: Path) -> None:
    """Weights that have changed since, on purpose, as after several updates on the same texts."""
    model = llama(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=5.0)

    def program(_: object) -> None:
        texts = model.generate(PROMPTS[1:], max_new_tokens=8, min_new_tokens=8)
        for _update in range(3):
            model(input_ids=texts, labels=texts).loss.backward()
            optimizer.step()

    assert gaps(watched(tmp_path, program)) == []
