"""Each parameter's note names the line of the program that gave it its dtype, and what that line calls."""

import copy
import gc
import inspect
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from watched import watched

from dtypedoctor.instrument.dtype_lines import DtypeLines
from dtypedoctor.instrument.session import Session
from dtypedoctor.trace.events import ParameterNote
from dtypedoctor.trace.writer import TraceWriter

HALF = torch.bfloat16


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4, bias=False)
        self.head = nn.Linear(4, 2, bias=False)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Sums in float32, so that any dtypes go together."""
        return (self.body.weight.float().sum() + self.head.weight.float().sum()) * x.float()


def by_half() -> nn.Module:
    model = Twice().to(HALF)
    model.head.float()
    return model


def by_construction() -> nn.Module:
    """A new head in another dtype."""
    model = Twice()
    model.head = nn.Linear(4, 2, bias=False, dtype=HALF)
    return model


def by_copy() -> nn.Module:
    """A copy is cast, its original is not."""
    return copy.deepcopy(Twice()).half()


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (by_half, {"body.weight": "Twice().to()", "head.weight": "model.head.float()", "scale": "Twice().to()"}),
        (by_construction, {"head.weight": "nn.Linear()"}),
        (by_copy, {"body.weight": "copy.deepcopy().half()", "scale": "copy.deepcopy().half()"}),
    ],
)
def test_a_note_names_the_call(make: Callable[[], nn.Module], expected: dict[str, str], tmp_path: Path) -> None:
    """The last call that changed the dtype, without its arguments, at its line in this file."""
    trace = watched(tmp_path, lambda _: make()(torch.ones(4)))
    notes = {note.name: note for note in trace.all(ParameterNote)}
    assert {name: notes[name].set_by for name in expected} == expected
    lines, first = inspect.getsourcelines(make)
    for name, called in expected.items():
        path, _, line = (notes[name].set_at or "").rpartition(":")
        assert path == __file__
        assert called.rpartition(".")[2].rstrip("()") in lines[int(line) - first]
        assert notes[name].set_span[0] == int(line)


def test_an_assignment_to_data_is_named(tmp_path: Path) -> None:
    """No hook of torch's sees it: the file has one such line."""
    made = tmp_path / "made.py"
    made.write_text(
        "import torch\nmodel = torch.nn.Linear(2, 2, dtype=torch.bfloat16)\nfor p in model.parameters():\n    p.data = p.data.float()\n"
    )
    note = watched(tmp_path, lambda _: runpy.run_path(str(made))["model"](torch.ones(1, 2))).all(ParameterNote)[0]
    assert (note.set_at, note.set_by, note.dtype) == (f"{made}:4", "p.data = …", "float32")


def test_arguments_of_the_call_that_set_a_dtype_are_not_recorded(tmp_path: Path) -> None:
    """They may hold a token."""

    def load(token: str) -> nn.Module:
        return Twice() if token else nn.Identity()

    trace = watched(tmp_path, lambda _: load(token="hf_" + "x" * 30).half()(torch.ones(4)))
    assert {note.set_by for note in trace.all(ParameterNote)} == {"load().half()"}


def test_dtype_lines_of_modules_that_are_gone_are_forgotten(tmp_path: Path) -> None:
    """Memory is bounded by the modules that are alive, and torch is as it was before."""
    lines = DtypeLines(Session(TraceWriter(tmp_path)).guard.shield)
    original = nn.Module._apply
    lines.start()
    try:
        kept = [Twice().half() for _ in range(3)]
        assert len(lines._of) >= 9
        kept.clear()
        gc.collect()
        assert not lines._of
    finally:
        lines.stop()
    assert nn.Module._apply is original
    Twice()
    assert not lines._of
