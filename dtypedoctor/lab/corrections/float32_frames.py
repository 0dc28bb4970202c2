"""Arithmetic of chosen Python frames in float32, whatever dtype their operands have, and float32 storage for what modules hold.

A *frame* is the code of one module's ``forward`` and of the functions that it calls, without the modules that it calls.
Inside, every float16 or bfloat16 operand of a torch function is widened to float32 first, and where the code asks for one
of these dtypes it gets float32. Such a tensor remembers the dtype that it stands for, its *nominal* dtype (an attribute of
the tensor object, which ``.dtype`` answers with inside the frame), and has it again when it leaves for code that is not
kept in float32: :func:`narrow` casts it back and clamps it to the dtype's range, so that a value which was never
too large for float32 does not become inf at the border.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dtypedoctor._torch_private import graph_task, parameters_of, qualified_name
from dtypedoctor.corrections.contract import Counters

HALF = frozenset({torch.float16, torch.bfloat16})


_NOMINAL = "_dtypedoctor_nominal"

_SAME_VALUES = frozenset({
    "alias", "chunk", "clone", "contiguous", "cpu", "cuda", "detach", "diagonal", "expand", "expand_as", "flatten", "flip", "gather",
    "__getitem__", "index_select", "movedim", "narrow", "permute", "repeat", "reshape", "reshape_as", "roll", "select", "split",
    "squeeze", "swapaxes", "t", "take_along_dim", "tensor_split", "transpose", "unbind", "unflatten", "unfold", "unsqueeze",
    "view", "view_as",
})  # fmt: skip
"""Functions that move values without computing: their operands stay as they are, so views stay views."""

_UNTOUCHED = frozenset({
    "__set__", "__delete__", "__repr__", "__format__", "__deepcopy__", "__reduce_ex__", "backward", "data_ptr", "dim", "element_size",
    "get_device", "is_contiguous", "is_floating_point", "numel", "register_hook", "requires_grad_", "retain_grad", "set_", "size",
    "stride", "untyped_storage",
})  # fmt: skip
"""Functions that tell about a tensor or change what is not its values."""

_CASTS: dict[str, torch.dtype | None] = {
    "to": None, "type": None, "type_as": None,
    "half": torch.float16, "bfloat16": torch.bfloat16, "float": torch.float32, "double": torch.float64,
}  # fmt: skip

_IN_PLACE_OPERATORS = frozenset(
    f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "div", "floordiv", "mod", "pow", "matmul")
) | {"__setitem__"}


def nominal(tensor: Tensor) -> torch.dtype:
    """The dtype that ``tensor`` would have if nothing had been widened."""
    found: torch.dtype | None = tensor.__dict__.get(_NOMINAL)
    return tensor.dtype if found is None else found


def set_nominal(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Notes that ``tensor`` stands for one of ``dtype``; None, or its own dtype, takes the note back."""
    if dtype is None or tensor.dtype is dtype:
        tensor.__dict__.pop(_NOMINAL, None)
    else:
        tensor.__dict__[_NOMINAL] = dtype
    return tensor


def is_narrow(value: object) -> bool:
    """Whether ``value`` is a float16 or bfloat16 tensor of numbers (packed storage may have such a dtype, too)."""
    return isinstance(value, Tensor) and value.dtype in HALF and not hasattr(value, "quant_state")


def widen(tensor: Tensor) -> Tensor:
    """A float16 or bfloat16 tensor in float32, differentiable, with its dtype as the nominal one."""
    return set_nominal(tensor.float(), tensor.dtype)


def narrow(tensor: Tensor, counters: Counters) -> Tensor:
    """A widened tensor in its nominal dtype; any other tensor as it is.

    Finite values beyond the range of the dtype become its largest ones, with zero gradient, and count as ``clamped``;
    inf and NaN stay what they are.
    """
    dtype = nominal(tensor)
    if dtype is tensor.dtype:
        return tensor
    limit = torch.finfo(dtype).max
    finite = torch.isfinite(tensor)
    counters.add("clamped", finite & (tensor.abs() > limit))
    return torch.where(finite, tensor.clamp(-limit, limit), tensor).to(dtype)


def mapped(value: Any, change: Callable[[Tensor], Tensor], depth: int = 0) -> Any:
    """``value`` with every tensor in its tuples, lists and mappings changed, to a depth of 4.

    Mappings are changed in place, since transformers' outputs are mappings of their own kind. Other objects, key-value
    caches for example, are left alone.
    """
    if isinstance(value, Tensor):
        return change(value)
    if depth == 4:
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(item, change, depth + 1) for item in value))
    if type(value) in (tuple, list):
        return type(value)(mapped(item, change, depth + 1) for item in value)
    if isinstance(value, dict):
        _map_in_place(value, change, depth + 1)
    return value


def _map_in_place(values: dict[Any, Any], change: Callable[[Tensor], Tensor], depth: int) -> None:
    for key, item in list(values.items()):
        new = mapped(item, change, depth)
        if new is not item:
            values[key] = new


def inside(value: Any) -> list[Tensor]:
    """The tensors that :func:`mapped` finds, in order."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    mapped(value, note)
    return found


class CallNotes:
    """What the arguments of one module stood for when a kept frame called it last.

    Activation checkpointing runs a frame again in the backward pass, but only the plain code of it, on equal tensors that
    are other objects. The modules called there find out by this that they are called from a kept frame all the same.
    """

    def __init__(self) -> None:
        self._dtypes: list[torch.dtype] | None = None
        self.autocast: tuple[tuple[str, torch.dtype], ...] = ()
        """The autocast regions that the kept frame was called in, kept here for whoever needs them again."""

    def take(self, arguments: Any) -> None:
        """A kept frame calls: notes the nominal dtypes of the tensors in ``arguments``, in order."""
        self._dtypes = [nominal(tensor) for tensor in inside(arguments)]

    def restore(self, arguments: Any) -> bool:
        """Without a kept frame around: whether this repeats a call from one, in a backward pass.

        If so, and if ``arguments`` has as many tensors as were noted, its float32 tensors get their nominal dtypes again.
        """
        if self._dtypes is None or graph_task() == -1:
            return False
        tensors = inside(arguments)
        if len(tensors) != len(self._dtypes):
            return False
        for tensor, dtype in zip(tensors, self._dtypes, strict=True):
            if tensor.dtype is torch.float32:
                set_nominal(tensor, dtype)
        return True


class Float32Frame(TorchFunctionMode):
    """While entered and not suspended, torch functions compute in float32.

    Operators of other libraries (``torch.ops.NAMESPACE.*``) get their operands as they are. An in-place function on a
    narrow tensor computes in float32 and writes the rounded result, held within the range, into that tensor.

    Args:
        counters: receives ``clamped``.

    Attributes:
        suspended: while positive, everything passes unchanged (a module that is not kept in float32 is running).
    """

    def __init__(self, counters: Counters) -> None:
        super().__init__()
        self.suspended = 0
        self._counters = counters

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Calls ``func`` with widened operands."""
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if self.suspended or (name in _UNTOUCHED or qualified_name(func).split("::")[0] not in ("aten", "prims")):
            return func(*args, **kwargs)
        if name == "__get__":
            # a property of a tensor: ``dtype`` is the nominal one, and views such as ``T`` and ``data`` keep it
            if getattr(getattr(func, "__self__", None), "__name__", "") == "dtype":
                return nominal(args[0])
            found = func(*args)
            return _described(found, nominal(args[0])) if isinstance(found, Tensor) else found
        if name in _CASTS and isinstance(next(iter(args), None), Tensor):
            return _cast(func, name, args, kwargs)
        if name in _SAME_VALUES:
            return _described(func(*args, **kwargs), _promoted(args, kwargs))
        if _is_in_place(name, kwargs):
            return self._in_place(func, args, kwargs)
        expected = _promoted(args, kwargs)
        asked = kwargs.get("dtype")
        if isinstance(asked, torch.dtype):  # also of functions that make tensors out of nothing
            expected = asked
            kwargs["dtype"] = torch.float32 if asked in HALF else asked
        return _described(func(*_widened(args), **_widened(kwargs)), expected)

    def _in_place(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        target = args[0] if args else None
        if not is_narrow(target):
            return func(*_widened(args), **_widened(kwargs))
        assert isinstance(target, Tensor)  # a narrow value is one
        wide = widen(target)
        func(wide, *_widened(args[1:]), **_widened(kwargs))
        target.copy_(narrow(wide, self._counters))
        return target


def _is_in_place(name: str, kwargs: Mapping[str, Any]) -> bool:
    if name in _IN_PLACE_OPERATORS or kwargs.get("out") is not None or kwargs.get("inplace"):
        return True
    return name.endswith("_") and not name.endswith("__")


def _cast(func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A cast that the code asks for: of one to a narrow dtype only a note is taken."""
    source = args[0]
    wanted = _CASTS[name] or _requested(args[1:], kwargs)
    if wanted is None:  # moved to another device, or named by a string
        return _described(func(*args, **kwargs), nominal(source))
    if wanted not in HALF and wanted is not torch.float32:
        return func(*args, **kwargs)
    wide = (_moved(source, args[1:], kwargs) if name == "to" else source).float()
    return set_nominal(wide.view_as(wide), wanted)  # the note belongs to the object, so this needs one of its own


def _moved(source: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``source.to()`` with everything that was asked for but the dtype."""
    options = {key: value for key, value in kwargs.items() if key not in ("dtype", "other")}
    places = [a.device if isinstance(a, Tensor) else a for a in args if not isinstance(a, torch.dtype)]
    return source.to(*places, **options) if places or options else source


def _requested(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.dtype | None:
    """The dtype that a cast names, directly or by the example of another tensor."""
    for value in (*args, kwargs.get("dtype"), kwargs.get("other")):
        if isinstance(value, torch.dtype):
            return value
        if isinstance(value, Tensor):
            return nominal(value)
    return None


def _widened(value: Any) -> Any:
    """Operands with the narrow ones among them in float32; nested lists such as those of ``torch.cat`` included."""
    if isinstance(value, Tensor):
        return widen(value) if is_narrow(value) else value
    if type(value) in (tuple, list):
        return type(value)(_widened(item) for item in value)
    if type(value) is dict:
        return {key: _widened(item) for key, item in value.items()}
    return value


def _described(result: Any, expected: torch.dtype | None) -> Any:
    """Notes on float32 results that they stand for ``expected``."""
    if expected is not None and expected in HALF:
        for tensor in _tensors(result):
            if tensor.dtype is torch.float32:
                set_nominal(tensor, expected)
    return result


def _promoted(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.dtype | None:
    """The dtype that torch's type promotion gives for the operands' nominal dtypes; None without floating operands."""
    with_shape: torch.dtype | None = None
    scalar: torch.dtype | None = None
    for tensor in _tensors((args, tuple(kwargs.values()))):
        dtype = nominal(tensor)
        if not dtype.is_floating_point:
            continue
        if tensor.dim():
            with_shape = dtype if with_shape is None else torch.promote_types(with_shape, dtype)
        else:
            scalar = dtype if scalar is None else torch.promote_types(scalar, dtype)
    return with_shape or scalar


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        items: Iterable[Any] = value
        for item in items:
            yield from _tensors(item)


@dataclass(frozen=True, slots=True, kw_only=True)
class Widened:
    """What was changed.

    Attributes:
        tensors: how many parameters and buffers got float32 storage.
        shared: how many did not because a module outside holds them, too (a tied embedding).
        put_back: restores every dtype; values trained since are rounded to it.
    """

    tensors: int
    shared: int
    put_back: Callable[[], None]


def widen_storage(model: nn.Module, modules: Sequence[nn.Module]) -> Widened:
    """Gives the own parameters and buffers of ``modules`` float32 storage, with the dtype they had as the nominal one.

    bitsandbytes' 4-bit linears keep their packed weights and dequantize to float32.

    Args:
        model: all of it, to find out which tensors are shared.
        modules: modules of it; only what they hold directly is changed.
    """
    inside = {id(module) for module in modules}
    owners: defaultdict[int, set[int]] = defaultdict(set)
    for module in model.modules():
        for tensor in _held(module):
            owners[id(tensor)].add(id(module))
    found = {id(tensor): tensor for module in modules for tensor in _held(module) if is_narrow(tensor)}
    shared = {key for key in found if not owners[key] <= inside}
    dtypes = {key: tensor.dtype for key, tensor in found.items() if key not in shared}
    for key, dtype in dtypes.items():
        _store(found[key], torch.float32, nominal=dtype)
    restore = [undo for module in modules for undo in _compute_in_float32(module)]

    def put_back() -> None:
        for key, dtype in dtypes.items():
            _store(found[key], dtype, nominal=None)
        while restore:
            restore.pop()()

    return Widened(tensors=len(dtypes), shared=len(shared), put_back=put_back)


def _held(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def _store(tensor: Tensor, dtype: torch.dtype, nominal: torch.dtype | None) -> None:
    gradient, tensor.grad = tensor.grad, None  # torch refuses a gradient of another dtype than its tensor
    tensor.data = tensor.data.to(dtype)
    set_nominal(tensor, nominal)
    if gradient is not None:
        tensor.grad = gradient.to(dtype)


def _compute_in_float32(module: nn.Module) -> list[Callable[[], None]]:
    """Lets a 4-bit linear dequantize to float32 and multiply in it; gives what undoes that."""
    state: Any = getattr(parameters_of(module).get("weight"), "quant_state", None)
    if state is None:
        return []
    undo = [_set(state, "dtype", torch.float32)]
    wanted = {
        "compute_dtype": torch.float32,
        "compute_type_is_set": True,  # else the first input decides anew
        "support_avx512bf16_for_cpu": False,  # else a first forward in evaluation mode repacks the weight to bfloat16
    }
    return undo + [_set(module, name, value) for name, value in wanted.items() if hasattr(module, name)]


def _set(owner: Any, name: str, value: object) -> Callable[[], None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    return lambda: setattr(owner, name, before)
