"""What a terminal shows first comes before anything heavy is imported, and so does a refusal that needs nothing of it; modules are counted, not seconds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from patience import PATIENCE, read_to_end

from dtypedoctor.cli.main import app

HEAVY = (
    "torch",
    "transformers",
    "dtypedoctor.scenario.model",
    "rich.markdown",
    "yaml",
    "dtypedoctor.diagnosis",
    "dtypedoctor.trials.treatment",
)
"""What takes a tenth of a second and more; each is needed by some verb. (typer imports pydantic itself.)"""
COMMANDS = {
    "run": ["gemma4_grpo_fp16"],
    "bisect": ["gemma4_grpo_fp16"],
    "exec": ["train.py"],
    "replay": ["capsule"],
    "inspect": ["builtin:llama-tiny"],
    "report": ["run"],
    "compare": ["run", "run"],
    "env": [],
    "job-report": ["run"],
}
AT_ONCE = {"treat", "explain", "scenarios", "enable", "disable"}
"""Verbs that print what they are asked for, or become the script, and have no more to import than that takes."""

FIRST = """
import builtins, json, os, sys

def first(*words, **how):
    os.write(1, json.dumps([" ".join(map(str, words)), sorted(sys.modules)]).encode())
    os._exit(0)

builtins.print = first
from dtypedoctor.cli.main import main
main()
"""
"""The command line, until it prints something: that, and the modules that are imported by then."""


@pytest.mark.parametrize("verb", COMMANDS)
def test_a_verb_says_what_it_does_before_it_imports_what_it_needs_for_that(verb: str, tmp_path: Path) -> None:
    """At a terminal; the words name what was given."""
    (tmp_path / "train.py").touch()
    (tmp_path / "run").mkdir()
    terminal, end = os.openpty()
    done = subprocess.run(
        [sys.executable, "-c", FIRST, verb, *COMMANDS[verb]],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=end,
        timeout=PATIENCE,
        check=False,
    )
    os.close(end)
    assert done.stdout, read_to_end(terminal).decode()
    os.close(terminal)
    words, modules = json.loads(done.stdout)
    assert words.endswith(" …")
    assert all(given in words for given in COMMANDS[verb])
    assert [name for name in HEAVY if name in modules] == []


def test_no_verb_is_forgotten() -> None:
    """A new one has to say at once what it does, or to be quick."""
    assert {*COMMANDS, *AT_ONCE} == set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("inspect builtin:lama-tiny", "there is no builtin model 'lama-tiny'; did you mean 'llama-tiny'?"),
        ("inspect nowhere:make", "cannot find the model factory nowhere:make"),
        ("bisect --model builtin:lama-tiny", "there is no builtin model 'lama-tiny'"),
        ("run gemma4_grpo_fp16 --model builtin:lama-tiny", "there is no builtin model 'lama-tiny'"),
        ("run gemma4_grpo_fp16 --device cuda", "this scenario needs a CUDA device and there is none"),
        ("bisect --model builtin:llama-tiny --device cuda", "this scenario needs a CUDA device and there is none"),
    ],
)
def test_what_is_not_there_is_refused_without_torch(command: str, told: str, tmp_path: Path) -> None:
    """A worker would say the same, seconds later; no process is started that could be one."""
    started = """
import sys
from dtypedoctor.cli.main import main

def started(event, details):
    if event in ("subprocess.Popen", "os.fork", "os.posix_spawn"):
        sys.stderr.write(f"started {details}")

sys.addaudithook(started)
try:
    main()
finally:
    sys.stderr.write(f"torch is imported: {'torch' in sys.modules}")
"""
    done = subprocess.run(
        [sys.executable, "-c", started, *command.split()],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (done.returncode, told in done.stderr) == (2, True), done.stderr
    assert "started " not in done.stderr
    assert done.stderr.endswith("torch is imported: False")
