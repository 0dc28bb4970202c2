"""What the command line says about itself: help, version, completion."""

import re
import shlex

import pytest
import typer
from command import dtypedoctor

from dtypedoctor import __version__
from dtypedoctor.cli.main import with_verb

COMMAND = typer.main.get_command(with_verb(""))
VERBS = sorted(COMMAND.commands)  # type: ignore[attr-defined]


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_every_verb_says_what_it_does_and_ends_with_an_example(verb: str) -> None:
    """A sentence, a help text for each parameter, and a command line that the verb itself understands."""
    finished = dtypedoctor(verb, "--help", NO_COLOR="1")
    assert finished.code == 0, finished.err
    assert finished.out.startswith(f"Usage: dtypedoctor {verb} ")
    command = COMMAND.commands[verb]  # type: ignore[attr-defined]
    example = re.fullmatch(r"Example:  dtypedoctor (.+?)(?: > \S+)?", command.epilog)
    assert example is not None, command.epilog
    assert " ".join(command.epilog.split()) in finished.said
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
    assert "Begin with:  dtypedoctor exec train.py" in finished.out
    assert re.search(r"Commands:\n  exec ", finished.out)
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
