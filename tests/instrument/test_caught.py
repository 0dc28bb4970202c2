"""Exceptions of torch's that the program catches: failures are found where they are raised, probing is not called one."""

import contextlib
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from watched import watched

from dtypedoctor.examination.examine import examine
from dtypedoctor.instrument import whereabouts
from dtypedoctor.instrument.instruments import Instruments
from dtypedoctor.report.build import build_report
from dtypedoctor.report.to_json import Report
from dtypedoctor.runner.command import Program
from dtypedoctor.runner.run import Run, WorkerExit
from dtypedoctor.trace.events import Caught
from dtypedoctor.worker.process_watch import follow_threads


@pytest.fixture(autouse=True)
def _not_a_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is raised here shall not count as raised in a test."""
    monkeypatch.setattr(whereabouts, "_RUNNERS", ("no such file",))


SCENARIO = Program(name="case", summary="A program.", path="train.py").described()


def report_on(directory: Path, work: Callable[[Instruments], Any], code: int = 0) -> Report:
    trace = watched(directory, work)
    ended = WorkerExit(code=code, timed_out=False, seconds=1.0)
    run = Run(trace=trace, exit=ended, directory=directory, foreign=True)
    return build_report(examine(SCENARIO, run), command="", files={}, next_command="")


def mixed() -> nn.Module:
    """A model whose second layer rejects what the first one returns."""
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16())


def swallowed(_: Any) -> None:
    """A server, a notebook cell, a trainer: the error is printed, and the program ends well."""
    model = mixed()
    for _ in range(3):
        with contextlib.suppress(RuntimeError):
            model(torch.ones(1, 2))


def beside_others(_: Any) -> None:
    """Another model works before, and none after."""
    nn.Linear(2, 2)(torch.ones(1, 2))
    with contextlib.suppress(RuntimeError):
        mixed()(torch.ones(1, 2))


class Product(torch.autograd.Function):
    """Its backward pass multiplies different dtypes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient @ torch.ones(2, 2, dtype=torch.bfloat16)


def in_backward(_: Any) -> None:
    """Each step's forward pass works, no backward pass does."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        with contextlib.suppress(RuntimeError):
            Product.apply(model(torch.ones(1, 2))).sum().backward()  # type: ignore[no-untyped-call]
            optimizer.step()


def guarded(instruments: Instruments) -> None:
    """The error becomes an exit status; a call of the same layer has succeeded in between."""
    layer = nn.Linear(2, 2).bfloat16()
    try:
        try:
            layer(torch.ones(1, 2))
        except RuntimeError:
            layer(torch.ones(1, 2).bfloat16())
            sys.exit(1)
    except SystemExit as leaving:
        instruments.note_behind(leaving)


def outside(_: Any) -> None:
    """An operator of the loss raises in each step, after a model that works."""
    model = nn.Linear(2, 2)
    for _ in range(3):
        with contextlib.suppress(RuntimeError):
            torch.mm(model(torch.ones(1, 2)), torch.ones(2, 2).half())


def beside_other_shapes(_: Any) -> None:
    """The operator that raises returns elsewhere, what it makes of other operands."""
    for _ in range(2):
        with contextlib.suppress(RuntimeError):
            torch.mm(torch.ones(1, 2), torch.ones(2, 2).half())
        torch.mm(torch.ones(3, 2), torch.ones(2, 2))


def of_whole_numbers(_: Any) -> None:
    """A layer is called with whole numbers, and with nothing else."""
    with contextlib.suppress(RuntimeError):
        nn.Linear(2, 2)(torch.ones(1, 2).long())


def probes_with_whole_numbers(_: Any) -> None:
    layer = nn.Linear(2, 2)
    with contextlib.suppress(RuntimeError):
        layer(torch.ones(1, 2).long())
    layer(torch.ones(1, 2))


def probes_outside(_: Any) -> None:
    """An operator is tried once, and then a model runs."""
    with contextlib.suppress(RuntimeError):
        torch.mm(torch.ones(1, 2), torch.ones(2, 2).half())
    nn.Linear(2, 2)(torch.ones(1, 2))


@pytest.mark.release(all_but=3)
@pytest.mark.parametrize(
    ("work", "code", "phase"),
    [
        (swallowed, 0, "forward"),
        (beside_others, 0, "forward"),
        (of_whole_numbers, 0, "forward"),
        (in_backward, 0, "backward"),
        (outside, 0, "forward"),
        (beside_other_shapes, 0, "forward"),
        (guarded, 1, "forward"),
    ],
)
def test_a_failure_that_is_caught_is_found_where_it_is_raised(
    work: Callable[[Instruments], Any], code: int, phase: str, tmp_path: Path
) -> None:
    """The report names it like one that ends the program, and says that the program caught it."""
    report = report_on(tmp_path, work, code)
    finding = report.findings[0]
    assert (report.status, finding.id, finding.phase) == ("findings", "operand-dtype-mismatch", phase)
    assert "was caught by the program." in finding.summary
    assert report.before is not None
    assert ("RuntimeError" in report.before.ended) is False
    assert any("was caught by the program: mat1 and mat2" in line or "same dtype" in line for line in finding.evidence)


class Fallback(nn.Module):
    """Tries one way and takes another one inside of a call."""

    def __init__(self) -> None:
        super().__init__()
        self.fast, self.slow = nn.Linear(2, 2).bfloat16(), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> Any:
        try:
            return self.fast(x)
        except RuntimeError:
            return self.slow(x)


def falls_back(_: Any) -> None:
    """Each call tries the fast way first."""
    model = Fallback()
    for _ in range(3):
        model(torch.ones(1, 2))


def probes(_: Any) -> None:
    """A throw-away model finds out what works; then another one is trained."""
    with contextlib.suppress(RuntimeError):
        mixed()(torch.ones(1, 2))
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def retries(_: Any) -> None:
    """The same model is called again in another dtype."""
    model = nn.Linear(2, 2).bfloat16()
    with contextlib.suppress(RuntimeError):
        model(torch.ones(1, 2))
    model(torch.ones(1, 2).bfloat16())


def falls_back_outside(_: Any) -> None:
    """Each step tries an operator outside of modules in half precision, and takes float32 where it is caught."""
    half, weight = torch.ones(2, 2).half(), torch.ones(2, 2)
    for _ in range(4):
        try:
            half @ weight
        except RuntimeError:
            half.float() @ weight


def falls_back_later(_: Any) -> None:
    """The fallback is another function, called after the exception has been dealt with."""
    probabilities, labels = torch.full((3,), 0.5), torch.ones(3).double()
    for kind in (torch.float32, torch.float64):
        with contextlib.suppress(RuntimeError):
            nn.functional.binary_cross_entropy(probabilities.to(kind), labels)


class Raising(nn.Module):
    def forward(self, x: torch.Tensor, error: Exception) -> torch.Tensor:
        raise error


def others(_: Any) -> None:
    """Out of memory, an iterator's end, and an exception of the program's own are no failures of precision."""
    nn.Linear(2, 2)(torch.ones(1, 2))
    model = Raising()
    memory = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB (dtype float16)")
    for error in (memory, StopIteration(), ValueError("an empty batch"), KeyError("labels")):
        with contextlib.suppress(Exception):
            model(torch.ones(1), error)


GONE_ON_FROM = [
    falls_back,
    falls_back_outside,
    falls_back_later,
    probes,
    probes_with_whole_numbers,
    probes_outside,
    retries,
    others,
]


@pytest.mark.release(all_but=3)
@pytest.mark.parametrize("work", GONE_ON_FROM)
def test_an_exception_that_the_program_goes_on_from_is_no_finding(
    work: Callable[[Instruments], Any], tmp_path: Path
) -> None:
    """A fallback, a probe, a retry and the program's own exceptions leave the run healthy; those about dtypes are noted."""
    report = report_on(tmp_path, work)
    assert (report.status, report.findings) == ("healthy", ())
    assert any("the program caught it and continued" in line for line in report.coverage) == (work is not others)


def trains(_: Any) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def in_a_thread(target: Callable[[], Any]) -> None:
    """Runs it in a thread, and waits for that."""
    thread = threading.Thread(target=target)
    thread.start()
    thread.join()


def test_an_exception_that_ends_a_thread_is_a_finding_whatever_other_threads_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program has not caught it; its own hook is called, once, and stays what it is, and the traceback has no frame of this package."""
    told: list[threading.ExceptHookArgs] = []

    def hook(args: threading.ExceptHookArgs) -> None:
        told.append(args)

    def work(instruments: Instruments) -> None:
        stop = follow_threads(instruments.note_thread_ends)
        monkeypatch.setattr(threading, "excepthook", hook)
        in_a_thread(lambda: mixed()(torch.ones(1, 2)))
        assert threading.excepthook is hook
        stop()
        trains(instruments)

    report = report_on(tmp_path, work)
    finding = report.findings[0]
    assert (report.status, finding.id) == ("findings", "operand-dtype-mismatch")
    assert "ended its thread, while the program continued." in finding.summary
    assert not [line for line in report.coverage if "the program caught it" in line]
    assert [args.exc_type for args in told] == [RuntimeError]
    frames = [frame.filename for frame in traceback.extract_tb(told[0].exc_traceback)]
    assert not [path for path in frames if "/dtypedoctor/instrument/" in path]


def test_an_exception_that_a_future_holds_has_ended_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks for the result is told of it, or nobody; so it is caught. What is raised when nothing follows any more is not recorded."""

    def work(instruments: Instruments) -> None:
        make = threading._make_invoke_excepthook  # type: ignore[attr-defined]
        stop = follow_threads(instruments.note_thread_ends)
        with ThreadPoolExecutor(1) as pool:
            assert isinstance(pool.submit(mixed(), torch.ones(1, 2)).exception(), RuntimeError)
        with monkeypatch.context() as patched:
            patched.setattr(threading, "excepthook", threading.__excepthook__)  # pytest's own takes that for a failure
            in_a_thread(lambda: sys.exit(3))
        stop()
        assert threading._make_invoke_excepthook is make  # type: ignore[attr-defined]
        trains(instruments)

    report = report_on(tmp_path, work)
    assert (report.status, report.findings) == ("healthy", ())
    assert any("the program caught it and continued" in line for line in report.coverage)


def test_a_failure_that_no_rule_explains_is_listed(tmp_path: Path) -> None:
    """The program never gets past it, so that it may not go without a word."""

    def work(_: Instruments) -> None:
        scores = nn.Linear(2, 2)(torch.ones(1, 2))
        with contextlib.suppress(RuntimeError):
            nn.NLLLoss()(scores, torch.zeros(1))

    report = report_on(tmp_path, work)
    assert not report.findings
    assert any("nothing that raised it succeeded later" in line and "Long" in line for line in report.coverage)


def test_an_exception_that_is_caught_in_every_call_is_recorded_a_few_times_only(tmp_path: Path) -> None:
    """A program that raises in every call does not fill its trace."""

    def work(_: Any) -> None:
        model = mixed()
        for _ in range(200):
            with contextlib.suppress(RuntimeError):
                model(torch.ones(1, 2))

    assert 1 <= len(watched(tmp_path, work).all(Caught)) <= 10


def own_words(_: Any) -> None:
    """A program that raises, in a module, an exception with torch's words."""

    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("expected scalar type Half but found Float")

    with contextlib.suppress(RuntimeError):
        Fails()(torch.ones(1))


def test_an_exception_says_whether_a_statement_of_the_program_raised_it(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """What C code raises ends in a call of the innermost frame, what a program raises in its ``raise``; that is no failure of torch's."""
    (of_torch, *_) = watched(tmp_path_factory.mktemp("torch"), swallowed).all(Caught)
    (own, *_) = watched(tmp_path_factory.mktemp("own"), own_words).all(Caught)
    assert (of_torch.by_statement, own.by_statement) == (False, True)
    assert report_on(tmp_path_factory.mktemp("report"), own_words).findings == ()
