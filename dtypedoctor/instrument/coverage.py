"""How much of what ran was really measured, counted while it runs: "healthy" is only said of what was measured."""

from dataclasses import dataclass, fields

from torch import Tensor

from dtypedoctor.trace import events

__all__ = ["Coverage", "holds_no_floats"]

_PLAIN = (type(None), bool, int, str, bytes)
"""Types of values that can neither be inf nor NaN."""
_CONTAINERS = (tuple, list, set, frozenset)


@dataclass(slots=True)
class Coverage:
    """Counts of what ran, each with how much of it was measured. Whoever sees one adds to the first, whoever measures it to the second.

    Attributes:
        module_calls: module calls that ended with a result in steps that are measured; those whose result holds no float are left out.
        operators: operators that ran outside of module calls.
        gradients: gradients of parameters.
        losses: tensors that a backward pass was started from, and other losses that were noticed.
    """

    module_calls: int = 0
    module_calls_measured: int = 0
    operators: int = 0
    operators_measured: int = 0
    gradients: int = 0
    gradients_measured: int = 0
    losses: int = 0
    losses_measured: int = 0

    def record(self) -> events.Coverage:
        """The counts so far, as a record of the trace."""
        return events.Coverage(**{field.name: getattr(self, field.name) for field in fields(self)})


def holds_no_floats(value: object, depth: int = 0) -> bool:
    """Whether nothing in ``value``, the result of a call, can be inf or NaN, as far as can be told without running code of its class."""
    if isinstance(value, _PLAIN):
        return True
    if isinstance(value, Tensor):
        return not (value.is_floating_point() or value.is_complex())
    if type(value) is dict:
        value = list(value.values())
    if depth == 8 or type(value) not in _CONTAINERS:
        return False
    return all(holds_no_floats(item, depth + 1) for item in value)  # type: ignore[attr-defined]
