"""Edits of a library's source: which are made, what they leave as it was, and how those that do not fit are answered."""

import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from dtypedoctor.plugins import Edit
from dtypedoctor.source_edits import AlreadyCorrectedError, TargetMismatchError, install, patched

SOURCE = """\
import functools

LIMIT = 10


def doubled(function):
    @functools.wraps(function)
    def wrapper(*arguments):
        return 2 * function(*arguments)
    return wrapper


class Scale:
    def __init__(self, by):
        self.by = by

    @doubled
    def times(self, x):
        # before
        if x > LIMIT:
            x = LIMIT
        y = x * self.by
        return y / 1 if y else 1 / y


def made(offset):
    def add(x):
        return x + offset
    return add


if LIMIT:
    def halve(x): return x / 2
else:
    def halve(x): return x / 2
"""

CLAMP = Edit(
    module="small_library",
    function="Scale.times",
    parameters=("self", "x"),
    old="if x > LIMIT:\n    x = LIMIT",
    new="if x > 2 * LIMIT:\n    # twice as much\n    x = 2 * LIMIT",
    acts="x > LIMIT",
)
SQUARE = replace(CLAMP, old="y = x * self.by", new="y = x * self.by * self.by", acts="")


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The library, imported."""
    (tmp_path / "small_library.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("small_library")
    del sys.modules["small_library"]


def test_whoever_has_the_function_runs_the_corrected_lines_until_they_are_undone(library: ModuleType) -> None:
    """An object from before and a bound method that somebody keeps; the decorator stays."""
    times: Callable[[int], float] = library.Scale(3).times
    counted: list[bool] = []
    place, undo = install(CLAMP, library, counted.append)
    assert (place, times(15), times(5)) == ("small_library.py:20", 90, 30)
    assert counted == [True, False]
    undo()
    undo()
    assert (times(15), counted) == (60, [True, False])


def test_two_corrections_of_one_function_are_undone_in_any_order(library: ModuleType) -> None:
    """The one that stays goes on counting."""
    times = library.Scale(3).times
    counted: list[bool] = []
    _, undo = install(CLAMP, library)
    _, undo_square = install(SQUARE, library, counted.append)
    assert times(15) == 270
    undo()
    assert (times(15), len(counted)) == (180, 2)
    undo_square()
    assert (times(15), len(counted)) == (60, 2)


def test_a_patch_is_made_in_every_definition_that_has_the_lines() -> None:
    """A file may define a function for each kind of device."""
    edit = Edit(module="small_library", function="halve", parameters=("x",), old="def halve(x): return x / 2",
                new="def halve(x): return x * 0.5")  # fmt: skip
    after = patched(SOURCE, [edit, CLAMP], "small_library.py")
    assert after.count("    def halve(x): return x * 0.5\n") == 2
    assert "        if x > 2 * LIMIT:\n            # twice as much\n            x = 2 * LIMIT\n        y" in after
    with pytest.raises(AlreadyCorrectedError, match=r"small_library.py:20: Scale.times has this correction already"):
        patched(after, [CLAMP], "small_library.py")


@pytest.mark.parametrize(
    ("edit", "difference"),
    [
        (replace(CLAMP, parameters=("self", "y")), r"py:18: Scale.times takes \(self, x\), .* for \(self, y\)"),
        (replace(CLAMP, old="if x > LIMITS:"), r"has no `if x > LIMITS:`, .*small_library.py:20 has `if x > LIMIT:`"),
        (replace(CLAMP, old="if x > LIMIT:\n    pass"), "has no `pass`"),
        (replace(CLAMP, function="Scale.plus"), "has no function Scale.plus"),
    ],
)
def test_code_that_an_edit_was_not_written_for_stays_and_the_difference_is_named(
    library: ModuleType, edit: Edit, difference: str
) -> None:
    """Nothing is half done."""
    before = library.Scale.times.__wrapped__.__code__
    with pytest.raises(TargetMismatchError, match=difference):
        install(edit, library)
    assert library.Scale.times.__wrapped__.__code__ is before


def test_a_function_that_another_patch_has_replaced_is_left_alone(library: ModuleType) -> None:
    """Its source is not the library's."""
    library.Scale.times = lambda self, x: x
    with pytest.raises(TargetMismatchError, match="another patch is in place"):
        install(CLAMP, library)
