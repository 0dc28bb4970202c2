"""Keeps what one module was given and made in one call, so that the call can be repeated without the model around it.

Two kinds of capture. Of a **whole** module: its arguments, its parameters and buffers and those of everything in it. Of a
module's **own** arithmetic: its arguments, its own parameters and buffers, and in place of the modules in it what they were
given and what they returned. Written down are tensors (safetensors) and a description (JSON) that names them; how a value is
described stands at :func:`describe`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from dtypedoctor.instrument.position import Position
from dtypedoctor.instrument.recipes import Tensors, describe, recipe
from dtypedoctor.unpatched import to_json

DESCRIPTION, TENSORS = "capture.json", "capture.safetensors"


class Capture:
    """Watches one module of a model until its call comes.

    Args:
        model: the model, corrections installed.
        fqn: dotted name of the module.
        own: keep what the modules in it did, instead of these.
        call: number of the outermost module call.
        position: tells which call is going on.

    Raises:
        KeyError: the model has no such module.
    """

    def __init__(self, model: nn.Module, fqn: str, *, own: bool, call: int, position: Position) -> None:
        self._module = dict(model.named_modules())[fqn]
        self._own = own
        self._call = call
        self._position = position
        self._tensors = Tensors()
        self._depth = 0
        self._found: dict[str, Any] | None = None
        self._undo: list[Callable[[], None]] = []
        self._replace(self._module, self._around)
        if own:
            for name, part in self._module.named_modules():
                if part is not self._module and not _is_container(part):
                    self._replace(part, self._around_part(name))

    def write(self, directory: Path) -> None:
        """Takes the hooks out again and writes ``capture.json`` and ``capture.safetensors``; nothing where the call did not come."""
        while self._undo:
            self._undo.pop()()
        if self._found is None:
            return
        save_file(self._tensors.named(), directory / TENSORS)
        (directory / DESCRIPTION).write_text(to_json(self._found), encoding="utf-8")

    def _replace(self, module: nn.Module, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        present = module.__dict__.get("forward")
        module.forward = around(module.forward)

        def undo() -> None:
            if present is None:
                module.__dict__.pop("forward", None)
            else:
                module.forward = present

        self._undo.append(undo)

    @property
    def _wanted(self) -> bool:
        return self._found is None and self._position.call == self._call and not self._position.muted

    def _around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not self._wanted:
                return original(*args, **kwargs)
            with self._position.mute():
                self._begin(args, kwargs)
            result = original(*args, **kwargs)
            with self._position.mute():
                self._leaving("the output", result)
            return result

        return forward

    def _begin(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        module = self._module
        watched = module.__dict__.pop("forward")
        put_back = self._undo[0]
        put_back()  # the recipe must not hold this watch's own forward
        try:
            described = recipe(module, self._tensors, own=self._own)
        finally:
            module.__dict__["forward"] = watched
        self._found = {
            "recipe": described,
            "own": self._own,
            "args": [describe(value, self._tensors, f"input.{i}") for i, value in enumerate(args)],
            "kwargs": {name: describe(value, self._tensors, f"input.{name}") for name, value in kwargs.items()},
            "training": module.training,
            "grad": torch.is_grad_enabled(),
            "autocast": list(_autocast_regions()),
            "calls": [],
            "leaving": [],
        }

    def _around_part(self, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def around(original: Callable[..., Any]) -> Callable[..., Any]:
            def forward(*args: Any, **kwargs: Any) -> Any:
                if self._depth or self._found is None or self._position.call != self._call or self._position.muted:
                    return original(*args, **kwargs)
                with self._position.mute():
                    self._leaving(f"what {name} is given", (args, kwargs))
                self._depth += 1
                try:
                    result = original(*args, **kwargs)
                finally:
                    self._depth -= 1
                with self._position.mute():
                    self._came_back(name, result)
                return result

            return forward

        return around

    def _came_back(self, name: str, result: Any) -> None:
        assert self._found is not None  # the part is called by the captured module
        number = len(self._found["calls"])
        self._found["calls"].append([name, describe(result, self._tensors, f"{name}.{number}")])

    def _leaving(self, what: str, value: Any) -> None:
        """Notes that tensors leave the frame, and keeps the gradients that come back for them."""
        assert self._found is not None  # the frame has begun
        gradients: dict[str, str] = {}
        self._found["leaving"].append({"what": what, "gradients": gradients})
        place = len(self._found["leaving"]) - 1
        for index, tensor in enumerate(_tensors(value)):
            if tensor.requires_grad:
                tensor.register_hook(self._keep_gradient(gradients, index, f"gradient.{place}.{index}"))

    def _keep_gradient(self, gradients: dict[str, str], index: int, key: str) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            if str(index) not in gradients:
                gradients[str(index)] = self._tensors.keep(key, gradient)

        return hook


def _is_container(module: nn.Module) -> bool:
    return type(module) in (nn.ModuleList, nn.ModuleDict)


def _autocast_regions() -> Iterator[tuple[str, str]]:
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            yield device, str(torch.get_autocast_dtype(device)).removeprefix("torch.")


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors of nested tuples, lists, mappings and simple namespaces, in order: the script that repeats the call counts them alike."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, (Mapping, SimpleNamespace)):
        for item in (vars(value) if isinstance(value, SimpleNamespace) else value).values():
            yield from _tensors(item)
