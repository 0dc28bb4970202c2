"""Notices when a backward pass, an optimizer step, a scaler step or a generation begins and ends.

Functions are wrapped while the watch runs and put back afterwards; the wrapped function is called exactly as it was.
"""

import functools
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from dtypedoctor._torch_private import MODES_CAN_IGNORE_COMPILED
from dtypedoctor.instrument.guard import Guard
from dtypedoctor.instrument.open_calls import steps_running
from dtypedoctor.instrument.position import Position
from dtypedoctor.interruptions import noticing

Listener = Callable[[], None]


class Phases:
    """Keeps ``position.step`` and ``position.phase``.

    Args:
        position: what it keeps.
        guard: keeps the listeners' errors from the program.

    Attributes:
        before_backward: called with the tensors that a backward pass starts from.
        after_backward: called when the outermost backward pass has ended, also by an exception.
        before_step, after_step: called with the optimizer around its step.
        before_unscale: called with the scaler and the optimizer whose gradients are about to be unscaled.
        on_gradients: called with what ``torch.autograd.grad`` returns, where it is called outermost.
        pause, resume: called around all of these, and around what a gradient scaler does.
        settle: called when a backward pass or an optimizer step has begun, and when something was compiled.
        after_scaler: called with the scaler, the optimizer and whether the step was skipped.
        on_failure: called with an exception that leaves a backward pass, a generation or a scaler, once.
        failure: identity of the last exception that left a backward pass, a generation or a scaler, and that phase.
    """

    def __init__(self, position: Position, guard: Guard) -> None:
        self._position = position
        self._guard = guard
        self._undo: list[Callable[[], None]] = []
        self._steps: Counter[int] = Counter()
        self._first = 1
        self._wrapped_generate = False
        self.before_backward: list[Callable[[list[Tensor]], None]] = []
        self.after_backward: list[Listener] = []
        self.before_step: list[Callable[[Optimizer], None]] = []
        self.after_step: list[Callable[[Optimizer], None]] = []
        self.failure: tuple[int, str] = (0, "")
        self.on_failure: list[Callable[[BaseException], None]] = []
        self.before_unscale: list[Callable[[Any, Optimizer], None]] = []
        self.after_scaler: list[Callable[[Any, Optimizer, bool], None]] = []
        self.on_gradients: list[Callable[[Any], None]] = []
        self.pause: Listener = _nothing
        self.resume: Listener = _nothing
        self.settle: Listener = _nothing

    def start(self) -> None:
        """Wraps backward, optimizer and scaler steps of the process."""
        self._wrap(torch.autograd, "backward", self._around_backward)
        self._wrap(torch.autograd, "grad", self._around_backward)
        self._wrap(torch.amp.GradScaler, "step", self._around_scaler_step)
        self._wrap(torch.amp.GradScaler, "unscale_", self._around_unscale)
        if not MODES_CAN_IGNORE_COMPILED:
            self._wrap(torch, "compile", self._around_compile)
        pre = register_optimizer_step_pre_hook(self._pre_step)
        post = register_optimizer_step_post_hook(self._post_step)
        self._undo += [pre.remove, post.remove]

    def stop(self) -> None:
        """Puts everything back as it was."""
        while self._undo:
            self._undo.pop()()
        self._wrapped_generate = False

    def restart(self, step: int) -> None:
        """Training begins anew, with optimizers of its own; its first step is number ``step``."""
        self._steps.clear()
        self._first = step
        self._position.step = step

    def follow_generate(self) -> None:
        """Wraps transformers' ``generate`` once transformers is there; cheap to call again."""
        if self._wrapped_generate:
            return
        utils = sys.modules.get("transformers.generation.utils")
        mixin = getattr(utils, "GenerationMixin", None)
        if mixin is None:
            return
        self._wrapped_generate = True
        self._wrap(mixin, "generate", self._around_generate)

    def _wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        setattr(owner, name, wrapper)
        self._undo.append(lambda: setattr(owner, name, original))

    def _around_backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or self._position.muted:
            if self._position.silenced:
                self._position.silent_work()
            return original(*args, **kwargs)
        first = args[0] if args else kwargs.get("tensors", kwargs.get("outputs"))
        tensors = [first] if isinstance(first, Tensor) else [t for t in (first or ()) if isinstance(t, Tensor)]
        self.forget_ended_steps()
        if not self._position.backward_depth:
            self._tell(self.before_backward, "some losses", tensors)
        self._position.backward_depth += 1
        result = None
        try:
            with self._noting_failure("backward"):
                self.settle()
                result = original(*args, **kwargs)
        finally:
            self._position.backward_depth -= 1
            if not self._position.backward_depth:
                if result is not None:
                    self._tell(self.on_gradients, "some gradients", result)
                self._tell(self.after_backward, "the end of some backward passes")
        return result

    def _around_compile(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What the program compiles runs beside no mode from here on, with a torch that cannot do that."""
        compiled = original(*args, **kwargs)
        self.settle()
        return compiled

    def _around_generate(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        overrides = self._position.overrides
        open_before = len(overrides)
        try:
            with self._noting_failure("generate"):
                overrides.append("generate")
                return original(*args, **kwargs)
        finally:
            del overrides[open_before:]

    def _around_scaler_step(self, original: Callable[..., Any], scaler: Any, optimizer: Any, *args: Any,
                            **kwargs: Any) -> Any:  # fmt: skip
        inner = getattr(optimizer, "optimizer", optimizer)
        before = self._steps[id(inner)]
        self.pause()
        try:
            with self._noting_failure("optimizer"):
                result = original(scaler, optimizer, *args, **kwargs)
        finally:
            self.resume()
        skipped = scaler.is_enabled() and self._steps[id(inner)] == before
        self._tell(self.after_scaler, "the gradient scaler", scaler, inner, skipped)
        if skipped:
            self._count(inner)
        return result

    def _around_unscale(self, original: Callable[..., Any], scaler: Any, optimizer: Any) -> Any:
        self._tell(self.before_unscale, "what the gradient scaler unscales", scaler, optimizer)
        self.pause()
        try:
            with self._noting_failure("optimizer"):
                return original(scaler, optimizer)
        finally:
            self.resume()

    def _noting_failure(self, phase: str) -> noticing:
        return noticing(lambda error: self._note_failure(error, phase))

    def _note_failure(self, error: BaseException, phase: str) -> None:
        if self.failure[0] != id(error):
            self.failure = (id(error), phase)
            self._tell(self.on_failure, "exceptions that the program may have caught", error)

    def forget_ended_steps(self, running: int = 0) -> None:
        """Ends the phase of optimizer steps that an exception has left, of which torch tells nobody.

        Args:
            running: how many optimizer steps are running.
        """
        overrides = self._position.overrides
        while overrides and overrides[-1] == "optimizer" and steps_running() <= running:
            overrides.pop()

    def _pre_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.forget_ended_steps(1)
        self._tell(self.before_step, "gradients before some optimizer steps", optimizer)
        self._position.overrides.append("optimizer")
        self.settle()

    def _post_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._position.overrides:
            self._position.overrides.pop()
        self._tell(self.after_step, "parameters after some optimizer steps", optimizer)
        self._count(optimizer)

    def _tell(self, listeners: list[Any], what: str, *facts: Any) -> None:
        self.pause()
        try:
            for listener in listeners:
                self._guard.shield(listener, what)(*facts)
        finally:
            self.resume()

    def _count(self, optimizer: Optimizer) -> None:
        """Counts a step; with several optimizers (one per network, say) the busiest one gives the step number."""
        self._steps[id(optimizer)] += 1
        self._position.step = max(self._position.step, self._first + self._steps[id(optimizer)])


def _nothing() -> None:
    """Stands for a listener that nobody has named."""
