"""Builds the module of a capsule and what it is called with, by running the script that a capsule is written as.

What the capsule of a stranger names is looked up before anything is made of it, and rejected where it is not what its name says.
"""

import importlib
import inspect
import linecache
import os
import types
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from dtypedoctor._torch_private import OpOverload, schema_of
from dtypedoctor.errors import UsageError
from dtypedoctor.instrument.capture import Operator
from dtypedoctor.instrument.live_call import tensors_of
from dtypedoctor.instrument.settings import Settings
from dtypedoctor.interruptions import contained
from dtypedoctor.replay.allowed import Named
from dtypedoctor.replay.capsule import AGAIN, ALLOW_CODE, CAPSULE_TENSORS, Capsule, read_capsule
from dtypedoctor.replay.script import CannotBeWrittenError, capsule_script

_MACHINERY = frozenset({*dir(nn.Module), *vars(nn.Module()), "_init_flat_weights"}) - {"training"}
"""What every module has: with another forward, or a hook, an instance would do what its class does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What the module of a capsule is called with.

    Attributes:
        args, kwargs: the arguments, on the module's device.
        grad: whether gradients are enabled.
        gradients: by index among the tensors that are returned, the gradient that comes back.
        random: state of the CPU's generator; None where nothing is drawn.
        settings: what torch is set to.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    grad: bool
    gradients: dict[int, Tensor]
    random: Tensor | None
    settings: Settings


class Enclosing(nn.Module):
    """Stands for the modules around the one of the capsule, which so keeps its dotted name.

    Args:
        path: dotted name, of at least one part.
        module: what has this name.
    """

    def __init__(self, path: str, module: nn.Module) -> None:
        super().__init__()
        name, _, rest = path.partition(".")
        self.add_module(name, Enclosing(rest, module) if rest else module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls what is inside."""
        (inner,) = self.children()
        return inner(*args, **kwargs)


_calls: WeakKeyDictionary[nn.Module, Call] = WeakKeyDictionary()


def call_of(model: nn.Module) -> Call:
    """What a model that :func:`load_capsule` has built is called with.

    Raises:
        UsageError: it has built none such.
    """
    if model not in _calls:
        raise UsageError("the model is not the module of a capsule", "Use `dtypedoctor replay CAPSULE`.")
    return _calls[model]


def load_capsule(directory: Path, dtype: torch.dtype, device: torch.device, *, allow_code: bool = False) -> nn.Module:
    """The module of the capsule in ``directory``.

    Args:
        directory: the capsule.
        dtype: in which the tensors are that have the most frequent floating dtype in the capsule.
        device: where it is to be.
        allow_code: run the source text that it holds, and make whatever it names.

    Raises:
        UsageError: it cannot be read, or what it names cannot be imported here, or may not be made.
        MemoryError: there is not enough memory for it; RuntimeError where a tensor asked for it.
    """
    capsule = read_capsule(directory)
    script = types.ModuleType("repro")
    path = str(directory / "repro.py")
    model: Any = None
    with contained() as refused:
        if not allow_code:  # before anything is made; of what was read here, whoever may have looked at the file before
            require_known(capsule)
        _require_room(capsule)
        text = capsule_script(capsule, tensors=CAPSULE_TENSORS)
        linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
        script.__dict__["__file__"] = path
        exec(compile(text, path, "exec"), script.__dict__)  # noqa: S102  (of literals and calls of what is known, or allowed)
        script.__dict__["DEVICE"] = str(device)
        kept = _converted(script, getattr(torch, capsule.dtype), dtype, device)
        for name in capsule.description["requires_grad"]:
            if name in kept and name.startswith("input."):
                kept[name].requires_grad_()
        module, arguments = script.__dict__["module"](kept), script.__dict__["arguments"](kept)
        if capsule.operator is not None:
            module = _operator(capsule, arguments)
        model = _with_call(module, arguments, script, kept, capsule)
    if (error := refused.error) is not None:
        if isinstance(error, UsageError) or is_out_of_memory(error):
            raise error
        if isinstance(error, CannotBeWrittenError):
            raise UsageError(f"{directory}: the call cannot be rebuilt: {error}", AGAIN)
        words = f"{type(error).__name__}: {error}"
        raise UsageError(f"{directory}: the call cannot be rebuilt here: {words}", "Its libraries must be installed.")
    loaded: nn.Module = model
    return loaded


def _require_room(capsule: Capsule) -> None:
    """Rejects what this machine has no memory for, such as a file of a terabyte that takes no room on a disk.

    Raises:
        UsageError: its tensors are larger than the memory, or the file does not hold what it says.
    """
    capsule.tensors()
    room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if capsule.memory > room:
        raise UsageError(
            f"{capsule.directory}: its tensors take {capsule.memory >> 20:,} MiB, and this machine has {room >> 20:,}",
            "Replay it on a larger machine.",
        )


def _operator(capsule: Capsule, arguments: Any) -> nn.Module:
    """The operator of a capsule as a module."""
    op = str(capsule.description["call"]["recipe"]["operator"])
    if not (capsule.operator or {}).get("backward"):
        return Operator(op)
    results = list(tensors_of(Operator(op)(*arguments[0], **arguments[1])))
    return Operator(op, (list(results[0].shape), results[0].dtype))


def _converted(
    script: types.ModuleType, main: torch.dtype, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """The tensors on ``device``, those of dtype ``main`` in ``dtype``."""
    random = script.__dict__.get("RANDOM")
    if dtype is not main:
        script.__dict__["CAST"][main] = dtype
    found = {}
    for name, tensor in script.__dict__["kept"]().items():
        changes = tensor.dtype is main and ".packed" not in name and name != random
        found[name] = tensor if name == random else tensor.to(device, dtype if changes else tensor.dtype)
    return found


def _with_call(
    module: nn.Module, arguments: Any, script: types.ModuleType, kept: dict[str, Tensor], capsule: Capsule
) -> nn.Module:
    trained = set(capsule.description["requires_grad"])
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(f"weight.{name}" in trained or isinstance(module, Operator))
    gradients = {index: kept[key] for (_, index), key in script.__dict__.get("GRADIENTS", {}).items()}
    if isinstance(module, Operator) and module.backward is not None:
        gradients = {0: torch.ones_like(module.zero)}
    model = Enclosing(capsule.fqn, module) if capsule.fqn else module
    _calls[model] = Call(
        args=arguments[0],
        kwargs=arguments[1],
        grad=script.__dict__["GRAD"],
        gradients=gradients,
        random=kept.get("random"),
        settings=Settings.now().with_default_dtype(capsule.description["call"].get("default_dtype", "float32")),
    )
    return model


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation on the CPU failed; torch's allocator raises a plain RuntimeError that only names it."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error))


def require_known(capsule: Capsule) -> None:
    """Looks up everything that ``capsule`` names. It imports modules of known libraries, and makes nothing.

    Raises:
        UsageError: it holds code, or something in it is not on a list, or not what the list says that it is.
        ImportError: a library is not installed, or has no such module.
    """
    for why in capsule.code():
        raise UsageError(f"{capsule.directory}: replaying runs code: {why}", ALLOW_CODE)
    for named in capsule.named():
        if why := _why_not(named):
            raise UsageError(f"{capsule.directory}: replaying runs code: {why}", ALLOW_CODE)


def _why_not(named: Named) -> str:
    """Why something that is on a list may not be made all the same; empty where it may."""
    if named.role == "operator":
        return "" if _computes(named.name) else f"the operator {named.shown}, which does more than compute"
    if named.role == "dtype":
        return "" if isinstance(getattr(torch, named.name, None), torch.dtype) else f"{named.shown}, which is no dtype"
    module_name, _, path = named.name.partition(":")
    name, _, member = path.partition(".")
    module = importlib.import_module(module_name)
    thing = vars(module).get(name)
    if module_name == "torch.nn.functional":
        fits = isinstance(thing, (types.FunctionType, types.BuiltinFunctionType))
        return "" if fits else f"{named.shown}, which is no function"
    is_own = getattr(thing, "__module__", None) == module_name and getattr(thing, "__qualname__", None) == name
    if not is_own or not _fits(named.role, thing, member):
        return f"{named.shown}, which is no {_KINDS[named.role]} that {module_name} defines"
    for attribute in named.attributes:
        if _replaces(thing, attribute):
            return f"the attribute {attribute} of {named.shown}, which replaces a part of the class"
    return ""


_KINDS = {
    "class": "module class", "forward": "forward of a module", "config": "configuration", "mapping": "output class", "object": "class",
    "function": "function",
}  # fmt: skip


def _fits(role: str, thing: Any, member: str) -> bool:
    """Whether something is of the kind that its role says."""
    if role == "function":
        if isinstance(thing, type):  # a class would be made by whoever calls it
            held = vars(thing).get(member)
            return isinstance(held, staticmethod) or (issubclass(thing, Enum) and member in thing.__members__)
        return isinstance(thing, types.FunctionType) and not member
    if not isinstance(thing, type):
        return False
    if role in ("class", "forward"):
        own = isinstance(vars(thing).get("forward"), types.FunctionType) if role == "forward" else True
        return issubclass(thing, nn.Module) and own
    if role == "config":
        return callable(getattr(thing, "from_dict", None)) and not issubclass(thing, nn.Module)
    if role == "mapping":
        return issubclass(thing, dict)
    return not issubclass(thing, (nn.Module, BaseException))


def _replaces(cls: Any, attribute: str) -> bool:
    """Whether an attribute of an instance takes the place of something that the class calls."""
    if issubclass(cls, nn.Module) and attribute in _MACHINERY:
        return True
    present = inspect.getattr_static(cls, attribute, None)
    return callable(present) or isinstance(present, (staticmethod, classmethod))


def _computes(name: str) -> bool:
    """Whether an operator takes or gives tensors, and no name of a file."""
    _, packet, overload = name.split(".")
    operator = getattr(getattr(torch.ops.aten, packet, None), overload, None)
    if not isinstance(operator, OpOverload):
        return False
    schema = schema_of(operator)
    values = [*schema.arguments, *schema.returns]
    return any("Tensor" in str(value.type) for value in values) and all("file" not in value.name for value in values)
