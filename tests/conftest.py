"""What holds for all tests."""

import functools
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Generator, Sequence
from compileall import compile_dir
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

import dtypedoctor
from dtypedoctor.runner.view import NoViewError, View

# How long an example and its making take depends on the machine. And each run has the same examples, or a new one fails a change that
# has nothing to do with it: runs with the release tests look for new ones, and for more of them.
settings.register_profile("exploring", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=250)
settings.register_profile("repeatable", settings.get_profile("exploring"), derandomize=True, max_examples=50)
settings.load_profile("repeatable")

sys.path.append(str(Path(__file__).parent / "e2e"))  # helpers of its tests, such as `patience`, are others' too

os.environ.setdefault("OMP_NUM_THREADS", "1")
"""Each process of the suite computes alone: on tiny tensors a second thread mostly spins, and on two cores it takes the other process's time.

Set before torch is imported here or in what a test starts; one that is set already stays.
"""

os.environ.pop(
    "PYTHONUNBUFFERED", None
)  # print() then writes a line and its end one by one, and ranks write into each other's

SLOW_FOLDERS = ("e2e", "benchmarks")

collect_ignore = ["e2e/extension"]  # the test of a package that is not installed here; test_extension.py runs it


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--rewrite-snapshot``, which `tests/e2e/snapshot.py` explains."""
    parser.addoption(
        "--rewrite-snapshot", action="store_true", help="write tests/e2e/snapshot.json instead of checking it"
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    """What a test starts hears Ctrl-C: a background job of a shell is deaf to it, and a command that was called in this process ends deaf."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def rewrite_snapshot(pytestconfig: pytest.Config) -> bool:
    """Whether what is said now becomes the snapshot."""
    return bool(pytestconfig.getoption("rewrite_snapshot"))


def pytest_configure(config: pytest.Config) -> None:
    """With several processes files are handed out in the order of the folders, `e2e` first, whose few tests are the longest.

    pytest-xdist would begin with the files that hold the most tests, and end with a process that waits for the other.
    """
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False
    if config.getoption("markexpr") in ("", "release"):
        settings.load_profile("exploring")
    if not hasattr(config, "workerinput"):
        _compile_the_package()
    _allow_reruns_where_no_view_is_possible()


def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores for ``-n auto``: a test that waits for processes, sockets or a clock leaves its core to another."""
    return len(os.sched_getaffinity(0)) + 1


def _compile_the_package() -> None:
    """Once, before tests start hundreds of processes: under ``PYTHONDONTWRITEBYTECODE`` each of them would compile it for itself."""
    compile_dir(Path(dtypedoctor.__file__).parent, quiet=2)


def _allow_reruns_where_no_view_is_possible() -> None:
    """What the scripts of tests write may be written twice."""
    try:
        View(Path.cwd())
    except (NoViewError, OSError):
        os.environ.setdefault("DTYPEDOCTOR_RERUN_IN_PLACE", "1")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Marks as slow whatever starts processes of its own: all of `e2e` and `benchmarks`. Elsewhere a test says it itself."""
    if item.path.parent.name in SLOW_FOLDERS:
        item.add_marker(pytest.mark.slow)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The first tier does not import test modules of which it runs nothing."""
    return True if config.getoption("markexpr") == "not slow" and collection_path.name in SLOW_FOLDERS else None


_commands: list[Sequence[Any]] = []
"""Arguments of the processes that the test at hand has started."""


_begin = subprocess.Popen.__init__


@functools.wraps(_begin)
def _noting(process: Any, args: Any, *others: Any, **named: Any) -> None:
    _commands.append(args)
    _begin(process, args, *others, **named)


subprocess.Popen.__init__ = _noting  # type: ignore[method-assign]  # no audit hook: Dynamo would compile it among the tests' functions


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Fails a test that starts the command line and does not say that it is slow, so that the first tier stays quick on any machine."""
    _commands.clear()
    yield
    started = next((words for words in _commands if "dtypedoctor" in words), None)
    if started is not None and item.get_closest_marker("slow") is None:
        pytest.fail(f"it starts dtypedoctor, so mark it as slow: {started}")


@pytest.hookimpl(tryfirst=True)  # before ``-m`` selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what is marked ``release`` unless ``-m`` names that marker or is empty.

    Of ``release(all_but=N)`` the first N cases always run, and so does on a GPU what needs one, which ``-m gpu`` chooses.
    """
    cases = Counter[str]()
    for item in items:
        marker = item.get_closest_marker("release")
        if marker is None or marker not in item.own_markers:
            continue
        needs_gpu = item.get_closest_marker("gpu") is not None
        if not needs_gpu:
            cases[item.nodeid.partition("[")[0]] += 1
        if needs_gpu or cases[item.nodeid.partition("[")[0]] <= marker.kwargs.get("all_but", 0):
            item.own_markers.remove(marker)
    expression = config.getoption("markexpr")
    if expression and "release" not in expression:
        left_out = [item for item in items if item.get_closest_marker("release") is not None]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.get_closest_marker("release") is None]
