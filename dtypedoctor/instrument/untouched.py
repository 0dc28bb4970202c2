"""Puts back everything that a module call changes which is made again inside of the running program.

Memory is put back operator by operator: :class:`KeptMemory` is a dispatch mode that copies what an operator is about to write to, unless the
replay has made it itself. So buffers, key-value caches, inputs and global tensors are covered alike, and only what is really written costs
anything. Python objects that the call can reach (modules, arguments, closures, the script's globals) are compared with shallow copies. What is
printed or logged is swallowed, files that the program has open are cut back, and an audit hook rejects what would reach another process or another file.
"""

import io
import logging
import os
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from math import inf
from threading import get_ident
from traceback import clear_frames
from types import CellType, FrameType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from dtypedoctor._torch_private import (
    COALESCING,
    COMPILER,
    EnableTorchFunction,
    buffers_of,
    function_modes,
    memory_key,
    number_of_modes,
    set_versions,
    version_of,
    without_modes,
)
from dtypedoctor.instrument.live_call import RandomState
from dtypedoctor.instrument.module_tree import modules_in
from dtypedoctor.instrument.operators import (
    Arguments,
    OperatorMode,
    flat,
    is_inplace,
    is_unfinished,
    is_whole,
    leaves_memory_as_it_was,
    name_of_collective,
    tensors_of,
    written,
)
from dtypedoctor.interruptions import contained
from dtypedoctor.unpatched import at_audit, perf_counter

if TYPE_CHECKING:
    from dtypedoctor.instrument.optrace import OpTrace
    from dtypedoctor.instrument.session import Session

__all__ = ["Again", "CannotReplayError", "KeptMemory", "as_before", "at_moment", "make_again", "undone"]


MAX_OBJECTS = 300_000
"""Python objects that are looked at; of a program that holds more, those nearest to the module are put back."""
MAX_BYTES = 1 << 30
"""Bytes of the program's memory that a replay may overwrite, because as much is copied."""
_CHANGES = ("os.", "shutil.", "subprocess.", "socket.", "ctypes.dlopen")
"""How the names of audit events begin that tell of a change outside of the process. ``os.`` has no event for what only reads but these:"""
_READS = frozenset(
    {"os.listdir", "os.scandir", "os.walk", "os.fwalk", "os.getxattr", "os.listxattr", "os.add_dll_directory"}
)
_ENVIRONMENT = frozenset({"os.putenv", "os.unsetenv"})
"""Changes inside of the process, which are put back: accelerate's hooks set variables while they ask for devices."""
_DRIVER = ("ctypes.dlopen", "libnvidia-ml.so.1")
"""What torch asks for the number of devices where it is built for CUDA, and accelerate asks torch each time that it has loaded weights."""
_COMPILERS = frozenset({"triton.compiler.compiler", "triton.runtime.build"})
"""Modules that compile a kernel where it is launched for the first time with such arguments, as a call is that was compiled as a whole and is made again
in eager mode. What they write is a cache of theirs."""
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
SHARE_OF_FREE = 0.5
"""Share of the free memory of a CUDA device that a replay may take."""
MAX_BUFFER = 16 << 20
"""Bytes of a buffer that is copied although no operator is known to write to it."""
MAX_WAIT = 2.0
"""Seconds that a replay waits for another thread of the program."""
LOOKS = 32
"""After how many operators the memory of the device is looked at."""


class CannotReplayError(Exception):
    """The call cannot be made again without changing the program."""


class KeptMemory(OperatorMode):
    """Copies what is about to be overwritten; :meth:`restore` puts it back.

    Raises:
        CannotReplayError: from inside of the operator that cannot be made without a trace: a collective, a write to a tensor of the program's
            autograd graph, another size of a tensor, more memory than is there. Every later operator raises it too, so that a program
            that catches exceptions does not go on.

    Args:
        device: whose memory is watched; None for none.
        allowed: bytes that may be allocated on it meanwhile.
        seconds: after which no operator may begin.
    """

    def __init__(self, device: torch.device | None = None, allowed: int = 0, seconds: float = inf) -> None:
        super().__init__()
        self._seconds, self._until = seconds, perf_counter() + seconds
        self._device = device
        self._allowed = allowed
        self._before = torch.cuda.memory_allocated(device) if device is not None else 0
        self._operators = 0
        self._made: set[int] = set()
        self._storages: dict[int, tuple[Tensor, Tensor]] = {}
        self._versions: list[tuple[Tensor, int]] = []
        self._seen: set[int] = set()
        self._generators: list[tuple[torch.Generator, Tensor]] = []
        self._bytes = 0
        self.why_not = ""

    @classmethod
    def within_free(cls, named: "Iterable[tuple[str, Tensor]]", seconds: float = inf) -> "KeptMemory":
        """One that allows a share of the memory that is free on the CUDA device of some of the tensors, where they lie on one."""
        device = next((tensor.device for _, tensor in named if tensor.is_cuda), None)
        if device is None:
            return cls(seconds=seconds)
        free, _ = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return cls(device, int((free + reserved) * SHARE_OF_FREE), seconds)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs ``func`` as it is."""
        arguments = (args, dict(kwargs or {}))
        if is_whole(func, types, tensors_of(arguments)):
            return self.taken_apart(func, *arguments)
        self._look(func, arguments)
        result = self.run(func, *arguments)
        given = {_key(tensor) for tensor in tensors_of(arguments)}
        self._made |= {key for tensor in tensors_of(result) if (key := _key(tensor)) not in given}
        return result

    def keep_buffers(self, module: nn.Module) -> None:
        """Copies the buffers of ``module``: the operators of batch normalization write to theirs, and their signatures do not say so."""
        for part in modules_in(module):
            for buffer in buffers_of(part).values():
                if buffer is not None and _key(buffer) and buffer.untyped_storage().nbytes() <= MAX_BUFFER:
                    self._note(buffer)

    def _look(self, func: Any, arguments: Arguments) -> None:
        self._look_at_limits()
        if is_unfinished(func):
            self._give_up(f"{name_of_collective(func)} needs the other ranks")
        for generator in flat(arguments):
            if isinstance(generator, torch.Generator):
                self._generators.append((generator, generator.get_state()))
        for tensor in written(func, arguments):
            if _key(tensor) not in self._made:
                self._keep(func, tensor, arguments)
        if self.why_not:
            raise CannotReplayError(self.why_not)

    def _look_at_limits(self) -> None:
        self._operators += 1
        if self._device is not None and self._operators % LOOKS == 0:
            taken = torch.cuda.memory_allocated(self._device) - self._before
            if taken > self._allowed:
                self._give_up(f"it takes more than the {self._allowed >> 20:,} MiB that are free for it")
        if perf_counter() > self._until:
            self._give_up(f"it takes longer than {self._seconds:.0f} s")

    def _keep(self, func: Any, tensor: Tensor, arguments: Arguments) -> None:
        """Copies the memory of a tensor of the program's, once."""
        if leaves_memory_as_it_was(func) or _key(tensor) == 0:
            self._give_up("it changes the size or the memory of a tensor that was there before")
        elif torch.is_grad_enabled() and (
            tensor.requires_grad or (is_inplace(func) and any(tensor.requires_grad for tensor in tensors_of(arguments)))
        ):
            self._give_up("it writes to a tensor that was there before, in a way that autograd records")
        else:
            self._note(tensor)

    def _note(self, tensor: Tensor) -> None:
        if id(tensor) not in self._seen:
            self._seen.add(id(tensor))
            self._versions.append((tensor, version_of(tensor)))
        self._copy(tensor)

    def _copy(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = memory_key(storage)
        if key in self._storages:
            return
        self._bytes += storage.nbytes()
        if self._bytes > MAX_BYTES:
            self._give_up(f"it writes to more than {MAX_BYTES >> 20:,} MiB of memory that was there before")
            return
        with (
            torch.inference_mode(mode=False),
            torch.no_grad(),
        ):  # what is made in inference mode cannot be written outside of it
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            self._storages[key] = (whole, whole.clone())

    def _give_up(self, why: str) -> None:
        self.why_not = self.why_not or why

    def restore(self) -> None:
        """Puts memory, its version counters and generators back."""
        with torch.no_grad():
            for whole, copy in self._storages.values():
                whole.copy_(copy)
        counted = [(tensor, version) for tensor, version in reversed(self._versions) if version >= 0]
        set_versions([tensor for tensor, _ in counted], [version for _, version in counted])
        for generator, state in reversed(self._generators):
            generator.set_state(state)
        self._storages.clear()
        self._versions.clear()


class _Audit:
    """Rejects, in one thread and for a time, what changes something outside of the process."""

    def __init__(self) -> None:
        self._thread = 0
        self._allowed: Callable[[], object] = bool
        self._installed = False

    @contextmanager
    def rejecting(self, thread: int, allowed: Callable[[], object]) -> Iterator[None]:
        """Inside, ``thread`` cannot, but while ``allowed`` says that the doctor itself is at work."""
        if not self._installed:
            self._installed = True
            at_audit(self._heard, "open", *_CHANGES)
        self._thread, self._allowed = thread, allowed
        try:
            yield
        finally:
            self._thread = 0

    def _heard(self, event: str, args: Any) -> None:
        if not self._thread or threading.get_ident() != self._thread:
            return
        opens = event == "open" and isinstance(args[2], int) and args[2] & _WRITING
        asks = event in _READS | _ENVIRONMENT or (event, *args[:1]) == _DRIVER
        if (opens or (event.startswith(_CHANGES) and not asks)) and not self._is_at_work():
            raise CannotReplayError(f"it changes something outside of the process ({event})")

    def _is_at_work(self) -> bool:
        """Whether the doctor itself is at work, or a compiler of kernels."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_globals.get("__name__") not in _COMPILERS:
            frame = frame.f_back
        return frame is not None or bool(self._allowed())


_audit = _Audit()


def _key(tensor: Tensor) -> int:
    """The memory of a tensor; 0 where it has none of its own."""
    try:
        return memory_key(tensor.untyped_storage())
    except (NotImplementedError, RuntimeError):
        return 0


@contextmanager
def as_before(roots: Iterable[Any], thread: int, ours: Callable[[], object]) -> Iterator[None]:
    """Inside, the program's code may run once more; afterwards Python's objects, generators and streams are as they were before.

    Args:
        roots: objects that the code may change; what they hold is looked at as well.
        thread: identity of the thread that runs it: what other threads print meanwhile is printed.
        ours: says whether what runs at this moment is the doctor's own work.

    Raises:
        CannotReplayError: the code can reach something that cannot be put back.
    """
    objects = _Objects()
    for root in (*roots, *function_modes()):  # the modes of the program stay on, and count what they see, say
        objects.keep(root)
    script = sys.modules.get("__main__")
    if script is not None:
        objects.keep(vars(script), shallow=True)
    with ExitStack() as stack:
        stack.callback(objects.restore)
        stack.callback(RandomState.now().restore)
        if torch.cuda.is_initialized() and torch.cuda.get_sync_debug_mode():  # setting it warns
            stack.callback(torch.cuda.set_sync_debug_mode, torch.cuda.get_sync_debug_mode())
            torch.cuda.set_sync_debug_mode("default")
        stack.callback(_put_back_environment, dict(os.environ))
        stack.callback(setattr, sys, "dont_write_bytecode", sys.dont_write_bytecode)
        sys.dont_write_bytecode = (
            True  # what is imported for the first time must not fail at the file that Python would write
        )
        if COMPILER in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(without_modes())
        with contained():  # where the program has switched such hooks off, there are none to hide from
            stack.enter_context(
                saved_tensors_hooks(_without_node, _unchanged)
            )  # those of checkpointing count what is saved
        stack.enter_context(EnableTorchFunction())  # a default device is a mode of functions
        stack.enter_context(_silent(thread))
        stack.enter_context(_nothing_put_together(thread))
        stack.enter_context(_no_waiting(thread))
        stack.enter_context(_audit.rejecting(thread, ours))
        yield


def _put_back_environment(before: Mapping[str, str]) -> None:
    """Gives variables the values that they had; nothing where all have them, as Python's audit hooks would hear of it."""
    for name in {*os.environ, *before}:
        if name not in before:
            del os.environ[name]
        elif os.environ.get(name) != before[name]:
            os.environ[name] = before[name]


def _without_node(tensor: Tensor) -> Tensor:
    # A node that saves its own result would hold itself, and what it was computed from, for ever.
    return tensor.detach()


def _unchanged(tensor: Any) -> Any:
    return tensor


@contextmanager
def _nothing_put_together(thread: int) -> Iterator[None]:
    """Inside, the replay cannot begin to put collectives together: a group whose operators never come would leave the process group waiting.

    On CUDA its backward pass runs in a thread of autograd's, which takes the modes of ``thread`` along.
    """
    groups = torch.distributed.ProcessGroup if torch.distributed.is_available() else None
    begin: Any = getattr(groups, COALESCING[0], None)
    if begin is None:
        yield
        return

    def rejected(group: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread or number_of_modes():
            raise CannotReplayError("a group of collectives needs the other ranks")
        return begin(group, *args, **kwargs)

    setattr(groups, COALESCING[0], rejected)
    try:
        yield
    finally:
        setattr(groups, COALESCING[0], begin)


@contextmanager
def _no_waiting(thread: int) -> Iterator[None]:
    """Inside, ``thread`` does not wait for another one for long: what that has given to the call once may never come again."""
    wait = threading.Condition.wait

    def waits_a_little(condition: threading.Condition, timeout: float | None = None) -> bool:
        if timeout is not None or threading.get_ident() != thread:
            return wait(condition, timeout)
        if not wait(condition, MAX_WAIT):
            raise CannotReplayError("it waits for another thread")
        return True

    threading.Condition.wait = waits_a_little  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        threading.Condition.wait = wait  # type: ignore[method-assign]


class _Silent:
    """A text stream that swallows what one thread writes."""

    def __init__(self, stream: Any, thread: int) -> None:
        self._stream = stream
        self._thread = thread

    def write(self, text: str) -> int:
        """Writes what another thread writes."""
        return len(text) if threading.get_ident() == self._thread else int(self._stream.write(text))

    def writelines(self, lines: Iterable[str]) -> None:
        """Does the same with several lines."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _silent(thread: int) -> Iterator[None]:
    out, err = sys.stdout, sys.stderr
    loggers = [
        logging.root,
        *(one for one in logging.root.manager.loggerDict.values() if isinstance(one, logging.Logger)),
    ]
    handlers = [one for logger in loggers for one in logger.handlers if isinstance(one, logging.StreamHandler)]
    streams = [(handler, handler.stream) for handler in dict.fromkeys(handlers) if "stream" in vars(handler)]
    try:
        sys.stdout, sys.stderr = _Silent(out, thread), _Silent(err, thread)
        for handler, stream in streams:
            handler.stream = _Silent(stream, thread)
        yield
    finally:
        sys.stdout, sys.stderr = out, err
        for handler, stream in streams:
            handler.stream = stream


_PLAIN = (str, bytes, int, float, complex, bool, type(None), type, Tensor, type(sys), torch.dtype, torch.device)


class _Objects:
    """Shallow copies of everything mutable that some objects lead to."""

    def __init__(self) -> None:
        self._known: dict[int, Any] = {}
        self._undo: list[Callable[[], None]] = []

    def keep(self, root: Any, *, shallow: bool = False) -> None:
        """Copies what ``root`` leads to; with ``shallow`` of its values only plain lists, dictionaries and sets."""
        if shallow:
            self._copy(root)
            for value in list(root.values()):
                if type(value) in (list, dict, set) or isinstance(value, io.IOBase):
                    self._copy(value)
            return
        waiting = deque([root])
        while waiting and len(self._known) < MAX_OBJECTS:
            value = waiting.popleft()
            if isinstance(value, _PLAIN) or id(value) in self._known or _is_ours(value):
                continue
            waiting.extend(self._copy(value))

    def _copy(self, value: Any) -> list[Any]:
        """Keeps a shallow copy of ``value``; what it holds."""
        self._known[id(value)] = value
        if isinstance(value, io.IOBase):
            self._copy_file(value)
            return []
        if isinstance(value, dict):
            self._undo.append(_undo_dict(value))
            inside = [*dict.keys(value), *dict.values(value)]
        elif isinstance(value, (list, deque)):
            self._undo.append(_undo_sequence(value))
            inside = list(value)
        elif isinstance(value, set):
            self._undo.append(_undo_set(value))
            inside = list(value)
        elif isinstance(value, (tuple, frozenset)):
            inside = list(value)
        elif isinstance(value, FunctionType):
            inside = list(value.__closure__ or ())
        elif isinstance(value, MethodType):
            return [value.__self__, value.__func__]
        elif isinstance(value, CellType):
            try:
                content = value.cell_contents
            except ValueError:  # empty as yet
                return []
            self._undo.append(lambda: setattr(value, "cell_contents", content))
            return [content]
        else:
            inside = self._copy_slots(value)
        held = getattr(value, "__dict__", None)
        return [*inside, held] if isinstance(held, dict) else inside

    def _copy_file(self, file: Any) -> None:
        """Of a regular file that is open for writing, its length and place are kept."""
        if file.closed or not file.writable() or file in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
            return
        try:
            if file.seekable():
                file.flush()
                descriptor, place = file.fileno(), file.tell()
                size = os.fstat(descriptor).st_size
                self._undo.append(lambda: _cut_back(file, descriptor, place, size))
                return
        except (OSError, ValueError):  # in memory
            if isinstance(file, (io.BytesIO, io.StringIO)):
                content, place = file.getvalue(), file.tell()
                self._undo.append(lambda: _write_again(file, content, place))
                return
        raise CannotReplayError("it can write to a pipe or a terminal that the program has opened")

    def _copy_slots(self, value: Any) -> list[Any]:
        names = [name for cls in type(value).__mro__ for name in cls.__dict__.get("__slots__", ()) if "__" not in name]
        held = {name: getattr(value, name) for name in names if hasattr(value, name)}

        def undo() -> None:
            for name, old in held.items():
                if getattr(value, name, None) is not old:
                    object.__setattr__(value, name, old)

        if held:
            self._undo.append(undo)
        return list(held.values())

    def restore(self) -> None:
        """Puts everything back that is not as it was."""
        for undo in self._undo:
            undo()


def _is_ours(value: Any) -> bool:
    return str(getattr(type(value), "__module__", "")).startswith("dtypedoctor.") or (
        isinstance(value, FunctionType) and str(value.__module__).startswith("dtypedoctor.")
    )


def _cut_back(file: Any, descriptor: int, place: int, size: int) -> None:
    file.flush()
    if os.fstat(descriptor).st_size > size:
        os.ftruncate(descriptor, size)
    if file.tell() != place:
        file.seek(place)


def _write_again(file: Any, content: Any, place: int) -> None:
    if file.getvalue() != content:
        file.seek(0)
        file.truncate()
        file.write(content)
    file.seek(place)


def _undo_dict(value: dict[Any, Any]) -> Callable[[], None]:
    kept = list(dict.items(value))
    kind: Any = OrderedDict if isinstance(value, OrderedDict) else dict

    def undo() -> None:
        now = list(dict.items(value))
        if len(now) != len(kept) or any(a is not c or b is not d for (a, b), (c, d) in zip(now, kept, strict=True)):
            kind.clear(value)
            for name, held in kept:
                kind.__setitem__(value, name, held)

    return undo


def _undo_sequence(value: Any) -> Callable[[], None]:
    kept = list(value)

    def undo() -> None:
        if len(value) != len(kept) or any(a is not b for a, b in zip(value, kept, strict=True)):
            value.clear()
            value.extend(kept)

    return undo


def _undo_set(value: set[Any]) -> Callable[[], None]:
    kept = set(value)

    def undo() -> None:
        if len(value) != len(kept) or set(map(id, value)) != set(map(id, kept)):
            set.clear(value)
            set.update(value, kept)

    return undo


@dataclass(slots=True)
class Again:
    """What came of code of the program that was run again.

    Attributes:
        error: what it has raised.
        why_not: why it could not be run again to its end; empty where it was, whatever came of it.
    """

    error: BaseException | None = None
    why_not: str = ""


def make_again(
    session: "Session",
    run: Callable[[], object],
    *,
    roots: Sequence[Any],
    at: AbstractContextManager[None],
    ops: "OpTrace | None" = None,
    memory: "KeptMemory | None" = None,
    before_undone: Callable[[Again], object] | None = None,
) -> Again:
    """Runs code of the program once more, with one thing changed or none, and puts back everything that it may change.

    Args:
        session: of the process.
        run: makes a call, a statement or an optimizer step again. An experiment is what it does otherwise than the program.
        roots: Python objects that it may change.
        at: of :func:`at_moment`.
        ops: records its operators.
        memory: bounds it; one without bounds by default.
        before_undone: looks at what was made, with the program's memory as the code has left it; not called where it could not be run.
    """
    memory = KeptMemory() if memory is None else memory
    again, reduces = Again(), False
    with contained() as prevented, undone(session, roots, at, memory, lambda: reduces), memory:
        with contained() as attempt:
            if ops is not None:
                ops.open()
            try:
                run()
            finally:
                if ops is not None:
                    ops.close()
        again.error = attempt.error
        again.why_not = str(attempt.error) if isinstance(attempt.error, CannotReplayError) else memory.why_not
        if again.why_not:
            session.writer.forget_held()
        elif before_undone is not None:
            reduces = True
            before_undone(again)
    if isinstance(prevented.error, CannotReplayError):
        again.why_not = str(prevented.error)
    elif prevented.error is not None:
        raise prevented.error
    if again.error is not None:
        clear_frames(again.error.__traceback__)  # their variables hold tensors, and this frame the exception: a circle
    return again


@contextmanager
def undone(
    session: "Session",
    roots: Sequence[Any],
    moment: AbstractContextManager[None],
    memory: "KeptMemory",
    runs_program: Callable[[], bool],
) -> Iterator[None]:
    """Inside, code of the program may run once more at an earlier moment; afterwards the program is as it was.

    Autocast keeps no copies of weights inside: the program's own calls would find them.

    Args:
        session: of the process.
        roots: objects that the code may change; of modules among them the buffers are copied.
        moment: of :func:`at_moment`.
        memory: a mode that the caller enters around the code itself.
        runs_program: says whether the program's code runs although the instruments are muted: it must not reach anything outside of the process.
    """
    with ExitStack() as stack:
        stack.callback(memory.restore)
        stack.enter_context(as_before(roots, get_ident(), lambda: session.position.muted and not runs_program()))
        stack.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
        torch.set_autocast_cache_enabled(False)
        stack.enter_context(moment)
        stack.enter_context(session.autocast.unheard())
        for root in roots:
            if isinstance(root, nn.Module):
                memory.keep_buffers(root)
        yield


@contextmanager
def at_moment(
    session: "Session", first: int, *, step: int, call: int, overrides: Sequence[str], depth: int = 0
) -> Iterator[None]:
    """Inside, the position is an earlier one, outside of all modules, in ``depth`` backward passes, and records take the numbers from ``first`` on
    that were reserved then."""
    position = session.position
    here = position.here
    before = (here.call, here.stack, here.overrides, here.backward_depth, position.step)
    try:
        here.call, here.stack, here.overrides, here.backward_depth = call, [], list(overrides), depth
        position.step = step
        with session.writer.numbering_from(first):
            yield
    finally:
        here.call, here.stack, here.overrides, here.backward_depth, position.step = before
