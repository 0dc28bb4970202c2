"""Fixes that are tried on the failing call of a replay, in the process that keeps it."""

import pytest
import torch
from torch import nn

from dtypedoctor.instrument.capsule import Kind
from dtypedoctor.instrument.live_call import LiveCall
from dtypedoctor.worker import call_fixes
from dtypedoctor.worker.call_fixes import tried_fixes


@pytest.fixture(autouse=True)
def no_limit(monkeypatch):
    """However slow the machine is, every fix is tried."""
    monkeypatch.setattr(call_fixes, "LONGEST", 1e9)


class Overflowing(nn.Module):
    """Its product is too large for float16; the bounded result is not."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        """A value between 0 and 1 of a product up to 250,000."""
        return torch.sigmoid(self.inner(x) * x / 1e6) + (self.inner(x) * x) * 0


class Mixed(nn.Module):
    """A float32 weight, which meets what autocast has made."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        """Autocast casts the product and not what is written into its place."""
        held = torch.zeros(x.shape[0], 4)
        held[torch.tensor([True] * x.shape[0])] = self.inner(x)
        return held


def overflowing():
    module = Overflowing().half()
    nn.init.constant_(module.inner.weight, 100.0)
    return module, torch.full((2, 4), 300.0, dtype=torch.float16)


def outcomes(module, *inputs, fixes, kind=Kind.NONFINITE):
    call = LiveCall.entered(module, "layers.0", inputs, {})
    return {row["fix"]: row["outcome"] for row in tried_fixes(call, kind, fixes)}


def test_an_overflow_is_fixed_by_a_wider_dtype_and_by_float32() -> None:
    """Both widen the range; the module is afterwards what it was."""
    module, x = overflowing()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    found = outcomes(module, x, fixes=["bfloat16", "keep-float32", "autocast-off", "fresh-process"])
    assert found == {"bfloat16": "fixed", "keep-float32": "fixed"}
    after = module.state_dict()
    assert all(after[name].dtype == value.dtype and torch.equal(after[name], value) for name, value in before.items())


def test_a_call_that_rejects_its_dtypes_is_fixed_by_the_region_it_is_in() -> None:
    """Without autocast nothing is float16."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        module = Mixed()
        call = LiveCall.entered(module, "", (torch.randn(3, 4),), {})
    rows = tried_fixes(call, Kind.RAISED, ["autocast-off", "norm-output-cast", "autocast-dtype-of-model"])
    assert [(row["fix"], row["outcome"]) for row in rows] == [("autocast-off", "fixed")]


def test_a_fix_that_clamps_says_so() -> None:
    """Float32 inside, and float16 behind it: what does not fit there becomes its max."""
    module = nn.Linear(4, 4, bias=False).half()
    nn.init.constant_(module.weight, 100.0)
    call = LiveCall.entered(module, "", (torch.full((2, 4), 300.0, dtype=torch.float16),), {})
    (row,) = tried_fixes(call, Kind.NONFINITE, ["keep-float32"])
    assert row == {
        "fix": "keep-float32",
        "outcome": "fixed",
        "reason": "8 elements beyond the range of their dtype are clamped to its max",
    }


def test_a_fix_that_changes_nothing_says_how_the_call_still_fails() -> None:
    """The reason is that of the call with the fix."""
    module = Mixed()
    module.inner.to(torch.float16)
    call = LiveCall.entered(module, "", (torch.randn(3, 4, dtype=torch.float16),), {})
    (row,) = tried_fixes(call, Kind.RAISED, ["bfloat16"])
    assert row["outcome"] == "not-fixed"
    assert row["reason"].startswith("raises RuntimeError: Index put requires")


def test_nothing_is_said_of_a_call_that_passes_or_that_fails_silently() -> None:
    """There is nothing that a fix could make go away."""
    assert outcomes(nn.Linear(4, 4), torch.ones(2, 4), fixes=["bfloat16"]) == {}
    module, x = overflowing()
    assert outcomes(module, x, fixes=["bfloat16"], kind=Kind.SILENT) == {}


class Once(nn.Module):
    """Its first two calls overflow."""

    calls = 0

    def forward(self, x):
        """Finite from the third call on."""
        Once.calls += 1
        return x * (1e5 if Once.calls <= 2 else 1)


def test_nothing_is_fixed_where_the_call_passes_without_the_fix_too() -> None:
    """The control call after a fix must fail as the one before it did."""
    call = LiveCall.entered(Once(), "", (torch.ones(2, dtype=torch.float16),), {})
    Once.calls = 1
    (row,) = tried_fixes(call, Kind.NONFINITE, ["bfloat16", "keep-float32"])
    assert row["outcome"] == "not-tried"
    assert "without it" in row["reason"]
