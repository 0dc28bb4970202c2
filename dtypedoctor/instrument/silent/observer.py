"""An observer: the part of a check that watches the program. Any subclass in this package is one, and any that a plug-in names.

Nothing here imports torch, so that the file of a plug-in may hold an observer beside the rule that reads what it writes.
"""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from dtypedoctor.instrument.lifted import Lifted
    from dtypedoctor.instrument.naming import Names
    from dtypedoctor.instrument.operators import Arguments
    from dtypedoctor.instrument.session import Session
    from dtypedoctor.instrument.silent.look import Seen
    from dtypedoctor.instrument.whereabouts import Whereabouts
    from dtypedoctor.trace.records.execution import AutocastRegion

__all__ = ["Observer", "named_parameters_of", "parameters_of"]


class Observer:
    """Watches for one kind of failure. A subclass overrides the moments that it wants to hear of; of all others it is not called.

    Attributes:
        priority: of those that hear of a moment, the one with the smallest number is called first.
        between_looks: whether it hears of steps that are not looked at as well; what it does there is paid for in each step.
        waits_for: names of modules of whose import :meth:`imported` tells.
        checks: all observers of the process (:class:`checks.Checks`); ``checks[Shadows]`` is the one of that class.
        session: where observations go: ``session.emit(record, fqn=...)``, or ``session.once(record, key, fqn)``.
        position: the step and the call that the program is in; with ``position.mute()`` nothing inside is recorded.
        names: dotted names of modules, parameters and buffers.
    """

    priority: ClassVar[int] = 100
    between_looks: ClassVar[bool] = False
    waits_for: ClassVar[Sequence[str]] = ()

    def __init__(self, checks: Any) -> None:
        self.checks = checks
        self.session: Session = checks.session
        self.position = self.session.position
        self.names = self.session.names
        self.whereabouts: Whereabouts = checks.whereabouts
        self._replaced: list[tuple[Any, str, Any]] = []

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Sets an attribute, which has its present value again when the program has ended."""
        self._replaced.append((owner, name, vars(owner)[name]))
        setattr(owner, name, value)

    def put_back(self) -> None:
        """Undoes each :meth:`replace`."""
        while self._replaced:
            owner, name, value = self._replaced.pop()
            setattr(owner, name, value)

    def here(self) -> tuple[str | None, str | None]:
        """``file:line`` of the operator that is running, and the dotted name of the module that it runs in; None outside of modules."""
        return self.whereabouts.line_and_module(sys._getframe(1))

    def start(self) -> None:
        """The program begins."""

    def imported(self, module: str) -> None:
        """The program has imported a module that it waits for."""

    def before_call(self, module: "nn.Module") -> None:
        """An outermost module is called."""

    def returned(self, module: "nn.Module", args: Any, kwargs: Any, output: Any) -> None:
        """An outermost module has returned ``output``."""

    def after_call(self, module: "nn.Module") -> None:
        """An outermost call has ended, in whatever way."""

    def saw(self, seen: "Seen") -> None:
        """An operator has run inside of an outermost call that is looked at: the first ones, and a few later. Modes and autocast are off."""

    def look_ended(self) -> None:
        """The call that was looked at has ended: concludes and forgets."""

    def follows(self, func: Any) -> bool:
        """Whether :meth:`ran` is called with this operator; asked once for each operator of torch that the program uses."""
        return False

    def ran(self, func: Any, arguments: "Arguments", result: Any) -> None:
        """An operator that it :meth:`follows` has run outside of modules."""

    def writing(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An operator outside of modules is about to write to its operands."""

    def lifted(self, made: "Lifted") -> None:
        """Python's numbers have been put into a tensor, and they are known."""

    def before_generate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """``generate`` of transformers is called."""

    def entered(self, region: "AutocastRegion") -> None:
        """An autocast region is entered."""

    def scaled(self, scaled: "Tensor", loss: "Tensor") -> None:
        """A gradient scaler has multiplied ``loss``."""

    def before_backward(self, tensors: "list[Tensor]") -> None:
        """A backward pass from ``tensors`` begins."""

    def after_backward(self) -> None:
        """It has ended."""

    def before_unscale(self, scaler: Any, optimizer: "Optimizer") -> None:
        """A gradient scaler is about to take the scale off the gradients of ``optimizer``."""

    def before_step(self, optimizer: "Optimizer") -> None:
        """An optimizer step begins."""

    def after_step(self, optimizer: "Optimizer") -> None:
        """An optimizer step has ended."""

    def stop(self) -> None:
        """The program has ended: tells what only the end shows."""


def parameters_of(optimizer: "Optimizer") -> "Sequence[Tensor]":
    """All parameters of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def named_parameters_of(optimizer: "Optimizer", names: "Names") -> "list[tuple[str, Tensor]]":
    """The same with their dotted names; those of no known module are named by their group."""
    known = names.parameters()
    return [
        (known.get(id(parameter), (0, f"param_groups.{number}.{index}"))[1], parameter)
        for number, group in enumerate(optimizer.param_groups)
        for index, parameter in enumerate(group["params"])
    ]
