"""Culprits planted at random in a real model of 128 modules are found exactly, in real float16, within the bound."""

import copy
import random
from collections.abc import Sequence
from math import log2

import pytest
import torch
from planted_blocks import NAMES, planted
from torch import nn

from dtypedoctor.corrections.keep_float32 import install_keep_float32
from dtypedoctor.trials.bisection.questions import Forest, plant
from dtypedoctor.trials.reduction import Options, Outcome, Result, reduce

MODULES = 128
IDS = torch.arange(8).reshape(2, 4)
ACCEPTED = 0.05
"""Largest difference of logits from float32; float16 alone comes to 0.003."""

INDEPENDENT = [(k, seed) for k in range(1, 6) for seed in (1, 2)]


class Runs:
    """Runs the model in float16 with a set of modules kept in float32, and compares with float32."""

    def __init__(self, roles: dict[str, str]) -> None:
        model = planted(roles).half()
        with torch.no_grad():
            self._exact = copy.deepcopy(model).float()(IDS)
        self._model: nn.Module = model
        self.forest: Forest = plant([name for name, _ in model.named_modules() if not name.endswith("s")], {})

    def __call__(self, treated: frozenset[str]) -> Outcome:
        names = self.forest.names(treated)
        installed = install_keep_float32(self._model, names) if names else None
        with torch.no_grad():
            logits = self._model(IDS)
        if installed is not None:
            installed.undo()
        if not logits.isfinite().all():
            return Outcome.FAIL
        return Outcome.PASS if (logits.float() - self._exact).abs().max() < ACCEPTED else Outcome.UNRESOLVED


def found(roles: dict[str, str]) -> Result:
    """What the reducer finds, each key outcome taken twice as ``bisect`` does."""
    runs = Runs(roles)
    return reduce(runs, runs.forest.roots, Options(repeat=1))


def bound(culprits: int) -> float:
    """Most probes allowed."""
    return 2 * culprits * log2(MODULES) + culprits


def drawn(count: int, seed: int) -> Sequence[str]:
    """Parts at random, in the order of the model."""
    return sorted(random.Random(f"{count} {seed}").sample(NAMES, count), key=NAMES.index)


def test_the_model_has_128_modules_that_something_can_be_planted_in() -> None:
    """112 parts and 16 blocks; nothing planted, nothing wrong."""
    runs = Runs({})
    assert len(NAMES) + 16 == MODULES
    assert len(runs.forest.leaves) >= MODULES
    assert runs(frozenset()) is Outcome.PASS


@pytest.mark.parametrize(("count", "seed"), INDEPENDENT)
def test_independent_culprits_are_found_exactly_and_within_the_bound(count: int, seed: int) -> None:
    """k parts overflow each by itself: exactly these must be kept, after at most 2 k log2(128) + k probes."""
    culprits = drawn(count, seed)
    result = found(dict.fromkeys(culprits, "overflows"))
    assert set(result.culprits) == set(culprits)
    assert result.probes <= bound(count)
    assert result.one_minimal
    assert result.monotone


@pytest.mark.parametrize("seed", [1, 2])
def test_of_a_pair_that_only_fails_together_one_is_kept(seed: int) -> None:
    """The first absorbs a signal in float16, and only without that signal does the second overflow; another is independent."""
    absorbing, overflowing, other = drawn(3, seed)
    result = found({absorbing: "absorbs", overflowing: "overflows-without-signal", other: "overflows"})
    assert other in result.culprits
    assert len(result.culprits) == 2
    assert set(result.culprits) < {absorbing, overflowing, other}
    assert result.probes <= bound(2)
    assert result.one_minimal


@pytest.mark.parametrize("seed", [1, 2])
def test_a_module_that_must_not_be_kept_alone_is_no_culprit(seed: int) -> None:
    """Kept in float32, the first emits a signal at which the second overflows in float16: more treatment is worse."""
    emitting, sensitive, other = drawn(3, seed)
    roles = {emitting: "absorbs", sensitive: "overflows-with-signal", other: "overflows"}
    runs = Runs(roles)
    assert runs(frozenset([other])) is Outcome.PASS
    assert runs(frozenset([other, emitting])) is Outcome.FAIL
    result = found(roles)
    assert result.culprits == (other,)
    assert result.probes <= bound(1)
    assert result.one_minimal
