"""``compile-off``: what is compiled by torch runs as the Python code that it is."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch

from dtypedoctor.worker.conditions.contract import Condition, TookEffect
from dtypedoctor.worker.conditions.patching import replaced


@contextmanager
def _forced_eager(took_effect: TookEffect) -> Iterator[None]:
    from torch._dynamo import eval_frame

    ask = eval_frame._callback_from_stance

    @wraps(ask)
    def _callback_from_stance(callback: Any) -> Any:
        """torch asks this whenever a compiled function is entered; the answer None means that its Python code runs."""
        chosen = ask(callback)
        if callback not in (None, False) and chosen is None:
            took_effect()
        return chosen

    with (
        replaced(eval_frame, "_callback_from_stance", _callback_from_stance),
        torch.compiler.set_stance("force_eager"),
    ):
        yield


COMPILE_OFF = Condition(
    id="compile-off",
    switches={"torch._dynamo": _forced_eager},
    without_effect="nothing that torch.compile has made was called",
)
