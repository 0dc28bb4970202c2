"""``dtypedoctor exec`` runs any script as Python would, and reports truthfully how it went and how it ended."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from command import Finished, dtypedoctor, forked, report_of
from patience import PATIENCE, becomes
from safetensors.torch import save_file

from dtypedoctor.report.files import read_report
from dtypedoctor.report.formats import FORMATS, format_named
from dtypedoctor.report.run_document import public_run

OVERFLOWING = """
    import torch
    from torch import nn
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).half()
    with torch.no_grad():
        net[1].weight.fill_(6e4)
        net[0].weight.fill_(1.0)
    print("finite:", net(torch.ones(2, 4).half()).isfinite().all().item())
"""
"""The second layer's matrix product leaves the range of float16."""


def script(folder: Path, source: str, name: str = "work.py") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(source))
    return path


def execute(
    folder: Path, *arguments: str | Path, late_with: Path | None = None, **environment: str
) -> tuple[Finished, Path]:
    """Runs ``dtypedoctor exec --out FOLDER/run ARGUMENTS`` in ``folder``."""
    command, out = ("exec", "--once", "--out", folder / "run", *arguments), folder / "run"
    return dtypedoctor(*command, cwd=folder, late_with=late_with, OMP_NUM_THREADS="1", **environment), out


def python(folder: Path, *arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )


@dataclass(frozen=True, kw_only=True)
class Overflowed:
    """The overflowing script after exec, which was given a file as its standard input."""

    path: Path
    source: bytes
    done: "subprocess.CompletedProcess[str]"
    out: Path


@pytest.fixture(scope="module")
def overflowed(tmp_path_factory: pytest.TempPathFactory) -> Overflowed:
    """One run of it for several tests."""
    folder = tmp_path_factory.mktemp("overflowed")
    path = script(folder, "import sys\nprint(sys.stdin.read().strip())" + textwrap.dedent(OVERFLOWING))
    source = path.read_bytes()
    (folder / "input.txt").write_text("one batch\n")

    command = ["-m", "dtypedoctor", "exec", "--out", "run", str(path)]
    with (folder / "input.txt").open() as given:
        done = subprocess.run(
            [sys.executable, *command], stdin=given, cwd=folder, capture_output=True, text=True, check=False, timeout=PATIENCE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    return Overflowed(path=path, source=source, done=done, out=folder / "run")


def test_an_overflow_is_found_at_its_module_and_op_from_one_run(overflowed: Overflowed) -> None:
    """Exit 10; the finding names module, op and line; the script itself is as it was."""
    assert overflowed.done.returncode == 10
    assert overflowed.done.stdout == "one batch\nfinite: False\n"
    finding = report_of(overflowed.out)["findings"][0]
    assert (finding["id"], finding["fqn"], finding["op"]) == ("float16-overflow", "1", "aten.addmm.default")
    assert finding["source"].startswith("work.py:")
    assert finding["confidence"] == "proven"
    assert overflowed.path.read_bytes() == overflowed.source
    assert (overflowed.out / "report.md").read_text().startswith("## FOUND")
    assert [path.parent.name for path in overflowed.out.glob("*/request.json")] == ["before"]
    assert report_of(overflowed.out)["do_this"][0]["tried"] == "run"
    assert report_of(overflowed.out)["rerun"] == ""  # what it would tell is known


def test_no_folder_of_the_user_is_in_what_is_made_to_be_shown(overflowed: Overflowed) -> None:
    """The script was given as an absolute path, and the traces hold more of them; the reports name files only."""
    report = read_report(overflowed.out)
    texts = {style: format_named(style).render(public_run(report)) for style in (one.name for one in FORMATS)}
    texts |= {name: (overflowed.out / name).read_text() for name in ("report.json", "report.md")}
    for style, text in texts.items():
        assert str(overflowed.path.parent) not in text, style
        assert sys.prefix not in text, style
        assert "work.py" in text, style


def test_a_healthy_script_exits_with_zero(tmp_path: Path) -> None:
    """Nothing found, nothing run twice."""
    path = script(tmp_path, "import torch\nprint(torch.nn.Linear(2, 2)(torch.ones(1, 2)).shape)")
    finished, out = execute(tmp_path, path)
    assert finished.code == 0
    assert report_of(out)["status"] == "healthy"
    assert [p.name for p in out.iterdir() if p.is_dir()] == ["before"]


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            False,
            "import json, sys; print(json.dumps([sys.argv, sys.path, __name__, __file__, __package__, str(__spec__)]))",
        ),
        (
            True,
            "import json, sys; print(json.dumps([sys.argv, sys.path, __name__, __file__, __package__, __spec__.name]))",
        ),
    ],
)
def test_a_script_sees_what_python_would_show_it(module: bool, source: str, tmp_path: Path) -> None:
    """argv, sys.path, and the attributes of __main__ are equal, for a script and for a module inside a package."""
    script(tmp_path, source, "pack/__main__.py" if module else "pack/tool.py")
    target = ["-m", "pack"] if module else ["pack/tool.py"]
    finished, _ = execute(tmp_path, *target, "--epochs", "3", "-m", "--help")
    alone = python(tmp_path, *target, "--epochs", "3", "-m", "--help")
    assert finished.code == 10, finished.err  # it has computed nothing that could be measured
    assert finished.out == alone.stdout


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("source", ["raise KeyError('lost')", "def f():\n    f2()\ndef f2():\n    1 / 0\nf()", "x = ("])
def test_an_uncaught_exception_prints_what_python_prints(source: str, tmp_path: Path) -> None:
    """The same traceback, without a frame of the doctor's; its own exit status on request."""
    path = script(tmp_path, source)
    finished, out = execute(tmp_path, "--propagate-exit", path)
    alone = python(tmp_path, path)
    assert finished.err.startswith(alone.stderr)
    assert finished.code == alone.returncode == 1
    assert report_of(out)["status"] == "error"


def test_an_exception_below_a_module_shows_no_frame_of_the_doctor(tmp_path: Path) -> None:
    """Backward passes and optimizer steps are wrapped while watched; the traceback does not say so."""
    path = script(
        tmp_path,
        """
        import torch
        net = torch.nn.Linear(2, 2)
        class Bad(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * 1
            @staticmethod
            def backward(ctx, gradient):
                raise ValueError("bad gradient")
        Bad.apply(net(torch.ones(1, 2))).sum().backward()
        """,
    )
    finished, _ = execute(tmp_path, path)
    traceback, _, _ = finished.err.partition("ERROR:")
    assert "ValueError: bad gradient" in traceback
    assert "dtypedoctor" not in traceback


@pytest.mark.release(all_but=2)
@pytest.mark.parametrize(
    ("source", "status"),
    [
        ("import sys; sys.exit(7)", 7),
        ("import sys; sys.exit('no data')", 1),
        ("import os, torch; torch.nn.Linear(1, 1)(torch.ones(1, 1)); os._exit(5)", 5),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 137),
        ("import os; os.abort()", 134),
        ("import atexit, sys; atexit.register(print, 'bye'); sys.exit(0)", 0),
        ("import os, sys; os.execv(sys.executable, [sys.executable, '-c', 'print(5)'])", 0),
        ("import threading, time; threading.Thread(target=lambda: (time.sleep(0.2), print('late'))).start()", 0),
    ],
)
def test_the_scripts_own_exit_is_kept(source: str, status: int, tmp_path: Path) -> None:
    """sys.exit, os._exit, signals, exit handlers, another program, a last thread; all is shown that is printed."""
    path = script(tmp_path, source)
    alone = python(tmp_path, path)
    finished, out = execute(tmp_path, "--propagate-exit", path)
    assert finished.code == status == (alone.returncode if alone.returncode >= 0 else 128 - alone.returncode)
    assert finished.out == alone.stdout
    report = report_of(out)
    assert (report["status"] in ("healthy", "unknown")) == (status == 0)
    assert str(status) in report["headline"] or "SIG" in report["headline"] or status in (0, 1)


def test_a_script_that_never_calls_a_module_gets_a_truthful_report(tmp_path: Path) -> None:
    """The report says that nothing was measured, which is not healthy."""
    finished, out = execute(tmp_path, script(tmp_path, "print(sum(range(10)))"))
    assert finished.code == 10
    assert finished.out == "45\n"
    report = report_of(out)
    assert (report["status"], report["headline"]) == ("unknown", "this process did not import torch.")
    assert any("has not imported torch" in line for line in report["coverage"])


@pytest.mark.release
def test_environment_set_before_torch_is_imported_is_heeded(tmp_path: Path) -> None:
    """The doctor has not imported torch before the script does."""
    source = """
        import os, sys
        assert "torch" not in sys.modules and "pydantic" not in sys.modules
        os.environ["OMP_NUM_THREADS"] = "2"
        import torch
        print(torch.get_num_threads(), torch.__spec__.loader is torch.__loader__, type(torch.__loader__).__name__)
    """
    path = script(tmp_path, source)
    finished, _ = execute(tmp_path, path)
    assert finished.out == python(tmp_path, path).stdout == "2 True SourceFileLoader\n"


def test_a_time_limit_ends_the_script_and_says_so(tmp_path: Path) -> None:
    """What it printed until then is shown, and that it was stopped is the verdict."""
    source = "import pathlib, time\nprint('hung', flush=True)\npathlib.Path('hangs').touch()\ntime.sleep(2000)"
    limit = ("--time-limit", "1000")
    finished, out = execute(tmp_path, *limit, script(tmp_path, source), late_with=tmp_path / "hangs")
    assert finished.out == "hung\n"
    assert finished.code == 10
    report = report_of(out)
    assert report["status"] == "worker-died"
    assert "time limit" in report["headline"]


def test_a_hang_inside_of_a_module_is_told_with_the_module(tmp_path: Path) -> None:
    """The second step never returns from its second layer; the headline says so, and in which step and pass."""
    source = """
        import pathlib, time
        import torch
        from torch import nn
        def hang(*_):
            pathlib.Path("hangs").touch()
            time.sleep(2000)
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in (1, 2):
            if step == 2:
                net[1].register_forward_pre_hook(hang)
            net(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    """
    limit = ("--time-limit", "1000")
    finished, out = execute(tmp_path, *limit, script(tmp_path, source), late_with=tmp_path / "hangs")
    assert finished.code == 10
    assert "Traceback" not in finished.err
    report = report_of(out)
    assert report["status"] == "worker-died"
    assert "was stopped at its time limit" in report["headline"]
    assert report["headline"].endswith(
        "the last module entered was model[1] (float32 in, float32 out) in step 2 (forward)."
    )


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_goes_to_the_script_and_the_report_is_written(number: int, tmp_path: Path) -> None:
    """Ctrl-C as KeyboardInterrupt; the script ends as it does alone."""
    source = """
        import sys, time, torch
        torch.nn.Linear(1, 1)(torch.ones(1, 1))
        try:
            print("ready", flush=True)
            time.sleep(600)
        except KeyboardInterrupt:
            print("cleaning up", flush=True)
            raise
    """
    out = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-m", "dtypedoctor", "exec", "--propagate-exit", "--out", out, script(tmp_path, source)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL, start_new_session=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    os.kill(process.pid, number)
    rest, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + number
    assert rest == ("cleaning up\n" if number == signal.SIGINT else "")
    report = report_of(out)
    assert ("interrupted" in report["headline"]) == (number == signal.SIGINT)
    assert report["findings"] == []


@pytest.mark.release
def test_a_rerun_that_is_interrupted_is_not_taken_for_an_answer(tmp_path: Path) -> None:
    """Ctrl-C in the run without instrumentation: the finding stands, and nothing is claimed of what instrumentation changes."""
    source = OVERFLOWING.replace(
        "import torch", "import pathlib, time, torch\n    again = pathlib.Path('../seen').exists()"
    ) + (
        "    pathlib.Path('../seen').touch()\n    if again:\n        pathlib.Path('../waiting').touch()\n        time.sleep(600)\n"
    )
    work = tmp_path / "work"
    path = script(work, source)
    process = subprocess.Popen(
        [sys.executable, "-m", "dtypedoctor", "exec", "--rerun", "--out", "../run", path], cwd=work,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, start_new_session=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert becomes(lambda: (tmp_path / "waiting").exists() or process.poll() is not None)
    assert process.poll() is None
    os.kill(process.pid, signal.SIGINT)
    process.communicate(timeout=PATIENCE)
    report = report_of(tmp_path / "run")
    assert process.returncode == 10
    assert (report["findings"][0]["id"], report["findings"][0]["op"]) == ("float16-overflow", "aten.addmm.default")
    assert report["observer"]["bitwise_equal"] is None


def test_in_a_terminal_the_script_has_the_terminal(tmp_path: Path) -> None:
    """It is a terminal on all streams, it can be typed into, and Ctrl-C ends the script, but not what reports on it."""
    source = """
        import sys, time, torch
        torch.nn.Linear(1, 1)(torch.ones(1, 1))
        print([stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)])
        print("hello", input("name? "), flush=True)
        for _ in range(6000):  # a signal just before a sleep waits for its end
            time.sleep(0.1)
    """
    path, out = script(tmp_path, source), tmp_path / "run"
    child, terminal = os.forkpty()
    if child == 0:
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
        os.execv(sys.executable, [sys.executable, "-m", "dtypedoctor", "exec", "--once", "--out", str(out), str(path)])
    seen = until(terminal, b"name? ")
    os.write(terminal, b"Ada\n")
    seen += until(terminal, b"hello Ada")
    os.write(terminal, b"\x03")
    seen += until(terminal, b"Full report")
    _, status = os.waitpid(child, 0)
    assert b"[True, True, True]" in seen
    assert b"KeyboardInterrupt" in seen
    assert os.waitstatus_to_exitcode(status) == 10
    assert "interrupted" in report_of(out)["headline"]


def until(terminal: int, wanted: bytes) -> bytes:
    """Everything up to ``wanted``, which has to come."""
    seen, deadline = b"", time.monotonic() + PATIENCE
    while wanted not in seen:
        assert time.monotonic() < deadline, seen
        try:
            seen += os.read(terminal, 65536)
        except OSError as error:
            raise AssertionError(seen) from error
    return seen


def test_a_run_directory_is_never_overwritten(tmp_path: Path) -> None:
    """The script does not even start."""
    (tmp_path / "run").mkdir()
    finished, _ = execute(tmp_path, script(tmp_path, "print('started')"))
    assert finished.code == 2
    assert finished.out == ""


SAVING = """
    import shutil, sys, torch
    torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
    shutil.copytree("saved", sys.argv[1], dirs_exist_ok=True)
"""


@pytest.mark.release
def test_a_checkpoint_that_the_script_itself_writes_is_not_one_that_it_has_loaded(tmp_path: Path) -> None:
    """``--output_dir out`` names a folder that is not there before the run; the second time it is, and is checked."""
    (tmp_path / "saved").mkdir()
    save_file({"model.norm.weight": torch.ones(4, dtype=torch.bfloat16)}, tmp_path / "saved" / "model.safetensors")
    (tmp_path / "saved" / "config.json").write_text('{"model_type": "llama", "dtype": "float16"}')
    path = script(tmp_path, SAVING)
    for run, found in (("first", []), ("second", ["checkpoint-dtype-mismatch"])):
        dtypedoctor("exec", "--out", run, path, "out", cwd=tmp_path)
        assert [finding["id"] for finding in report_of(tmp_path / run)["findings"]] == found


@pytest.mark.parametrize(
    "options", ["--overhead-budget 0%", "--overhead-budget 0.0%", "--every-n-steps -1", "--capsule-limit 0"]
)  # fmt: skip
def test_a_wrong_option_is_refused_before_the_script_runs(options: str, tmp_path: Path) -> None:
    """Nothing of it has run, and no directory is left."""
    done = dtypedoctor("exec", *options.split(), script(tmp_path, "open('ran', 'w')"), cwd=tmp_path)
    assert done.code == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["work.py"]


def test_what_a_shell_script_starts_records_itself(tmp_path: Path) -> None:
    """Two interpreters, one report; a program that calls itself a rank, and that no launcher has started, is none."""
    call = "import os\nos.environ.update(RANK='0', WORLD_SIZE='1')" + textwrap.dedent(OVERFLOWING)
    path = script(tmp_path, call)
    (tmp_path / "run.sh").write_text(
        f"#!/bin/sh\n{sys.executable} -c 'import torch; torch.nn.Linear(1, 1)(torch.ones(1, 1))'\n{sys.executable} {path}\n"
    )
    (tmp_path / "run.sh").chmod(0o755)
    finished, out = execute(tmp_path, "./run.sh")
    assert (finished.code, finished.out) == (10, "finite: False\n"), finished.err
    assert report_of(out)["findings"][0]["op"] == "aten.addmm.default"
    assert sorted(place.name for place in (out / "before").iterdir() if place.is_dir()) == ["spawned-101"]


def test_a_program_that_nothing_can_be_put_into_is_said_to_be_unrecorded(tmp_path: Path) -> None:
    """An isolated interpreter heeds no variable; what it computes is unknown, and not without torch."""
    finished, out = execute(tmp_path, sys.executable, "-I", script(tmp_path, "import torch"))
    assert finished.code == 10
    assert report_of(out)["status"] == "unknown"
    assert report_of(out)["headline"].startswith("no process could be recorded")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--try", "keep-float32:../../x"), "remedies[0]: String should match pattern"),
        (("--out", "d/" * 3000), "File name too long"),
    ],
    ids=["pattern", "path"],
)
def test_what_an_option_cannot_be_is_told_without_a_traceback(
    tmp_path: Path, options: tuple[str, str], says: str
) -> None:
    """A mistake of the one who types is no defect of the tool."""
    script(tmp_path, "print('ran')")
    ended = forked("exec", *options, "work.py", cwd=tmp_path)
    assert ended.code == 2
    assert says in ended.err
    assert "Traceback" not in ended.err
    assert len(ended.err) < 2000


def test_an_argument_that_is_no_text_reaches_the_script(tmp_path: Path) -> None:
    """Names of files are bytes: pydantic's JSON has no room for those that are not UTF-8."""
    script(tmp_path, "import os, sys, torch\ntorch.nn.Linear(2, 2)(torch.ones(1, 2))\nprint(os.fsencode(sys.argv[1]))")
    ended = forked("exec", "--out", tmp_path / "run", "work.py", os.fsdecode(b"\xff.bin"), cwd=tmp_path)
    assert (ended.code, ended.out) == (0, "b'\\xff.bin'\n"), ended.err


def test_a_script_that_is_typed_wrong_leaves_no_run_folder(tmp_path: Path) -> None:
    """Its own usage error is all that there is to say, with its own status; one that has computed before is reported as ever."""
    source = (
        "import argparse, torch\nparser = argparse.ArgumentParser()\nparser.add_argument('--epochs', required=True)\n"
    )
    path = script(tmp_path, f"{source}parser.parse_args()\n")
    finished = forked("exec", path, cwd=tmp_path)
    assert finished.code == 2
    assert "the following arguments are required: --epochs" in finished.err
    assert "before anything could be measured" in finished.err
    assert sorted(place.name for place in tmp_path.iterdir()) == ["work.py"]
    path = script(tmp_path, f"{source}torch.nn.Linear(2, 2)(torch.ones(1, 2))\nparser.parse_args()\n")
    assert forked("exec", path, cwd=tmp_path).code == 10
    assert len(list((tmp_path / "runs").iterdir())) == 1
