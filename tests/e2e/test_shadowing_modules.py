"""Modules beside the user's files are the script's, by Python's rules, and never the doctor's."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from patience import PATIENCE

from dtypedoctor.lab.bisect.measurements import run_clean

HOSTILE = """
from os import path
with open(path.join(path.dirname(path.abspath(__file__)), "IMPORTED"), "a") as file:
    file.write(__name__ + "\\n")
raise ImportError("this is not the module that was meant")
"""

NAMES = [
    "accelerate", "argparse", "asyncio", "base64", "bisect", "calendar", "concurrent", "configparser", "contextlib",
    "copy", "csv", "ctypes", "dataclasses", "datasets", "datetime", "decimal", "difflib", "email", "errno", "fcntl",
    "fractions", "getpass", "gzip", "hashlib", "html", "http", "importlib_metadata", "inspect", "ipaddress", "json",
    "logging", "lzma", "multiprocessing", "numbers", "numpy", "pathlib", "peft", "pickle", "pip", "platform",
    "pydantic", "queue", "random", "resource", "secrets", "select", "selectors", "shlex", "shutil", "signal",
    "socket", "statistics", "string", "struct", "subprocess", "tempfile", "textwrap", "threading", "token",
    "tokenize", "torch", "traceback", "transformers", "triton", "trl", "typer", "types", "typing",
    "typing_extensions", "unittest", "urllib", "uuid", "warnings", "weakref", "xml", "yaml", "zipfile", "zlib",
]  # fmt: skip


def hostile_folder(place: Path, names: Sequence[str] = NAMES) -> Path:
    place.mkdir()
    for name in names:
        (place / f"{name}.py").write_text(HOSTILE)
    return place


def imported(folder: Path) -> list[str]:
    note = folder / "IMPORTED"
    return note.read_text().split() if note.exists() else []


COMMAND = "from dtypedoctor.__main__ import main\nif __name__ == '__main__':\n    main()\n"
"""What pip installs as ``bin/dtypedoctor``."""

TRAINING = """
import torch
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
net(torch.ones(2, 4)).sum().backward()
print("trained")
"""

TELLS = """
import sys
for name in ("json", "queue", "selectors", "threading", "zlib", "ctypes", "dataclasses", "signal"):
    try:
        module = __import__(name)
        print(name, getattr(module, "__file__", None), sorted(vars(module))[:3])
    except ImportError as error:
        print(name, error)
print(sys.path[0], sys.modules["os"].__file__)
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A hostile working directory, and the command and a training outside of it."""
    hostile_folder(tmp_path / "host")
    (tmp_path / "dtypedoctor").write_text(COMMAND)
    (tmp_path / "train.py").write_text(TRAINING)
    return tmp_path


def doctor(place: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Runs a command in the hostile directory."""
    clean = [path for path in sys.path if path and Path(path).resolve() != place]
    return subprocess.run(
        [sys.executable, place / "dtypedoctor", *arguments], cwd=place / "host", capture_output=True, text=True, check=False,
        timeout=PATIENCE, env=os.environ | {"PYTHONPATH": os.pathsep.join(clean), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize(
    "arguments",
    [
        ("env",),
        ("exec", "--once", "--out", "../run", "../train.py"),
        ("exec", "--once", "--nproc-per-node", "2", "--out", "../run", "../train.py"),
    ],
    ids=lambda arguments: " ".join(arguments[:3]),
)
def test_the_doctor_imports_nothing_from_the_working_directory(place: Path, arguments: tuple[str, ...]) -> None:
    """Neither the command nor any process that it starts: pip, torchrun, the server of workers, the script's own before it begins."""
    done = doctor(place, *arguments)
    assert imported(place / "host") == []
    assert done.returncode == 0, done.stderr
    if arguments[0] == "exec":
        assert "trained" in done.stdout
        assert doctor(place, "report", "../run").returncode == 0
        assert imported(place / "host") == []


LAUNCHES = """
from pathlib import Path
from dtypedoctor.lab.runner.launch import Launcher
from dtypedoctor.lab.scenarios.loading import resolve
from dtypedoctor.lab.scenarios.loading import load_scenario
from dtypedoctor.lab.scenarios.model import Request
if __name__ == "__main__":
    with Launcher(Path("../server.log")) as launcher:
        scenario = load_scenario(resolve("nf4_dequant_compile_corrected"))
        print(launcher.run(Request(scenario=scenario), Path("../run")).trace.end)
"""


@pytest.mark.release
def test_workers_import_nothing_from_the_working_directory(place: Path) -> None:
    """Nor does what multiprocessing starts for ``run`` and ``bisect``: its server and its tracker of resources."""
    (place / "dtypedoctor").write_text(LAUNCHES)
    done = doctor(place)
    assert imported(place / "host") == []
    assert "completed" in done.stdout, done.stderr


def test_a_reproduction_finds_the_modules_of_the_working_directory_last(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A factory there can be imported; a module there with the name of another is not."""
    host = place / "host"
    (host / "my_factory.py").write_text("VALUE = 3")
    (place / "repro").mkdir()
    (place / "repro" / "repro.py").write_text("import json, my_factory\nprint(json.dumps(my_factory.VALUE), __name__)")
    monkeypatch.chdir(host)
    assert run_clean(place / "repro" / "repro.py", PATIENCE) == (0, "3 __main__\n", "")


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("how", ["script", "module", "PYTHONPATH"])
def test_a_script_imports_what_it_would_without_the_doctor(tmp_path: Path, how: str) -> None:
    """Modules beside it come before those of the standard library, as far as the interpreter has not imported these itself."""
    folder = hostile_folder(tmp_path / "host", ["json", "selectors", "zlib", "ctypes", "dataclasses"])
    (folder / "queue.py").write_text("MINE = 1")
    tells = (tmp_path if how == "PYTHONPATH" else folder) / "tells.py"
    tells.write_text(TELLS)
    program = ["-m", "tells"] if how == "module" else [str(tells)]
    environment = os.environ | {"PYTHONPATH": str(folder) if how == "PYTHONPATH" else ""}

    def output(*command: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
            env=environment,
        )
        return [line for line in done.stdout.splitlines() if line]

    plain = output(*program)
    (folder / "IMPORTED").unlink(missing_ok=True)
    assert any("this is not the module that was meant" in line for line in plain)
    assert any("MINE" in line for line in plain)
    assert output("-m", "dtypedoctor", "exec", "--out", str(tmp_path / "run"), *program) == plain
