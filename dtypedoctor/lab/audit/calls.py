"""Keeps the calls of kernels that one step of a program makes, and puts each on trial once the step is over."""

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from dtypedoctor._torch_private import operator_classes, operator_namespaces, qualified_name_of
from dtypedoctor.instrument.frames import source_of
from dtypedoctor.instrument.live_call import LiveCall, tensors_of
from dtypedoctor.instrument.naming import dtype_name
from dtypedoctor.interruptions import contained, say
from dtypedoctor.lab.audit.subject import Called, Subject
from dtypedoctor.lab.audit.trials import Trials
from dtypedoctor.lab.audit.verdicts import COMPILED_REGION, FUNCTION, OPERATOR, KernelTried
from dtypedoctor.trace.events import Observed
from dtypedoctor.trace.writer import TraceWriter

FORMS = 2
"""Calls of one kernel that are tried: with other dtypes, numbers of dimensions or switches it may go another way."""
BYTES = 2 << 30
"""Memory that copies of arguments may take."""
SECONDS = 20.0
"""For the trials of one kernel."""


class Audit:
    """Changes a program's process so that its kernels are tried after its first optimizer step, with which it ends; else at its end.

    Args:
        writer: where each kernel is recorded.
        scenario: of the request.
    """

    def __init__(self, writer: TraceWriter, scenario: Mapping[str, Any]) -> None:
        self._writer = writer
        self._kept: dict[tuple[Any, ...], tuple[KernelTried, Subject | None]] = {}
        self._forms: Counter[str] = Counter()
        self._bytes = 0
        self._depth = 0
        self._is_on = False
        self._native = operator_namespaces()
        self._undoing: list[Callable[[], None]] = []

    def begin(self) -> None:
        """Follows every way in which a kernel is called."""
        self._is_on = True
        apply = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]

        # Stands for `Function.apply`; torch's own Functions are left alone.
        def applied(cls: Any, *args: Any, **kwargs: Any) -> Any:
            function, module = partial(apply, cls), str(cls.__module__)
            if module.partition(".")[0] in ("torch", "dtypedoctor"):
                return function(*args, **kwargs)
            return self._called(FUNCTION, f"{module}.{cls.__qualname__}", function, args, kwargs)

        self._replace(torch.autograd.Function, "apply", classmethod(applied))
        for cls in operator_classes():
            self._replace(cls, "__call__", self._calling(cls.__call__))
        self._replace(torch, "compile", self._compiling(torch.compile))
        self._undoing.append(register_optimizer_step_post_hook(self._step_is_over).remove)

    def offer(self, module: nn.Module) -> None:
        """An outermost module is about to be called."""

    def end(self) -> None:
        """Tries what was called, where no optimizer has made a step."""
        self._try_all()
        for undo in self._undoing:
            undo()

    def _calling(self, call: Any) -> Any:
        """Stands for the call of an operator; those that torch brings are left alone."""

        @wraps(call)
        def called(operator: Any, /, *args: Any, **kwargs: Any) -> Any:
            function = partial(call, operator)
            name = qualified_name_of(operator)
            if name.partition("::")[0] in self._native:
                return function(*args, **kwargs)
            return self._called(OPERATOR, name.removesuffix(".default"), function, args, kwargs)

        return called

    def _compiling(self, compile: Any) -> Any:
        """Stands for ``torch.compile``; what it returns is called as before."""

        @wraps(compile)
        def compiling(model: Any = None, *args: Any, **kwargs: Any) -> Any:
            if model is None:
                return lambda model: compiling(model, *args, **kwargs)
            compiled = compile(model, *args, **kwargs)
            name = str(getattr(model, "__qualname__", None) or type(model).__qualname__)
            holder = model if isinstance(model, nn.Module) else getattr(model, "__self__", None)
            forward = compiled.forward if isinstance(compiled, nn.Module) else compiled

            @wraps(forward)
            def called(*args: Any, **kwargs: Any) -> Any:
                module = holder if isinstance(holder, nn.Module) else None
                return self._called(COMPILED_REGION, name, forward, args, kwargs, module)

            if not isinstance(compiled, nn.Module):
                return called
            compiled.forward = called
            return compiled

        return compiling

    def _called(
        self,
        kind: str,
        name: str,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        holder: nn.Module | None = None,
    ) -> Any:
        """Calls a kernel for the program; before that keeps its arguments, unless it is called inside of another one."""
        if not self._is_on or self._depth or torch.compiler.is_compiling():
            return function(*args, **kwargs)
        subject = None
        with contained() as ours:
            subject = self._keep(kind, name, function, args, kwargs, holder)
        if ours.error is not None:
            reason = f"its arguments cannot be kept: {type(ours.error).__name__}: {ours.error}"
            self._kept[kind, name] = KernelTried(kernel=name, kind=kind, not_tried=[reason]), None
        self._depth += 1
        try:
            output = function(*args, **kwargs)
        finally:
            self._depth -= 1
        for index, tensor in enumerate(tensors_of(output) if subject is not None else ()):
            if subject is not None and tensor.requires_grad:
                tensor.register_hook(partial(_consume, subject, index))  # type: ignore[no-untyped-call]
        return output

    def _keep(
        self, kind: str, name: str, function: Callable[..., Any], args: Any, kwargs: Any, holder: nn.Module | None
    ) -> Subject | None:
        tensors = list(tensors_of((list(args), dict(kwargs))))
        floating = [tensor for tensor in tensors if tensor.is_floating_point()]
        values = (*args, *kwargs.values())
        switches = tuple(repr(value) for value in values if isinstance(value, (bool, str, int, torch.dtype)))
        form = tuple((t.dtype, t.dim(), t.requires_grad, t.is_contiguous()) for t in tensors)
        key = (kind, name, form, switches)
        if not floating or key in self._kept or self._forms[name] >= FORMS:
            return None
        about = KernelTried(
            kernel=name,
            kind=kind,
            source=source_of(sys._getframe()),
            dtype=dtype_name(max(floating, key=lambda tensor: torch.finfo(tensor.dtype).eps)),
            shapes=["×".join(map(str, tensor.shape)) or "scalar" for tensor in tensors],
        )
        self._forms[name] += 1
        self._bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        if self._bytes > BYTES:
            about.not_tried.append("copies of its arguments take too much memory; make the batch smaller")
            self._kept[key] = about, None
            return None
        call = LiveCall.entered(Called(function, holder), name, args, kwargs)
        subject = Subject(call, is_compiled=kind == COMPILED_REGION)
        self._kept[key] = about, subject
        return subject

    def _step_is_over(self, *_: Any) -> None:
        if self._is_on:
            self._try_all()
            raise SystemExit(0)  # more steps would tell nothing else

    def _try_all(self) -> None:
        if not self._is_on:
            return
        self._is_on = False
        say(f"dtypedoctor: putting {len(self._kept)} kernel calls on trial …")
        for about, subject in self._kept.values():
            if subject is not None:
                Trials(subject, about, SECONDS).run()
            self._writer.write(Observed(n=self._writer.next_n(), step=1, call=1, phase="forward", what=about))

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        self._undoing.append(partial(setattr, owner, name, vars(owner)[name]))
        setattr(owner, name, value)


def _consume(subject: Subject, index: int, gradient: Tensor) -> None:
    subject.consumed.add(index)
