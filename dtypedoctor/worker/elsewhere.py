"""Where else a program was at work: in other processes and in code that torch does not know, where nobody watches.

torch is imported by the functions that need it: this module begins to listen before the program has imported it.
"""

import os
import resource
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from importlib.machinery import EXTENSION_SUFFIXES, PathFinder
from pathlib import Path
from types import FrameType
from typing import Any

from dtypedoctor.interruptions import contained
from dtypedoctor.lasting import at_audit, at_fork
from dtypedoctor.trace.events import NOT_HERE, WORKED_ELSEWHERE

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

_IN_OPEN = 0x20
FIRST_DESCRIPTOR = 512
"""Descriptors of ours are numbered from here, so that the program's own are those that it would have anyway."""

_STARTERS = ("python", "pypy", "torchrun", "accelerate", "deepspeed")
"""How the names of programs begin that run Python programs."""
_MODULES = frozenset({"compileall", "ensurepip", "http", "pip", "platform", "site", "sysconfig", "tensorboard", "venv"})
"""Modules that are run as programs and compute nothing."""


_JOB = "DTYPEDOCTOR_JOB"
"""Environment variable that is there where each Python process of this environment that imports torch records itself: ``hooked.py``."""


def _comes_with_torch(path: str) -> bool:
    """Whether a library lies in the folder of torch, or of the packages of NVIDIA and Triton that are installed beside it."""
    spec = PathFinder.find_spec("torch")
    if spec is None or spec.origin is None or not os.path.isabs(path):
        return False
    beside = (Path(entry or ".") / package for entry in sys.path for package in ("nvidia", "triton"))
    return any(Path(path).is_relative_to(folder) for folder in (Path(spec.origin).parent, *beside))


_FAULTS_OF_TORCH = 20_000
"""Page faults below which no process has imported torch: it costs 40,000 with 2.13 for a CPU, 80,000 with CUDA; Python alone 800, git 300."""


class TorchOpened:
    """Says whether a process that this one has started has loaded its torch since :meth:`watch`.

    Linux tells when a file is opened, and not by whom: on a shared machine it may be anybody. So the children that were waited for must
    also have had the page faults that importing torch costs.
    """

    def __init__(self) -> None:
        self._descriptor: int | None = None
        self._known = True
        self._faults = 0
        self._had_child = False

    def watch(self) -> None:
        """A program is about to be started; cheap to call again."""
        if self._descriptor is not None or not self._known:
            return
        import fcntl  # not before a program is started: a script sees which modules there are
        from ctypes import CDLL

        self._known = False
        self._faults, self._had_child = _children_waited_for(), _has_child()
        with contained():  # not Linux, no torch, or no descriptor left
            spec = PathFinder.find_spec("torch")
            library = Path(str(spec and spec.origin)).parent / "lib" / "libtorch_cpu.so"
            system = CDLL(None)
            first = system.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
            if first < 0 or system.inotify_add_watch(first, os.fsencode(library), _IN_OPEN) < 0:
                return
            self._descriptor = fcntl.fcntl(first, fcntl.F_DUPFD_CLOEXEC, FIRST_DESCRIPTOR)
            os.close(first)
            self._known = True

    def by_this_process(self) -> None:
        """This process has loaded torch itself: who else has is not known any more where it was watched before."""
        self._known = self._known and self._descriptor is None

    @property
    def by_another(self) -> bool | None:
        """None where it is not known."""
        if not self._known or self._descriptor is None:
            return None
        import select

        with contained():  # the program may have closed it, and have a file of that number
            if os.readlink(f"/proc/self/fd/{self._descriptor}") == "anon_inode:inotify":
                opened = bool(select.select([self._descriptor], [], [], 0)[0])
                runs_on = _has_child() and not self._had_child
                return opened and (runs_on or _children_waited_for() - self._faults >= _FAULTS_OF_TORCH)
        return None


class Elsewhere:
    """Listens for forks, programs that are started and C libraries that are loaded, from :meth:`begin` to :meth:`end`.

    Python's audit events tell of the latter two; nothing of the program is wrapped for them.

    Args:
        becomes: called with the program that this process is about to become.
    """

    def __init__(self, becomes: Callable[[str], object] = lambda program: None) -> None:
        self._becomes = becomes
        self._owner = os.getpid()
        self._listening = False
        self._forks = 0
        self._programs: dict[str, None] = {}
        self._pythons: dict[str, None] = {}
        self._libraries: dict[str, None] = {}
        self._torch = TorchOpened()
        self._other_python = False
        self._compiles = False
        self._waited_for = _children_waited_for()
        self._had_child = _has_child()

    def begin(self) -> None:
        """Begins to listen; to be called once."""
        self._listening = True
        at_fork(after_in_parent=self._forked)
        at_audit(self.heard, "subprocess.Popen", "os.posix_spawn", "os.system", "os.exec", "ctypes.dlopen")

    def end(self) -> None:
        """Stops listening."""
        self._listening = False

    def _forked(self) -> None:
        self._forks += self._listening

    def torch_is_there(self) -> None:
        """This process has imported torch itself."""
        self._torch.by_this_process()

    def heard(self, event: str, details: tuple[Any, ...]) -> None:
        """Notes an audit event."""
        if not self._listening:
            return
        if event in ("subprocess.Popen", "os.posix_spawn"):
            if _is_by_inductor():
                self._compiles = True
                return
            name = _base(details[0])
            works = _may_work(name, details[1])
            (self._pythons if works else self._programs)[name] = None
            self._other_python |= works and not _is_of_this_environment(details[0])
            self._torch.watch()
        elif event == "os.system":
            self._torch.watch()
            self._programs["a shell"] = None
        elif event == "os.exec" and os.getpid() == self._owner:
            scripts = [_base(word) for word in details[1] if os.fsencode(word).endswith(b".py")]
            self._becomes(" ".join([_base(details[0]), *scripts[:1]]))
        elif event == "ctypes.dlopen" and details[0] is not None:
            self._libraries[os.fsdecode(details[0])] = None

    @property
    def libraries(self) -> list[str]:
        """File names of the C libraries that were loaded by ctypes, those that come with torch and the system left out."""
        others = (path for path in self._libraries if not _comes_with_torch(path))
        return [name for path in others if not (name := _base(path)).startswith(_SYSTEM)]

    def processes(self, followed: int = 0) -> Iterator[tuple[str, str]]:
        """What ran in other processes, and why it is not watched; ``followed`` of them leave traces of their own."""
        if self._forks:
            yield f"{self._forks} forked process(es)", NOT_HERE
        programs = [name for name in self._programs if name not in _TOOLS]
        if programs:
            yield f"other programs that were started ({', '.join(programs)})", NOT_HERE
        record_themselves = _JOB in os.environ and not self._other_python
        if self._pythons and not record_themselves:
            left = _has_child() and not self._had_child  # it may come to torch yet
            idle = self._torch.by_another is False and not self._other_python and not left
            yield (
                f"Python programs that were started ({', '.join(self._pythons)})",
                NOT_HERE if idle else WORKED_ELSEWHERE,
            )
        elif programs and self._torch.by_another and not followed and not self._compiles:
            yield "torch in programs that were started", WORKED_ELSEWHERE
        elif (
            not (followed or self._forks or self._programs or self._pythons or self._compiles)
            and self._has_had_children()
        ):
            yield "other processes that were started", NOT_HERE

    def _has_had_children(self) -> bool:
        """Whether there is a first child now, or one was waited for; multiprocessing spawns without an event."""
        return _children_waited_for() != self._waited_for or (_has_child() and not self._had_child)


def outliving_threads() -> Iterator[tuple[str, str]]:
    """Threads that are still at work when a script's last line is over, and why they are not watched."""
    others = [t for t in threading.enumerate() if t is not threading.main_thread() and not t.daemon]
    if others:
        yield f"{len(others)} thread(s) that outlive the script's last line", "recording ends with it"


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


def _is_of_this_environment(program: Any) -> bool:
    """Whether a program lies beside this interpreter: then its torch is the same."""
    import shutil

    found = shutil.which(os.fsdecode(program))
    return found is not None and Path(found).parent == Path(sys.executable).parent


def _children_waited_for() -> int:
    """Page faults of all children that were waited for; every process has some."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt


def _has_child() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


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
