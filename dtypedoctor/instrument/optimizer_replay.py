"""An optimizer step that has written inf or NaN into a parameter is made again on copies, under the op trace.

For programs of which no fork can go on. Parameters in float16, their gradients and their state are copied before each step, behind the stream:
float16 is the dtype in which an epsilon rounds to 0 and an update overflows. When a parameter is found not to be finite that was finite before the
step, as its gradient was, the same ``step`` runs on the copies; nothing of the program is touched.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import unwrap
from itertools import zip_longest
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dtypedoctor._torch_private import as_the_program, copy_all, version_of
from dtypedoctor.instrument.frames import source_of
from dtypedoctor.instrument.operators import bytes_of, uncollected
from dtypedoctor.instrument.repeated_call import is_same, share_of_device
from dtypedoctor.instrument.session import Session
from dtypedoctor.instrument.statistics import is_finite, measurable, out_of_their_sight
from dtypedoctor.instrument.untouched import at_moment, make_again
from dtypedoctor.redaction.messages import message_of
from dtypedoctor.trace.events import REPLAY_OF_FAILURES
from dtypedoctor.trace.records.execution import ReplayedCall

if TYPE_CHECKING:
    from dtypedoctor.instrument.optrace import OpTrace

__all__ = ["OptimizerReplays"]

KEPT = 2
"""Steps of which the copies are kept: what a device computes may be known one step later."""
RESERVED = 1 << 17
"""Numbers of the trace that are kept free before each step, for the operators of a replay."""
LEFT_OUT = (
    "copies of all float16 parameters, gradients and states take more than {:,} MiB; --rerun records the optimizer step"
)


@dataclass(slots=True, kw_only=True)
class _Copy:
    """A parameter before the step: the parameter, copies of it and of its gradient, its state, and its version after the step."""

    parameter: Tensor
    value: Tensor
    gradient: Tensor
    state: dict[str, Any]
    version: int = -1

    def is_spoilt(self, after: Tensor) -> bool:
        """Whether the step has made it inf or NaN, which leaves it as ``after``; asks the device, and waits for it."""
        return not is_finite(after) and is_finite(self.value) and is_finite(self.gradient)


@dataclass(slots=True, kw_only=True)
class _Step:
    """An optimizer step as it began.

    Attributes:
        optimizer: which one; the program may want it and its parameters to die.
        cls: its class.
        fields: its attributes.
        groups: its groups of parameters, with the options of then.
        copies: by the identity of the parameter.
        buffers: memory of the copies, for the step after the next.
        number: the first of the numbers that are reserved for it.
        step, call: the position.
        source: the line of the program that has called it.
        is_whole: whether all float16 parameters were copied.
    """

    optimizer: ref[Optimizer]
    cls: type[Optimizer]
    fields: dict[str, Any]
    groups: list[dict[str, Any]]
    copies: dict[int, _Copy]
    buffers: list[Tensor]
    number: int
    step: int
    call: int
    source: str | None
    is_whole: bool

    def spoils(self, later: "_Step | None") -> bool:
        """Whether the step has made a parameter inf or NaN; what it left is what the ``later`` one, if there is one, has begun with."""
        begun_later = later.copies if later is not None else {}
        return any(
            copy.is_spoilt(begun_later[key].value if key in begun_later else copy.parameter)
            for key, copy in self.copies.items()
        )

    def twin(self) -> Optimizer:
        """An optimizer of the same class that has the copies for parameters, and nothing in common with the program's."""
        others = {number: nn.Parameter(copy.value) for number, copy in self.copies.items()}
        twin: Optimizer = object.__new__(self.cls)
        vars(twin).update(self.fields)
        twin.state = defaultdict(dict)
        for number, copy in self.copies.items():
            others[number].grad = copy.gradient
            if copy.state:
                twin.state[others[number]] = copy.state
        twin.param_groups = [
            {**group, "params": [others[id(p)] for p in group["params"] if id(p) in others]} for group in self.groups
        ]
        return twin


class OptimizerReplays:
    """Copies what optimizer steps begin with, and makes the step again that has spoilt a parameter.

    Args:
        session: of the process.
        new_trace: makes an op trace.
        measure: has all parameters measured that were not since the last step.

    Attributes:
        has_explained: whether a step was found that has spoilt a parameter: what is not finite later follows from it.
    """

    def __init__(self, session: Session, new_trace: "Callable[[], OpTrace]", measure: Callable[[], None]) -> None:
        self._session = session
        self._new_trace = new_trace
        self._measure = measure
        self._steps: list[_Step] = []
        self._is_told = False
        self.has_explained = False

    def before_step(self, optimizer: Optimizer) -> None:
        """A step begins: queues the copies, and does not wait for them."""
        if self.has_explained or isinstance(getattr(optimizer, "optimizer", None), Optimizer):
            return  # a wrapper; the optimizer inside tells of itself
        parameters, is_whole = _copied(optimizer)
        if not parameters:
            return
        oldest = self._steps.pop(0) if len(self._steps) >= KEPT else None
        position = self._session.position
        with position.mute(), out_of_their_sight(), torch.no_grad():
            buffers, copies = _copies(optimizer, parameters, oldest.buffers if oldest is not None else [])
        begun = _Step(
            optimizer=ref(optimizer, self._forget),
            cls=type(optimizer),
            fields=dict(vars(optimizer)),
            groups=[dict(group) for group in optimizer.param_groups],
            copies=copies,
            buffers=buffers,
            number=self._session.writer.next_n(RESERVED),
            step=position.step,
            call=position.call,
            source=source_of(sys._getframe()),
            is_whole=is_whole,
        )
        self._steps.append(begun)

    def after_step(self, optimizer: Optimizer) -> None:
        """A step has ended."""
        for begun in self._steps[-1:]:
            if begun.optimizer() is optimizer:
                for copy in begun.copies.values():
                    copy.version = version_of(copy.parameter)

    def _forget(self, optimizer: ref[Optimizer]) -> None:
        """An optimizer has died."""
        self._steps = [begun for begun in self._steps if begun.optimizer is not optimizer]

    def explain(self) -> None:
        """Something is not finite: makes the step again that has spoilt a parameter, if one has. Waits for the device."""
        for begun, later in zip_longest(self._steps, self._steps[1:]):
            if begun.spoils(later):
                self.has_explained = True
                self._measure()
                self._replay(begun)
                self._steps.clear()
                return
        if not all(begun.is_whole for begun in self._steps) and not self._is_told:
            self._is_told = True
            limit = share_of_device() >> 20
            self._session.guard.tell(REPLAY_OF_FAILURES, LEFT_OUT.format(limit))

    def _replay(self, begun: _Step) -> None:
        ops = self._new_trace()
        ops.lines = {source_of(sys._getframe()): begun.source}
        twin = begun.twin()
        session = self._session
        same: list[bool] = []

        def step() -> None:
            with torch.no_grad(), as_the_program():
                unwrap(type(twin).step)(twin)

        again = make_again(
            session,
            step,
            roots=[vars(twin)],
            at=at_moment(session, begun.number, step=begun.step, call=begun.call, overrides=("optimizer",)),
            ops=ops,
            before_undone=lambda _: same.extend(_compared(begun)),
        )
        if again.error is not None and not again.why_not:
            again.why_not = f"its optimizer step raised {message_of(again.error)}"
        if again.why_not:
            session.guard.tell(REPLAY_OF_FAILURES, again.why_not)
            return
        doubt = None if all(same) else "the result of the optimizer step differs from that of its replay"
        session.emit(ReplayedCall(why="optimizer", compared=bool(same), doubt=doubt, copies=True))


def _compared(begun: _Step) -> Iterator[bool]:
    """Whether each parameter that was not written to since has the bits that the replay has made of its copy."""
    for copy in begun.copies.values():
        if version_of(copy.parameter) == copy.version:
            yield is_same(copy.parameter, copy.value)


def _copied(optimizer: Optimizer) -> tuple[list[Tensor], bool]:
    """The parameters that are copied before a step, and whether these are all of float16."""
    narrow = [p for group in optimizer.param_groups for p in group["params"] if p.dtype is torch.float16]
    if not narrow:
        return [], True
    left, is_whole = share_of_device() // KEPT, True
    found = []
    for parameter in filter(_is_at_risk, narrow):
        size = bytes_of([parameter, parameter.grad, *_tensors(optimizer, parameter)])
        if size <= left:
            left -= size
            found.append(parameter)
        else:
            is_whole = False
    return found, is_whole


def _is_at_risk(parameter: Tensor) -> bool:
    """Whether an optimizer step may make a parameter inf or NaN, and plain memory is all that there is of it."""
    is_plain = type(parameter) in (Tensor, nn.Parameter) and measurable(parameter)
    return is_plain and parameter.grad is not None and measurable(parameter.grad)


def _tensors(optimizer: Optimizer, parameter: Tensor) -> list[Tensor]:
    """The state of a parameter as far as it is tensors."""
    return [value for value in optimizer.state.get(parameter, {}).values() if isinstance(value, Tensor)]


def _copies(
    optimizer: Optimizer, parameters: list[Tensor], buffers: list[Tensor]
) -> tuple[list[Tensor], dict[int, _Copy]]:
    """Copies of parameters, their gradients and their states, in ``buffers`` if these fit; the memory that they lie in."""
    sources: list[Tensor] = []
    for parameter in parameters:
        assert parameter.grad is not None
        sources += [parameter.detach(), parameter.grad.detach(), *_tensors(optimizer, parameter)]
    if list(map(_looks, buffers)) != list(map(_looks, sources)):
        buffers = uncollected([torch.empty_like(source) for source in sources])
    copy_all(buffers, sources)
    left = iter(buffers)
    found = {}
    for parameter in parameters:
        value, gradient = next(left), next(left)
        state = dict(optimizer.state.get(parameter, {}))
        state = {key: next(left) if isinstance(held, Tensor) else held for key, held in state.items()}
        found[id(parameter)] = _Copy(parameter=parameter, value=value, gradient=gradient, state=state)
    return buffers, found


def _looks(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.device, tensor.stride()
