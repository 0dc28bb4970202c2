"""``loss-scale-one``: gradient scalers multiply the loss by 1 and leave it at that; they go on skipping steps."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torch import Tensor
from torch.amp import GradScaler

from dtypedoctor._torch_private import SCALER_BEGINS, fix_scale
from dtypedoctor.worker.conditions.contract import Condition, TookEffect
from dtypedoctor.worker.conditions.patching import replaced


@contextmanager
def _at_one(took_effect: TookEffect) -> Iterator[None]:
    build, load, update = GradScaler.__init__, GradScaler.load_state_dict, GradScaler.update
    begin = getattr(GradScaler, SCALER_BEGINS)

    @wraps(build)
    def __init__(scaler: GradScaler, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        build(scaler, *args, **kwargs)
        _pin(scaler)

    @wraps(load)
    def load_state_dict(scaler: GradScaler, state_dict: dict[str, Any]) -> None:
        load(scaler, state_dict)
        _pin(scaler)

    @wraps(begin)
    def begin_at_one(scaler: GradScaler, *args: Any) -> None:
        begin(scaler, *args)  # called once by each scaler that is used: its scale is 1 from here on
        took_effect()

    @wraps(update)
    def update_(scaler: GradScaler, new_scale: float | Tensor | None = None) -> None:
        """A scale that the program names is as much another one as a scale that has grown."""
        update(scaler, None if new_scale is None else 1.0)

    with (
        replaced(GradScaler, "__init__", __init__),
        replaced(GradScaler, "load_state_dict", load_state_dict),
        replaced(GradScaler, SCALER_BEGINS, begin_at_one),
        replaced(GradScaler, "update", update_),
    ):
        yield


def _pin(scaler: GradScaler) -> None:
    if scaler.is_enabled():
        fix_scale(scaler, 1.0)


LOSS_SCALE_ONE = Condition(
    id="loss-scale-one",
    switches={"torch": _at_one},
    without_effect="no enabled GradScaler of torch has scaled a loss",
)
