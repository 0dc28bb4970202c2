"""The dotted names of modules, parameters and buffers; packed weights; and which module's forward stands at a line of a file."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dtypedoctor._torch_private import COMPILED_MODULE, buffers_of, parameters_of
from dtypedoctor.instrument.frames import Call
from dtypedoctor.instrument.module_tree import ByModule, attribute_of, modules_in, named_modules, parameters_in
from dtypedoctor.instrument.statistics import measurable
from dtypedoctor.trace.events import ParameterNote, Root
from dtypedoctor.unpatched import unwrap

if TYPE_CHECKING:
    from dtypedoctor.trace.writer import TraceWriter

FULL_LOOK = 16
"""Steps after which all modules are searched again for parameters that were not there before."""


def short_name(dtype: torch.dtype) -> str:
    """``float16``, say, without the ``torch.`` prefix."""
    return str(dtype).removeprefix("torch.")


def dtype_name(tensor: Tensor) -> str:
    """The dtype of ``tensor`` without the ``torch.`` prefix."""
    return str(tensor.dtype).removeprefix("torch.")


class Names:
    """Numbers the outermost modules and knows the dotted name of everything inside them.

    A root that is later found inside a larger one (a model that an adapter is put around after its first call) is absorbed:
    its modules are named from the larger root on, and the trace says how the names before belong to those. A module that two
    roots share keeps the name under the one where it was seen first. Nothing here keeps a module or a tensor alive.

    Attributes:
        version: grows whenever a module gets a name or loses it.
        set_by: tells which line of the program gave a module's own parameter or buffer its dtype.
    """

    def __init__(self, writer: "TraceWriter") -> None:
        self._writer = writer
        self._names: ByModule[tuple[int, str]] = ByModule()
        self._roots: list[ref[nn.Module] | None] = []
        self._noted: dict[tuple[int, str], tuple[str, bool]] = {}
        self._held: list[tuple[ref[nn.Module], bool, str, torch.dtype, bool]] = []
        self._glances = 0
        self.version = 0
        self.set_by: Callable[[nn.Module, str, Tensor], Call | None] = lambda owner, name, tensor: None

    @property
    def roots(self) -> tuple[nn.Module, ...]:
        """The outermost modules that are still there, in the order in which they were added."""
        return tuple(root for _, root in self._living())

    @property
    def count(self) -> int:
        """How many outermost modules there have been."""
        return len(self._roots)

    def _living(self) -> Iterator[tuple[int, nn.Module]]:
        for number, held in enumerate(self._roots):
            root = held() if held is not None else None
            if root is not None:
                yield number, root

    def remove_root(self, module: nn.Module) -> None:
        """Lets go of an outermost module and of everything inside it; does nothing where it is not one."""
        self._roots = [None if held is not None and held() is module else held for held in self._roots]
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
        # Roots inside of it are roots no longer, and have a name in there.
        inside = {id(child): name for name, child in named_modules(module)}
        absorbed = {number: inside[id(root)] for number, root in self._living() if id(root) in inside}
        elements: Counter[str] = Counter()
        for parameter in parameters_in(module):
            elements[dtype_name(parameter)] += 0 if is_lazy(parameter) else parameter.numel()
        self._writer.write(
            Root(
                root=number,
                cls=type(module).__name__,
                modules=sum(1 for _ in modules_in(module)),
                dtypes=dict(elements),
                absorbs={str(inner): name for inner, name in absorbed.items()},
            )
        )
        self._roots.append(ref(module))  # not before: an interruption would leave a root that is described nowhere
        for inner in absorbed:
            self._roots[inner] = None
        self._name_all(module, number, absorbed)
        self.note_parameters()

    def _name_all(self, module: nn.Module, number: int, absorbed: Collection[int] = ()) -> None:
        for name, child in named_modules(module):
            held = self._names.get(child)
            if held is None or held[0] == number or held[0] in absorbed:
                self._names[child] = (number, name)
        self.version += 1

    def find(self, module: nn.Module) -> tuple[int, str] | None:
        """Root number and dotted name of ``module``, or None for a module that no root is known to hold."""
        found = self._names.get(module)
        if found is None and self._roots:
            for number, root in self._living():  # modules may have been added after the root was first seen
                if any(child is module for child in modules_in(root)):
                    self._name_all(root, number)
                    return self._names.get(module)
        return found

    def of_call(self, stack: Sequence[nn.Module]) -> tuple[int, str] | None:
        """Root number and name of the innermost call of ``stack``; None where it is empty.

        A module that no root holds, as one that a hook calls or that is made where it is used, is named after the call around it and its own
        class, and what it holds after it: ``layers.0.Probe().lin``.
        """
        unheld: list[nn.Module] = []
        held = None
        for module in reversed(stack):
            held = self.find(module)
            if held is not None:
                break
            unheld.append(module)
        if not unheld:
            return held

        root, around = held if held is not None else (0, "")
        outermost = unheld[-1]
        inside = next((name for name, child in named_modules(outermost) if child is unheld[0]), None)
        own = f"{type(unheld[0]).__name__}()" if inside is None else f"{type(outermost).__name__}()"
        return root, ".".join(part for part in (around, own, inside) if part)

    def tensors(self) -> Iterator[tuple[int, str, Tensor, nn.Module, bool]]:
        """Every parameter and buffer that has memory: root, name, tensor, owner, whether it is a buffer."""
        for number, root in self._living():
            for prefix, module in named_modules(root):
                dot = f"{prefix}." if prefix else ""
                for name, tensor in parameters_of(module).items():
                    if tensor is not None and not is_lazy(tensor):
                        yield number, dot + name, tensor, module, False
                for name, buffer in buffers_of(module).items():
                    if buffer is not None and not is_lazy(buffer):
                        yield number, dot + name, buffer, module, True

    def parameters(self) -> dict[int, tuple[int, str]]:
        """Root number and dotted name of each parameter that has memory, by the identity of its tensor."""
        return {id(tensor): (root, name) for root, name, tensor, _, is_buffer in self.tensors() if not is_buffer}

    def gradients(self) -> set[int]:
        """Addresses of the gradients that parameters have now."""
        gradients = (
            parameter.grad for *_, parameter, _, is_buffer in self.tensors() if not is_buffer and parameter.is_leaf
        )
        return {gradient.data_ptr() for gradient in gradients if gradient is not None and measurable(gradient)}

    def note_parameters(self) -> None:
        """Writes a note for every parameter and buffer that is new or whose dtype or requires_grad has changed."""
        self._held = []
        for root, name, tensor, owner, is_buffer in self.tensors():
            self._held.append((ref(owner), is_buffer, name.rpartition(".")[2], tensor.dtype, tensor.requires_grad))
            state = (dtype_name(tensor), tensor.requires_grad)
            if self._noted.get((root, name)) == state:
                continue
            made = self.set_by(owner, name.rpartition(".")[2], tensor)
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
                    set_at=made.at if made is not None else None,
                    set_by=made.called if made is not None else "",
                    set_span=made.span if made is not None else [],
                )
            )
            self._noted[root, name] = state

    def glance_at_parameters(self) -> None:
        """Does the same for a tenth of the time: what was seen before is looked at each time, new names now and then."""
        self._glances += 1
        if self._glances % FULL_LOOK == 0 or self._has_changed():
            self.note_parameters()

    def _has_changed(self) -> bool:
        """Whether one of the parameters and buffers that were seen has gone, or looks different."""
        for owner, is_buffer, name, dtype, requires_grad in self._held:
            module = owner()
            if module is None:
                return True
            tensor: Tensor | None = (buffers_of(module) if is_buffer else parameters_of(module)).get(name)
            if tensor is None or tensor.dtype is not dtype or tensor.requires_grad is not requires_grad:
                return True
        return False


def quantization_of(tensor: Tensor, owner: nn.Module, state: Any = None) -> dict[str, Any] | None:
    """Describes bitsandbytes' 4-bit storage of ``tensor``; None for an ordinary tensor.

    Reads attributes only: the packed bytes are never touched.

    Args:
        tensor: the packed bytes.
        owner: the module that holds them.
        state: their quantisation state, where ``tensor`` does not carry it itself.
    """
    state = state if state is not None else getattr(tensor, "quant_state", None)
    if state is None:
        return None
    nested = getattr(state, "nested", False)
    offset = getattr(state, "offset", None)
    compute = attribute_of(owner, "compute_dtype")
    return {
        "kind": str(getattr(state, "quant_type", "")),
        "dtype": short_name(state.dtype),
        "compute_dtype": short_name(compute) if compute is not None else None,
        "storage_dtype": dtype_name(tensor),
        "nested": bool(nested),
        "offset_dtype": dtype_name(offset) if isinstance(offset, Tensor) else None,
        "absmax_dtype": dtype_name(state.absmax),
        "blocksize": int(getattr(state, "blocksize", 0)),
        "shape": list(state.shape) if getattr(state, "shape", None) is not None else None,
    }


class CodePlaces:
    """Knows where the forward methods of the modules that were called stand.

    Args:
        names: gives modules their dotted names.
    """

    def __init__(self, names: Names) -> None:
        self._names = names
        self._spans: dict[str, list[tuple[int, int, str]]] = {}
        self._seen: set[type] = set()
        self._roots: ByModule[None] = ByModule()

    def learn(self, module: nn.Module) -> None:
        """Takes note of an outermost module and of everything in it, at its first call."""
        if module in self._roots:
            return
        self._roots[module] = None
        for child in modules_in(module):
            if type(child) in self._seen:
                continue
            place, code = self._names.find(child), _forward(type(child))
            if place is None or code is None:
                continue
            self._seen.add(type(child))
            last = max((line for _, _, line in code.co_lines() if line is not None), default=code.co_firstlineno)
            fqn = ".".join(part for part in place[1].split(".") if part != COMPILED_MODULE)
            self._spans.setdefault(code.co_filename, []).append((code.co_firstlineno, last, fqn))

    def module_at(self, place: str) -> str | None:
        """Dotted name of the first module whose forward is at ``FILE:LINE`` (anything after a space is ignored)."""
        file, _, line = place.partition(" ")[0].rpartition(":")
        if not line.isdigit():
            return None
        return next((fqn for first, last, fqn in self._spans.get(file, ()) if first <= int(line) <= last), None)


def _forward(cls: type) -> Any:
    """The code object of a class's forward; None where it is no Python function."""
    method = getattr(cls, "forward", None)
    return getattr(unwrap(method), "__code__", None) if callable(method) else None
