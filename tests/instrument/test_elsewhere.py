"""What a program does where nobody watches: other processes, other programs, machine code."""

import ctypes
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader
from pathlib import Path
from types import FunctionType, ModuleType

import pytest
import torch

from dtypedoctor.trace.events import NOT_HERE
from dtypedoctor.worker.recording import WHY_NOT_INSIDE, Elsewhere, own_kernels

pytestmark = pytest.mark.slow

ANY_LIBRARY = Path(str(importlib.util.find_spec("_json").origin))  # type: ignore[union-attr]
"""A small shared library that comes with Python."""


def seen(work: Callable[[], object]) -> Elsewhere:
    elsewhere = Elsewhere()
    elsewhere.begin()
    try:
        work()
    finally:
        elsewhere.end()
    return elsewhere


def fork_a_child() -> None:
    """A child that ends at once."""
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)


def start_with_posix_spawn() -> None:
    """A program that is started without the subprocess module."""
    os.waitpid(os.posix_spawn("/bin/true", ["true"], os.environ), 0)


PROCESSES: list[tuple[Callable[[], object], str]] = [
    (fork_a_child, "1 forked process(es)"),
    (start_with_posix_spawn, "other programs that were started (true)"),
    (lambda: os.system("true"), "other programs that were started (a shell)"),
]


@pytest.mark.parametrize(("work", "note"), PROCESSES, ids=[note for _, note in PROCESSES])
def test_another_process_is_noticed_however_it_is_started(work: Callable[[], object], note: str) -> None:
    """One note each, with what is known of it."""
    assert list(seen(work).processes()) == [(note, NOT_HERE)]


def test_a_process_without_children_has_none_to_tell_of() -> None:
    """Neither has one that only asked the system about itself, as libraries do."""

    def ask() -> None:
        sys.audit("subprocess.Popen", "/sbin/ldconfig", ["ldconfig", "-p"], None, None)

    assert list(seen(lambda: None).processes()) == []
    assert list(seen(ask).processes()) == []


def test_a_kernel_that_is_compiled_is_no_work_of_another_program() -> None:
    """Triton starts ptxas in each rank while the other ranks load torch: that is nobody's computation."""

    def build() -> None:
        for program in ("/opt/triton/backends/nvidia/bin/ptxas", "/usr/bin/file", "/usr/bin/c++"):
            sys.audit("subprocess.Popen", program, [program, "-v"], None, None)

    assert list(seen(build).processes()) == []


@pytest.mark.parametrize(
    ("arguments", "works"),
    [
        (["python3", "train.py"], True),
        (["python3", "-m", "trainer"], True),
        (["torchrun", "train.py"], True),
        (["python3", "-c", "import torch; torch.ones(1)"], True),
        (["python3", "-c", "print(1)"], False),
        (["python3", "-m", "pip", "freeze"], False),
        (["python3", "/torch/_inductor/compile_worker/__main__.py"], False),
        (["gzip", "train.py"], False),
    ],
)
def test_a_program_that_may_compute_with_torch_is_told_from_others(
    arguments: list[str], works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a program of Python that records itself, as part of the same job, nothing is said."""

    def start() -> None:
        sys.audit("subprocess.Popen", arguments[0], arguments, None, None)

    assert [why for _, why in seen(start).processes()] == [NOT_HERE]
    monkeypatch.setenv("DTYPEDOCTOR_JOB", "/somewhere")
    assert len(list(seen(start).processes())) == (0 if works else 1)


@pytest.mark.release
def test_what_torch_compile_starts_is_no_computation_of_the_program() -> None:
    """Inductor starts Python to try what its compiler made, which loads torch."""
    started = f"import subprocess\nsubprocess.run([{sys.executable!r}, '-c', 'import torch'], check=True)"
    code = compile(started, "/site-packages/torch/_inductor/cpu_vec_isa.py", "exec")
    assert list(seen(FunctionType(code, {})).processes()) == []


def test_what_happens_afterwards_is_not_noticed() -> None:
    """Audit hooks stay for good; this one sleeps once it was ended."""
    elsewhere = seen(lambda: None)
    os.system("true")
    ctypes.CDLL(str(ANY_LIBRARY))
    fork_a_child()
    assert elsewhere.libraries == []
    assert "forked" not in str(list(elsewhere.processes()))
    assert "shell" not in str(list(elsewhere.processes()))


def test_libraries_loaded_by_ctypes_are_named_and_the_systems_left_out(tmp_path: Path) -> None:
    """The C library and Python itself are no kernels of the program's own."""
    own = shutil.copy(ANY_LIBRARY, tmp_path / "libfast_norm.so")

    def load() -> None:
        ctypes.CDLL(None)
        ctypes.CDLL("libc.so.6")
        ctypes.CDLL(own)

    assert seen(load).libraries == ["libfast_norm.so"]
    assert ("C code loaded by ctypes (libfast_norm.so)", WHY_NOT_INSIDE) in list(own_kernels(["libfast_norm.so"]))


def test_libraries_in_the_folders_of_torch_and_nvidia_are_not_the_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever their names: where they lie tells whose they are."""
    of_nvidia = tmp_path / "nvidia" / "cu13" / "lib" / "any_name.so"
    of_nvidia.parent.mkdir(parents=True)
    shutil.copy(ANY_LIBRARY, of_nvidia)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])

    def load() -> None:
        ctypes.CDLL(str(of_nvidia))
        ctypes.CDLL(str(next(Path(torch.__file__).parent.joinpath("lib").glob("libshm*.so"))))

    assert seen(load).libraries == []


def notes() -> str:
    """Everything that is said of the process's own machine code."""
    return "\n".join(what for what, _ in own_kernels([]))


def test_operators_that_a_program_defines_are_listed_by_namespace() -> None:
    """Through `custom_op` and through a library; torch's own are not listed."""
    assert "elsewhere_test" not in notes()

    @torch.library.custom_op("elsewhere_test::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    library = torch.library.Library("elsewhere_test", "FRAGMENT")
    library.define("thrice(Tensor x) -> Tensor")
    assert "elsewhere_test: 2" in notes()
    assert "prims" not in notes()
    assert twice(torch.ones(1)).item() == 2


@pytest.fixture
def extension(tmp_path: Path) -> Iterator[str]:
    """A module of machine code outside of every installed package."""
    path = shutil.copy(ANY_LIBRARY, tmp_path / f"_json{EXTENSION_SUFFIXES[0]}")
    kept = sys.modules.get("_json")
    loader = ExtensionFileLoader("_json", str(path))
    spec = importlib.util.spec_from_loader("_json", loader, origin=str(path))
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    sys.modules["elsewhere_extension"] = module
    yield "elsewhere_extension"
    del sys.modules["elsewhere_extension"]
    if kept is not None:
        sys.modules["_json"] = kept


def test_an_extension_that_was_built_for_the_program_is_listed(extension: str) -> None:
    """Those of Python and of installed packages are not."""
    (line,) = [line for line in notes().splitlines() if "extension modules" in line]
    assert extension in line
    assert "_json" not in line.replace(extension, "")
    assert "torch" not in line


def test_triton_kernels_are_listed_with_the_package_that_holds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton needs a GPU, so a class of the same name and module stands for its kernels."""
    triton = ModuleType("triton.runtime.jit")
    kernel = type("JITFunction", (), {"__module__": "triton.runtime.jit"})
    mine = ModuleType("elsewhere_kernels.norms")
    vars(mine).update(forward=kernel(), backward=kernel(), number=3)
    monkeypatch.setitem(sys.modules, "elsewhere_kernels.norms", mine)
    monkeypatch.delitem(sys.modules, "triton.runtime.jit", raising=False)  # builds of torch for a GPU import it
    assert "elsewhere_kernels" not in notes()
    monkeypatch.setitem(sys.modules, "triton.runtime.jit", triton)
    (line,) = [line for line in notes().splitlines() if line.startswith("Triton kernels (")]
    assert "elsewhere_kernels: 2" in line
