"""What hangs on the tensors that a script can reach, at each line that it runs outside of module calls."""

from __future__ import annotations

import gc
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

MOST_HITS = 2
"""How often one line is looked at."""
INSIDE = ("torch/nn/modules/module.py", "autograd/graph.py", "autograd/function.py", "torch/_tensor.py")
"""Ends of the files of torch through which it calls the script."""

State = tuple[Any, ...]
"""Line, hit, name and shape of a tensor; its weak references, uses, hooks of its accumulated gradient and attributes; and of a leaf the hooks."""


def noted(path: str, script: Callable[[], None]) -> list[State]:
    """The states of all tensors at the lines of the script at ``path``, which ``script`` runs."""
    states: list[State] = []
    hits: Counter[int] = Counter()

    def enters(frame: FrameType, event: str, _: Any) -> Any:
        return at_line if frame.f_code.co_filename == path and not _is_inside(frame) else None

    def at_line(frame: FrameType, event: str, _: Any) -> Any:
        hits[frame.f_lineno] += event == "line"
        if event == "line" and hits[frame.f_lineno] <= MOST_HITS:
            gc.collect()  # the program's own circles go at other moments where more is allocated
            where = (frame.f_lineno, hits[frame.f_lineno])
            states.extend((*where, *state) for state in _states({**frame.f_globals, **frame.f_locals}))
        return at_line

    gc.freeze()  # what is there already need not be looked through each time
    before = sys.gettrace()
    sys.settrace(enters)
    try:
        script()
    finally:
        sys.settrace(before)
    return states


def _is_inside(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.endswith(INSIDE):
            return True
        frame = frame.f_back
    return False


def _states(values: Mapping[str, Any]) -> Iterator[State]:
    with torch._C.DisableTorchFunctionSubclass():
        for name, tensor in _reached(values).items():
            hooks = len(tensor._backward_hooks or ()) if tensor.is_leaf else 0
            accumulated = len(tensor._post_accumulate_grad_hooks or ())
            held = (len(weakref.getweakrefs(tensor)), tensor._use_count(), sorted(vars(tensor)))
            yield name, tuple(tensor.shape), *held, accumulated, hooks


def _reached(values: Mapping[str, Any]) -> dict[str, Tensor]:
    """Tensors, and those of modules and optimizers, by the first path that leads to them."""
    reached: dict[int, tuple[str, Tensor]] = {}

    def add(name: str, value: Any, deepest: int = 3) -> None:
        if isinstance(value, Tensor) and id(value) not in reached:
            reached[id(value)] = (name, value)
            add(f"{name}.grad", value.grad if value.is_leaf else None)
        elif isinstance(value, nn.Module) and "_modules" in vars(value):  # not while it is being made
            for prefix, module in value.named_modules():
                held = {**module._parameters, **module._buffers}
                for key, tensor in held.items():
                    add(f"{name}.{prefix}.{key}", tensor)
        elif isinstance(value, torch.optim.Optimizer):
            add(f"{name}.state", [list(state.values()) for state in value.state.values()])
        elif deepest and type(value) in (list, tuple):
            for number, item in enumerate(value):
                add(f"{name}.{number}", item, deepest - 1)

    for name, value in values.items():
        if not name.startswith("__"):
            add(name, value)
    return dict(reached.values())
