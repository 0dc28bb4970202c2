"""What a mode has to know of the operators and functions that it sees: their signatures, the identity of their tensors, the memory
that an experiment with them may take, and how a mode stays out of the compiler's way.
"""

import ctypes
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from dtypedoctor._torch_private import (
    CONJUGATE_KEYS,
    HIDDEN_KEYS,
    DispatchMode,
    OpOverload,
    by_way_of_others,
    is_compiled_module,
    is_composite,
    is_followed,
    keys_inside,
    memory_key,
    modes_on,
    next_sequence_number,
    pop_mode,
    push_mode,
    schema_of,
    takes_numbers_as_tensors,
    top_function_mode,
    uncompiled,
    version_of,
    with_keys,
    with_own_warnings,
)
from dtypedoctor.instrument.statistics import HALF, holds_whole_numbers, measurable, real_of
from dtypedoctor.interruptions import contained, noticing

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a call."""


_COLLECTIVES = frozenset({"c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd", "symm_mem"})
_GROUP = "group_name"
"""Argument by which DTensor's ``shard_dim_alltoall``, and operators of libraries, are told which ranks they are for."""
_BEFORE_A_COLLECTIVE = frozenset({"fsdp.all_gather_copy_in.default"})
_UNCOMPUTED = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize", "resize_as", "set"}
)


class Followed(NamedTuple):
    """An operator: its public name, and which of its arguments are its operands and its results, None where it has none."""

    name: str
    operands: int | None = 1
    results: int | None = 0


_IN_PLACE = 0
FOLLOWED = {
    "allreduce_": Followed("all_reduce", _IN_PLACE),
    "allreduce_coalesced_": Followed("all_reduce", _IN_PLACE),
    "broadcast_": Followed("broadcast", _IN_PLACE),
    "reduce_": Followed("reduce", _IN_PLACE),
    "allgather_": Followed("all_gather"),
    "_allgather_base_": Followed("all_gather"),
    "allgather_coalesced_": Followed("all_gather"),
    "allgather_into_tensor_coalesced_": Followed("all_gather"),
    "reduce_scatter_": Followed("reduce_scatter"),
    "_reduce_scatter_base_": Followed("reduce_scatter"),
    "reduce_scatter_tensor_coalesced_": Followed("reduce_scatter"),
    "gather_": Followed("gather"),
    "scatter_": Followed("scatter"),
    "alltoall_": Followed("all_to_all"),
    "alltoall_base_": Followed("all_to_all"),
    "send": Followed("send", _IN_PLACE, None),
    "recv_": Followed("recv", None, _IN_PLACE),
}
"""Operators of the namespace ``c10d``."""
MESSAGES = frozenset({"send", "recv"})
"""Operators between two ranks."""
SHARED = frozenset(one.name for one in FOLLOWED.values()) - {"broadcast", "scatter"} - MESSAGES
"""Collectives to which every rank of the group sends something."""


def name_of_collective(operator: Any) -> str:
    """The public name of an operator that waits for other ranks; of one that is not followed its own."""
    own = schema_of(operator).name.split("::")[-1]
    return FOLLOWED[own].name if own in FOLLOWED else own.strip("_")


def flat(value: Any) -> Iterator[Any]:
    """Everything inside nested lists, tuples and dicts, in order."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from flat(item)
    elif isinstance(value, dict):
        yield from flat(list(value.values()))
    else:
        yield value


def tensors_of(value: Any) -> list[Tensor]:
    """Every tensor inside nested lists, tuples and dicts, in order."""
    found: list[Tensor] = []
    _collect([value], found)
    return found


def _collect(items: Iterable[Any], found: list[Tensor]) -> None:
    """Puts the tensors of ``items`` into ``found``; called several times for each operator, so a generator would take too long."""
    for item in items:
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, (list, tuple)):
            _collect(item, found)
        elif isinstance(item, dict):
            _collect(list(item.values()), found)


def tree_map(function: Callable[[Any], Any], value: Any) -> Any:
    """A structure of lists, tuples and dicts with a function of each of its leaves.

    That of torch leaves a circle of references behind, which keeps what it has seen until Python's collector comes.
    """
    if isinstance(value, dict):
        return {name: tree_map(function, item) for name, item in value.items()}
    if not isinstance(value, (tuple, list)):
        return function(value)
    items = [tree_map(function, item) for item in value]
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


_untrack = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("PyObject_GC_UnTrack", ctypes.pythonapi))


def uncollected(value: Any) -> Any:
    """``value``, of whose tensors, the doctor's own, Python's garbage collector no longer keeps a list: ``gc.get_objects()`` counts those of the program.

    They refer to nothing, so they are in no circle, and are freed with their last reference: Python does the same for tuples of numbers.

    Args:
        value: tensors without a graph, hooks and attributes, also in tuples, lists and dictionaries.
    """
    if type(value) is Tensor:
        _untrack(value)
    elif isinstance(value, (tuple, list)):
        for item in value:
            uncollected(item)
    elif isinstance(value, dict):
        uncollected(list(value.values()))
    return value


class Uncollected:
    """Base of what keeps such tensors in its attributes, alone or in tuples."""

    __slots__ = ()

    def __setattr__(self, name: str, value: object) -> None:
        if isinstance(value, (Tensor, tuple)):
            uncollected(value)
        object.__setattr__(self, name, value)


@cache
def is_unfinished(func: Any) -> bool:
    """Whether an operator is a collective, whose results may hold nothing yet when it returns, or fills what one is to send.

    Such an operator is neither measured nor ever run again: one rank that repeats a collective alone breaks those of all.
    """
    if func.namespace in _COLLECTIVES or str(func) in _BEFORE_A_COLLECTIVE:
        return True
    return isinstance(func, OpOverload) and any(argument.name == _GROUP for argument in schema_of(func).arguments)


def node_of_operator() -> int | None:
    """Number of the autograd node of the operator that is being dispatched, which is made just before; None where gradients are off."""
    return next_sequence_number() - 1 if torch.is_grad_enabled() else None


def leaves_memory_as_it_was(func: Any) -> bool:
    """Whether nothing has computed what an operator returns: what is in there was left behind by somebody else."""
    return schema_of(func).name.split("::")[-1].rstrip("_") in _UNCOMPUTED


def is_inplace(func: Any) -> bool:
    """Whether the operator writes to its first argument, as ``add_`` does."""
    return bool(schema_of(func).name.split("::")[-1].endswith("_")) and schema_of(func).is_mutable


def has_out(func: Any) -> bool:
    """Whether the operator fills memory that it is given: an ``out=`` argument, or a tensor where it returns nothing."""
    schema = schema_of(func)
    if any(argument.is_out for argument in schema.arguments):
        return True
    given = {argument.name for argument in schema.arguments if str(argument.type) == "Tensor"}
    return not schema.returns and bool(given & set(names_written(func)))


def written(func: Any, arguments: Arguments) -> list[Tensor]:
    """The tensors that a call writes to."""
    args, kwargs = arguments
    names = names_written(func)
    if not names:
        return []
    positions = [argument.name for argument in schema_of(func).arguments]
    found = [value for name, value in zip(positions, args, strict=False) if name in names]
    return tensors_of([*found, *(value for name, value in kwargs.items() if name in names)])


_WRITES_STATISTICS = frozenset({f"aten.{name}_batch_norm.default" for name in ("native", "cudnn", "miopen")})
"""Operators that write to running statistics and do not say so."""
_FUSED_CASTS = frozenset({"aten._softmax.default", "aten._log_softmax.default"})


def for_wider(func: Any, arguments: Arguments) -> Arguments:
    """The arguments of an operator whose operands have been made wider: on a GPU a softmax may cast half precision to float32 itself, and takes no other."""
    args, kwargs = arguments
    if len(args) == 3 and args[2] is True and str(func) in _FUSED_CASTS and args[0].dtype not in HALF:
        return (*args[:2], False), kwargs
    return arguments


def in_wider(
    func: Any,
    arguments: Arguments,
    dtype: torch.dtype,
    narrow: Collection[torch.dtype],
    stand_ins: Mapping[int, Tensor],
) -> list[Tensor]:
    """What an operator returns, or writes to, where its operands are in a wider dtype; empty where it has no such form, or draws the program's random numbers.

    Args:
        func: the operator.
        arguments: its arguments, which stay as they are.
        dtype: in place of those that are ``narrow``.
        narrow: dtypes that become ``dtype``.
        stand_ins: tensors that stand for operands, by the identity of these; the operator may write to them.
    """
    if torch.Tag.nondeterministic_seeded in func.tags:
        return []

    def widened(value: Any) -> Any:
        if isinstance(value, Tensor) and id(value) in stand_ins:
            return stand_ins[id(value)]
        if measurable(value):
            return value.to(dtype) if value.dtype in narrow else value.clone()
        if real_of(value) is not value:  # its parts are numbers of a narrow dtype, too
            return value.to(dtype.to_complex()) if value.dtype.to_real() in narrow else value.clone()
        return dtype if isinstance(value, torch.dtype) and value in narrow else value

    def made_real(value: Any) -> Any:
        return value.to(dtype) if holds_whole_numbers(value) else value

    args, kwargs = for_wider(func, tree_map(widened, arguments))
    with contained():
        results = tensors_of(unheard(func, args, kwargs))
        operands = tensors_of((args, kwargs))
        if results and results[0].dtype in narrow and not any(map(measurable, map(real_of, operands))):
            # made of numbers or of whole numbers, in the default dtype, which is one for all threads
            takes = {"dtype": dtype} if any(a.name == "dtype" for a in schema_of(func).arguments) else {}
            args, kwargs = tree_map(made_real, (args, kwargs))
            results = tensors_of(unheard(func, args, {**kwargs, **takes}))
        return results or written(func, (args, kwargs))
    return []


def unheard(func: Any, args: Any, kwargs: Any) -> Any:
    """Calls an operator that warns nobody, and leaves to the program what torch warns of once in a process.

    The list of filters is swapped, since ``catch_warnings`` makes Python forget which warnings the program has shown already.
    """
    filters, always = warnings.filters, torch.is_warn_always_enabled()
    warnings.filters = _IGNORE_ALL
    torch.set_warn_always(True)
    try:
        return with_own_warnings(func, args, kwargs)
    finally:
        torch.set_warn_always(always)
        warnings.filters = filters


_IGNORE_ALL: Any = [("ignore", None, Warning, None, 0)]


def keep_written(func: Any, arguments: Arguments) -> Arguments:
    """Copies what the call writes to, so that it can be made again later: in ``b.mul_(b)`` both operands are written to."""
    memories = {address_of(tensor) for tensor in written(func, arguments)}
    if not memories:
        return arguments

    def copied(value: Any) -> Any:
        return value.clone() if isinstance(value, Tensor) and address_of(value) in memories else value

    copies: Arguments = tree_map(copied, arguments)
    return copies


def address_of(tensor: Tensor) -> int:
    """Numbers the memory of a tensor, as long as it lives; sparse tensors and some wrappers have none of their own."""
    try:
        return memory_key(tensor.untyped_storage())
    except (NotImplementedError, RuntimeError):
        return id(tensor)


def scalars(arguments: Arguments) -> list[str]:
    """The numbers, strings and dtypes among the arguments, as text."""
    return [str(v)[:40] for v in flat(arguments) if isinstance(v, (bool, int, float, str, torch.dtype))]


@cache
def names_written(func: Any) -> set[str]:
    """The arguments that an operator writes to."""
    if str(func) in _WRITES_STATISTICS:
        return {"running_mean", "running_var"}
    if not schema_of(func).is_mutable:
        return set()
    return {a.name for a in schema_of(func).arguments if a.alias_info is not None and a.alias_info.is_write}


@cache
def writes_besides(func: Any) -> bool:
    """Whether an operator writes to tensors that it does not return: running statistics."""
    returned = [one.alias_info for one in schema_of(func).returns]
    return bool(returned) and bool(names_written(func)) and not any(returned)


@dataclass(slots=True)
class _Memory:
    number: int
    held: StorageWeakRef
    """Keeps the address from being given to other memory, without keeping the memory itself."""
    writes: int = 0


class TensorIds:
    """Equal numbers for the same tensor in the same version; writes are told to it by :meth:`wrote`.

    Python objects do not tell tensors apart: below autograd a view, a saved tensor or a parameter often comes in a new wrapper. A tensor is
    identified by its position in memory, how it is read there, and how often that memory was written to.
    """

    def __init__(self, first: int = 1) -> None:
        self._memories: dict[int, _Memory] = {}
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._next = first

    @property
    def next(self) -> int:
        """The number that the next tensor gets."""
        return self._next

    def of(self, tensor: Tensor) -> tuple[int, int]:
        """Number of the tensor, and of its memory (0 for a tensor without any of its own)."""
        memory = self._memory(tensor)
        if memory is None:
            return self._new(), 0
        place = (memory.number, memory.writes, tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride())
        number = self._numbers.get(place)
        if number is None:
            number = self._numbers[place] = self._new()
        return number, memory.number

    def whole(self, tensor: Tensor) -> tuple[Any, ...] | None:
        """What two tensors have in common that are the same elements in any order; None where that cannot be said."""
        memory = self._memory(tensor)
        return None if memory is None else (memory.number, tensor.storage_offset(), tensor.numel(), tensor.dtype)

    def wrote(self, tensor: Tensor) -> None:
        """The memory of ``tensor`` was written to: everything in it is another tensor from now on."""
        memory = self._memory(tensor)
        if memory is not None:
            memory.writes += 1

    def _memory(self, tensor: Tensor) -> _Memory | None:
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # sparse tensors and some wrappers have none
            return None
        key = memory_key(storage)
        found = self._memories.get(key)
        if found is None:
            found = self._memories[key] = _Memory(self._new(), StorageWeakRef(storage))
        return found

    def _new(self) -> int:
        self._next += 1
        return self._next - 1


AT_LEAST = 20 << 20
"""Bytes that an experiment may take in any program."""
SHARE = 0.015
"""Share of what the program itself holds that it may take besides."""

_STATM = Path("/proc/self/statm")


def fits(needed: int, device: torch.device) -> bool:
    """Whether an experiment may take ``needed`` bytes on ``device``, of which it keeps nothing beyond the call that it is made in."""
    return needed <= AT_LEAST or needed <= AT_LEAST + SHARE * _held(device)


def bytes_of(tensors: Iterable[Tensor], itemsize: int = 0) -> int:
    """Bytes of copies of ``tensors``, with elements of ``itemsize`` bytes instead of their own where it is given."""
    return sum(t.numel() * (itemsize or t.element_size()) for t in tensors)


def _held(device: torch.device) -> int:
    """Bytes that the program holds on ``device``; 0 where that is not known."""
    if device.type == "cuda":
        # what it says is a part of a dictionary of hundreds of numbers, which `memory_allocated` sorts anew each time
        stats = torch.cuda.memory_stats_as_nested_dict(device)
        return int(stats["allocated_bytes"]["all"]["current"]) if stats else 0
    try:
        return int(_STATM.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def why_opaque(module: nn.Module) -> str:
    """Why the inside of ``module`` is not watched; empty if it is."""
    if isinstance(module, torch.jit.ScriptModule):
        return "TorchScript runs no module hooks"
    if is_compiled_module(module) or is_followed(module):
        return "compiled code runs no module hooks; its inputs and outputs were measured"
    return ""


GETTER = "__get__"
"""Name of what reads an attribute of a tensor. It computes nothing, and some attributes are refused to tensors of inference mode."""

Listener = Callable[[str, Any, tuple[Any, ...], dict[str, Any], Exception], None]


Made = Callable[[torch.Tensor, float], None]

_OF_NUMBERS = frozenset({torch.tensor, torch.as_tensor})


class FunctionErrors(TorchFunctionMode):
    """Tells ``listener`` the op name, the function, its arguments and the error of each torch function that raises.

    ``scaled_dot_product_attention`` and the convolutions check dtypes above the dispatcher, where the op trace does not see.

    ``made`` is told of each tensor that is made of a Python number, and of that number: no operator sees what rounding made of it.

    While one of its own functions runs (``Tensor.backward`` is one), torch holds the mode aside: closed then, it stays on until it is closed again.
    """

    def __init__(self, listener: Listener, made: Made) -> None:
        super().__init__()
        self._listener = listener
        self._made = made
        self._is_open = False

    def open(self) -> None:
        """Begins to watch the functions of this thread."""
        if not self._is_open:
            self._is_open = True
            self.__enter__()

    def close(self) -> None:
        """Stops watching."""
        if self._is_open and top_function_mode() is self:
            self._is_open = False
            self.__exit__(None, None, None)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Calls ``func`` as it is."""
        arguments = dict(kwargs or {})

        def refused(error: Exception) -> None:
            if getattr(func, "__name__", "") != GETTER:
                self._listener(op_name(func), func, args, arguments, error)

        with noticing(refused, Exception):
            result = func(*args, **arguments)
        if func in _OF_NUMBERS and args and isinstance(args[0], float):
            self._made(result, args[0])
        return result


def op_name(func: Any) -> str:
    """``aten.NAME.default`` for a function that an operator of torch stands for, else ``function.NAME``."""
    name = str(getattr(func, "__name__", "")) or "unknown"
    return f"aten.{name}.default" if hasattr(torch.ops.aten, name) else f"function.{name}"


@cache
def _is_uncounted(func: Any) -> bool:
    """Whether torch counts the writes of an operator only where no dispatch mode is on: those on lists, as optimizers and clipping use them."""
    return (
        isinstance(func, OpOverload)
        and schema_of(func).name.startswith("aten::_foreach_")
        and schema_of(func).is_mutable
    )


@cache
def _calls_no_other(func: Any) -> bool:
    """Whether the kernel of an operator computes by itself, as those of torch's core do: others may leave casts and conjugates to the dispatcher."""
    if not isinstance(func, OpOverload):
        return True  # an operator of higher order has rules of its own
    return func.is_view or torch.Tag.pointwise in func.tags or torch.Tag.core in func.tags


@cache
def _keys_of_direct_call(func: OpOverload) -> Any:
    """What the dispatcher does inside of an operator, of which is not known what called it: all that is made of others has been taken apart above the mode.

    Autocast may have cast for the caller, and then does nothing inside. So it is asked only where the program calls an operator itself, or by a caller
    that is known.
    """
    if func.namespace != "aten":
        return keys_inside(func)
    callers = _CALLED_BY.get(str(func))
    return CONJUGATE_KEYS if callers is None else keys_inside(func, *callers)


_CALLED_BY: dict[str, tuple[OpOverload, ...]] = {
    "aten._transformer_encoder_layer_fwd.default": (),
    "aten._native_multi_head_attention.default": (),
    "aten._trilinear.default": (torch.ops.aten.bilinear.default,),
    "aten.linalg_pinv.atol_rtol_tensor": (),
}
"""Operators whose kernels leave it to autocast to cast for those that they call, by trying all of torch's, and what else than the program calls them."""

_hidden: set[type] = set()


class OperatorMode(DispatchMode):
    """A dispatch mode whose own code is never compiled.

    torch wraps a mode's ``__torch_dispatch__`` so that Dynamo leaves it alone, and the wrapper imports Dynamo at the first
    operator: more than a second of processor time in a program that compiles nothing. Here the function is wrapped once
    Dynamo has come, which only matters from then on; call :func:`keep_compiler_out` when it comes.
    """

    _keys: Any = HIDDEN_KEYS
    """What the dispatcher does for the operators that are called now, by the one that was taken apart."""

    def __enter__(self) -> Self:
        keep_compiler_out()
        super().__enter__()
        return self

    def leave(self) -> None:
        """Takes the mode off, if it is on and wherever it stands: an exception may have kept it on for longer than its block."""
        if not any(mode is self for mode in modes_on()):
            return
        above = []
        while modes_on()[-1] is not self:
            above.append(pop_mode())
        try:
            self.__exit__(None, None, None)
        except IndexError:  # an interruption in the middle of that has restored torch's flags, and left the mode on
            pop_mode()
        finally:
            for mode in reversed(above):
                push_mode(mode)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operator of the program as torch does without this mode.

        Below a mode neither autocast nor a conjugate that was put off is seen to: what a fused attention, a pseudo-inverse or a custom operator
        leaves to them for the operators that it calls would be computed in float32, or be another number.
        """
        for i in _places_of_tensors(func):
            # TorchScript keeps a number as a tensor, the dispatcher hands a mode the number, and torch does not take it back
            if i < len(args) and type(args[i]) in _DTYPES:
                args = (*args[:i], torch.tensor(args[i], dtype=_DTYPES[type(args[i])]), *args[i + 1 :])
        if _is_uncounted(func) and args:
            # Runs an operator and counts its writes as torch does without a mode: autograd tells by them what it must reject
            plain = [
                tensor for tensor in args[0] if type(tensor) in (Tensor, nn.Parameter)
            ]  # for others their class may count
            versions = list(map(version_of, plain))
            result = func(*args, **kwargs)
            for tensor, version in zip(plain, versions, strict=True):
                if version_of(tensor) == version != -1:
                    increment_version(tensor)
            return result
        if _calls_no_other(func):
            return func(*args, **kwargs)
        keys = keys_inside(func) if torch.is_inference_mode_enabled() else _keys_of_direct_call(func)
        with with_keys(keys & self._keys):
            return func(*args, **kwargs)

    def taken_apart(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operator that is made of others by way of these, which this mode sees."""
        outer = self._keys
        self._keys = keys_inside(func) & outer
        try:
            with with_keys(self._keys), self:
                return by_way_of_others(func, *args, **kwargs)
        finally:
            self._keys = outer


_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
"""The dtype of a tensor that stands for one of Python's numbers."""


@cache
def _places_of_tensors(func: Any) -> Sequence[int]:
    """Which arguments of an operator are tensors, for which torch takes no number; none of one that takes numbers."""
    if not isinstance(func, OpOverload) or takes_numbers_as_tensors(schema_of(func).name.rpartition("::")[2]):
        return ()
    return [i for i, argument in enumerate(schema_of(func).arguments) if argument.type.kind() == "TensorType"]


def is_whole(func: Any, types: Any, operands: Iterable[Tensor]) -> bool:
    """Whether an operator that is made of others comes here as one.

    Autograd's part of the dispatcher takes ``linear`` or ``matmul`` apart before a mode sees it. That part is left out in inference
    mode, and outside of it for tensors that were made there: autocast casts those with ``to`` and not with ``_to_copy``. Tensors of
    classes of their own may have a rule for the whole operator, so theirs are left alone.
    """
    if types or not _is_composite(func):
        return False
    return torch.is_inference_mode_enabled() or any(tensor.is_inference() for tensor in operands)


@cache
def _is_composite(func: Any) -> bool:
    return isinstance(func, OpOverload) and is_composite(func)


def keep_compiler_out() -> None:
    """Wraps the modes if Dynamo has been imported; cheap to call again."""
    for mode in set(OperatorMode.__subclasses__()) - _hidden:
        hidden = uncompiled(mode.__torch_dispatch__)
        if hidden is None:
            return
        _hidden.add(mode)
        mode.__torch_dispatch__ = hidden  # type: ignore[method-assign]
