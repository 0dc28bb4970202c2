"""Where else a program was at work: in other processes and in code that torch does not know, where nobody watches.

torch is imported by the functions that need it: this module begins to listen before the program has imported it.
"""

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from importlib.machinery import EXTENSION_SUFFIXES, PathFinder
from pathlib import Path
from types import FrameType
from typing import Any

from dtypedoctor.lasting import at_audit, at_fork
from dtypedoctor.trace.events import NOT_HERE
from dtypedoctor.trace.ranks import JOB

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
    """

    def __init__(self, becomes: Callable[[str], object] = lambda program: None) -> None:
        self._becomes = becomes
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
        at_audit(self.heard, "subprocess.Popen", "os.posix_spawn", "os.system", "os.exec", "ctypes.dlopen")

    def end(self) -> None:
        """Stops listening."""
        self._listening = False

    def _forked(self) -> None:
        self._forks += self._listening

    def heard(self, event: str, details: tuple[Any, ...]) -> None:
        """Notes an audit event."""
        if not self._listening:
            return
        if event in ("subprocess.Popen", "os.posix_spawn") and not _is_by_inductor():
            name = _base(details[0])
            (self._pythons if _may_work(name, details[1]) else self._programs)[name] = None
        if event == "os.system":
            self._programs["a shell"] = None
        if event == "ctypes.dlopen" and details[0] is not None:
            self._libraries[os.fsdecode(details[0])] = None
        if event == "os.exec" and os.getpid() == self._owner:
            self._becomes(_with_script(*details[:2]))

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
