"""What breaks in while an instrument is at work means the program, and reaches it; what the instrument raises does not."""

import gc
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C import _len_torch_dispatch_stack
from torch.utils._python_dispatch import _pop_mode

from dtypedoctor.instrument.instruments import Instruments
from dtypedoctor.trace.events import NotWatched
from dtypedoctor.trace.model import Trace
from tests.instrument.watched import watched

ALARMS = 150


@pytest.fixture(autouse=True)
def no_mode_is_left_to_other_tests() -> Iterator[None]:
    """An interruption may hit torch's own entering of a mode, too; what other tests count must not hold it."""
    yield
    while _len_torch_dispatch_stack():
        _pop_mode()


class Alarm(Exception):  # noqa: N818
    """A program's own time-out."""


class Shutdown(BaseException):
    """A program's own way to end, which no ``except Exception`` may stop."""


def raises(error: type[BaseException], number: int, frame: Any) -> None:
    """The handler itself."""
    raise error


@pytest.fixture
def virtual_alarm() -> Iterator[None]:
    """Puts the handler of SIGVTALRM back (pytest's own time limit has SIGALRM)."""
    before = signal.getsignal(signal.SIGVTALRM)
    yield
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    signal.signal(signal.SIGVTALRM, before)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4)])


def interrupted_training(alarms: int) -> int:
    """Trains until it has been interrupted so often; how often it was told."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def train(steps: int) -> None:
        for _ in range(steps):
            model(torch.randn(2, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    train(2)  # torch imports more of itself meanwhile, and swallows what interrupts that
    signal.signal(signal.SIGVTALRM, partial(raises, Alarm))
    told = 0
    for wait in torch.linspace(5e-4, 1e-2, alarms).tolist():
        try:
            signal.setitimer(signal.ITIMER_VIRTUAL, wait)
            train(5000)
        except Alarm:
            told += 1
        torch.set_grad_enabled(True)  # torch's optimizers leave it off where an exception hits them at the wrong moment
    train(1)
    return told


@pytest.mark.release
def test_a_training_that_is_interrupted_150_times_is_told_150_times(tmp_path: Path, virtual_alarm: None) -> None:
    """No alarm is lost in an instrument, and no trace is broken; phases are right to the end.

    Between two instructions of Python an alarm can come where nothing can be undone: that an instrument has begun and not noted it. So of five
    trainings, of 30 alarms each, two have to have nothing at all to tell of.
    """
    clean = [is_told_of_all(tmp_path / str(number)) for number in range(5)]
    assert sum(clean) >= 2


def is_told_of_all(directory: Path) -> bool:
    """Whether a training that was interrupted shows nothing of it; all its alarms arrive, and its trace is whole."""
    directory.mkdir()
    gc.collect()  # else weak dictionaries of the watch before hear meanwhile of modules that die: Python lets no exception out of that
    told: list[int] = []
    trace = watched(directory, lambda _: told.append(interrupted_training(ALARMS // 5)))
    assert told == [ALARMS // 5]
    assert trace.damage == ()
    outputs = [sample for sample in trace.samples if trace.sites[sample.site].kind == "output"]
    last = max(sample.call for sample in outputs)
    assert last >= ALARMS // 5
    phases = {trace.sites[sample.site].phase for sample in outputs}
    return trace.all(NotWatched) == () and phases == {"forward"} and sum(s.call == last for s in outputs) == 13


def signalled_inside(handler: Any, where: str) -> Callable[[Instruments], None]:
    """Calls a model while a listener of the instruments gets a signal, at the place that is named."""

    def work(instruments: Instruments) -> None:
        signal.signal(signal.SIGVTALRM, handler)
        listeners: list[Any] = getattr(instruments.modules, where)
        listener: Callable[..., None] = lambda *_: signal.raise_signal(signal.SIGVTALRM)
        listeners.append(listener)
        model = net()
        try:
            model(torch.ones(1, 8))
        finally:
            listeners.remove(listener)
            model(torch.ones(1, 8))

    return work


@pytest.mark.release(all_but=2)
@pytest.mark.parametrize("where", ["before_root", "on_return", "after_root"])
@pytest.mark.parametrize("error", [Alarm, RuntimeError, Shutdown, KeyboardInterrupt])
def test_whatever_a_signal_handler_raises_passes(
    tmp_path: Path, virtual_alarm: None, error: type[BaseException], where: str
) -> None:
    """The call raises it, and the next call is watched as a whole."""
    raised: list[BaseException] = []

    def work(instruments: Instruments) -> None:
        try:
            signalled_inside(partial(raises, error), where)(instruments)
        except error as one:
            raised.append(one)

    trace = watched(tmp_path, work)
    assert [type(one) for one in raised] == [error]
    assert trace.all(NotWatched) == ()
    assert len([s for s in trace.samples if s.call == 2]) == 13


def test_what_another_thread_sends_passes(tmp_path: Path) -> None:
    """An exception sent by ``PyThreadState_SetAsyncExc`` while an instrument is at work reaches the program."""
    from ctypes import c_ulong, py_object, pythonapi

    def send(*_: Any) -> None:
        pythonapi.PyThreadState_SetAsyncExc(c_ulong(threading.get_ident()), py_object(Alarm))

    def work(instruments: Instruments) -> None:
        instruments.modules.before_root.append(send)
        with pytest.raises(Alarm):
            net()(torch.ones(1, 8))

    assert watched(tmp_path, work).all(NotWatched) == ()


class Touchy(Tensor):
    """A tensor of a class whose every function raises, once it is told to."""

    armed = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if cls.armed:
            raise Alarm("not for others")
        return super().__torch_function__(func, types, args, kwargs)


class Shows(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x

    def __repr__(self) -> str:
        raise Alarm("no text")


def defect(*_: Any) -> None:
    """Ours."""
    raise ValueError("a defect of an instrument")


def failing_operator(*_: Any) -> None:
    """torch's, because we called it."""
    torch.ones(2, 3) @ torch.ones(2, 3)


def program_code(*_: Any) -> None:
    """The program's, because we asked for its text."""
    repr(Shows())


def touchy_tensor(*_: Any) -> None:
    """The program's, because we computed with it."""
    value = torch.ones(2).as_subclass(Touchy)
    Touchy.armed = True
    try:
        value.sum()
    finally:
        Touchy.armed = False


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("own", [defect, failing_operator, program_code])
def test_what_an_instrument_raises_or_provokes_stays_inside(tmp_path: Path, own: Callable[..., None]) -> None:
    """A defect of ours, an operator's error and what the program's own classes raise because we asked do not reach the program."""

    def work(instruments: Instruments) -> None:
        instruments.modules.before_root.append(own)
        net()(torch.ones(1, 8))

    trace = watched(tmp_path, work)
    (told,) = trace.all(NotWatched)
    assert "dtypedoctor failed there" in told.why


def test_the_class_of_a_tensor_does_not_hear_of_what_an_instrument_computes(tmp_path: Path) -> None:
    """Its ``__torch_function__`` is the program's code."""

    def work(instruments: Instruments) -> None:
        instruments.modules.before_root.append(touchy_tensor)
        net()(torch.ones(1, 8))

    assert not list(watched(tmp_path, work).all(NotWatched))


def abandoned_calls(tmp_path: Path, error: type[BaseException]) -> Trace:
    """The trace of a model whose first call an exception ends, and of two calls of another one."""

    class Stops(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise error

    def work(_: Instruments) -> None:
        with pytest.raises(error):
            nn.Sequential(nn.Linear(8, 8), Stops())(torch.ones(1, 8))
        model = net()
        model(torch.ones(1, 8))
        model(torch.ones(1, 8))

    return watched(tmp_path, work)


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, Alarm])
def test_a_call_that_an_exception_ends_is_over(tmp_path: Path, error: type[BaseException]) -> None:
    """After Ctrl-C in a notebook the next call of any model is an outermost call of its own."""
    trace = abandoned_calls(tmp_path, error)
    calls = {sample.call for sample in trace.samples if trace.sites[sample.site].cls == "GELU"}
    assert calls == {2, 3}


def test_an_optimizer_step_that_raises_is_over(tmp_path: Path) -> None:
    """What runs after it is not counted as part of it."""

    class Fails(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise Alarm

    def work(_: Instruments) -> None:
        model = net()
        with pytest.raises(Alarm):
            Fails(model.parameters(), 1e-3).step()
        model(torch.ones(1, 8)).sum().backward()

    trace = watched(tmp_path, work)
    assert {site.phase for site in trace.sites.values() if site.kind == "output"} == {"forward"}
