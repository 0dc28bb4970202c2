"""Functions that are called as soon as a module has been imported."""

import copy
import importlib.util
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtypedoctor.worker.on_import import after_import


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on ``sys.path``; what is imported from it is forgotten afterwards, with everything that waits."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before, finders = set(sys.modules), list(sys.meta_path)
    yield tmp_path
    sys.meta_path[:] = finders
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_two_that_wait_for_one_module_are_both_told(folder: Path) -> None:
    """Neither asks the other for the module, and the loader in the end is the ordinary one."""
    (folder / "wanted_twice.py").write_text("x = 1\n")
    seen: list[str] = []
    finders = list(sys.meta_path)
    after_import("wanted_twice", lambda: seen.append("first"))
    after_import("wanted_twice", lambda: seen.append("second"))
    module = importlib.import_module("wanted_twice")
    assert sorted(seen) == ["first", "second"]
    assert type(module.__loader__).__name__ == "SourceFileLoader"
    assert sys.meta_path == finders


def test_a_module_that_is_there_already_is_told_at_once() -> None:
    """No import has to happen again."""
    seen: list[str] = []
    after_import("sys", lambda: seen.append("sys"))
    assert seen == ["sys"]


def test_the_module_looks_as_if_nobody_had_waited_for_it(folder: Path) -> None:
    """Spec, loader and source are those of an ordinary import, for a package too, and no finder is left behind."""
    (folder / "plain_one.py").write_text("x = 1\n")
    (folder / "pack").mkdir()
    (folder / "pack" / "__init__.py").write_text("")
    (folder / "pack" / "inner.py").write_text("")
    finders = list(sys.meta_path)
    after_import("pack.inner", lambda: None)
    after_import("plain_one", lambda: None)
    importlib.import_module("pack.inner")
    module = importlib.import_module("plain_one")
    assert module.__spec__ is not None
    assert module.__spec__.loader is module.__loader__
    assert type(module.__loader__).__name__ == "SourceFileLoader"
    assert sys.meta_path == finders


def test_a_module_that_is_waited_for_runs_as_a_script(folder: Path) -> None:
    """So does `runpy`, which asks the loader for its code and does not import it."""
    (folder / "run_by_name.py").write_text("made_as = __name__\n")
    stop = after_import("run_by_name", lambda: None)
    try:
        assert runpy.run_module("run_by_name", run_name="__main__")["made_as"] == "__main__"
        loader = importlib.util.find_spec("run_by_name").loader  # type: ignore[union-attr]
        assert copy.copy(loader).get_source("run_by_name") == "made_as = __name__\n"  # type: ignore[union-attr]
    finally:
        stop()


def test_a_module_that_fails_to_import_raises_its_own_error(folder: Path) -> None:
    """The listener is not called, and a later attempt that succeeds is told."""
    path = folder / "moody.py"
    path.write_text("raise ValueError('not today')\n")
    seen: list[str] = []
    after_import("moody", lambda: seen.append("moody"))
    with pytest.raises(ValueError, match="not today"):
        importlib.import_module("moody")
    assert seen == []
    path.write_text("x = 'now it is longer'\n")
    importlib.invalidate_caches()
    importlib.import_module("moody")
    assert seen == ["moody"]


def test_a_module_that_does_not_exist_is_missing_as_ever(folder: Path) -> None:
    """ModuleNotFoundError, and nothing is told."""
    seen: list[str] = []
    after_import("nowhere_at_all", lambda: seen.append("x"))
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("nowhere_at_all")
    assert seen == []


@pytest.mark.parametrize("text", ["raise ImportError('own')", "import no_such_module_anywhere", "1 / 0"])
def test_a_module_that_raises_has_the_traceback_that_it_has_alone(text: str, folder: Path) -> None:
    """As of the import system itself, there is no frame of what waits for it."""
    (folder / "raising.py").write_text(f"{text}\n")
    after_import("raising", lambda: None)
    with pytest.raises((ImportError, ZeroDivisionError)) as caught:
        import raising  # noqa: F401
    assert [Path(entry.path).name for entry in caught.traceback] == ["test_on_import.py", "raising.py"]
