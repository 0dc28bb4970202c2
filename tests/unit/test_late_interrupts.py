"""Ctrl-C while the command is ending already."""

import sys
from types import SimpleNamespace

import pytest

from dtypedoctor.__main__ import _again


@pytest.mark.parametrize(
    ("error", "told"),
    [(OSError("Signal 2 ignored due to race condition"), 0), (OSError("no space left"), 1), (ValueError("race"), 1)],
)
def test_a_signal_that_came_before_it_was_ignored_is_no_error(
    error: Exception, told: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python reports it as an exception that nobody can catch; any other of these is shown as Python shows it."""
    shown: list[object] = []
    monkeypatch.setattr(sys, "__unraisablehook__", shown.append)
    _again(SimpleNamespace(exc_type=type(error), exc_value=error))  # type: ignore[arg-type]
    assert len(shown) == told
