"""``compile-off``: what is compiled by torch runs as the Python code that it is."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch

from dtypedoctor._torch_private import COMPILER, asked_for_compiled
from dtypedoctor.worker.conditions.contract import Condition, TookEffect
from dtypedoctor.worker.conditions.patching import replaced


@contextmanager
def _forced_eager(took_effect: TookEffect) -> Iterator[None]:
    owner, name = asked_for_compiled()
    ask = getattr(owner, name)

    @wraps(ask)
    def chosen(callback: Any) -> Any:
        """torch asks this whenever a compiled function is entered; the answer None means that its Python code runs."""
        answer = ask(callback)
        if callback not in (None, False) and answer is None:
            took_effect()
        return answer

    with (
        replaced(owner, name, chosen),
        torch.compiler.set_stance("force_eager"),
    ):
        yield


COMPILE_OFF = Condition(
    id="compile-off",
    switches={COMPILER: _forced_eager},
    without_effect="nothing that torch.compile has made was called",
)
