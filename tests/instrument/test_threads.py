"""Threads of the program: what each computes is measured, and nothing of the doctor's stays in them."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from patience import PATIENCE
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from watched import watched

from dtypedoctor.diagnosis import diagnose
from dtypedoctor.trace.events import Coverage, NotWatched


class Waiting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside, self.go_on = threading.Event(), threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        self.inside.set()
        assert self.go_on.wait(PATIENCE)
        return x + 1


def modes() -> list[str]:
    return [type(mode).__name__ for mode in _get_current_dispatch_mode_stack()]


def thread(work: Callable[[], Any]) -> None:
    """Runs ``work`` in a thread of the oldest kind."""
    one = threading.Thread(target=work)
    one.start()
    one.join()


def pool(work: Callable[[], Any]) -> None:
    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(work) for _ in range(4)]:
            done.result()


def subclass(work: Callable[[], Any]) -> None:
    """Runs ``work`` in a thread whose class has a ``run`` of its own."""

    class Own(threading.Thread):
        def run(self) -> None:
            work()

    one = Own()
    one.start()
    one.join()


def timer(work: Callable[[], Any]) -> None:
    one = threading.Timer(0, work)
    one.start()
    one.join()


@pytest.mark.release(all_but=2)
@pytest.mark.parametrize("run", [thread, pool, subclass, timer])
def test_an_operator_in_a_thread_is_measured(run: Callable[..., None], tmp_path: Path) -> None:
    """A logarithm of zero in a thread is found at its line, and every operator is counted and measured."""

    def work() -> None:
        print(torch.log(torch.tensor([1.0, 0.0]) * 1.0).sum().item())

    trace = watched(tmp_path, lambda _: run(work))
    first = diagnose(trace)[0]
    assert (first.op, first.source) == ("aten.log.default", f"test_threads.py:{work.__code__.co_firstlineno + 1}")
    counts = trace.last(Coverage)
    assert counts is not None
    assert counts.operators == counts.operators_measured > 0


def test_calls_of_two_threads_at_once_leave_no_mode_behind(tmp_path: Path) -> None:
    """A call that begins and ends inside of that of another thread takes off nothing of the other's and leaves nothing on; both are measured.

    A mode that is still on a stack when its thread ends aborts the program at its end.
    """
    slow, quick = Waiting(), nn.Linear(2, 2)
    after: list[list[str]] = []

    def first() -> None:
        slow(torch.zeros(2))
        after.append(modes())

    def second() -> None:
        quick(torch.zeros(1, 2)).sum().backward()
        after.append(modes())

    def work(_: Any) -> None:
        one = threading.Thread(target=first)
        one.start()
        assert slow.inside.wait(PATIENCE)
        thread(second)
        slow.go_on.set()
        one.join()
        after.append(modes())

    trace = watched(tmp_path, work)
    assert after == [["Sentinel"]] * 3
    counts = trace.last(Coverage)
    assert counts is not None
    assert counts.module_calls == counts.module_calls_measured == 2


def test_each_call_of_many_threads_is_counted_and_measured(tmp_path: Path) -> None:
    """Nothing is passed over because another thread's result is being measured."""
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    def work() -> None:
        for _ in range(10):
            net(torch.randn(8, 4)).sum().backward()

    trace = watched(tmp_path, lambda _: pool(work))
    counts = trace.last(Coverage)
    assert counts is not None
    assert counts.module_calls == counts.module_calls_measured == 4 * 10 * 4


def test_autocast_of_a_thread_is_its_own(tmp_path: Path) -> None:
    """What one thread casts says nothing of what another one computes."""
    slow, quick = Waiting(), nn.Linear(2, 2)

    def casting() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            slow(torch.zeros(2))

    def work(_: Any) -> None:
        one = threading.Thread(target=casting)
        one.start()
        assert slow.inside.wait(PATIENCE)
        quick(torch.zeros(1, 2))
        slow.go_on.set()
        one.join()

    trace = watched(tmp_path, work)
    assert {site.cls: site.autocast for site in trace.sites.values() if site.kind == "output"} == {
        "Linear": None,
        "Waiting": "bfloat16",
    }


def test_operators_in_a_daemon_are_listed_as_not_watched(tmp_path: Path) -> None:
    """A daemon may be ended with a mode on, which would abort the program."""
    seen: list[list[str]] = []

    def work(_: Any) -> None:
        one = threading.Thread(target=lambda: seen.append(modes()), daemon=True)
        one.start()
        one.join()

    trace = watched(tmp_path, work)
    assert seen == [[]]
    assert "operators in daemon threads" in {note.what for note in trace.all(NotWatched)}


def test_threads_are_as_they_were_afterwards(tmp_path: Path) -> None:
    """Nothing of ``threading`` stays replaced."""
    before = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]
    watched(tmp_path, lambda _: thread(lambda: None))
    assert threading.Thread._bootstrap_inner is before  # type: ignore[attr-defined]
