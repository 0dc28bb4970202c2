"""Programs without modules: what is computed on plain tensors is measured, and its origin found in the run itself."""

import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from plain_programs import FAULTY, HEALTHY
from watched import watched

from dtypedoctor.diagnosis import diagnose
from dtypedoctor.diagnosis.rule import Finding, Severity
from dtypedoctor.trace.events import NotWatched

MARK = "# makes: "


def found_in(directory: Path, program: Callable[[], None]) -> list[Finding]:
    """What one run of ``program`` shows, without what is mere information."""
    trace = watched(directory, lambda _: program())
    return [finding for finding in diagnose(trace) if finding.severity is not Severity.INFO]


def label_of(program: Callable[[], None]) -> tuple[int, list[str]]:
    """The line of the program's file in which the first value goes wrong, and the operators that may be named."""
    lines, first = inspect.getsourcelines(program)
    place = next(i for i, line in enumerate(lines) if MARK in line)
    return first + place, lines[place].partition(MARK)[2].split()


@pytest.mark.release(all_but=4)
@pytest.mark.parametrize("program", FAULTY, ids=lambda program: program.__name__)
def test_the_operator_that_makes_inf_or_nan_is_found_in_one_run(program: Callable[[], None], tmp_path: Path) -> None:
    """A plain program in which a value stops being finite is no healthy one; operator and line are those that made it."""
    line, operators = label_of(program)
    findings = found_in(tmp_path, program)
    assert findings, "called healthy"
    first = findings[0]
    assert first.source == f"plain_programs.py:{line}"
    named = f"{first.op} {first.summary}"
    assert any(f".{op}." in named or f"`{op}`" in named for op in operators), named


@pytest.mark.release(all_but=2)
@pytest.mark.parametrize("program", HEALTHY, ids=lambda program: program.__name__)
def test_infinities_that_are_meant_are_no_finding(program: Callable[[], None], tmp_path: Path) -> None:
    """Masks, bounds, running minima and gaps that the program fills are none of the doctor's business; all is measured without trouble."""
    trace = watched(tmp_path, lambda _: program())
    assert not [finding for finding in diagnose(trace) if finding.severity is not Severity.INFO]
    assert not trace.all(NotWatched)


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize(("of", "infinity"), [(torch.log, " returns -inf in "), (torch.reciprocal, " returns inf in ")])
def test_an_infinity_is_named_with_its_sign(
    of: Callable[[torch.Tensor], torch.Tensor], infinity: str, tmp_path: Path
) -> None:
    """The logarithm of 0 is another infinity than what is divided by it."""
    (finding,) = found_in(tmp_path, lambda: print(of(torch.tensor([2.0, 0.0])).sum().item()))
    assert infinity in finding.summary


def test_what_is_just_above_a_maximum_is_not_said_to_be_it(tmp_path: Path) -> None:
    """Twice the largest power of two that float32 holds is its maximum in six digits."""
    (finding,) = found_in(tmp_path, lambda: print((torch.tensor(2.0**127) * 2).item()))
    assert [line for line in finding.evidence if "float32 max, 3.40282e+38, or just above" in line]
