"""``with dtypedoctor.watch(model)``: the run directory that it leaves, how the block ends, and what is refused."""

import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from inprocess_parts import OWN_CODE, overflowing, process_state, report_in, trace_in
from torch import Tensor, nn

import dtypedoctor
from dtypedoctor.errors import UsageError
from dtypedoctor.trace.events import Raised


@pytest.fixture
def two_threads() -> Iterator[None]:
    """More than the one that watching could leave behind."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


class BadGradient(torch.autograd.Function):
    """Its backward pass raises."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:  # type: ignore[override]
        raise ValueError("bad gradient", 7)


def test_a_watched_block_leaves_what_exec_leaves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Report, Markdown and trace; the module that overflows is named, and stderr says what to do and where to look."""
    with dtypedoctor.watch(overflowing(), out=tmp_path / "run") as watched:
        assert watched.report is None
        overflowing()(torch.ones(2, 4).half())
    report = report_in(tmp_path / "run")
    assert report["status"] == "findings"
    assert (report["findings"][0]["id"], report["findings"][0]["fqn"]) == ("float16-overflow", "1")
    assert watched.report is not None
    assert watched.report.headline == report["headline"]
    said = capsys.readouterr()
    assert said.out == ""
    headline, advice, where, call = said.err.splitlines()
    assert headline == f"dtypedoctor: {report['headline']}"
    assert advice.startswith("dtypedoctor: do this: Use bfloat16")
    assert where == f"dtypedoctor: report in {watched.directory}"
    assert call.startswith("dtypedoctor: failing call: ")


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize(("largest", "weight"), [(9e5, 1.0), (1.0, 6e4)])
def test_an_input_that_float16_cannot_hold_is_told_from_what_the_model_computes(
    largest: float, weight: float, tmp_path: Path
) -> None:
    """The data may be wrong then, and bfloat16 would hide it."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.no_grad():
        net[0].weight.fill_(weight)
    with dtypedoctor.watch(net, out=tmp_path / "run"), torch.autocast("cpu", dtype=torch.float16):
        net(torch.full((2, 4), largest))
    (finding,) = report_in(tmp_path / "run")["findings"]
    assert finding["id"] == "float16-overflow"
    assert ("It casts the model's input (args.0)" in finding["cause"]) is (largest > weight)


def test_without_a_directory_the_report_lies_under_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks in a row get two directories."""
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        with dtypedoctor.watch():
            nn.Linear(2, 2)(torch.ones(1, 2))
    directories = sorted((tmp_path / "runs").iterdir())
    assert [report_in(directory)["status"] for directory in directories] == ["healthy", "healthy"]


def test_a_decorated_function_is_watched_in_each_call(tmp_path: Path) -> None:
    """It returns what it returned, and each call leaves a report of its own."""
    block = dtypedoctor.watch(out=tmp_path / "run")

    @block
    def double(x: Tensor, *, scale: float = 2.0) -> Tensor:
        """Doubles."""
        return nn.Identity()(x * scale)

    assert double.__doc__ == "Doubles."
    assert double(torch.ones(1)).item() == 2
    assert double(torch.full((1,), 6e4).half(), scale=2).isinf().all()
    assert [report_in(tmp_path / name)["status"] for name in ("run", "run-2")] == ["healthy", "findings"]
    assert block.directory == tmp_path / "run-2"
    assert str(block.report).startswith("findings: ")


def test_a_patch_that_the_program_makes_meanwhile_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has kept to call is ours, which then only passes on."""
    casts: list[nn.Module] = []
    monkeypatch.setattr(nn.Module, "_apply", nn.Module._apply)  # what stands there after the test
    with dtypedoctor.watch(out=tmp_path / "run"):
        before = nn.Module._apply

        def patched(module: nn.Module, *args: object, **kwargs: object) -> nn.Module:
            casts.append(module)
            return before(module, *args, **kwargs)

        monkeypatch.setattr(nn.Module, "_apply", patched)
        nn.Linear(2, 2).half()
    assert nn.Module._apply is patched
    layer = nn.Linear(2, 2).half()
    assert layer.weight.dtype is torch.float16
    assert casts[-1] is layer


def test_a_decorated_function_may_call_itself(tmp_path: Path) -> None:
    """The inner calls are a part of the outer one's recording; inside of another recording so is the whole call."""
    block = dtypedoctor.watch(out=tmp_path / "run")

    @block
    def doubled(x: Tensor, times: int) -> Tensor:
        return doubled(nn.Identity()(x * 2), times - 1) if times else x

    assert doubled(torch.ones(1), 3).item() == 8
    assert report_in(tmp_path / "run")["status"] == "healthy"
    with dtypedoctor.watch(out=tmp_path / "outer"):
        assert doubled(torch.ones(1), 1).item() == 2
    assert report_in(tmp_path / "outer")["status"] == "healthy"
    assert not (tmp_path / "run-2").exists()


def test_a_generator_is_not_decorated() -> None:
    """Its call makes nothing run, so a watched one would say nothing of it."""

    async def later() -> None: ...

    with pytest.raises(UsageError, match="later returns before anything of it has run"):
        dtypedoctor.watch()(later)


def test_an_exception_leaves_the_block_as_it_was_raised(tmp_path: Path) -> None:
    """The same object, arguments and lines of the program; neither its traceback nor the report shows the doctor's frames."""
    error = None
    try:
        with dtypedoctor.watch(out=tmp_path / "run"):
            BadGradient.apply(nn.Linear(2, 2)(torch.ones(1, 2))).sum().backward()
    except ValueError as caught:
        error = caught
    assert error is not None
    assert error.args == ("bad gradient", 7)
    frames = traceback.extract_tb(error.__traceback__)
    assert (frames[0].filename, frames[-1].name) == (__file__, "backward")
    assert not [frame for frame in frames if OWN_CODE in frame.filename and frame.filename != __file__]
    report = report_in(tmp_path / "run")
    assert report["status"] == "error"
    assert "ValueError in step 1 (backward)" in report["headline"]
    raised = trace_in(tmp_path / "run").last(Raised)
    assert raised is not None
    assert raised.frames[-1].endswith(" backward")
    assert not [frame for frame in raised.frames if f"{OWN_CODE}instrument" in frame]


def test_what_python_prints_of_an_exception_does_not_show_the_doctor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trainer's callback is not told of the exception that ends the program: Python prints it before the watch ends."""
    watched = dtypedoctor.watch(out=tmp_path / "run")
    watched.__enter__()
    try:
        BadGradient.apply(nn.Linear(2, 2)(torch.ones(1, 2))).sum().backward()
    except ValueError as error:
        hidden = [
            frame.filename
            for frame in traceback.extract_tb(error.__traceback__)
            if "/instrument/phases" in frame.filename
        ]
        sys.excepthook(type(error), error, error.__traceback__)
        shown = error
    watched.__exit__(None, None, None)
    printed = capsys.readouterr().err
    assert hidden
    assert "ValueError: ('bad gradient', 7)" in printed
    assert f"{OWN_CODE}instrument" not in printed
    assert printed.count("  File ") == len(traceback.extract_tb(shown.__traceback__))
    assert shown.args == ("bad gradient", 7)


@pytest.mark.release(all_but=2)
@pytest.mark.parametrize(("code", "status"), [(0, "healthy"), (None, "healthy"), (3, "error"), ("no data", "error")])
def test_leaving_the_program_inside_the_block_is_no_failure_of_its_own(
    code: int | str | None, status: str, tmp_path: Path
) -> None:
    """`sys.exit` goes through; its status decides what is said."""

    def leave() -> None:
        with dtypedoctor.watch(out=tmp_path / "run"):
            nn.Linear(2, 2)(torch.ones(1, 2))
            sys.exit(code)

    with pytest.raises(SystemExit) as left:
        leave()
    assert left.value.code == code
    report = report_in(tmp_path / "run")
    assert report["status"] == status
    assert status == "healthy" or f"ended with status {code if isinstance(code, int) else 1}" in report["headline"]


def test_an_interrupted_block_says_so(tmp_path: Path) -> None:
    """Ctrl-C goes through and is not called a failure."""

    def be_interrupted() -> None:
        with dtypedoctor.watch(out=tmp_path / "run"):
            nn.Linear(2, 2)(torch.ones(1, 2))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        be_interrupted()
    assert "interrupted" in report_in(tmp_path / "run")["headline"]


@pytest.mark.release(all_but=1)
@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("model", ["a path/to/a model", nn.Linear, torch.ones(2)], ids=["text", "class", "tensor"])
def test_what_is_no_module_is_refused_before_anything_is_touched(model: object, tmp_path: Path) -> None:
    """No directory is made, and the next watch begins as if nothing had been."""
    before = process_state()
    with (
        pytest.raises(UsageError, match=r"is not a torch\.nn\.Module"),
        dtypedoctor.watch(model, out=tmp_path / "run"),  # type: ignore[arg-type]
    ):
        pytest.fail("the block was entered")
    assert not (tmp_path / "run").exists()
    assert process_state() == before
    with dtypedoctor.watch(out=tmp_path / "run"):
        nn.Linear(2, 2)(torch.ones(1, 2))
    assert report_in(tmp_path / "run")["status"] == "healthy"


def test_a_directory_that_exists_is_left_alone(tmp_path: Path) -> None:
    """The block is not entered."""
    (tmp_path / "run").mkdir()
    with pytest.raises(UsageError, match="already exists"), dtypedoctor.watch(out=tmp_path / "run"):
        pytest.fail("the block was entered")
    assert list((tmp_path / "run").iterdir()) == []


def test_a_second_watch_inside_of_one_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    """The message names the run that is being watched."""
    with dtypedoctor.watch(out=tmp_path / "outer"):
        with pytest.raises(UsageError, match="outer"), dtypedoctor.watch(out=tmp_path / "inner"):
            pytest.fail("the block was entered")
        overflowing()(torch.ones(2, 4).half())
    assert not (tmp_path / "inner").exists()
    assert report_in(tmp_path / "outer")["findings"][0]["fqn"] == "1"


@pytest.mark.usefixtures("two_threads")
def test_everything_is_put_back_afterwards(tmp_path: Path) -> None:
    """Functions, hooks, finders of modules and settings are the very same, also after an exception."""
    before = process_state()

    def train() -> None:
        with dtypedoctor.watch(out=tmp_path / "run"):
            model = nn.Linear(2, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            assert process_state() != before
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert process_state() == before


@pytest.mark.usefixtures("two_threads")
def test_a_report_that_cannot_be_written_does_not_replace_the_programs_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the doctor cannot do, the program's exception leaves the block, and the process is watched no longer."""
    (elsewhere := tmp_path / "elsewhere").mkdir()
    monkeypatch.setenv("TMPDIR", str(elsewhere))
    before = process_state()
    block = dtypedoctor.watch(out=tmp_path / "run")

    def fail() -> None:
        with block:
            nn.Linear(2, 2)(torch.ones(1, 2))
            shutil.rmtree(*elsewhere.iterdir())
            raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        fail()
    assert block.report is None
    assert "dtypedoctor: no report" in capsys.readouterr().err
    assert process_state() == before


def test_a_forked_child_leaves_the_block_in_silence(tmp_path: Path) -> None:
    """The report is the parent's; the child's NaN is not in it, but that there was a child is."""
    model = nn.Linear(2, 2)
    block = dtypedoctor.watch(model, out=tmp_path / "run")
    with block:
        child = os.fork()
        if child == 0:
            model(torch.full((1, 2), float("nan")))
            block.__exit__(None, None, None)
            os._exit(int((tmp_path / "run" / "report.json").exists()))
        assert os.waitpid(child, 0)[1] == 0
        model(torch.ones(1, 2))
    report = report_in(tmp_path / "run")
    assert report["findings"] == []
    assert report["status"] == "unknown"  # the child has called a module that nobody has measured
    assert "1 forked process(es): only the process that runs the script is watched" in report["coverage"]


def test_a_program_that_is_started_is_listed_as_not_watched(tmp_path: Path) -> None:
    """With its name; one that was started before the block is not this block's."""
    subprocess.run([sys.executable, "-c", ""], check=True)
    with dtypedoctor.watch(out=tmp_path / "quiet"):
        nn.Linear(2, 2)(torch.ones(1, 2))
    with dtypedoctor.watch(out=tmp_path / "busy"):
        subprocess.run([sys.executable, "-c", ""], check=True)
    assert "started" not in "".join(report_in(tmp_path / "quiet")["coverage"])
    (note,) = [line for line in report_in(tmp_path / "busy")["coverage"] if "started" in line]
    assert Path(sys.executable).name in note


class Wrapping(torch.optim.Optimizer):
    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__([p for group in inner.param_groups for p in group["params"]], {})
        self.inner = inner

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.inner.step()


def stepped(directory: Path, optimizers: list[tuple[torch.optim.Optimizer, nn.Module]], *, infinite: int = 0) -> str:
    """The headline on three iterations in which a gradient scaler steps each optimizer; in the first ``infinite`` the first one's gradient is inf."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with dtypedoctor.watch(out=directory / "run", replay=False):
        for step in range(3):
            for number, (_, model) in enumerate(optimizers):
                scaler.scale(model(torch.ones(2, 4)).square().mean()).backward()
                if step < infinite and not number:
                    next(model.parameters()).grad[0, 0] = float("inf")  # type: ignore[index]
            for optimizer, _ in optimizers:
                scaler.step(optimizer)
            scaler.update()
            for optimizer, _ in optimizers:
                optimizer.zero_grad()
    return str(report_in(directory / "run")["headline"])


def test_the_steps_of_several_optimizers_are_added_up_and_so_are_those_that_are_skipped(tmp_path: Path) -> None:
    """Two optimizers, one of which is skipped twice."""
    models = [nn.Linear(4, 1), nn.Linear(4, 1)]
    headline = stepped(tmp_path, [(torch.optim.SGD(m.parameters(), lr=0.01), m) for m in models], infinite=2)
    assert "completed after 4 steps of 2 optimizers (2 more skipped by the gradient scaler)" in headline


def test_optimizers_that_follow_one_another_are_counted_though_their_steps_have_the_same_numbers(
    tmp_path: Path,
) -> None:
    """The number of the last step is that of the busiest one, and not how many were made."""
    with dtypedoctor.watch(out=tmp_path / "run", replay=False):
        for _ in range(3):
            model = nn.Linear(4, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            for _ in range(2):
                model(torch.ones(2, 4)).square().mean().backward()
                optimizer.step()
    assert "completed after 6 steps of 3 optimizers" in report_in(tmp_path / "run")["headline"]


def test_an_optimizer_that_steps_another_one_is_one_optimizer(tmp_path: Path) -> None:
    """Its steps are not counted twice."""
    model = nn.Linear(4, 1)
    headline = stepped(tmp_path, [(Wrapping(torch.optim.SGD(model.parameters(), lr=0.01)), model)])
    assert "completed after 3 optimizer steps" in headline
