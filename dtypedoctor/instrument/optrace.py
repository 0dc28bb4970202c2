"""The op trace: every operator inside a window, with its operands, so that the op where a failure is born can be named.

A ``TorchDispatchMode`` runs below autocast and autograd: it sees the dtypes that the kernels really get, in the forward
and in the backward pass alike. While the operands are at hand, an op that turns finite operands into non-finite results
is run again in a wider dtype, and an op that refuses mixed dtypes is run again with equal ones; both are recorded.
"""

import sys
from collections.abc import Iterable, Mapping
from types import FrameType
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from dtypedoctor.instrument.autocast import AutocastLog
from dtypedoctor.instrument.naming import Names, dtype_name
from dtypedoctor.instrument.position import Position
from dtypedoctor.instrument.replay import replay_equal_dtypes, replay_wider
from dtypedoctor.instrument.statistics import Extent, measurable, measure
from dtypedoctor.trace.events import Op, TensorNote
from dtypedoctor.trace.writer import TraceWriter

MAX_OPS = 200_000
"""Ops after which a window closes by itself, so that a forgotten window cannot fill a disk."""

_SKIPPED = frozenset({"aten.detach.default", "aten.alias.default", "aten._local_scalar_dense.default"})


class OpTrace(TorchDispatchMode):
    """Records ops while it is entered. Use :meth:`open` and :meth:`close`; both may be called more than once."""

    def __init__(self, writer: TraceWriter, position: Position, names: Names, autocast: AutocastLog) -> None:
        super().__init__()
        self._writer = writer
        self._position = position
        self._names = names
        self._autocast = autocast
        self._identity = _Identity()
        self._origins: dict[int, tuple[str, str | None]] = {}
        self._parameters: dict[int, str] = {}
        self._ops = 0
        self.is_open = False

    def open(self) -> None:
        """Opens the window."""
        if not self.is_open:
            self.is_open = True
            self._parameters = {id(tensor): name for _, name, tensor, _, _ in self._names.tensors()}
            self.__enter__()

    def close(self) -> None:
        """Closes the window."""
        if self.is_open:
            self.is_open = False
            self.__exit__(None, None, None)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs ``func`` as it is and records it."""
        kwargs = dict(kwargs or {})
        name = str(func)
        if self._position.muted or name in _SKIPPED or self._ops >= MAX_OPS:
            return func(*args, **kwargs)
        self._ops += 1
        operands = [t for t in _flat((args, kwargs)) if isinstance(t, Tensor)]
        with _disable_current_modes():
            inputs = self._notes(operands)
            kept = _keep_mutable(func, args, kwargs)
        n = self._writer.next_n()
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            with _disable_current_modes():
                self._write(
                    n, func, inputs, [], error=str(error).splitlines()[0] if str(error) else type(error).__name__
                )
                replay_equal_dtypes(self._writer, n, func, args, kwargs)
            raise
        with _disable_current_modes():
            outputs = self._notes([t for t in _flat(result) if isinstance(t, Tensor)])
            self._write(n, func, inputs, outputs, scalars=_scalars(args, kwargs))
            if _born(name, inputs, outputs):
                replay_wider(self._writer, n, func, *kept)
        return result

    def _notes(self, tensors: list[Tensor]) -> list[TensorNote]:
        with self._position.mute():
            return [self._note(t, measure([t])[0] if measurable(t) else None) for t in tensors]

    def _note(self, tensor: Tensor, extent: Extent | None) -> TensorNote:
        return TensorNote(
            id=self._identity.of(tensor),
            dtype=dtype_name(tensor),
            shape=list(tensor.shape),
            absmax=extent.absmax if extent else None,
            num_nan=extent.num_nan if extent else 0,
            num_posinf=extent.num_posinf if extent else 0,
            num_neginf=extent.num_neginf if extent else 0,
            name=self._parameters.get(id(tensor)),
        )

    def _write(self, n: int, func: Any, inputs: list[TensorNote], outputs: list[TensorNote], *,
               scalars: list[str] | None = None, error: str | None = None) -> None:  # fmt: skip
        position = self._position
        fqn, source, function = self._place()
        self._writer.write(
            Op(
                n=n,
                step=position.step,
                call=position.call,
                phase=position.phase,
                fqn=fqn,
                op=str(func),
                inputs=inputs,
                outputs=outputs,
                source=source,
                inplace=_is_inplace(func),
                out_variant=any(a.is_out for a in func._schema.arguments),
                function=function,
                autocast=self._autocast.innermost,
                scalars=scalars or [],
                error=error,
            )
        )

    def _place(self) -> tuple[str, str | None, str | None]:
        """Module, source line and custom Function of the op that runs now."""
        source, function = _python_place(sys._getframe(3))
        stack = self._position.stack
        place = self._names.find(stack[-1]) if stack else None
        fqn = place[1] if place else ""
        node = torch._C._current_autograd_node()
        if node is not None and not stack:  # a backward op belongs to the forward op that it differentiates
            known = self._origins.get(node._sequence_nr())
            if known is not None:
                fqn, forward_source = known
                source = source if function else forward_source
        else:
            self._origins[torch._C._autograd._get_sequence_nr()] = (fqn, source)
        return fqn, source, function


class _Identity:
    """Equal numbers for the same tensor in the same version."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[ReferenceType[Tensor], int, int]] = {}
        self._next = 1

    def of(self, tensor: Tensor) -> int:
        version = -1 if tensor.is_inference() else tensor._version
        held = self._known.get(id(tensor))
        if held is not None and held[0]() is tensor and held[1] == version:
            return held[2]
        number = self._next
        self._next += 1
        self._known[id(tensor)] = (ref(tensor), version, number)
        return number


def _flat(value: Any) -> Iterable[Any]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _flat(item)
    elif isinstance(value, dict):
        yield from _flat(list(value.values()))
    else:
        yield value


def _is_inplace(func: Any) -> bool:
    return bool(func._schema.name.split("::")[-1].endswith("_")) and func._schema.is_mutable


def _keep_mutable(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with a copy of everything the op writes to, so that it can be replayed."""
    if not func._schema.is_mutable:
        return args, kwargs
    written = {a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    positions = [a.name for a in func._schema.arguments]
    kept = tuple(
        a.clone() if isinstance(a, Tensor) and i < len(positions) and positions[i] in written else a
        for i, a in enumerate(args)
    )
    return kept, {k: v.clone() if k in written and isinstance(v, Tensor) else v for k, v in kwargs.items()}


def _scalars(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    return [str(v)[:40] for v in _flat((args, kwargs)) if isinstance(v, (bool, int, float, str, torch.dtype))]


def _born(name: str, inputs: list[TensorNote], outputs: list[TensorNote]) -> bool:
    """Whether an op turned finite operands into something else (creating a constant is not that)."""
    measured = [t for t in inputs if t.absmax is not None]
    return bool(measured) and all(t.finite for t in measured) and not all(t.finite for t in outputs)


def _python_place(frame: FrameType | None) -> tuple[str | None, str | None]:
    """``file.py:line`` of the innermost frame that is neither torch's nor the doctor's, and the custom Function it is in."""
    source: str | None = None
    function: str | None = None
    while frame is not None:
        code = frame.f_code
        if code.co_argcount and code.co_varnames[0] == "ctx" and function is None:
            context = frame.f_locals.get("ctx")
            if isinstance(context, FunctionCtx):
                function = type(context).__name__.removesuffix("Backward")
        module = frame.f_globals.get("__name__", "")
        if (
            source is None
            and not module.startswith(("torch.", "dtypedoctor.instrument", "dtypedoctor.worker"))
            and module != "torch"
        ):
            source = f"{code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno}"
        if source is not None and function is not None:
            break
        frame = frame.f_back
    return source, function
