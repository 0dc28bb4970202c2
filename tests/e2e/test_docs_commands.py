"""The commands that the documentation shows do what it says.

Every one of them is read by the program's own parser, and what it names (scenarios, findings) has to exist. Those that start
no run and leave nothing for the reader to fill in are executed besides, in a folder that holds a finished run.
"""

import contextlib
import shutil
from pathlib import Path

import pytest
import typer
from command import in_this_process, python
from documented import ROOT, Command, documented_commands, marked_examples
from recorded import run_directory

from dtypedoctor.cli.main import with_verb
from dtypedoctor.diagnosis import finding_ids
from dtypedoctor.examination.fixes import remedies
from dtypedoctor.lab.cli.matrix import render_matrix_json, row_of
from dtypedoctor.lab.scenarios.loading import available
from dtypedoctor.report.files import read_report

PARSER = typer.main.get_command(with_verb(""))
COMMANDS = documented_commands()
OURS = [command for command in COMMANDS if command.words[0] == "dtypedoctor" and "tinylab" not in str(command)]
"""Those of this program; what the package of docs/extending.md adds is typed by test_extension.py, which installs it."""
STARTS_NO_RUN = frozenset({"scenarios", "report", "compare", "explain", "env"})
CHEAP = [c for c in OURS if not c.inline and c.arguments[0] in STARTS_NO_RUN and not c.has_placeholder]
OTHER_PROGRAMS = frozenset({"git", "cd", "python3", "python", "pip", "pytest"})


def test_nothing_is_shown_that_is_not_checked_here() -> None:
    """A program that is neither ours nor one of a few everyday ones would go unnoticed."""
    assert len(OURS) > 40
    assert [str(c) for c in COMMANDS if c.words[0] not in OTHER_PROGRAMS | {"dtypedoctor"}] == []


def test_the_program_understands_the_command(subtests: pytest.Subtests) -> None:
    """Verb, options, choices and number of arguments are those of the real command line."""
    for command in dict.fromkeys(OURS):
        with subtests.test(str(command)):
            verb, *arguments = command.arguments
            if verb in ("--help", "--version"):
                continue
            known = PARSER.commands  # type: ignore[attr-defined]
            assert verb in known, f"there is no verb {verb!r}"
            if command.inline and not arguments:
                continue
            with contextlib.suppress(typer.Exit):  # --help
                known[verb].make_context(verb, list(arguments))


def scenarios_named(command: Command) -> list[str]:
    verb, *arguments = command.arguments
    if verb != "run" or not arguments:
        return []
    named = PARSER.commands["run"].make_context("run", arguments).params["scenarios"]  # type: ignore[attr-defined]
    return [name for name in named if not Command(place="", words=("", name)).has_placeholder]


def test_the_scenarios_that_a_command_names_exist(subtests: pytest.Subtests) -> None:
    """By name, by path or by pattern from the repository's root; or the page itself shows the file."""
    for command in [c for c in OURS if c.arguments[0] == "run"]:
        with subtests.test(str(command)):
            shipped = {path.stem for path in available()}
            page = (ROOT / command.place.partition(":")[0]).read_text(encoding="utf-8")
            for name in scenarios_named(command):
                shown = f"\nname: {Path(name).stem}\n" in page
                assert name in shipped or shown or list(ROOT.glob(name)), name


def test_the_findings_that_a_command_names_exist(subtests: pytest.Subtests) -> None:
    """`explain` is shown with ids that there are, of findings or fixes."""
    known = {*finding_ids(), *remedies()}
    for command in [c for c in OURS if c.arguments[0] == "explain"]:
        with subtests.test(str(command)):
            assert command.has_placeholder or {*command.arguments[1:]} - {"--patch"} <= known


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the documentation assumes it: the scenarios, and the first run of the first page."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "scenarios").symlink_to(ROOT / "scenarios")
    run_directory("gemma4_grpo_fp16", folder / "runs" / "first")  # as it was recorded: test_scenarios.py makes this run
    (folder / "dtype-report").mkdir()
    shutil.copytree(folder / "runs" / "first", folder / "dtype-report" / "gemma4_grpo_fp16")
    first = read_report(folder / "runs" / "first")
    row = row_of(first, exit_code=0, seconds=1.0, path="gemma4_grpo_fp16/report.json")
    (folder / "dtype-report" / "matrix.json").write_text(render_matrix_json([row], exit_code=0))
    return folder


@pytest.mark.release(all_but=2)
@pytest.mark.parametrize("command", CHEAP, ids=str)
def test_the_command_can_be_typed_as_it_is_shown(command: Command, place: Path) -> None:
    """It prints something, complains about nothing, and ends with 0, or with 10 where two runs are not equal."""
    finished = in_this_process(*command.arguments, cwd=place)
    assert finished.code in ({0, 10} if command.arguments[0] == "compare" else {0}), finished.err
    assert finished.out
    assert "Traceback" not in finished.err


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize(("example", "code"), marked_examples().items())
def test_the_example_for_programs_runs(example: str, code: str, place: Path) -> None:
    """It reads the report of the run as it says, and prints what that run is about."""
    done = python("-c", code, cwd=place)
    assert done.code == 0, f"{example}: {done.err}"
    assert "float16-overflow" in done.out


@pytest.mark.release
def test_some_commands_are_really_executed() -> None:
    """At least one of each verb that starts no run."""
    assert {command.arguments[0] for command in CHEAP} == STARTS_NO_RUN
