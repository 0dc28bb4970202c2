"""Settings of the whole process that say how precisely torch computes: which line has changed one while the program was running?

A library that sets one to go faster sets it for everything that follows. What is set and set back before the next call changes nothing, and is not told of.
"""

import sys
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dtypedoctor._torch_private import precision_setters
from dtypedoctor.instrument.frames import is_own_file, own_line, users_frame
from dtypedoctor.instrument.live_call import Settings
from dtypedoctor.instrument.silent.observer import Observer
from dtypedoctor.trace.records.silent import GlobalState

if TYPE_CHECKING:
    from dtypedoctor.instrument.silent.checks import Checks

__all__ = ["GlobalStateCheck"]

_READ: dict[str, Callable[[], Any]] = {
    "default dtype": torch.get_default_dtype,
    "float32 matmul precision": torch.get_float32_matmul_precision,
    "cuda.matmul.allow_tf32": lambda: torch.backends.cuda.matmul.allow_tf32,
    "cudnn.allow_tf32": lambda: torch.backends.cudnn.allow_tf32,
    "cuda.matmul.allow_fp16_accumulation": lambda: torch.backends.cuda.matmul.allow_fp16_accumulation,
}
"""The settings, and how each is read."""
_SIDE = 256
"""Of the square matrices whose product is compared."""
_TOLD = 16
"""Changes that are written at most."""


class GlobalStateCheck(Observer):
    """Writes a :class:`GlobalState` for each setting that is another one than at the call before."""

    def __init__(self, checks: "Checks") -> None:
        super().__init__(checks)
        self._keeping = self.session.guard.keeping("changes of torch's global precision")
        self._last: dict[str, str] = {}
        self._settings: Settings | None = None
        self._lines: dict[str, tuple[str, str | None, bool]] = {}
        self._has_run = False
        self._told = 0

    def start(self) -> None:
        """The program begins: follows what sets, wherever it was imported to."""
        self._last, self._settings = _values(), Settings.now()
        for owner, name in precision_setters():
            self.replace(owner, name, self._followed(getattr(owner, name)))

    def _followed(self, setter: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(setter)
        def followed(*args: Any) -> Any:
            before = _values()
            result = setter(*args)
            if not self.position.muted:
                with self._keeping:
                    self._note(before)
            return result

        return followed

    def _note(self, before: dict[str, str]) -> None:
        """Keeps the line that has changed a setting."""
        frame, own = users_frame(sys._getframe()), own_line(sys._getframe())
        if frame is None:
            return
        by_library = not is_own_file(frame.f_code.co_filename)
        source = f"{frame.f_globals.get('__name__', '')}:{frame.f_lineno}" if by_library else own.source if own else ""
        for name, value in _values().items():
            if value != before[name]:
                self._lines[name] = (source, own.source if own else None, by_library)

    def before_call(self, module: nn.Module) -> None:
        """An outermost module is called: what is set now is what it computes with."""
        if self._lines:
            with self._keeping, self.position.aside():
                self._compare(module)
        self._has_run = True

    def _compare(self, module: nn.Module) -> None:
        values, settings = _values(), Settings.now()
        changed = {name: value for name, value in values.items() if value != self._last[name]}
        lines, self._lines = self._lines, {}
        before, self._last = self._last, values
        was, self._settings = self._settings, settings
        if not changed or was is None or self._told >= _TOLD:
            return
        error = _product_moves(module, was) if self._has_run else 0.0
        for name in changed.keys() & lines.keys():
            source, called_at, by_library = lines[name]
            self._told += 1
            self.session.emit(
                GlobalState(
                    setting=name,
                    before=before[name],
                    after=values[name],
                    source=source,
                    called_at=called_at,
                    by_library=by_library,
                    has_run=self._has_run,
                    error=error,
                )
            )


def _values() -> dict[str, str]:
    return {name: _value(read) for name, read in _READ.items()}


def _value(read: Callable[[], Any]) -> str:
    try:
        return str(read()).removeprefix("torch.")
    except (AttributeError, RuntimeError):  # another release, or set by its old and its new name
        return "unknown"


def _product_moves(module: nn.Module, was: Settings) -> float:
    """Largest difference of a float32 product under the settings from before, over its largest magnitude."""
    device = next((tensor.device for tensor in module.parameters()), torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    factor = torch.randn(_SIDE, _SIDE, generator=generator, dtype=torch.float32).to(device)
    with torch.no_grad():
        now = factor @ factor
        with was.in_force():
            moved = (factor @ factor - now).abs().max()
        return float(moved / now.abs().max())
