"""What a gradient scaler finds when it is about to unscale: which parameters, in which dtypes, with or without a gradient."""

from collections import Counter
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from dtypedoctor._torch_private import scale_where_it_lies
from dtypedoctor.instrument.arrivals import Arrivals
from dtypedoctor.instrument.naming import Names, dtype_name
from dtypedoctor.instrument.position import Position
from dtypedoctor.trace.events import Observed, ScalerState
from dtypedoctor.trace.records.values import Unscaled
from dtypedoctor.trace.writer import TraceWriter

MAX_NAMES = 8
"""Parameters named per dtype."""


def scale_of(scaler: Any) -> Tensor | float:
    """The loss scale of a gradient scaler where it lies; ``scaler.get_scale()`` would wait for the device."""
    held = scale_where_it_lies(scaler)
    return held if held is not None else float(scaler.get_scale())


class ScalerLog:
    """Writes a :class:`ScalerState` for each step of a gradient scaler, when the scale has arrived.

    Args:
        writer: where the records go.
        position: shared coordinates.
        arrivals: brings the scale.
    """

    def __init__(self, writer: TraceWriter, position: Position, arrivals: Arrivals) -> None:
        self._writer = writer
        self._position = position
        self._arrivals = arrivals

    def tell(self, scaler: Any, skipped: bool) -> None:
        """``scaler`` has finished a step."""
        n, step = self._writer.next_n(), self._position.step

        def write(scale: float) -> None:
            self._writer.write(ScalerState(n=n, step=step, scale=scale, found_inf=skipped, skipped=skipped))

        self._arrivals.ask(scale_of(scaler), write)


class UnscaleLog:
    """Writes an :class:`Unscaled` for each optimizer, again whenever one of its fields but the scale changes."""

    def __init__(self, writer: TraceWriter, position: Position, names: Names, arrivals: Arrivals) -> None:
        self._writer = writer
        self._position = position
        self._names = names
        self._arrivals = arrivals
        self._last: dict[int, Unscaled] = {}

    def tell(self, scaler: Any, optimizer: Optimizer) -> None:
        """``scaler`` is about to unscale the gradients of ``optimizer``."""
        if not scaler.is_enabled():
            return
        inner = getattr(optimizer, "optimizer", optimizer)
        described = self._describe(inner)
        if self._last.get(id(inner)) == described:
            return
        self._last[id(inner)] = described
        position = self._position
        n, step, call = self._writer.next_n(), position.step, position.call

        def write(scale: float) -> None:
            what = replace(described, scale=scale)
            self._writer.write(Observed(n=n, step=step, call=call, phase="optimizer", what=what))

        self._arrivals.ask(scale_of(scaler), write)

    def _describe(self, optimizer: Optimizer) -> Unscaled:
        """All but the scale, which is still on its way."""
        known = {id(tensor): name for _, name, tensor, _, is_buffer in self._names.tensors() if not is_buffer}
        params: Counter[str] = Counter()
        gradients: Counter[str] = Counter()
        names: dict[str, list[str]] = {}
        frozen = strangers = 0
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            dtype = dtype_name(parameter)
            params[dtype] += 1
            frozen += not parameter.requires_grad
            strangers += id(parameter) not in known
            if parameter.grad is not None:
                gradients[dtype_name(parameter.grad)] += 1
            if dtype in ("float16", "bfloat16") and parameter.requires_grad and id(parameter) in known:
                names.setdefault(dtype, []).append(known[id(parameter)])
        return Unscaled(
            scale=0.0,
            params=dict(params),
            gradients=dict(gradients),
            names={dtype: found[:MAX_NAMES] for dtype, found in names.items()},
            frozen=frozen,
            strangers=strangers,
            optimizer=type(optimizer).__name__,
        )
