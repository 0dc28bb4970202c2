"""What a terminal shows first comes before anything heavy is imported; modules are counted, not seconds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from patience import PATIENCE, read_to_end

from dtypedoctor.cli.main import with_verb

HEAVY = (
    "torch",
    "transformers",
    "dtypedoctor.lab.scenarios.model",
    "rich.markdown",
    "yaml",
    "dtypedoctor.diagnosis",
    "dtypedoctor.lab.trials.treatment",
)
"""What takes a tenth of a second and more; each is needed by some verb. (typer imports pydantic itself.)"""
COMMANDS = {
    "audit": ["train.py"],
    "run": ["gemma4_grpo_fp16"],
    "bisect": ["gemma4_grpo_fp16"],
    "exec": ["train.py"],
    "replay": ["capsule"],
    "inspect": ["builtin:llama-tiny"],
    "report": ["run"],
    "compare": ["run", "run"],
    "env": [],
    "job-report": ["run"],
    "verify": ["saved", "--of", "run"],
    "parity": ["run", "rollouts.jsonl"],
}
AT_ONCE = {"treat", "explain", "scenarios", "enable", "disable", "skill"}
"""Verbs that print what they are asked for, or become the script, and have no more to import than that takes."""

FIRST = """
import json, os, sys

def first(*words, **how):
    os.write(1, json.dumps([" ".join(map(str, words)), sorted(sys.modules)]).encode())
    os._exit(0)

from dtypedoctor import interruptions
interruptions.say = first
from dtypedoctor.cli.main import main
main()
"""
"""The command line, until it prints something: that, and the modules that are imported by then."""


@pytest.mark.parametrize("verb", COMMANDS)
def test_a_verb_says_what_it_does_before_it_imports_what_it_needs_for_that(verb: str, tmp_path: Path) -> None:
    """At a terminal; the words name what was given."""
    (tmp_path / "train.py").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "rollouts.jsonl").write_text('{"prompt_ids": [1], "completion_ids": [2], "logprobs": [-1.0]}\n')
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
    assert all(given in words for given in COMMANDS[verb] if not given.startswith("-"))
    assert [name for name in HEAVY if name in modules] == []


def test_every_verb_is_listed_as_quick_or_says_at_once_what_it_does() -> None:
    """A new one has to say at once what it does, or to be quick."""
    assert {*COMMANDS, *AT_ONCE} == set(typer.main.get_command(with_verb("")).commands)  # type: ignore[attr-defined]
