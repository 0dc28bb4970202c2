"""The first screen after a run: what it holds, and that it fits."""

import io
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from recorded import play
from report_builders import everything, healthy, overflow
from rich.console import Console

from dtypedoctor.cli import reported
from dtypedoctor.diagnosis.rule import Advice, Edit, Excerpt
from dtypedoctor.report.build import write_report
from dtypedoctor.report.first_screen import MOST_LINES, WIDTH, print_first_screen
from dtypedoctor.report.to_json import Report, Status, render_json

FILES = ("report.html", "report.md")
LONG = "word " * 200


def shown(report: Report, files: tuple[str, ...] = FILES) -> str:
    """What a console of 100 columns receives."""
    stream = io.StringIO()
    print_first_screen(report, Console(file=stream, width=WIDTH), "runs/my run", files)
    return stream.getvalue()


def crowded() -> Report:
    """A report in which every text is long and every list is."""
    edits = tuple(Edit(file="train.py", line=n, old="a" * 90, new="b" * 90) for n in range(20))
    report = overflow()
    finding = replace(report.findings[0], evidence=(LONG,) * 20, cause=LONG, summary=LONG, proven_by=LONG)
    return replace(
        report,
        headline=LONG,
        findings=(finding,) * 12,
        do_this=(Advice(finding=finding.id, text=LONG, edits=edits),) * 12,
        excerpts=(Excerpt(file="train.py", line=3, function="main", text="x = y", end=5),) * 2,
        noticed=LONG,
        coverage=(LONG,) * 20,
    )


@pytest.mark.parametrize(
    "report", [*everything(), crowded()], ids=["healthy", "overflow", "mismatch", "worker-died", "hostile", "crowded"]
)
def test_the_first_screen_has_at_most_forty_lines(report: Report) -> None:
    """Forty lines at a hundred columns, however much there is to tell."""
    assert len(shown(report).splitlines()) <= MOST_LINES


def test_the_first_screen_holds_verdict_place_edit_reason_and_one_command() -> None:
    """In this order; what is left out is in the file that it names."""
    report = replace(overflow(), noticed="the loss is NaN in step 3, at train.py:41")
    text = shown(report)
    words = [
        "FOUND: ",
        "  origin ",
        "  noticed ",
        "do this",
        "why",
        "Proven: ",
        "Full report: runs/my run/report.html",
        "\nNext",
    ]
    places = [text.index(word) for word in words]
    assert places == sorted(places)
    assert "train.py:41" in text
    assert sum(line.startswith("Next") for line in text.splitlines()) == 1
    assert "Can this be trusted?" not in text


def test_a_change_is_shown_whole_or_one_command_applies_it() -> None:
    """Twelve lines are shown, and none of them is left out however little room there is; of twenty the patch is named."""
    report, names = crowded(), [f"line {n}" for n in range(12)]
    edits = tuple(Edit(file="train.py", line=3 * n, old=name, new=f"{name} +") for n, name in enumerate(names, 1))
    text = shown(replace(report, do_this=(replace(report.do_this[0], edits=edits),)))
    assert all(f"+{name} +" in text for name in names)
    assert "more changed line" not in text
    text = shown(report)
    assert "more changed lines. Apply all: patch -p0 < 'runs/my run/do-this.patch'" in " ".join(text.split())


def test_the_patch_in_the_run_directory_applies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the working directory, to the file that the edits name; there is none for a cell of a notebook."""
    monkeypatch.chdir(tmp_path)
    edits = tuple(Edit(file="train.py", line=n, old=f"x = {n}", new=f"x = {-n}") for n in range(1, 21))
    Path("train.py").write_text("".join(f"{edit.old}\n" for edit in edits))
    report = overflow()
    write_report(tmp_path, replace(report, do_this=(replace(report.do_this[0], edits=edits),)))
    subprocess.run("patch -p0 < do-this.patch", shell=True, check=True, capture_output=True)
    assert Path("train.py").read_text() == "".join(f"{edit.new}\n" for edit in edits)
    assert "+x = -20" in Path("report.md").read_text()
    Path("do-this.patch").unlink()
    cell = tuple(replace(edit, file="<cell 3>") for edit in edits)
    write_report(tmp_path, replace(report, do_this=(replace(report.do_this[0], edits=cell),)))
    assert not Path("do-this.patch").exists()


def test_a_note_on_a_healthy_run_is_one_line() -> None:
    """It may stay as it is: no change is shown, nor a command that would follow one."""
    report = replace(overflow(), status=Status.HEALTHY, next_command="dtypedoctor exec train.py")
    edits = (Edit(file="train.py", line=1, old="x = 1", new="x = 2"),)
    report = replace(report, do_this=(replace(report.do_this[0], edits=edits),))
    text = shown(report)
    assert "It may stay as it is; the full report shows how to change it." in " ".join(text.split())
    assert "do this" not in text
    assert "+x = 2" not in text
    assert "after the edit" not in text
    assert "+x = 2" in shown(replace(report, status=Status.FINDINGS))
    untried = replace(report, trials=(), findings=(replace(report.findings[0], remedies=()),))
    assert "edit above" not in shown(untried)
    assert "+x = 2" in shown(replace(untried, status=Status.FINDINGS))


def test_where_no_file_could_be_written_everything_is_printed() -> None:
    """A full disk leaves nothing to refer to."""
    text = shown(overflow(), ())
    assert "Can this be trusted?" in text
    assert "Full report" not in text


def test_a_healthy_report_says_nothing_of_what_to_type_next(tmp_path: Path) -> None:
    """There is nothing to do."""
    treatment = play("healthy_bfloat16_llama", tmp_path)
    assert reported.next_command(treatment, tmp_path, tmp_path) == ""
    assert "Next" not in shown(replace(healthy(), next_command=""))


@pytest.mark.parametrize("asked", [(), ("--rerun", "--try", "bfloat16"), ("--ablate", "autocast")])
def test_what_to_type_next_applies_the_edit_and_runs_again(asked: tuple[str, ...], tmp_path: Path) -> None:
    """As one line for the shell, where the report shows an edit of a file; a recorded run shows none that was tried. What was tried is not tried again."""
    treatment = play("overflow_gated_product_llama", tmp_path / "recorded")
    edit = Edit(file="train.py", line=1, old="a", new="b")
    advice = (replace(treatment.advice[0], edits=(edit,), tried="run"),)
    (tmp_path / "my run").mkdir()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(reported.sys, "argv", ["dtypedoctor", "exec", *asked, "train.py", "--try", "2"])
        report = reported.reported(replace(treatment, advice=advice), tmp_path / "my run")
    assert report.next_command.startswith(f"patch -p0 < '{tmp_path}/my run/do-this.patch' && ")
    assert report.next_command.endswith("dtypedoctor exec train.py --try 2")


def test_what_to_type_next_tries_the_edit_that_was_not_tried(tmp_path: Path) -> None:
    """As it was asked for otherwise, of which running once does not go with it."""
    treatment = replace(play("overflow_gated_product_llama", tmp_path / "recorded"), rerun="--fix: it tries edits")
    (tmp_path / "run").mkdir()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(reported.sys, "argv", ["dtypedoctor", "exec", "--once", "train.py", "--once"])
        report = reported.reported(treatment, tmp_path / "run")
    assert report.next_command.endswith("dtypedoctor exec --fix train.py --once")


def test_what_to_type_next_is_found_by_the_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the command on the path, or with that of another installation, the interpreter that runs is named."""
    monkeypatch.setattr(reported, "which", lambda name: None)
    assert reported.as_typed_here("dtypedoctor exec train.py").endswith(" -m dtypedoctor exec train.py")
    monkeypatch.setattr(reported, "which", lambda name: f"/elsewhere/bin/{name}")
    assert reported.as_typed_here("dtypedoctor exec train.py").endswith(" -m dtypedoctor exec train.py")
    monkeypatch.setattr(reported, "which", lambda name: f"{reported.Path(reported.sys.executable).parent}/{name}")
    assert reported.as_typed_here("dtypedoctor exec train.py") == "dtypedoctor exec train.py"


def test_ones_own_line_is_whole_on_ones_own_terminal_and_masked_everywhere_else(tmp_path: Path) -> None:
    """A log, a file of the run directory and what is redacted show it masked; no file has it."""
    whole, masked = 'net.load("my secret")', "net.load(***********)"
    excerpt = Excerpt(file="train.py", line=3, function="main", text=masked, end=5, own=whole)
    report = replace(overflow(), excerpts=(excerpt,))
    assert whole not in shown(report)
    stream = io.StringIO()
    print_first_screen(report, Console(file=stream, width=WIDTH, force_terminal=True, no_color=True), "runs/x", FILES)
    assert whole in stream.getvalue()
    write_report(tmp_path, report)
    assert all("secret" not in file.read_text() for file in tmp_path.iterdir())
    assert "my secret" not in render_json(report)
