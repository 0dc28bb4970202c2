"""What loading a state or a pretrained model does to the dtypes of parameters."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

__all__ = ["Pretrained", "RoundedAndTrained", "StateLoaded"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLoaded:
    """A ``load_state_dict`` that cast.

    Attributes:
        casts: elements by ``FROM->TO``.
        became_inf, became_zero: elements that were finite, or not zero, before a cast to a smaller range.
        elements: that were cast to a smaller range.
        names: a few of these tensors.
    """

    KIND: ClassVar[str] = "state-loaded"

    casts: Mapping[str, int]
    became_inf: int
    became_zero: int
    elements: int
    names: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundedAndTrained:
    """Parameters that lost bits when a state was loaded into them, in the groups of an optimizer that is about to step.

    Attributes:
        casts: elements by ``FROM->TO``.
        rounded: elements whose value the cast changed.
        elements: of these parameters.
        parameters: how many.
        names: a few of them.
        mean_change: mean relative change of the values that were rounded.
    """

    KIND: ClassVar[str] = "rounded-and-trained"

    casts: Mapping[str, int]
    rounded: int
    elements: int
    parameters: int
    names: list[str]
    mean_change: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pretrained:
    """A model that transformers' ``from_pretrained`` has loaded.

    Attributes:
        model: its class.
        stored, loaded: elements by dtype, in the checkpoint and in the model.
        requested: dtype that was asked for, or None.
    """

    KIND: ClassVar[str] = "pretrained"

    model: str
    stored: Mapping[str, int]
    loaded: Mapping[str, int]
    requested: str | None
