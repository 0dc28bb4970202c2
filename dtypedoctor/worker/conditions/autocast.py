"""``autocast-off``: every autocast region is entered disabled, whoever opens it."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.amp.autocast_mode import autocast

from dtypedoctor._torch_private import region_is_on, set_region
from dtypedoctor.worker.conditions.contract import Condition, TookEffect
from dtypedoctor.worker.conditions.patching import replaced


@contextmanager
def _off(took_effect: TookEffect) -> Iterator[None]:
    """Where regions are entered is where all of them meet: with statements, decorators, trainers, custom functions, graphs."""
    enter, leave = autocast.__enter__, autocast.__exit__
    wanted: WeakKeyDictionary[autocast, list[bool]] = WeakKeyDictionary()

    @wraps(enter)
    def __enter__(region: autocast) -> Any:  # noqa: N807
        wanted.setdefault(region, []).append(region_is_on(region))
        set_region(region, False)
        entered = enter(region)
        asked = wanted[region][-1]
        if asked and not torch.is_autocast_enabled(region.device):
            took_effect()
        return entered

    @wraps(leave)
    def __exit__(region: autocast, *how: Any) -> Any:  # noqa: N807
        """A region can be entered again: a decorator's is, at each call."""
        left = leave(region, *how)
        if wanted.get(region):
            set_region(region, wanted[region].pop())
        return left

    with replaced(autocast, "__enter__", __enter__), replaced(autocast, "__exit__", __exit__):
        yield


AUTOCAST_OFF = Condition(
    id="autocast-off",
    switches={"torch": _off},
    without_effect="no autocast region that casts was opened",
)
