"""Every private name of torch that this package uses, once.

Private is what torch may rename without a word: a name below ``torch`` with a component that begins with an underscore (``torch._C``,
``torch.utils._python_dispatch``, also where its documentation mentions it), and such an attribute of one of its objects (``tensor._version``).
Names of operators (``aten._foreach_norm``) are the dispatcher's, of which checkpoints and exported programs depend, and stand where they
are needed. Nothing else in the package may name them (``tests/unit/test_one_private_module.py``), and all of them are tried on the torch that is
installed (``tests/instrument/test_torch_private.py``).

All were seen on torch 2.9.1 and 2.13.0. What has a fallback says so; a name that is gone without one is in :data:`LOST`, and each trace
says what was not watched for it. What stands under *Needed* has neither: without it this module cannot be imported, and the worker says
which name it misses. Nothing here imports Dynamo, but for functions that say so.
"""

import functools
import gc
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from importlib import import_module
from inspect import currentframe
from itertools import count
from operator import attrgetter, or_, sub
from types import CodeType, FrameType, MethodType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch import overrides as _overrides
from torch._C import _current_autograd_node, _is_torch_function_mode_enabled, _len_torch_dispatch_stack
from torch._C._autograd import _get_sequence_nr
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor, peek_interpreter_stack
from torch.amp import GradScaler
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as _modules
from torch.utils import _python_dispatch, _pytree
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode as _TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from dtypedoctor.unpatched import unseen_by_warnings

LOST: dict[str, str] = {}
"""Private names that this torch has not, by what goes unwatched for it."""

NEWEST_TESTED = (2, 15)
"""The newest minor release of torch that the whole suite has passed with; the package itself sets no upper bound."""


CASTS_TO = torch.ops.aten._to_copy.default
"""The operator that a cast is."""


def untested_release(version: str = str(torch.__version__)) -> str | None:
    """Return the release of torch (``2.16``) if it is newer than any that was tested, else None."""
    release = tuple(map(int, version.split(".")[:2]))
    return ".".join(map(str, release)) if release > NEWEST_TESTED else None


def _optional(path: str, lost: str | None, otherwise: Any = None) -> Any:
    """What stands at ``path`` below torch; ``otherwise`` where it is gone, which is told as ``lost`` (None: nothing is lost)."""
    try:
        return attrgetter(path)(torch)
    except AttributeError:
        if lost is not None:
            LOST[lost] = path
        return otherwise


# Needed: modes, and what runs under them -----------------------------------------------------------------------------------------------


class DispatchMode(_TorchDispatchMode):
    """A mode that sees operators, and that torch does not wrap for Dynamo's sake: see :class:`.operator_mode.OperatorMode`."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: torch need not wrap what a subclass wraps itself. 2.9.1 wraps no mode, and does not ask."""
        return False


OpOverload = torch._ops.OpOverload
"""The class of operators with their signature, as a dispatch mode gets them."""


def operator_classes() -> tuple[type, type]:
    """The classes whose instances are called where a program calls an operator by its name, with and without an overload."""
    return torch._ops.OpOverload, torch._ops.OpOverloadPacket


DisableTorchFunction = torch._C.DisableTorchFunction
DisableTensorClasses = torch._C.DisableTorchFunctionSubclass
"""Inside, no ``__torch_function__`` of a class is called; modes are."""


def as_the_program() -> AbstractContextManager[None]:
    """Inside, code of the program that we run again calls ``__torch_function__`` of its classes, as it does by itself; not where modes are off, too."""
    return nullcontext() if torch._C._is_torch_function_all_disabled() else EnableTorchFunction()


tree_flatten: Callable[[Any], tuple[list[Any], Any]] = _pytree.tree_flatten
"""The leaves of a structure, and its form."""

MODES_CAN_IGNORE_COMPILED = hasattr(_TorchDispatchMode, "ignore_compile_internals") and torch.__version__ >= "2.10"
"""Whether a mode can be left on while compiled code runs; else modes watch nothing that may be compiled.

2.9.1 has the name, and compiles a function anew at each call while such a mode is on; 2.10.0 and 2.13.0 do not.
"""

modes_on: Callable[[], list[Any]] = _python_dispatch._get_current_dispatch_mode_stack
"""The dispatch modes that are on in this thread, bottom first."""
pop_mode: Callable[[], Any] = _python_dispatch._pop_mode
"""Takes the topmost dispatch mode off."""
push_mode: Callable[[Any], None] = _python_dispatch._push_mode
"""Puts a dispatch mode on top."""
BEGINS_PROFILING, ENDS_PROFILING = "_enable_profiler", "_disable_profiler"
"""Functions of ``torch.autograd.profiler`` through which every profiler of the program begins and ends."""
profiler_is_on: Callable[[], bool] = _optional("_C._autograd._profiler_enabled", None, lambda: False)
"""Whether a profiler of the program records the operators of this thread."""
record_operators: Callable[[bool], None] = _optional("_C._autograd._enable_record_function", None, lambda _: None)
"""Says whether a profiler sees the operators that this thread runs from now on."""
without_modes: Callable[[], AbstractContextManager[Any]] = _python_dispatch._disable_current_modes
"""Inside, no dispatch mode sees anything."""
number_of_modes: Callable[[], int] = _len_torch_dispatch_stack
"""How many dispatch modes are on in this thread."""
function_mode_is_on: Callable[[], bool] = _is_torch_function_mode_enabled
"""Whether a ``TorchFunctionMode`` is on in this thread."""


def function_modes() -> list[Any]:
    """The modes of functions that are on in this thread, bottom first: the program's own, and the default device."""
    return _overrides._get_current_function_mode_stack()


def default_device() -> torch.device:
    """Where new tensors go, as the program has named it. torch's own function asks by making a device, which a mode of the program would see."""
    contexts = [mode for mode in function_modes() if isinstance(mode, DeviceContext)]
    return contexts[-1].device if contexts else _CPU


_CPU = torch.device("cpu")


is_wrapped: Callable[[Any], bool] = is_functorch_wrapped_tensor
"""Whether a tensor belongs to a transformation: ``vmap``, ``grad``."""
transformation: Callable[[], Any] = peek_interpreter_stack
"""The innermost transformation that the code runs in; None outside of all."""
unwrapped: Callable[[Any], Tensor] = get_unwrapped
"""What is behind one level of a tensor of a transformation."""
schema_of: Callable[[Any], Any] = attrgetter("_schema")
"""The signature of an operator."""


def _held_as(name: str) -> Callable[[nn.Module], Any]:
    """Reads what a module holds under ``name`` past ``__getattr__`` and properties, which are the program's code; a module without it holds nothing."""

    def held_by(module: nn.Module) -> Any:
        held = object.__getattribute__(module, "__dict__").get(name, {})
        return held if isinstance(held, dict) else dict(held.items())  # a scripted module's reads C++

    return held_by


parameters_of: Callable[[nn.Module], dict[str, nn.Parameter | None]] = _held_as("_parameters")
"""The parameters that a module holds itself: what it changes, and also those that are None."""
buffers_of: Callable[[nn.Module], dict[str, Tensor | None]] = _held_as("_buffers")
"""The buffers that a module holds itself: what it changes, and also those that are None."""
children_of: Callable[[nn.Module], dict[str, nn.Module | None]] = _held_as("_modules")
"""The modules that a module holds itself, and also those that are None."""
HELD_APART = frozenset({"_parameters", "_buffers", "_modules"})
"""Attributes of a module in which those are."""
next_sequence_number: Callable[[], int] = _get_sequence_nr
"""The number that the next autograd node takes."""
autograd_node: Callable[[], Any] = _current_autograd_node
"""The autograd node whose backward runs in this thread; None outside of backward passes."""
is_wrapper_subclass: Callable[[type], bool] = _python_dispatch.is_traceable_wrapper_subclass_type
"""Whether a class of tensors wraps others, by which the compiler can take it apart."""


def outside_of_transformations() -> AbstractContextManager[object]:
    """Inside, tensors that are no ``vmap`` or ``grad`` tensors are computed with as they are."""
    if peek_interpreter_stack() is None:
        return nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack  # loaded already: it made the stack

    return temporarily_clear_interpreter_stack()


def functions_of_programs() -> tuple[type, ...]:
    """The custom functions that there are but for torch's own, by the classes that their nodes have."""
    waiting, classes = list(torch.autograd.Function.__subclasses__()), []
    while waiting:
        function = waiting.pop()
        waiting += function.__subclasses__()
        if function.__module__.partition(".")[0] != "torch":
            classes.append(function._backward_cls)
    return tuple(classes)


def sequence_number(node: Any) -> int:
    """The number of an autograd node, by which a backward operator is known as that of a forward one."""
    number: int = node._sequence_nr()
    return number


def gradient_dtype(node: Any, index: int = 0) -> torch.dtype:
    """The dtype in which an autograd node gets the gradient of what it returned; the engine casts what it is handed."""
    dtype: torch.dtype = node._input_metadata[index].dtype
    return dtype


# With a fallback: settings of the thread ------------------------------------------------------------------------------------------------

set_grad_enabled: Callable[[bool], Any] = _optional("_C._set_grad_enabled", None, torch.set_grad_enabled)
"""Switches autograd on or off. Without it by the public class, which does more."""


@contextmanager
def _autocast_off() -> Iterator[None]:
    with ExitStack() as stack:
        for device in ("cpu", "cuda"):
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


_with_functions_disabled: Any = _optional(
    "_C._disabled_torch_function_impl", None, lambda func, _, args, kwargs: func(*args, **kwargs)
)


def with_own_warnings(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Calls an operator; what it warns of is told before this returns, and not when the program's call around it does.

    torch collects warnings for the outermost function of its Python interface, and an operator is none; what is called here is one.
    """
    return _with_functions_disabled(func, (), args, kwargs)


without_autocast: Callable[[], AbstractContextManager[Any]] = _optional("_C._DisableAutocast", None, _autocast_off)
"""Inside, nothing is autocast. Without it by regions that are off, for CPU and CUDA."""

graph_task: Callable[[], int] = _optional(
    "_C._current_graph_task_id", "recomputed calls of the fp32 replay of a function", lambda: -1
)
"""Number of the backward pass that runs in this thread, -1 outside of all."""

EnableTorchFunction: Callable[[], AbstractContextManager[Any]] = _optional("_C._EnableTorchFunction", None, nullcontext)
"""Inside, ``__torch_function__`` is asked again. Without it a default device does not hold where a call is made again."""

takes_numbers_as_tensors: Callable[[str], bool] = _optional(
    "_C._should_allow_numbers_as_tensors", None, lambda name: False
)
"""Whether the operators of a name can be called with Python's numbers in the place of tensors. Without it by none."""

_tracing_state: Callable[[], Any] = _optional("_C._get_tracing_state", None, lambda: torch.jit.is_tracing() or None)  # type: ignore[attr-defined]
_dispatch_mode: Callable[[Any], Any] = _optional("_C._get_dispatch_mode", None, lambda key: None)
_PROXIES: Any = _optional("_C._TorchDispatchModeKey.PROXY", None, None)


def being_recorded() -> bool:
    """Whether torch is writing down what runs now, so that a measurement would become part of it: ``torch.jit.trace``, ``make_fx``, ``torch.export``."""
    return _tracing_state() is not None or _dispatch_mode(_PROXIES) is not None


def _current_stream(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream


is_capturing: Callable[[], bool] = _optional(
    "_C._cuda_isCurrentStreamCapturing", None, torch.cuda.is_current_stream_capturing
)
"""Whether the current CUDA stream is being captured. Builds without CUDA have none. Without it by the public function, a call more."""


raw_stream: Callable[[int], int] = _optional("_C._cuda_getCurrentRawStream", None, _current_stream)
"""Handle of the stream that is current on a CUDA device. Builds without CUDA have none. Without it by the public object, which is slower."""


PRECISION_SETTERS = (
    "_C._set_default_dtype", "_C._set_float32_matmul_precision", "_C._set_fp32_precision_setter", "_C._set_cublas_allow_tf32",
    "_C._set_cudnn_allow_tf32", "_C._set_cublas_allow_fp16_accumulation",
)  # fmt: skip
"""What sets how precisely the whole process computes; torch's public functions look it up there at each call. One that is gone is not followed."""


def precision_setters() -> Iterator[tuple[Any, str]]:
    """Module and name of each of :data:`PRECISION_SETTERS` that this torch has."""
    for path in PRECISION_SETTERS:
        owner, _, name = path.rpartition(".")
        if hasattr(attrgetter(owner)(torch), name):
            yield attrgetter(owner)(torch), name


# With a fallback: tensors ---------------------------------------------------------------------------------------------------------------


version_now: Callable[[Tensor], int] = attrgetter("_version")
"""How often the tensor was written to in place. A tensor of inference mode raises RuntimeError; :func:`version_of` does not."""
base_of: Callable[[Tensor], Tensor | None] = attrgetter("_base") if hasattr(Tensor, "_base") else lambda tensor: None
"""The tensor that a view was made of, None for any other. Without the name None: then memory that is kept alive is counted too low."""


def version_of(tensor: Tensor) -> int:
    """How often the tensor was written to in place; -1 where torch does not count: in inference mode, or without the name."""
    try:
        return tensor._version
    except (RuntimeError, AttributeError):
        return -1


class MemoryRef:
    """Refers to where a tensor's values lie, and neither keeps them nor hangs on the tensor: one with a weak reference to it cannot be swapped for
    another, as ``Module.double()`` may do."""

    __slots__ = ("_held", "_layout")

    def __init__(self, tensor: Tensor) -> None:
        self._held: StorageWeakRef | None = None
        self._layout: tuple[Any, ...] = ()
        with DisableTorchFunction(), suppress(NotImplementedError, RuntimeError):  # some have no memory of their own
            self._layout = _layout_of(tensor)
            self._held = StorageWeakRef(tensor.untyped_storage())

    def is_of(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` has these values, or what was written over them: a memory that is referred to leaves its address to no other."""
        if self._held is None:
            return False
        with DisableTorchFunction(), suppress(NotImplementedError, RuntimeError):
            return self._held.cdata == memory_key(tensor.untyped_storage()) and _layout_of(tensor) == self._layout
        return False

    def tensor(self) -> Tensor | None:
        """The values, in a tensor without a graph that shares their memory; None where the program has let go of it."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self._held.cdata) if self._held is not None else None
        if storage is None:
            return None
        dtype, *layout = self._layout
        return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, *layout)


def _layout_of(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()


class Writes:
    """Tells whether a tensor has been written to since, without a reference to it: weak ones, too, keep ``swap_tensors`` from its work.

    A detached tensor shares the count of writes. It would keep the memory as well, so it is given an empty one.
    """

    __slots__ = ("_before", "_detached")

    def __init__(self, tensor: Tensor) -> None:
        with torch.no_grad():
            self._detached = tensor.detach()
            self._detached.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self._before = version_of(tensor)

    @property
    def happened(self) -> bool:
        """Whether it was; False where torch does not count, also when the tensor is gone."""
        return self._before >= 0 and version_of(self._detached) != self._before


def set_versions(tensors: Sequence[Tensor], versions: Sequence[int]) -> None:
    """Has tensors count as written to so often. Without the name a value that is put back counts as a write, which autograd may reject."""
    if tensors and _set_version_counter is not None:
        _set_version_counter(tuple(tensors), tuple(versions))


_set_version_counter = _optional("_C._autograd._unsafe_set_version_counter", None)

has_no_memory: Callable[[Tensor], bool] = getattr(Tensor, "_is_zerotensor", lambda _: False)
"""Whether a tensor is a zero that was never computed, as ``torch.func`` makes them. False without the name: reading one raises."""


memory_key: Callable[[Any], int] = (
    attrgetter("_cdata") if hasattr(torch.UntypedStorage, "_cdata") else torch.UntypedStorage.data_ptr
)
"""A number that is one storage's as long as it lives. Without the name its address, which empty storages share."""


def local_shard(tensor: Any) -> Tensor:
    """What this process holds of a DTensor, without a place in the autograd graph; without the name ``to_local()``, which has one."""
    local: Tensor = tensor._local_tensor if hasattr(tensor, "_local_tensor") else tensor.to_local().detach()
    return local


def stored_values(tensor: Tensor) -> Tensor:
    """The values that a sparse COO tensor stores, coalesced or not; without the name those of a coalesced copy."""
    return tensor._values() if hasattr(tensor, "_values") else tensor.coalesce().values()


def jagged_values(tensor: Any) -> Tensor | None:
    """The memory behind a jagged nested tensor where all of it is used; None where it has holes, or without the names."""
    return getattr(tensor, "_values", None) if getattr(tensor, "_lengths", tensor) is None else None


def kind_of(cls: type) -> str:
    """Which of torch's own classes of tensors ``cls`` is: ``fake``, ``functional``, ``async``, ``nested``; empty for another, and without the names."""
    for kind, (module, name) in _CLASSES.items():
        if cls is getattr(sys.modules.get(module), name, None):
            return kind
    return ""


_CLASSES = {
    "fake": ("torch._subclasses.fake_tensor", "FakeTensor"),
    "functional": ("torch._subclasses.functional_tensor", "FunctionalTensor"),
    "async": ("torch.distributed._functional_collectives", "AsyncCollectiveTensor"),
    "nested": ("torch.nested._internal.nested_tensor", "NestedTensor"),
}

_without_dispatch = _optional(
    "_C._disabled_torch_dispatch_impl", "tensors of classes that only add to torch's", object()
)


def is_plain_inside(cls: type) -> bool:
    """Whether a class of tensors leaves operators to torch, so that its values are plain memory. False without the name."""
    return cls.__torch_dispatch__ is _without_dispatch  # type: ignore[attr-defined]


def sees_operators(cls: type) -> bool:
    """Whether a class of tensors has code of the program that is called at each operator: what we do with one would be seen."""
    return not (is_plain_inside(cls) or cls.__module__.startswith("torch."))


def norm_of_each(tensors: Sequence[Tensor], order: float, dtype: torch.dtype | None = None) -> Sequence[Tensor]:
    """The norm of each tensor, in its own dtype or in ``dtype``, in as few kernels as can be; without the name in one each."""
    if hasattr(torch, "_foreach_norm"):
        return torch._foreach_norm(list(tensors), order, dtype=dtype)
    return [torch.linalg.vector_norm(tensor, order, dtype=dtype) for tensor in tensors]


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies tensors into others that look the same, in as few kernels as can be; without the name in one each."""
    on_cpu = [pair for pair in zip(targets, sources, strict=True) if pair[0].device.type == "cpu"]
    others = [pair for pair in zip(targets, sources, strict=True) if pair[0].device.type != "cpu"]
    if others and hasattr(torch, "_foreach_copy_"):
        torch._foreach_copy_([target for target, _ in others], [source for _, source in others], non_blocking=True)
        others = []
    for target, source in (*on_cpu, *others):
        target.copy_(source)


_OWN_IDS = count(1 << 48, 1 << 10)


def register_own(register: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The handle of a hook that ``register`` registers, with a number beyond all of a program's: its own handles have the numbers that they would have.

    A thread that registers one meanwhile gets a number after it. So numbers differ all the same, and no hook takes the place of another.
    """
    of_program = RemovableHandle.next_id
    if of_program >= 1 << 48:  # another thread is here
        return register(*args, **kwargs)
    RemovableHandle.next_id = next(_OWN_IDS)
    try:
        return register(*args, **kwargs)
    finally:
        RemovableHandle.next_id = of_program


def hook_gradient(tensor: Tensor, hook: Any) -> None:
    """Has ``hook`` called with the gradient of a plain tensor that is no leaf; with None if nothing has used the tensor, but its siblings.

    The same as ``tensor.register_hook(hook)`` without a handle to remove it by, which takes two thirds of the time: the hooks of a tensor
    are a dictionary, and any key does that is not the number of a handle. Without the names it is that.
    """
    hooks: Any = getattr(tensor, "_backward_hooks", None)
    if hooks is None and hasattr(tensor.grad_fn, "_register_hook_dict") and hasattr(tensor, "_backward_hooks"):
        hooks = tensor._backward_hooks = OrderedDict()
        tensor.grad_fn._register_hook_dict(tensor)  # type: ignore[union-attr]
    if hooks is None:
        register_own(tensor.register_hook, hook)
    else:
        hooks[hook] = hook


def saved_by(node: Any, name: str) -> Any:
    """What an autograd node keeps of an argument of its operator; None where it keeps none of that name, or without the names."""
    return getattr(node, f"_saved_{name}", None)


# With a fallback: modules ---------------------------------------------------------------------------------------------------------------

COMPILED_MODULE = "_orig_mod"
"""Under which name ``torch.compile`` holds the module that it wraps. Where that changes, fqns of compiled modules hold the new name."""

_call: Any = _optional("nn.Module._call_impl", None, nn.Module.__call__)
CALL_CODE: CodeType = _call.__code__
"""The code that runs the hooks and the forward of a module. Without the name that of ``__call__``."""


def call_is_replaced() -> bool:
    """Whether somebody has put a function of their own in the place of that."""
    return getattr(nn.Module, "_call_impl", nn.Module.__call__).__code__ is not CALL_CODE


_COMPILED_CALL = "_compiled_call_impl"
"""Attribute of a module that ``nn.Module.compile()`` has compiled in place: what its calls go to, past the hooks of modules."""
if not hasattr(nn.Module, _COMPILED_CALL):
    LOST["modules that nn.Module.compile() compiles"] = f"nn.Module.{_COMPILED_CALL}"

CompiledCall = Callable[[nn.Module, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Makes a call of a module that is compiled in place, of which it gets the compiled code and the arguments."""


def _followed(self: nn.Module, compiled: Callable[..., Any], call: CompiledCall) -> Callable[..., Any]:
    """``compiled``, called through ``call``: has the name and the variables of torch's own frame of a module call, and what Dynamo knows it by.

    A compiled region around it is compiled as if this were not there: Dynamo follows an attribute of ``compiled``, which ``wraps`` copies.
    """

    @functools.wraps(compiled)
    def _call_impl(*args: Any, **kwargs: Any) -> Any:
        return call(self, compiled, args, kwargs)

    return _call_impl


FOLLOWED_CODE: CodeType = next(const for const in _followed.__code__.co_consts if isinstance(const, CodeType))
"""The code that runs in the place of :data:`CALL_CODE` where a module that is compiled in place is called, and is followed."""


def is_followed(module: nn.Module) -> bool:
    """Whether :func:`follow_compiled_calls` follows the calls of a module that is compiled in place."""
    return getattr(vars(module).get(_COMPILED_CALL), "__code__", None) is FOLLOWED_CODE


def follow_compiled_calls(call: CompiledCall) -> Callable[[], None]:
    """Has modules that ``nn.Module.compile()`` has compiled, or compiles from here on, called through ``call``; returns the undo.

    Neither a copy nor a pickle of a module holds what is put there: torch leaves this attribute out of both. Without the name nothing is followed.
    """
    original: Any = getattr(nn.Module, "compile", None)
    if original is None or not hasattr(nn.Module, _COMPILED_CALL):
        return lambda: None
    followed: dict[int, tuple[ref[nn.Module], Any, Any]] = {}
    is_on = True

    def follow(module: nn.Module) -> None:
        compiled = vars(module).get(_COMPILED_CALL)
        # A method is what torch leaves there where compiling is switched off: it runs the hooks.
        if compiled is None or isinstance(compiled, MethodType) or is_followed(module):
            return
        _run_as_it_is(FOLLOWED_CODE)
        put = _followed(module, compiled, call)
        followed[id(module)] = (ref(module), compiled, put)
        setattr(module, _COMPILED_CALL, put)

    @functools.wraps(original)
    def compile_in_place(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = original(module, *args, **kwargs)
        if is_on:  # else a patch of the program's has kept this
            follow(module)
        return result

    def undo() -> None:
        nonlocal is_on
        is_on = False
        if getattr(nn.Module, "compile") is compile_in_place:  # noqa: B009  (to mypy, both are methods)
            setattr(nn.Module, "compile", original)  # noqa: B010
        for held, compiled, put in followed.values():
            module = held()
            if module is not None and vars(module).get(_COMPILED_CALL) is put:
                setattr(module, _COMPILED_CALL, compiled)

    for module in _compiled_in_place():
        follow(module)
    setattr(nn.Module, "compile", compile_in_place)  # noqa: B010
    return undo


def _compiled_in_place() -> Sequence[nn.Module]:
    """The modules that ``nn.Module.compile()`` has compiled so far. There are none before Dynamo is imported."""
    if COMPILER not in sys.modules:
        return ()
    modules = (held for held in gc.get_objects() if issubclass(type(held), nn.Module))
    return [module for module in modules if vars(module).get(_COMPILED_CALL) is not None]


CAST = "_apply"
"""Method of a module that ``half()`` and ``to(dtype)`` come to."""
if not hasattr(nn.Module, CAST):
    LOST["what casting a module has rounded"] = f"nn.Module.{CAST}"


def follow_casts(begin: Callable[[nn.Module], None], end: Callable[[nn.Module], None]) -> Callable[[], None]:
    """Calls ``begin`` before and ``end`` after each cast of a module, not for the modules inside of it; returns the undo.

    Neither may raise. Without the name nothing is followed. A cast that raises has no ``end``.
    """
    original = getattr(nn.Module, CAST, None)
    if original is None:
        return lambda: None
    is_on, is_casting = True, False

    @functools.wraps(original)
    @unseen_by_warnings
    def apply(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal is_casting
        if is_casting or not is_on:  # off, and a patch of the program's has kept it
            return original(module, *args, **kwargs)
        is_casting = True
        try:
            begin(module)
            result = original(module, *args, **kwargs)
            end(module)
            return result
        finally:
            is_casting = False

    def undo() -> None:
        nonlocal is_on
        is_on = False
        if getattr(nn.Module, CAST) is apply:  # else the program has patched it since
            setattr(nn.Module, CAST, original)

    setattr(nn.Module, CAST, apply)
    return undo


def is_persistent(module: nn.Module, buffer: str) -> bool:
    """Whether a state dict holds this buffer of the module; True of all without the name."""
    return buffer not in getattr(module, "_non_persistent_buffers_set", ())


_GLOBAL_HOOKS = (
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
)


def count_no_global_hook_of(own: frozenset[int]) -> Callable[[], None]:
    """Lets torch count none of these global module hooks when it asks whether there are any, to warn that compiled modules run them.

    Without the names torch warns.

    Args:
        own: numbers of the handles.

    Returns:
        What takes this back.
    """
    original = getattr(_modules, "_has_any_global_hook", None)
    if original is None:
        return lambda: None

    def others() -> bool:
        return any(set(getattr(_modules, name, ())) - own for name in _GLOBAL_HOOKS)

    _modules._has_any_global_hook = others

    def undo() -> None:
        _modules._has_any_global_hook = original

    return undo


class ModuleHooks:
    """Two global hooks, before and after each module call, that can be lifted while one call runs: then torch calls all modules inside of it as
    if there were no hooks. Without the names they are not lifted.

    Attributes:
        lifted_for: the module of whose call alone the end is told; None while they are in place.
    """

    def __init__(self) -> None:
        self.lifted_for: nn.Module | None = None
        self.can_lift = False
        self.places: list[tuple[Any, Any, Callable[..., None]]] = []
        """Of each hook where torch keeps it, its handle, and itself."""
        self.own: Any = None
        """The handle of the hook for the end of one call."""

    def put(self, before: Callable[..., None], after: Callable[..., None]) -> frozenset[int]:
        """Puts them in place; returns the numbers of their handles."""
        pre = register_own(_modules.register_module_forward_pre_hook, before)
        post = register_own(_modules.register_module_forward_hook, after, with_kwargs=True, always_call=True)
        self.places = [
            (getattr(_modules, "_global_forward_pre_hooks", None), pre, before),
            (getattr(_modules, "_global_forward_hooks", None), post, after),
        ]
        self.can_lift = all(hooks is not None for hooks, _, _ in self.places)
        return frozenset((pre.id, post.id))

    def lift(self, module: nn.Module, ended: Callable[..., None]) -> None:
        """``module`` is being called: until :meth:`put_back` torch tells only ``ended``, of the end of this call."""
        if self.lifted_for is not None or self.own is not None:
            self.put_back()
        if not self.can_lift:
            return
        self.lifted_for = module
        how = {"prepend": True, "with_kwargs": True, "always_call": True}
        self.own = register_own(module.register_forward_hook, ended, **how)
        for hooks, handle, _ in self.places:
            hooks.pop(handle.id, None)

    def put_back(self, *, keep: bool = False) -> None:
        """Puts the hooks in place again, before those of the program. The one for the end of the call stays with ``keep``, which torch may be
        about to ask for the next one after it."""
        if self.lifted_for is not None:
            self.lifted_for = None
            for hooks, handle, hook in self.places:
                hooks[handle.id] = hook
                hooks.move_to_end(handle.id, last=False)
        if self.own is not None and not keep:
            self.own.remove()
            self.own = None

    def remove(self) -> None:
        """Removes them; torch 2.13 keeps of a removed one that it takes keyword arguments."""
        self.put_back()
        for _, handle, _ in self.places:
            handle.remove()
            getattr(_modules, "_global_forward_hooks_with_kwargs", {}).pop(handle.id, None)


# With a fallback: autocast, gradient scaling, attention ---------------------------------------------------------------------------------


def top_function_mode() -> Any:
    """The function mode that sees the next function first; None where there is none, or all are held aside."""
    return torch.overrides._get_current_function_mode()


def region_is_on(region: torch.autocast) -> bool:
    """Whether an autocast region casts. True without the name."""
    return bool(getattr(region, "_enabled", True))


def set_region(region: torch.autocast, on: bool) -> None:
    """Has an autocast region cast or not when it is entered next. Without the name nothing changes, so the condition takes no effect."""
    region._enabled = on


def scale_where_it_lies(scaler: Any) -> Tensor | None:
    """The loss scale of a gradient scaler on its device; None where it has none yet, and without the name."""
    held = getattr(scaler, "_scale", None)
    return held if isinstance(held, Tensor) else None


def found_inf_by(scaler: Any, optimizer: Any) -> Sequence[Tensor]:
    """Per device, whether a scaler has found inf in the gradients of a fused optimizer: that is always called, and its kernel writes nothing then.

    Empty for other optimizers, which are not called, and without the name: then each step of a fused optimizer counts as taken.
    """
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return ()
    state = getattr(scaler, "_per_optimizer_states", {}).get(id(optimizer), {})
    return tuple(state.get("found_inf_per_device", {}).values())


SCALER_BEGINS = "_lazy_init_scale_growth_tracker"
"""Method of a gradient scaler that it calls when it is first used."""


def fix_scale(scaler: GradScaler, scale: float) -> None:
    """Sets the loss scale, and has it neither grow nor shrink. Without the names the scale stays: the condition takes no effect."""
    scaler._init_scale = scale
    scaler._growth_factor = scaler._backoff_factor = 1.0
    if (held := scale_where_it_lies(scaler)) is not None:
        held.fill_(scale)


def context_facts(context: Any) -> dict[str, Any]:
    """What ``custom_fwd`` has left in the context of a custom function.

    ``decorated`` (it is around the forward) and ``fwd_used_autocast``, None where it has left nothing. Without the names no function
    counts as decorated.
    """
    return {
        "decorated": hasattr(context, "_fwd_used_autocast"),
        "fwd_used_autocast": getattr(context, "_fwd_used_autocast", None),
    }


attention_choice: Callable[..., int] = _optional("_fused_sdp_choice", None, lambda *_, **__: -1)
"""Which implementation ``scaled_dot_product_attention`` chooses for its arguments, by number. Without it all count as fused."""


# With a fallback: operators and collectives ---------------------------------------------------------------------------------------------

_has_kernel = _optional(
    "_C._dispatch_has_kernel_for_dispatch_key", "operators in inference mode, inside of others", None
)


_operator_names: Callable[[], list[str]] = _optional(
    "_C._dispatch_get_all_op_names", "the operators that torch brings", list
)


def qualified_name_of(operator: Any) -> str:
    """Namespace and name of an operator of ``torch.ops``, with its overload where it has one of its own."""
    return str(getattr(operator, "_qualified_op_name", "") or operator.name())


def operator_namespaces() -> frozenset[str]:
    """The namespaces of the operators that are there now, and of those that torch registers later."""
    present = {name.partition("::")[0] for name in _operator_names()}
    later = {"inductor", "rngprims", "debugprims", "higher_order", "flex_lib", "fsdp", "symm_mem", "c10d_functional"}
    return frozenset({"aten", "prim", "prims", *present, *later})


def _has_kernel_for(operator: Any, key: str) -> bool:
    """Whether the dispatcher has a kernel of an operator for a key. It knows no ``prim::device``, by which a traced program asks for a device."""
    with suppress(RuntimeError):
        return _has_kernel is not None and _has_kernel(operator.name(), key)
    return False


def is_composite(operator: Any) -> bool:
    """Whether an operator is made of others. False without the name: then such an operator stays whole in inference mode."""
    return _has_kernel_for(operator, "CompositeImplicitAutograd")


def by_way_of_others(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls the operators that one is made of as torch does, and not by a decomposition in Python, which rounds otherwise."""
    return operator._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


_entry = _optional("_C._RestorePythonTLSSnapshot", "values of operators that call others under autocast", None)
"""Inside, the dispatcher is as it was where the program called the operator that a mode sees. Without it such operators keep to float32."""


_Keys = torch._C.DispatchKeySet
_AUTOCAST = {name: _Keys(key) for name, key in vars(torch._C.DispatchKey).items() if name.startswith("Autocast")}
CONJUGATE_KEYS: Any = functools.reduce(
    or_, (_Keys(getattr(torch._C.DispatchKey, name)) for name in ("Conjugate", "Negative", "ZeroTensor"))
)
HIDDEN_KEYS: Any = functools.reduce(or_, _AUTOCAST.values(), CONJUGATE_KEYS)
"""What the dispatcher does above a mode, and leaves out below it: it casts for autocast, and computes conjugates that were put off."""


@functools.cache
def keys_inside(*operators: Any) -> Any:
    """Those of the hidden keys that hold for what operators call, one inside of the other: autocast does not where it has cast for one of them."""
    casts = [keys for name, keys in _AUTOCAST.items() if any(_has_kernel_for(one, name) for one in operators)]
    return functools.reduce(sub, casts, HIDDEN_KEYS)


def tell_dispatcher_of_modes() -> None:
    """Makes the dispatcher of this thread ask for modes where some are on, and not where none is."""
    for key in (torch._C.DispatchKey.Python, torch._C.DispatchKey.PythonTLSSnapshot):
        torch._C._dispatch_tls_set_dispatch_key_included(key, number_of_modes() > 0)


def with_keys(keys: Any) -> AbstractContextManager[Any]:
    """Inside a mode, lets the dispatcher do what ``keys`` stand for, where it would do so for the program without the mode."""
    if _entry is None:
        return nullcontext()
    try:
        with _entry():
            left_out = torch._C._dispatch_tls_local_exclude_set()
    except RuntimeError:  # no dispatcher has called the mode
        return nullcontext()
    now = torch._C._dispatch_tls_local_exclude_set()
    guard: AbstractContextManager[Any] = torch._C._ForceDispatchKeyGuard(
        torch._C._dispatch_tls_local_include_set(), now - (keys - left_out)
    )
    return guard


after_autograd: Any = _optional("_C._after_ADInplaceOrView_keyset", "collectives between processes", None)
"""What a kernel below autograd hands an operator on to. None without the name."""


def close_library(library: torch.library.Library) -> None:
    """Takes the kernels of a library away again. Without the name they stay until the library is collected."""
    getattr(library, "_destroy", lambda: None)()


COALESCING = ("_start_coalescing", "_end_coalescing")
"""Methods of a process group around collectives that are issued together. Without them these are not followed."""

SHARDING_COPIES = ("torch.distributed.fsdp._fully_shard", "torch.distributed._composable.fsdp")
"""Modules that hold ``fully_shard`` besides the public one. Where one is gone, it holds nothing that had to be followed."""
UNIT_FILE = "_fsdp_param_group.py"
"""File of FSDP2 that issues the collectives of a unit. Where it is gone, they are named by the module that runs."""


def unit_fqn(group: Any) -> str:
    """Dotted name of an FSDP2 unit, of its group of parameters; empty without the name."""
    return str(getattr(group, "_module_fqn", None) or "")


def unit_policy(unit: Any) -> Any:
    """The mixed-precision policy of an FSDP2 unit; None without the names."""
    state = unit._get_fsdp_state() if hasattr(unit, "_get_fsdp_state") else None
    return getattr(state, "_mp_policy", None)


HOOKS_OF_SHARDING = ("torch.distributed.fsdp.", "torch.distributed._composable.")
"""How the modules begin whose hooks gather the parameters of a unit before its forward, and free them after it."""


def class_before_sharding(unit: nn.Module) -> type[nn.Module]:
    """The class of a module before ``fully_shard`` put one in front of it, which is its third base."""
    return type(unit).__mro__[2]


def marks_of_sharding(module: nn.Module) -> Sequence[str]:
    """Names of the attributes that ``fully_shard`` leaves in the dictionary of a module; none without the names."""
    own = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")
    return [name for name in vars(module) if name in own or name.startswith("__composable_api_state_key")]


def cast_for_unit(unit: Any) -> Callable[[Any, Any], tuple[Any, Any]]:
    """What casts positional and keyword arguments as the precision policy of an FSDP2 unit wants.

    torch 2.9 has no function for it; there tensors in lists, tuples and dicts are cast. Without the policy they are left as they are.
    """
    state = unit._get_fsdp_state() if hasattr(unit, "_get_fsdp_state") else None
    cast: Any = getattr(state, "_cast_forward_inputs", None)
    if cast is not None:
        return cast
    policy = unit_policy(unit)
    dtype = policy.param_dtype if policy is not None and policy.cast_forward_inputs else None

    def cast_tensor(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    return lambda args, kwargs: (args, kwargs) if dtype is None else _pytree.tree_map(cast_tensor, (args, kwargs))


def hooks_of(module: nn.Module) -> Sequence[Any]:
    """The dictionaries of the hooks that run before and after the forward of a module; none without the names."""
    names = ("_forward_pre_hooks", "_forward_hooks")
    return [getattr(module, name) for name in names if hasattr(module, name)]


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Has ``function`` called when the backward pass that is running has computed its gradients; those that asked first come first.

    Without the name it is not called.
    """
    queue: Any = getattr(getattr(torch.autograd.Variable, "_execution_engine", None), "queue_callback", None)
    if queue is not None:
        queue(function)


def defined_operators() -> Sequence[str]:
    """Qualified names of the operators that were defined from Python; empty without the name."""
    return tuple(getattr(torch.library, "_defs", ()))


def qualified_name(function: Any) -> str:
    """``namespace::name`` of a custom operator, or the namespace of another one; ``aten`` for a function, and without the name."""
    return str(getattr(function, "_qualified_op_name", None) or getattr(function, "namespace", "aten"))


# With a fallback: the compiler ----------------------------------------------------------------------------------------------------------

COMPILER = "torch._dynamo"
"""Dynamo, imported by torch when something is about to be compiled. Where it is called otherwise, nothing is known of compiled code."""
FRAME_COMPILER = "torch._dynamo.convert_frame"
"""The part of it that torch imports when something is compiled for the first time; also the name of a logger of its."""

_ENTERS_COMPILED = "_callback_from_stance"
"""Function of ``torch._dynamo.eval_frame`` that is asked whenever a compiled function is entered: what is Dynamo to do with it?"""
FRAME_SKIPPER = "torch._dynamo.decorators"
"""The part of it that knows functions whose frames are left alone."""


def skip_frames(function: Callable[..., Any]) -> None:
    """Has Dynamo, once it is imported, run the frames of a function and of what it calls as they are; without the names, its own alone.

    Python calls some functions inside of compiled ones, an audit hook say, and Dynamo would compile them too and count them.
    """
    skip: Any = getattr(sys.modules.get(FRAME_SKIPPER), "skip", None)
    if skip is not None:
        skip(function)
    _run_as_it_is(function.__code__)


def _run_as_it_is(code: CodeType) -> None:
    """Has Dynamo leave frames of ``code``, and those of what they call, alone; what they call that is compiled itself runs compiled."""
    evaluation: Any = sys.modules.get("torch._dynamo.eval_frame")
    decide = getattr(evaluation, "set_code_exec_strategy", None)
    if decide is not None:
        left = evaluation.FrameAction.SKIP
        decide(code, evaluation.FrameExecStrategy(left, left))


def is_refusal_of_compiler(error: BaseException) -> bool:
    """Whether Dynamo, or a backend of it, cannot compile something; an operator of the program that raises while it is compiled is none."""
    return type(error).__module__.startswith(COMPILER) and type(error).__name__ != "TorchRuntimeError"


def recompiling(versions: int) -> AbstractContextManager[Any]:
    """Inside, Dynamo compiles a function for up to ``versions`` kinds of arguments before it gives up on it, if torch allows fewer.

    Without the name nothing changes, and what is beyond torch's own limit runs in eager mode, which Dynamo reports.
    """
    config: Any = import_module("torch._dynamo.config")
    limit = getattr(config, "recompile_limit", None)
    return nullcontext() if limit is None else config.patch(recompile_limit=max(limit, versions))


def stays_uncompiled(function: Callable[..., Any]) -> bool:
    """Whether ``torch.compiler.disable`` has made ``function``. Without the name nothing is known to be."""
    return bool(getattr(function, "_torchdynamo_disable", False))


def is_compiled_module(module: nn.Module) -> bool:
    """Whether a module is what ``torch.compile`` makes of one. False without the names."""
    kind = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", None)
    return kind is not None and isinstance(module, kind)


class EntersCompiled:
    """A compiled function is about to be entered by a frame of Dynamo's, which holds the function as it was before, and the arguments."""

    def __init__(self, frame: FrameType | None) -> None:
        self.frame = frame

    def call(self) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] | None:
        """The function, and its arguments; None where the frame has other variables."""
        held = self.frame.f_locals if self.frame is not None else {}
        function, args, kwargs = (held.get(name) for name in ("fn", "args", "kwargs"))
        return (function, args, kwargs) if callable(function) and type(args) is tuple and type(kwargs) is dict else None


def before_compiled(heard: Callable[[EntersCompiled], Any], otherwise: Callable[[], Any]) -> Callable[[], None]:
    """Calls ``heard`` whenever a compiled function is about to be entered, in any thread, and not run as it is; returns the undo.

    Does nothing before Dynamo is imported. Without the name ``otherwise`` is called at once.
    """
    owner: Any = sys.modules.get("torch._dynamo.eval_frame")
    if owner is None:
        return lambda: None
    ask = getattr(owner, _ENTERS_COMPILED, None)
    if ask is None:
        otherwise()
        return lambda: None

    @functools.wraps(ask)
    def asked(callback: Any) -> Any:
        answer = ask(callback)
        if callback not in (None, False) and answer is not None:  # else it is left alone, or everything is
            here = currentframe()
            heard(EntersCompiled(here.f_back if here is not None else None))
        return answer

    def undo() -> None:
        if getattr(owner, _ENTERS_COMPILED) is asked:
            setattr(owner, _ENTERS_COMPILED, ask)

    setattr(owner, _ENTERS_COMPILED, asked)
    return undo


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """``function`` as Dynamo leaves it alone; None where Dynamo has not been imported, or is being."""
    disable: Any = getattr(sys.modules.get(COMPILER), "disable", None)
    return disable(function, recursive=True) if disable is not None else None


def norms_of(tensors: Sequence[Tensor], order: float) -> Tensor:
    """The norms of some tensors of one device in a vector; without ``_foreach_norm`` by an operator for each.

    The fused operator of CUDA returns the elements of one vector, side by side: that is taken, where it is so, and they need not be copied.
    """
    norms = list(norm_of_each(tensors, order))
    first, last = norms[0], norms[-1]
    offsets, apart = (first.storage_offset(), last.storage_offset()), last.data_ptr() - first.data_ptr()
    # Offsets and addresses say that both lie in one piece of memory; to ask for the memory itself takes ten times as long
    are_side_by_side = offsets == (0, len(norms) - 1) and apart == offsets[1] * first.itemsize
    return first.as_strided((len(norms),), (1,)) if are_side_by_side else torch.stack(norms)


set_frame_callback: Callable[[Any], Any] = _optional("_C._dynamo.eval_frame.set_eval_frame", None, lambda _: None)
"""Sets what Dynamo does with each frame, None for nothing, and returns what it was. Without it Dynamo may compile the doctor's own functions."""


def load_compiler() -> None:
    """Imports Dynamo, which takes a second and creates its loggers. Only for code that compiles.

    Raises:
        ImportError: it is gone.
    """
    import torch._dynamo.convert_frame  # noqa: F401


def compiler_counters() -> Any:
    """Dynamo's counters, by group and name. Imports Dynamo.

    Raises:
        ImportError: they are gone; what the compiler gave up on is not counted then.
    """
    from torch._dynamo.utils import counters

    return counters


def repeat_break_reports() -> None:
    """Has Dynamo report the next graph break with its stack, though an equal one was reported before. Imports Dynamo.

    Raises:
        ImportError: the name is gone.
    """
    from torch._dynamo.utils import reset_graph_break_dup_checker

    reset_graph_break_dup_checker()


def log_state() -> Any:
    """Which logs of torch are on.

    Raises:
        ImportError: the name is gone; what the compiler gave up on is not counted then.
    """
    from torch._logging._internal import log_state as state

    return state


def asked_for_compiled() -> tuple[Any, str]:
    """The module and the name of the function that torch asks whenever a compiled function is entered: imports Dynamo.

    Raises:
        AttributeError: it is gone; the condition ``compile-off`` cannot be told to have taken effect then.
    """
    from torch._dynamo import eval_frame

    getattr(eval_frame, _ENTERS_COMPILED)
    return eval_frame, _ENTERS_COMPILED
