"""The doctor's frames do not show in a script's tracebacks."""

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dtypedoctor.worker import recording
from dtypedoctor.worker.recording import hide_own_frames


def called_by_the_doctor(work: Callable[[], Any]) -> Any:
    """Calls ``work`` from code that stands in a file of the package."""
    source = "def call(work):\n    return work()\n"
    space: dict[str, Any] = {}
    exec(  # noqa: S102 - only code in a file of the package has frames of the package
        compile(source, str(Path(recording.__file__).with_name("invented.py")), "exec"), space
    )
    return space["call"](work)


def frames(error: BaseException) -> list[str]:
    """Names of the functions in a traceback."""
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def fail() -> None:
    """Raises."""
    raise KeyError("lost")


def test_own_frames_between_others_are_taken_out() -> None:
    """What is left is in order."""
    with pytest.raises(KeyError) as caught:
        called_by_the_doctor(fail)
    assert "call" in frames(caught.value)
    hide_own_frames(caught.value)
    assert frames(caught.value)[-2:] == ["called_by_the_doctor", "fail"]
    assert "call" not in frames(caught.value)


def test_causes_contexts_and_groups_are_cleaned_too() -> None:
    """Whatever Python would print with the exception."""

    def chained() -> None:
        try:
            called_by_the_doctor(fail)
        except KeyError as error:
            raise ExceptionGroup("several", [ValueError("one"), error]) from error

    with pytest.raises(ExceptionGroup) as caught:
        chained()
    hide_own_frames(caught.value)
    assert caught.value.__cause__ is not None
    assert "call" not in frames(caught.value.__cause__)
    assert all("call" not in frames(inner) for inner in caught.value.exceptions)


def test_an_exception_that_is_its_own_cause_comes_to_an_end() -> None:
    """A ring of causes is walked once."""
    first, second = KeyError(1), KeyError(2)
    first.__cause__, second.__context__ = second, first
    hide_own_frames(first)
    assert first.__traceback__ is None
