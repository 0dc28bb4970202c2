"""Ctrl-C while the command is ending already, and inside of libraries that make something else of it."""

import signal
import sys
from types import SimpleNamespace

import pytest

from dtypedoctor.__main__ import _again
from dtypedoctor.cli import main as command_line
from dtypedoctor.runner.process import ending_by_interrupt


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


class NotBuiltError(Exception):
    """What a library that is written in another language makes of an exception in what it calls."""


@pytest.mark.parametrize(("is_interrupted", "code"), [(True, 130), (False, 1)])
def test_an_interruption_that_a_library_takes_for_an_error_of_its_own_is_one(
    is_interrupted: bool, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """pydantic says that it cannot build a validator. The same error without a signal is a defect of ours."""

    def build(_: object) -> None:
        try:
            with ending_by_interrupt():
                if is_interrupted:
                    signal.raise_signal(signal.SIGTERM)
            raise KeyError
        except (KeyboardInterrupt, KeyError) as error:
            raise NotBuiltError(repr(error)) from None

    monkeypatch.setattr(command_line, "_run", build)
    monkeypatch.setattr(sys, "argv", ["dtypedoctor", "env"])
    with pytest.raises(SystemExit) as ended:
        command_line.main()
    assert ended.value.code == code
    assert ("interrupted" in capsys.readouterr().err) == is_interrupted
