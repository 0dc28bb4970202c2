"""What ends the program outside of module calls is run again in its frame: the operands of what raised are known then, and the program cannot tell."""

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from watched import watched

from dtypedoctor._torch_private import top_function_mode
from dtypedoctor.diagnosis import diagnose
from dtypedoctor.instrument.instruments import Instruments
from dtypedoctor.trace.events import REPLAY_OF_FAILURES, NotWatched, Op
from dtypedoctor.trace.model import Trace


def ended(directory: Path, work: Callable[[], object]) -> Trace:

    def program(instruments: Instruments) -> None:
        instruments.replay_failures()
        work()

    return watched(directory, program)


def _of_ones(*shape: int) -> Tensor:
    return nn.Linear(4, 4).bfloat16()(torch.ones(*shape, 4, dtype=torch.bfloat16)).detach()


def _exports() -> None:
    scores = _of_ones(2)
    np.histogram((scores[:, 1] - scores[:, 0]).cpu().numpy(), bins=4)


def _exports_in_a_library() -> None:
    np.histogram(_of_ones(2), bins=4)


def _transforms() -> None:
    torch.fft.rfft(_of_ones(2))


def _decomposes() -> None:
    torch.linalg.cholesky(_of_ones(4) + torch.eye(4, dtype=torch.bfloat16))


def _transforms_in_a_comprehension() -> None:
    scale = 2
    _ = [torch.fft.rfft(row * scale) for row in _of_ones(2)]


def _unscales_complex_gradients() -> None:
    weight = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    optimizer, scaler = torch.optim.SGD([weight]), torch.amp.GradScaler("cpu")
    scaler.scale(weight.abs().sum()).backward()
    scaler.step(optimizer)


def _averages_whole_numbers() -> None:
    torch.arange(4).mean()


@pytest.mark.release(all_but=3)
@pytest.mark.parametrize(
    ("work", "dtype"),
    [
        (_exports, "bfloat16"),
        (_exports_in_a_library, "bfloat16"),
        (_transforms, "bfloat16"),
        (_decomposes, "bfloat16"),
        (_transforms_in_a_comprehension, "bfloat16"),
        (_unscales_complex_gradients, "complex64"),
        (_averages_whole_numbers, "int64"),
    ],
)
def test_a_function_without_a_dtype_is_found_outside_of_modules(
    tmp_path: Path, work: Callable[[], object], dtype: str
) -> None:
    """Above the dispatcher or below it, in a library too: it is proven by trying it in another dtype, at the program's own line."""
    finding = diagnose(ended(tmp_path, work))[0]
    assert (finding.id, finding.confidence) == ("unsupported-dtype", "proven")
    assert f"not implemented for {dtype}" in finding.summary
    assert (finding.source or "").startswith("tests/instrument/test_failing_statement.py:") or (
        finding.source or ""
    ).startswith("test_failing_statement.py:")
    assert top_function_mode() is None


def test_operands_that_do_not_meet_outside_of_modules_are_known(tmp_path: Path) -> None:
    """An average in float32 of bfloat16 weights: no message alone says which of them is which."""
    model, average = nn.Linear(4, 4).bfloat16(), torch.zeros(4, 4)

    def work() -> None:
        model(torch.ones(1, 4, dtype=torch.bfloat16))
        with torch.no_grad():
            average.lerp_(model.weight, 0.1)

    finding = diagnose(ended(tmp_path, work))[0]
    assert (finding.id, finding.op) == ("operand-dtype-mismatch", "aten.lerp_.Scalar")
    assert (finding.dtype, finding.confidence) == ("bfloat16", "proven")  # what is written to keeps its dtype


def _writes_what_a_layer_returns() -> None:
    memory = torch.zeros(4, 2, dtype=torch.float16)  # sets float16: zeros
    rows = nn.Linear(3, 2)(torch.ones(2, 3))  # sets float32: Linear
    memory[torch.tensor([0, 1])] = rows * 2


def _adds_what_was_made_elsewhere() -> None:
    def pool(values: Tensor) -> Tensor:
        sums = torch.zeros(2, 2, dtype=torch.float16)  # sets float16: zeros
        return sums.index_add_(0, torch.tensor([0, 1]), values)

    pool((torch.ones(2, 2, dtype=torch.float64) / 3).float().t())  # sets float32: _to_copy


def _calls_a_layer_with_what_was_made_before() -> None:
    layer = nn.Linear(3, 2)  # sets float32: nn.Linear()
    grid = torch.linspace(0, 1, 6, dtype=torch.float64)  # sets float64: linspace
    layer(grid.reshape(2, 3) * 2)


def _calls_a_layer_with_what_numpy_has_promoted() -> None:
    layer = nn.Linear(3, 2).half()  # sets float16: half()
    mean = torch.from_numpy(np.ones(3))
    centered = torch.ones(2, 3).half() - mean  # sets float64: sub
    layer(centered / 2)


@pytest.mark.parametrize(
    "work",
    [
        _writes_what_a_layer_returns,
        _adds_what_was_made_elsewhere,
        _calls_a_layer_with_what_was_made_before,
        _calls_a_layer_with_what_numpy_has_promoted,
    ],
)
def test_the_lines_that_set_two_dtypes_outside_of_modules_are_named(work: Callable[[], None], tmp_path: Path) -> None:
    """The operator that made or cast each, or the module that returned it; what is computed from it in the same dtype hands it on."""
    (found,) = diagnose(ended(tmp_path, work))
    ends = {chain[-1].dtype_out: chain[-1] for chain in (found.provenance, found.met)}
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    for dtype, link in ends.items():
        name, _, number = (link.source or "").rpartition(":")
        assert name == Path(__file__).name
        assert f"# sets {dtype}: " in lines[int(number) - 1]
        assert lines[int(number) - 1].rpartition(": ")[2] in link.op
    assert len(ends) == 2
    assert found.confidence == "proven"


class Averaging(torch.optim.Optimizer):
    """Keeps an average of the gradients, in a dtype of its own."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        (parameter,) = self.param_groups[0]["params"]
        average = self.state.setdefault(parameter, {"average": torch.zeros(4, 1)})["average"]  # sets float32
        average.lerp_(parameter.grad, 0.1)


def test_the_line_that_makes_what_an_optimizer_keeps_is_named(tmp_path: Path) -> None:
    """Of its steps only state is followed, and what begins in them."""

    def work() -> None:
        layer = nn.Linear(1, 4, bias=False).bfloat16()
        layer(torch.ones(2, 1, dtype=torch.bfloat16)).sum().backward()
        Averaging(layer.parameters()).step()

    finding = diagnose(ended(tmp_path, work))[0]
    ends = [chain[-1] for chain in (finding.provenance, finding.met)]
    (source,) = [link.source for link in ends if link.dtype_out == "float32"]
    line = Path(__file__).read_text(encoding="utf-8").splitlines()[int((source or ":0").rpartition(":")[2]) - 1]
    assert "# sets float32" in line


def test_the_regions_that_an_exception_has_left_are_open_again(tmp_path: Path) -> None:
    """The product is bfloat16 because of the region; without it nothing would raise."""

    def work() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            (torch.ones(4, 4) @ torch.ones(4, 4)).numpy()

    assert diagnose(ended(tmp_path, work))[0].id == "unsupported-dtype"


def test_what_is_run_again_changes_nothing(tmp_path: Path) -> None:
    """Memory, versions, lists, random numbers and names are as they were when the program failed."""
    buffer, calls = torch.zeros(2), []

    def noted() -> Tensor:
        calls.append(torch.rand(1))
        return buffer.add_(1).bfloat16()

    with torch.random.fork_rng():
        state: list[Tensor] = []

        def work() -> None:
            state.append(torch.get_rng_state())
            torch.fft.rfft(noted())

        trace = ended(tmp_path, work)
        torch.set_rng_state(state[0])
        torch.rand(1)
        after = torch.rand(1)
    assert diagnose(trace)[0].id == "unsupported-dtype"
    assert (buffer.tolist(), buffer._version, len(calls)) == ([1.0, 1.0], 1, 1)
    assert after.numel() == 1


def _batches() -> Iterator[Tensor]:
    while True:
        yield torch.ones(4).bfloat16()


def test_a_statement_that_takes_from_an_iterator_is_not_run_again(tmp_path: Path) -> None:
    """The program would miss a batch; the report says why nothing was tried."""
    batches = _batches()
    trace = ended(tmp_path, lambda: torch.fft.rfft(next(batches)))
    assert "take the next item" in next(n.why for n in trace.all(NotWatched) if n.what == REPLAY_OF_FAILURES)


def _writes_a_file(path: Path) -> Tensor:
    path.write_text("once")
    return torch.ones(4).bfloat16()


def test_a_statement_that_writes_a_file_is_not_run_again(tmp_path: Path) -> None:
    """What a replay of a module call rejects, that of a statement does too."""
    file = tmp_path / "file"

    def work() -> None:
        torch.fft.rfft(_writes_a_file(file) if not file.exists() else _writes_a_file(tmp_path / "other"))

    (tmp_path / "run").mkdir()
    trace = ended(tmp_path / "run", work)
    assert not (tmp_path / "other").exists()
    assert "outside of the process" in next(n.why for n in trace.all(NotWatched) if n.what == REPLAY_OF_FAILURES)


def test_a_statement_that_may_write_to_a_pipe_is_not_run_again(tmp_path: Path) -> None:
    """What goes through it cannot be taken back."""
    read, write = os.pipe()
    with os.fdopen(read), os.fdopen(write, "w") as pipe:
        held = [pipe]
        trace = ended(tmp_path, lambda: torch.fft.rfft(_of_ones(2) if held[0].writable() else _of_ones(3)))
    assert "a pipe" in next(n.why for n in trace.all(NotWatched) if n.what == REPLAY_OF_FAILURES)


def test_a_statement_that_raises_something_else_the_second_time_shows_nothing(tmp_path: Path) -> None:
    """Its operands are not those of the failure."""
    held = [torch.ones(4).bfloat16()]

    def work() -> None:
        try:
            torch.fft.rfft(held[0])
        finally:
            held[0] = torch.ones(4).half()

    trace = ended(tmp_path, work)
    assert all(op.sentinel or op.error is None for op in trace.all(Op))
