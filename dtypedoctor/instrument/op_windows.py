"""Opens and closes the op trace at the moments that a request names."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from dtypedoctor.instrument.optrace import OpTrace
from dtypedoctor.instrument.position import Position
from dtypedoctor.instrument.whereabouts import call_arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class OpWindow:
    """When the op trace is open; see ``dtypedoctor.scenario.request.Window``."""

    call: int
    step: int
    until: str
    early: bool = False
    scaled: bool = False
    eager: bool = False


class OpWindows:
    """Told of calls, backward passes and steps as they begin and end.

    Args:
        ops: the op trace.
        position: shared coordinates.
        windows: when it is to be open.

    Attributes:
        scaled_backward: called with the tensors that a backward pass starts from where a window asks for the experiment.
    """

    def __init__(self, ops: OpTrace, position: Position, windows: Sequence[OpWindow]) -> None:
        self._ops = ops
        self._position = position
        self._windows = [window for window in windows if not window.eager]
        self._open: OpWindow | None = None
        self.scaled_backward: list[Callable[[list[Tensor]], None]] = []

    def start(self) -> None:
        """The program begins: what is made before the first call belongs to it, and to the first step."""
        self._open_early(0)
        self._open_whole(self._position.step)

    def before_call(self, module: nn.Module) -> None:
        """An outermost call begins."""
        if not self._windows:
            return
        call = self._position.call
        if self._is("next-call") and not self._position.backward_depth and not self._waits_for(call):
            self._close()
        for window in self._windows:
            if window.call == call and window.until in self._begins_here():
                self._begin(window)
        if self._ops.is_open:
            self._ops.enter_root(*call_arguments(module))

    def after_call(self) -> None:
        """An outermost call has ended."""
        self._ops.leave_root()
        if not self._position.backward_depth:
            self._open_early(self._position.call)

    def before_backward(self, tensors: list[Tensor]) -> None:
        """A backward pass begins."""
        call = self._position.call
        if any(window.scaled and window.call == call for window in self._windows):
            for listener in self.scaled_backward:
                listener(tensors)
        if self._is("next-call") and not self._waits_for(call + 1):
            self._close()

    def after_backward(self) -> None:
        """A backward pass has ended."""
        if self._is("backward") and not self._waits_for(self._position.call + 1):
            self._close()

    def before_step(self) -> None:
        """An optimizer step begins."""
        for window in self._windows:
            if window.until == "optimizer" and window.step == self._position.step:
                self._begin(window)

    def after_step(self) -> None:
        """An optimizer step has ended, or a loss scaler has skipped it; it is counted in a moment."""
        if self._is("optimizer") and not self._is_to_come():
            self._close()
        self._open_whole(self._position.step + 1)

    def _open_whole(self, step: int) -> None:
        for window in self._windows:
            if window.early and window.until == "optimizer" and window.step == step:
                self._begin(window)

    def _is_to_come(self) -> bool:
        """Whether the open window holds a whole step that is not over before another of several optimizers has taken its own."""
        return self._open is not None and self._open.early and self._position.step <= self._open.step

    def _open_early(self, call: int) -> None:
        for window in self._windows:
            if window.early and window.until != "optimizer" and window.call == call + 1:
                self._begin(window)

    def _begins_here(self) -> tuple[str, ...]:
        """Kinds of windows that an outermost call may open: a block that is recomputed belongs to the backward pass."""
        return ("backward",) if self._position.backward_depth else ("next-call", "backward")

    def _waits_for(self, call: int) -> bool:
        """Whether the open window was opened for a call that has not begun before number ``call``."""
        return self._open is not None and self._open.early and self._open.call >= call

    def _is(self, until: str) -> bool:
        return self._open is not None and self._open.until == until

    def _begin(self, window: OpWindow) -> None:
        if self._open is None:
            self._open = window
            self._ops.open()

    def _close(self) -> None:
        self._open = None
        self._ops.close()
