"""What the command line says about itself: help, version, completion."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from command import dtypedoctor

from dtypedoctor import __version__
from dtypedoctor.cli.main import with_verb

COMMAND = typer.main.get_command(with_verb(""))
VERBS = sorted(COMMAND.commands)  # type: ignore[attr-defined]
PROGRAM = Path(sys.executable).with_name("dtypedoctor")


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_every_verb_says_what_it_does_and_ends_with_an_example(verb: str) -> None:
    """A sentence, a help text for each parameter, and a command line that the verb itself understands."""
    finished = dtypedoctor(verb, "--help", NO_COLOR="1")
    assert finished.code == 0, finished.err
    assert finished.out.startswith(f"Usage: dtypedoctor {verb} ")
    command = COMMAND.commands[verb]  # type: ignore[attr-defined]
    example = re.fullmatch(r"Example:  dtypedoctor (.+?)(?: > \S+)?", command.epilog)
    assert example is not None, command.epilog
    assert " ".join(command.epilog.split()) in " ".join(finished.out.split())
    words = shlex.split(example[1])
    assert words[0] == verb
    command.make_context(verb, words[1:])
    assert [p.name for p in command.params if not getattr(p, "help", None)] == []


def test_every_verb_is_listed_and_the_first_thing_to_type_is_named() -> None:
    """`dtypedoctor --help`, and the same without any argument."""
    finished = dtypedoctor("--help", COLUMNS="100")
    assert finished.code == 0
    for verb in VERBS:
        assert re.search(rf"^  {verb}\s+\S", finished.out, re.MULTILINE), verb
    assert "Begin with:  dtypedoctor run gemma4_grpo_fp16" in finished.out
    assert "Commands:" in dtypedoctor().err


def test_the_version_is_that_of_the_package() -> None:
    """One line on stdout."""
    finished = dtypedoctor("--version")
    assert (finished.code, finished.out, finished.err) == (0, f"dtypedoctor {__version__}\n", "")


@pytest.mark.parametrize("word", ["--verison", "rnu"])
def test_a_slip_of_the_pen_is_a_usage_error(word: str) -> None:
    """Exit 2, no traceback, and the way to the help."""
    finished = dtypedoctor(word)
    assert finished.code == 2
    assert word in finished.err
    assert "Try 'dtypedoctor -h'" in finished.err
    assert "Traceback" not in finished.err


@pytest.mark.skipif(not PROGRAM.exists(), reason="the program is not installed beside this interpreter")
def test_bash_completes_verbs_and_formats(tmp_path: Path) -> None:
    """The script that --show-completion prints works in a real bash."""
    script = tmp_path / "completion.bash"
    # Typer looks for the shell among its parent processes; the second command keeps bash from stepping aside
    asked = f"{shlex.quote(str(PROGRAM))} --show-completion bash; exit $?"
    shown = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, check=True)
    script.write_text(shown.stdout)

    def completions(*words: str) -> list[str]:
        lines = [
            f"source {shlex.quote(str(script))}",
            f"COMP_WORDS=({shlex.join(words)})",
            f"COMP_CWORD={len(words) - 1}",
            "_dtypedoctor_completion dtypedoctor",
            'printf "%s\\n" "${COMPREPLY[@]}"',
        ]
        path = os.pathsep.join([str(PROGRAM.parent), os.environ["PATH"]])
        done = subprocess.run(["bash", "-c", "\n".join(lines)], capture_output=True, text=True, check=True,
                              env=os.environ | {"PATH": path, "PYTHONPATH": str(tmp_path)})  # fmt: skip
        return done.stdout.split()

    assert completions("dtypedoctor", "comp") == ["compare"]
    assert completions("dtypedoctor", "compare", "a", "b", "--format", "") == [
        "terminal",
        "html",
        "json",
        "junit",
        "md",
        "sarif",
    ]
    assert "--tolerance" in completions("dtypedoctor", "compare", "--t")
    (tmp_path / "torch.py").write_text("raise RuntimeError('torch is imported for a completion')")
    assert completions("dtypedoctor", "run", "gemma4_grpo_f") == ["gemma4_grpo_fp16", "gemma4_grpo_fp32"]
    assert completions("dtypedoctor", "explain", "float16-o") == ["float16-overflow"]
    assert completions("dtypedoctor", "run", "x", "--dtype", "b") == ["bfloat16"]
    assert completions("dtypedoctor", "exec", "--try", "gemma4-mlp-f") == ["gemma4-mlp-float32-product"]
    assert completions("dtypedoctor", "exec", "--ablate", "") == [
        "autocast",
        "fused-attention",
        "compile",
        "loss-scale",
    ]
    assert "quant-state-dtype" in completions("dtypedoctor", "treat", "--with", "quant")
    assert completions("dtypedoctor", "bisect", "--model", "builtin:g") == ["builtin:gemma4-tiny"]
