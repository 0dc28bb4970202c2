"""The trace that a process leaves of itself, the same for ``run``, ``exec``, ``watch()`` and the callback of trainers.

A :class:`Recording` writes the first record and the last. What is measured between them is the business of a :class:`Watch`,
which comes when torch is there. :class:`Elsewhere` notes where else the program was at work: in other processes and in code that torch does not know,
where nobody watches. Nothing heavy is imported here: a script may never come to torch. What ends the program is shown to its
user without the frames of this package.
"""

import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES, PathFinder
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Protocol

from dtypedoctor import guardian
from dtypedoctor.interruptions import contained
from dtypedoctor.trace.events import (
    END_OF_PROGRAM,
    NOT_HERE,
    Became,
    End,
    Killed,
    NotWatched,
    Refused,
    Resources,
    Stage,
)
from dtypedoctor.trace.ranks import JOB, header
from dtypedoctor.trace.writer import TraceWriter
from dtypedoctor.unpatched import at_audit, at_fork, audited, getpid, perf_counter
from dtypedoctor.worker.on_import import keep_out_of_compiler


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What a watch sums up at the end.

    Attributes:
        steps: optimizer steps, or whatever a workload counts as its steps.
        device: type or name of the device; empty where what the run took is not known.
        peak_memory: bytes over what was in use at the beginning.
        checksum: digest of what was trained; None where nobody has asked for it.
    """

    steps: int
    device: str = ""
    peak_memory: int = 0
    checksum: str | None = None


class Watch(Protocol):
    """What measures, from the moment at which torch is there."""

    def finish(self, error: BaseException | None, libraries: Sequence[str]) -> Totals:
        """Stops measuring, and writes what only the end knows.

        Args:
            error: what ended the run, if anything did; SystemExit is how a program leaves with a status.
            libraries: names of the C libraries that the program has loaded by ctypes.
        """
        raise NotImplementedError


class Recording:
    """The trace of this process, until :meth:`end` or :meth:`refuse`.

    Args:
        directory: where it lies; exists already.
        watched: False where no more than losses, steps and what ended the process are recorded.

    Attributes:
        writer: where the records go.
        watch: what measures; None until torch is there.
    """

    def __init__(self, directory: Path, *, watched: bool = True) -> None:
        self.writer = TraceWriter(directory)
        self.watch: Watch | None = None
        self._elsewhere: Elsewhere | None = None
        self._owner = getpid()
        self._began = perf_counter()
        self._over = False
        self.writer.write(header(watched=watched))

    @property
    def active(self) -> bool:
        """Whether it goes on, in this process: a forked child has a copy that does nothing."""
        return not self._over and getpid() == self._owner

    @property
    def seconds(self) -> float:
        """Time since it began."""
        return perf_counter() - self._began

    def follow_program(self, name: str) -> None:
        """This process runs a program that is not the doctor's, so it is also noted where else that is at work.

        Args:
            name: of the one stage that the trace has.
        """
        self.writer.write(Stage(n=self.writer.next_n(), index=0, name=name, workload="script"))
        at_fork(after_in_child=self.writer.disown)
        self._elsewhere = Elsewhere(
            becomes=lambda program: self.writer.write(Became(program=program)),
            kills=lambda process: self.writer.write(Killed(process=process)),
        )
        self._elsewhere.begin()

    def torch_is_there(self, watch: Watch) -> None:
        """The program has imported torch, and ``watch`` is about to begin."""
        self.watch = watch
        keep_out_of_compiler(audited)

    def refuse(self, message: str, hint: str = "") -> None:
        """What was asked for cannot be run; nothing that a watch knows is written."""
        self.writer.write(Refused(message=message, hint=hint))
        self._close("refused", 0)

    def end(self, error: BaseException | None, unwatched: Iterable[tuple[str, str]] = ()) -> None:
        """What is recorded has come to its end; does nothing where that is known already, and in a forked child.

        Args:
            error: what ended it, if anything did. A scenario fails by SystemExit as by anything else; a program may leave so.
            unwatched: what was not watched, and why.
        """
        if not self.active:
            return
        self._over = True
        is_program = self._elsewhere is not None
        if error is not None and is_program:
            hide_own_frames(error)
        steps = 0
        with contained() as ours:  # a defect of ours, or a device that no longer answers
            steps = self._conclude(error, unwatched)
        if ours.error is not None:
            self._not_watched(END_OF_PROGRAM, f"{type(ours.error).__name__}: {ours.error}")
        completed = error is None or (is_program and isinstance(error, SystemExit))
        self._close("completed" if completed else "raised", steps)

    def _conclude(self, error: BaseException | None, unwatched: Iterable[tuple[str, str]]) -> int:
        """Writes what only the end knows; steps that were done."""
        libraries: Sequence[str] = ()
        if self._elsewhere is not None:
            self._elsewhere.end()
            libraries = self._elsewhere.libraries
            for what, why in (*self._elsewhere.processes(), *unwatched):
                self._not_watched(what, why)
        if self.watch is None:
            return 0
        totals = self.watch.finish(error, libraries)
        if totals.device:
            self.writer.write(
                Resources(
                    seconds=self.seconds,
                    peak_memory=totals.peak_memory,
                    device=totals.device,
                    checksum=totals.checksum,
                )
            )
        return totals.steps

    def _not_watched(self, what: str, why: str) -> None:
        self.writer.write(NotWatched(what=what, why=why))

    def _close(self, outcome: str, steps: int) -> None:
        self._over = True
        self.writer.write(End(n=self.writer.next_n(), outcome=outcome, steps_completed=steps))
        self.writer.close()


def move_when_this_process_ends(private: str, wanted: str) -> None:
    """Starts a process, which is not a child of this one, that moves the record of a program that does not come to do so itself.

    Raises:
        OSError: it cannot be started; the record then stays where it is if the program is killed.
    """
    nowhere = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in range(3)]
    command = [sys.executable, "-I", "-S", guardian.PROGRAM, guardian.FOLLOW, str(getpid()), private, wanted]
    with _not_told_of_children():
        started = os.posix_spawn(sys.executable, command, os.environ, file_actions=nowhere)
        with suppress(ChildProcessError):  # a thread of the program waits for any child
            os.waitpid(started, 0)  # it has forked, and ends


_SIZE_OF_SIGACTION = 256
"""Bytes; more than the structure has anywhere. Zeros stand for the default action."""


@contextmanager
def _not_told_of_children() -> Iterator[None]:
    """The program's handler of SIGCHLD, whatever it is, does not run for children that end inside; it does after it for those of its own.

    Blocking the signal instead would only delay it, or let a thread of a library take it.
    """
    import ctypes  # not where nothing is started

    libc = ctypes.CDLL(None)
    handler, default = (ctypes.create_string_buffer(_SIZE_OF_SIGACTION) for _ in range(2))
    libc.sigaction(signal.SIGCHLD, default, handler)
    try:
        yield
    finally:
        libc.sigaction(signal.SIGCHLD, handler, None)
    with suppress(ChildProcessError):
        if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            os.kill(getpid(), signal.SIGCHLD)


HOME = str(Path(__file__).resolve().parents[1])


def hide_own_frames(error: BaseException) -> None:
    """Removes this package's frames, and torch's that are there because of it, from the traceback of ``error`` and of the exceptions
    that it came from."""
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        # A traceback without this package's frames, and without those of torch that are there because of it
        traceback = one.__traceback__
        kept: list[TracebackType] = []
        behind_own = False
        while traceback is not None:
            code = traceback.tb_frame.f_code
            if code.co_filename.startswith(HOME):
                while kept and _is(kept[-1], _UNCOMPILED):
                    kept.pop()
                behind_own = True
            elif not (behind_own and _is(traceback, _OPERATOR)):
                behind_own = False
                if _is(traceback, _WITH_HOOKS) and kept and not _has_other_hooks(kept[-1]):
                    kept[-1] = _without_hooks(kept[-1])
                else:
                    kept.append(traceback)
            traceback = traceback.tb_next
        following = None
        for frame in reversed(kept):
            frame.tb_next = following
            following = frame
        one.__traceback__ = following
        waiting += [one.__cause__, one.__context__]
        if isinstance(one, BaseExceptionGroup):
            waiting += one.exceptions


def hide_in_excepthook() -> Callable[[], None]:
    """Lets whatever ``sys.excepthook`` is now see exceptions without this package's frames; nothing else of them is changed.

    Returns:
        What puts the hook back, unless somebody has set another one since.
    """
    shown = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        hide_own_frames(error)
        shown(kind, error, error.__traceback__)

    def put_back() -> None:
        if sys.excepthook is hook:
            sys.excepthook = shown

    sys.excepthook = hook
    return put_back


_UNCOMPILED = ("torch/_dynamo/eval_frame.py", "_fn")
_OPERATOR = ("torch/_ops.py", "__call__")
_WITH_HOOKS = ("torch/nn/modules/module.py", "inner")
_CALLING = "torch.nn.modules.module"
_TABLES = ("_backward_pre_hooks", "_backward_hooks", "_forward_pre_hooks", "_forward_hooks")


def _is(traceback: TracebackType, function: tuple[str, str]) -> bool:
    code = traceback.tb_frame.f_code
    return code.co_name == function[1] and code.co_filename.endswith(function[0])


def _has_other_hooks(calling: TracebackType) -> bool:
    """Whether torch would have called hooks of the program in this frame, which calls a module."""
    module, modules = calling.tb_frame.f_locals.get("self"), sys.modules.get(_CALLING)
    hooks = [hook for name in _TABLES for hook in getattr(modules, f"_global{name}", {}).values()]
    if not all(map(_is_own, hooks)):
        return True
    return any(getattr(module, name, None) for name in _TABLES)


def _is_own(hook: object) -> bool:
    code = getattr(hook, "__code__", None)
    return code is not None and code.co_filename.startswith(HOME)


def _without_hooks(calling: TracebackType) -> TracebackType:
    """The frame that calls a module as it is where there are no hooks: its first call with all arguments is that of ``forward``."""
    import dis  # not before torch has brought it in: a script sees which modules there are

    for instruction in dis.get_instructions(calling.tb_frame.f_code):
        if instruction.opname == "CALL_FUNCTION_EX" and instruction.positions is not None:
            line = instruction.positions.lineno or calling.tb_lineno
            return TracebackType(None, calling.tb_frame, instruction.offset, line)
    return calling


_SYSTEM = (
    "libc.",
    "libm.",
    "libdl.",
    "librt.",
    "libpthread.",
    "libgomp",
    "libcuda",
    "libcud",
    "libnv",
    "libtorch",
    "libc10",
)
"""How the names of libraries begin that every program on torch loads."""
_TOOLS = frozenset(
    {
        "c++", "cc", "clang", "clang++", "cuobjdump", "file", "g++", "gcc", "git", "hostname", "ld", "ldconfig", "lscpu", "ninja",
        "nvcc", "nvdisasm", "nvidia-smi", "objdump", "ptxas", "ptxas-blackwell", "rocminfo", "uname", "which",
    }
)  # fmt: skip
"""Programs that libraries start to find out about the system or to build something."""

_INDUCTOR = f"torch{os.sep}_inductor{os.sep}"
"""In the file names of the code that starts compilers, and Python to try what they made: these load torch and compute nothing of the program's."""

_STARTERS = ("python", "pypy", "torchrun", "accelerate", "deepspeed")
"""How the names of programs begin that run Python programs."""
_MODULES = frozenset({"compileall", "ensurepip", "http", "pip", "platform", "site", "sysconfig", "tensorboard", "venv"})
"""Modules that are run as programs and compute nothing."""


def _comes_with_torch(path: str) -> bool:
    """Whether a library lies in the folder of torch, or of the packages of NVIDIA and Triton that are installed beside it."""
    spec = PathFinder.find_spec("torch")
    if spec is None or spec.origin is None or not os.path.isabs(path):
        return False
    beside = (Path(entry or ".") / package for entry in sys.path for package in ("nvidia", "triton"))
    return any(Path(path).is_relative_to(folder) for folder in (Path(spec.origin).parent, *beside))


class Elsewhere:
    """Listens for forks, programs that are started and C libraries that are loaded, from :meth:`begin` to :meth:`end`.

    Python's audit events tell of the latter two; nothing of the program is wrapped for them.

    Args:
        becomes: called with the program that this process is about to become.
        kills: called with the number of a process that this one ends.
    """

    def __init__(
        self,
        becomes: Callable[[str], object] = lambda program: None,
        kills: Callable[[int], object] = lambda process: None,
    ) -> None:
        self._becomes, self._kills = becomes, kills
        self._owner = os.getpid()
        self._listening = False
        self._forks = 0
        self._programs: dict[str, None] = {}
        self._pythons: dict[str, None] = {}
        self._libraries: dict[str, None] = {}

    def begin(self) -> None:
        """Begins to listen; to be called once."""
        self._listening = True
        at_fork(after_in_parent=self._forked)
        at_audit(self.heard, "subprocess.Popen", "os.posix_spawn", "os.system", "os.exec", "os.kill", "ctypes.dlopen")

    def end(self) -> None:
        """Stops listening."""
        self._listening = False

    def _forked(self) -> None:
        self._forks += self._listening

    def heard(self, event: str, details: tuple[Any, ...]) -> None:
        """Notes an audit event."""
        if not self._listening:
            return
        match event:
            case "subprocess.Popen" | "os.posix_spawn" if not _is_by_inductor():
                name = _base(details[0])
                (self._pythons if _may_work(name, details[1]) else self._programs)[name] = None
            case "os.system":
                self._programs["a shell"] = None
            case "ctypes.dlopen" if details[0] is not None:
                self._libraries[os.fsdecode(details[0])] = None
            case "os.exec" if os.getpid() == self._owner:
                self._becomes(_with_script(*details[:2]))
            case "os.kill" if os.getpid() == self._owner and details[1] in (signal.SIGTERM, signal.SIGKILL):
                self._kills(details[0])

    @property
    def libraries(self) -> list[str]:
        """File names of the C libraries that were loaded by ctypes, those that come with torch and the system left out."""
        others = (path for path in self._libraries if not _comes_with_torch(path))
        return [name for path in others if not (name := _base(path)).startswith(_SYSTEM)]

    def processes(self) -> Iterator[tuple[str, str]]:
        """What ran in other processes, and why it is not watched. Where this process is part of a job, Python programs record themselves."""
        if self._forks:
            yield f"{self._forks} forked process(es)", NOT_HERE
        programs = [name for name in self._programs if name not in _TOOLS]
        if programs:
            yield f"other programs that were started ({', '.join(programs)})", NOT_HERE
        if self._pythons and JOB not in os.environ:
            yield f"Python programs that were started ({', '.join(self._pythons)})", NOT_HERE


def _with_script(program: Any, arguments: Any) -> str:
    """A program by its name, and that of the script that it is given."""
    scripts = [_base(word) for word in arguments if os.fsencode(word).endswith(b".py")]
    return " ".join([_base(program), *scripts[:1]])


def _may_work(program: str, arguments: Any) -> bool:
    """Whether a program that is started may compute something with torch: Python, or what starts it, and no tool that comes with them."""
    if not program.startswith(_STARTERS):
        return False
    texts = [os.fsdecode(a) for a in arguments] if isinstance(arguments, (list, tuple)) else [str(arguments)]
    if "-c" in texts[:-1]:
        return "torch" in texts[texts.index("-c") + 1]
    if "-m" in texts[:-1]:
        return texts[texts.index("-m") + 1].partition(".")[0] not in _MODULES
    return not any("compile_worker" in text for text in texts) and "--version" not in texts


def _is_by_inductor() -> bool:
    """Whether torch.compile starts the program that is about to be started."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _INDUCTOR in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def _base(program: Any) -> str:
    return Path(os.fsdecode(program)).name


WHY_NOT_INSIDE = "what it reads and writes passes no torch operator; outputs of instrumented modules were measured"

_TRITON = "triton.runtime.jit"
_KERNEL_CLASSES = frozenset({"JITFunction", "InterpretedFunction", "Autotuner", "Heuristics"})
_NOT_THE_PROGRAMS = frozenset({"torch", "triton", "dtypedoctor"})
_TORCHS_NAMESPACES = frozenset(
    {
        "aten", "c10d", "c10d_functional", "cplib", "debug_mode_ops", "debugprims", "export", "flex_lib", "fsdp", "inductor",
        "mkl", "mkldnn", "onednn", "onnx", "onnx_symbolic", "prim", "prims", "profiler", "quantized", "quantized_decomposed",
        "rngprims", "sparse", "streams", "symm_mem", "triton",
    }
)  # fmt: skip
"""Namespaces of operators that torch itself defines from Python, in 2.9 to 2.13; those with a leading underscore besides."""


def own_kernels(libraries: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Each kind of such code that the process has loaded, in words, and why it is not watched.

    That it is loaded can be seen; whether it ever ran cannot.

    Args:
        libraries: names of the C libraries that were loaded by ctypes.
    """
    import torch

    for what, found in (
        ("C code loaded by ctypes", sorted(libraries)),
        (
            "C++ operators",
            sorted(Path(path).name for path in map(str, torch.ops.loaded_libraries) if not _comes_with_torch(path)),
        ),
        ("compiled extension modules", sorted(_extension_modules())),
        ("Triton kernels", _counted(_triton_kernels())),
    ):
        if found:
            yield f"{what} ({', '.join(found)})", WHY_NOT_INSIDE
    if operators := _counted(_operators()):
        yield (
            f"the inside of custom operators ({', '.join(operators)})",
            "an operator is one step for every instrument; whether these have run is not known",
        )


def _operators() -> Iterator[str]:
    """Namespace of each operator that was defined from Python and is not torch's own."""
    from dtypedoctor._torch_private import defined_operators

    for name in defined_operators():
        namespace = str(name).partition("::")[0]
        if namespace not in _TORCHS_NAMESPACES and not namespace.startswith("_"):
            yield namespace


def _triton_kernels() -> Iterator[str]:
    """Package of each Triton kernel that a loaded module holds under a name of its own."""
    if _TRITON not in sys.modules:
        return
    for name, module in list(sys.modules.items()):
        package = name.partition(".")[0]
        if package in _NOT_THE_PROGRAMS:
            continue
        for value in list(getattr(module, "__dict__", {}).values()):
            cls = type(value)
            if cls.__name__ in _KERNEL_CLASSES and cls.__module__.startswith("triton.runtime"):
                yield package


def _extension_modules() -> Iterator[str]:
    """Modules of machine code that are part of no installed package: what a program has built for itself."""
    import sysconfig

    import torch

    folders = [path for key, path in sysconfig.get_paths().items() if key.endswith("lib")]
    installed = (*folders, str(Path(torch.__file__).parents[1]), sys.base_prefix)
    for name, module in list(sys.modules.items()):
        origin = getattr(getattr(module, "__spec__", None), "origin", None)
        compiled = isinstance(origin, str) and origin.endswith(tuple(EXTENSION_SUFFIXES))
        if compiled and not str(origin).startswith(installed):
            yield name


def _counted(names: Iterable[str]) -> list[str]:
    return [f"{name}: {count}" for name, count in sorted(Counter(names).items())]
