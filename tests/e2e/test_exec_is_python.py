"""Whatever ``python`` can be given to run, ``dtypedoctor exec`` runs in the same way: one table, each form beside plain Python."""

import json
import os
import py_compile
import subprocess
import sys
import zipapp
from pathlib import Path

import pytest
from command import dtypedoctor, report_of
from patience import PATIENCE

from dtypedoctor.runner.process import BOOT
from dtypedoctor.scenario.model import Request, Scenario, ScenarioStep, Script

PROBE = '''
"""A program that looks at itself."""
import inspect, json, multiprocessing, pickle, sys

class Point:
    x = 1

def shown(value):
    return value if value is None or isinstance(value, str) else type(value).__name__ if not isinstance(value, type) else value.__name__

def attempt(what):
    try:
        return shown(what())
    except Exception as error:
        return type(error).__name__

def work():
    print("a spawned child", __name__, flush=True)

if __name__ == "__main__":
    given = globals()
    print(json.dumps({
        "argv": sys.argv,
        "path": sys.path,
        "names": sorted(given),
        "attributes": {name: shown(given.get(name)) for name in ("__name__", "__doc__", "__file__", "__cached__", "__package__")},
        "builtins": type(given["__builtins__"]).__name__,
        "loader": [shown(__loader__), shown(getattr(__loader__, "path", None))],
        "spec": [shown(__spec__), __spec__ and [__spec__.name, __spec__.origin, __spec__.parent]],
        "main": vars(sys.modules["__main__"]) is given,
        "source": attempt(lambda: inspect.getsource(Point)),
        "file": attempt(lambda: inspect.getsourcefile(work)),
        "code": [work.__code__.co_filename, sys._getframe().f_code.co_name],
        "pickle": type(pickle.loads(pickle.dumps(Point()))) is Point,
        "stdin": sys.stdin.read(),
        "flags": list(sys.flags),
    }), flush=True)
    child = multiprocessing.get_context("spawn").Process(target=work)
    child.start()
    child.join()
    print("ended with", child.exitcode)
    sys.exit(7)
'''


def programs(folder: Path) -> None:
    """The probe in every form that a program can have."""
    (folder / "sub").mkdir()
    (folder / "elsewhere").mkdir()
    for name in (
        "tool.py",
        "no_suffix",
        "sub/tool.py",
        "pack/__main__.py",
        "pack/__init__.py",
        "pack/part.py",
        "dir/__main__.py",
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("" if name.endswith("__init__.py") else PROBE)
    (folder / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\nprint(ascii('\xe9'))\n")
    (folder / "mark.py").write_bytes(b"\xef\xbb\xbfprint(ascii('\xc3\xa9'))\n")
    (folder / "broken.py").write_text("x = (")
    (folder / "elsewhere" / "link.py").symlink_to(folder / "tool.py")
    (folder / "linked").symlink_to(folder / "sub")
    zipapp.create_archive(folder / "dir", folder / "app.pyz")
    zipapp.create_archive(folder / "dir", folder / "archive.py")
    py_compile.compile(str(folder / "tool.py"), cfile=str(folder / "compiled.pyc"))
    py_compile.compile(str(folder / "tool.py"), cfile=str(folder / "compiled"))


FORMS: dict[str, tuple[list[str], dict[str, str]]] = {
    "script": (["tool.py"], {"path": "tool.py"}),
    "script, dot": (["./tool.py"], {"path": "./tool.py"}),
    "script, up and down": (["sub/../tool.py"], {"path": "sub/../tool.py"}),
    "script in a folder": (["sub/tool.py"], {"path": "sub/tool.py"}),
    "script behind a link": (["elsewhere/link.py"], {"path": "elsewhere/link.py"}),
    "script in a linked folder": (["linked/tool.py"], {"path": "linked/tool.py"}),
    "script without a suffix": (["no_suffix"], {"path": "no_suffix"}),
    "script with an encoding": (["latin.py"], {"path": "latin.py"}),
    "script with a byte order mark": (["mark.py"], {"path": "mark.py"}),
    "script that is not Python": (["broken.py"], {"path": "broken.py"}),
    "directory": (["dir"], {"path": "dir"}),
    "directory, slash": (["./dir/"], {"path": "./dir/"}),
    "archive": (["app.pyz"], {"path": "app.pyz"}),
    "archive named like a script": (["archive.py"], {"path": "archive.py"}),
    "compiled": (["compiled.pyc"], {"path": "compiled.pyc"}),
    "compiled, without a suffix": (["compiled"], {"path": "compiled"}),
    "module": (["-m", "tool"], {"module": "tool"}),
    "package": (["-m", "pack"], {"module": "pack"}),
    "module of a package": (["-m", "pack.part"], {"module": "pack.part"}),
    "text": (["-c", PROBE], {"code": PROBE}),
    "standard input": (["-"], {"path": "-", "code": PROBE}),
}
"""What comes behind ``python``, and the same as the target of a scenario's script."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all the programs lie."""
    folder = tmp_path_factory.mktemp("programs")
    programs(folder)
    return folder


def run(folder: Path, command: list[str], given: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Runs the interpreter."""
    paths = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.run([sys.executable, *command], cwd=folder, env=os.environ | paths | environment, input=given,
                          capture_output=True, text=True, check=False, timeout=PATIENCE)  # fmt: skip


ONE_OF_EACH_KIND = ("script", "archive", "text", "standard input")
CASES = [(form, "") for form in FORMS] + [(form, "1") for form in ONE_OF_EACH_KIND]


@pytest.mark.release(all_but=6)
@pytest.mark.parametrize(("form", "safe"), CASES, ids=[form + (", safe path" if safe else "") for form, safe in CASES])
def test_a_program_of_any_form_sees_what_python_shows_it(form: str, safe: str, folder: Path, tmp_path: Path) -> None:
    """Arguments, paths, all of ``__main__``, its source, pickles, spawned children, what is printed, and the exit status."""
    arguments, target = FORMS[form]
    own = ["--lr", "1e-3", "-m", ""]
    plain = run(folder, [*arguments, *own], PROBE if form == "standard input" else "a line\n", PYTHONSAFEPATH=safe)
    step = ScenarioStep(workload=Script(kind="script", args=own, **target))
    request = Request(scenario=Scenario(name="program", summary="A program.", steps=[step]))
    (tmp_path / "request.json").write_text(request.model_dump_json())
    ours = run(folder, [str(BOOT), str(tmp_path)], "" if form == "standard input" else "a line\n", PYTHONSAFEPATH=safe)
    assert (ours.stdout, ours.returncode) == (plain.stdout, plain.returncode), ours.stderr + plain.stderr
    if form not in ("text", "standard input"):  # whose spawned children print tracebacks with numbers of processes
        assert ours.stderr == plain.stderr
    if form == "script":
        assert json.loads(plain.stdout.splitlines()[0])["argv"] == ["tool.py", *own]


OVERFLOW = """
import sys, torch
big = torch.nn.Linear(4, 4).half()
with torch.no_grad():
    big.weight.fill_(6e4)
print(sys.argv, repr(sys.stdin.read()), big(torch.ones(2, 4).half()).isfinite().any().item())
"""


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("form", ["-", "-c", "archive"])
def test_the_command_line_takes_every_form_and_runs_it_again(form: str, tmp_path: Path) -> None:
    """A program that overflows is found to; the run without instrumentation has the same program and arguments."""
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__main__.py").write_text(OVERFLOW)
    zipapp.create_archive(tmp_path / "app", tmp_path / "app.pyz")
    (tmp_path / "program.py").write_text(OVERFLOW)
    arguments = {"-": ["-", "a", "-c"], "-c": ["-c", OVERFLOW, "a", "-c"], "archive": ["app.pyz", "a", "-c"]}[form]
    command = [sys.executable, "-m", "dtypedoctor", "exec", "--rerun", "--out", str(tmp_path / "run"), *arguments]
    with (tmp_path / "program.py").open() as given:
        done = subprocess.run(command, stdin=given if form == "-" else subprocess.DEVNULL, cwd=tmp_path, capture_output=True, text=True,
                              env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, check=False, timeout=PATIENCE)  # fmt: skip
    name = {"-": "-", "-c": "-c", "archive": "app.pyz"}[form]
    assert done.stdout == f"{[name, 'a', '-c']} '' False\n", done.stderr
    assert done.returncode == 10
    assert report_of(tmp_path / "run")["findings"][0]["op"] == "aten.addmm.default"
    assert (tmp_path / "run" / "unwatched" / "stdout.txt").read_text() == done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["-c", "-m", "x"], "give either -m or -c"), (["empty"], "can't find '__main__' module in 'empty'")],
)
def test_what_is_no_program_is_refused(arguments: list[str], message: str, tmp_path: Path) -> None:
    """Exit 2 and one message, and no directory is left."""
    (tmp_path / "empty").mkdir()
    finished = dtypedoctor("exec", "--out", tmp_path / "run", *arguments, cwd=tmp_path)
    assert finished.code == 2
    assert message in finished.err
    assert "Traceback" not in finished.err
    assert not (tmp_path / "run").exists()
