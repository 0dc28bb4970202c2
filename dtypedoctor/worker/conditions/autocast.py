"""``autocast-off``: every autocast region is entered disabled, whoever opens it."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch.amp.autocast_mode import autocast

from dtypedoctor.worker.conditions.contract import Condition, TookEffect
from dtypedoctor.worker.conditions.patching import replaced


@contextmanager
def _off(took_effect: TookEffect) -> Iterator[None]:
    """Where regions are entered is where all of them meet: with statements, decorators, trainers, custom functions, graphs."""
    enter = autocast.__enter__

    @wraps(enter)
    def __enter__(region: autocast) -> Any:  # noqa: N807
        wanted = region._enabled
        region._enabled = False
        entered = enter(region)
        if wanted and not torch.compiler.is_compiling() and not torch.is_autocast_enabled(region.device):
            took_effect()
        return entered

    with replaced(autocast, "__enter__", __enter__):
        yield


AUTOCAST_OFF = Condition(
    id="autocast-off",
    switches={"torch": _off},
    without_effect="no autocast region that casts was opened",
)
