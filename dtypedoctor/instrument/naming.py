"""Gives modules, parameters and buffers their dotted names and describes packed weights."""

from collections import Counter
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from dtypedoctor.trace.events import ParameterNote, Root
from dtypedoctor.trace.writer import TraceWriter

FULL_LOOK = 16
"""Steps after which all modules are searched again for parameters that were not there before."""


def dtype_name(tensor: Tensor) -> str:
    """The tensor's dtype without the ``torch.`` prefix."""
    return str(tensor.dtype).removeprefix("torch.")


class Names:
    """Numbers the outermost modules and knows the dotted name of everything inside them.

    A module that is later found inside a larger one (a model that is wrapped by an adapter after its first call) keeps
    the name under the root where it was seen first, unless the larger root is added before.

    Attributes:
        version: grows whenever a module gets a name or loses it.
    """

    def __init__(self, writer: TraceWriter) -> None:
        self._writer = writer
        self._names: WeakKeyDictionary[nn.Module, tuple[int, str]] = WeakKeyDictionary()
        self._roots: list[nn.Module | None] = []
        self._noted: dict[tuple[int, str], tuple[str, bool]] = {}
        self._held: list[tuple[dict[str, Any], str, torch.dtype, bool]] = []
        self._glances = 0
        self.version = 0

    @property
    def roots(self) -> tuple[nn.Module, ...]:
        """The outermost modules in the order in which they were added, those that were removed left out."""
        return tuple(root for root in self._roots if root is not None)

    def remove_root(self, module: nn.Module) -> None:
        """Lets go of an outermost module and of everything inside it; does nothing where it is not one."""
        self._roots = [None if root is module else root for root in self._roots]
        self._held = []
        self.version += 1

    def add_alias(self, wrapper: nn.Module, module: nn.Module) -> None:
        """Gives ``wrapper``, through which ``module`` is called (a compiled model, say), the name of ``module``."""
        place = self._names.get(module)
        if place is not None:
            self._names[wrapper] = place
            self.version += 1

    def add_root(self, module: nn.Module) -> None:
        """Numbers ``module`` as an outermost one and names everything inside it."""
        number = len(self._roots)
        self._roots.append(module)
        elements: Counter[str] = Counter()
        for parameter in module.parameters():
            elements[dtype_name(parameter)] += parameter.numel()
        self._name_all(module, number)
        self._writer.write(
            Root(
                root=number, cls=type(module).__name__, modules=sum(1 for _ in module.modules()), dtypes=dict(elements)
            )
        )
        self.note_parameters()

    def _name_all(self, module: nn.Module, number: int) -> None:
        for name, child in module.named_modules():
            self._names[child] = (number, name)
        self.version += 1

    def find(self, module: nn.Module) -> tuple[int, str] | None:
        """Root number and dotted name of ``module``, or None for a module that no root is known to hold."""
        found = self._names.get(module)
        if found is None and self._roots:
            for number, root in enumerate(self._roots):  # modules may have been added after the root was first seen
                if root is not None and any(child is module for child in root.modules()):
                    self._name_all(root, number)
                    return self._names.get(module)
        return found

    def tensors(self) -> Iterator[tuple[int, str, Tensor, nn.Module, bool]]:
        """Every parameter and buffer: root, name, tensor, owner, whether it is a buffer."""
        for number, root in enumerate(self._roots):
            if root is None:
                continue
            for prefix, module in root.named_modules(remove_duplicate=True):
                dot = f"{prefix}." if prefix else ""
                for name, tensor in module._parameters.items():
                    if tensor is not None:
                        yield number, dot + name, tensor, module, False
                for name, buffer in module._buffers.items():
                    if buffer is not None:
                        yield number, dot + name, buffer, module, True

    def note_parameters(self) -> None:
        """Writes a note for every parameter and buffer that is new or whose dtype or requires_grad has changed."""
        self._held = []
        for root, name, tensor, owner, is_buffer in self.tensors():
            holder = owner._buffers if is_buffer else owner._parameters
            self._held.append((holder, name.rpartition(".")[2], tensor.dtype, tensor.requires_grad))
            state = (dtype_name(tensor), tensor.requires_grad)
            if self._noted.get((root, name)) == state:
                continue
            self._noted[root, name] = state
            self._writer.write(
                ParameterNote(
                    n=self._writer.next_n(),
                    root=root,
                    name=name,
                    dtype=state[0],
                    shape=list(tensor.shape),
                    requires_grad=state[1],
                    buffer=is_buffer,
                    owner=type(owner).__name__,
                    quant=quantization_of(tensor, owner),
                )
            )

    def glance_at_parameters(self) -> None:
        """Does the same for a tenth of the time: what was seen before is looked at each time, new names now and then."""
        self._glances += 1
        if self._glances % FULL_LOOK == 0 or any(_changed(*one) for one in self._held):
            self.note_parameters()


def _changed(holder: dict[str, Any], name: str, dtype: torch.dtype, requires_grad: bool) -> bool:
    tensor = holder.get(name)
    return tensor is None or tensor.dtype is not dtype or tensor.requires_grad is not requires_grad


def quantization_of(tensor: Tensor, owner: nn.Module) -> dict[str, Any] | None:
    """Describes bitsandbytes' 4-bit storage of ``tensor``; None for an ordinary tensor.

    Reads attributes only: the packed bytes are never touched.
    """
    state = getattr(tensor, "quant_state", None)
    if state is None:
        return None
    nested = getattr(state, "nested", False)
    offset = getattr(state, "offset", None)
    compute = getattr(owner, "compute_dtype", None)
    return {
        "kind": str(getattr(state, "quant_type", "")),
        "dtype": str(state.dtype).removeprefix("torch."),
        "compute_dtype": str(compute).removeprefix("torch.") if compute is not None else None,
        "storage_dtype": dtype_name(tensor),
        "nested": bool(nested),
        "offset_dtype": dtype_name(offset) if isinstance(offset, Tensor) else None,
        "absmax_dtype": dtype_name(state.absmax),
        "blocksize": int(getattr(state, "blocksize", 0)),
    }
