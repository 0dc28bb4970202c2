"""``dtypedoctor exec``: any script, unchanged, run instrumented."""

import os
import re
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dtypedoctor.cli.output import EveryNSteps, NprocPerNode, OpenPage, Out, OverheadBudget, ScriptArgument, announce
from dtypedoctor.errors import UsageError
from dtypedoctor.interruptions import say

if TYPE_CHECKING:
    from collections.abc import Callable

    from dtypedoctor.cli.scripts import Nodes
    from dtypedoctor.report.to_json import Report
    from dtypedoctor.runner.command import Program
    from dtypedoctor.runner.directories import RecordFolder
    from dtypedoctor.trace.ranks import Member

WEEK = 604_800


def register(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command(
        name="exec",
        epilog="Example:  dtypedoctor exec --out runs/first train.py --epochs 3",
        context_settings={"allow_interspersed_args": False},
    )(execute)


Ablate = Annotated[
    list[str] | None,
    typer.Option(
        "--ablate",
        help="Rerun without autocast, fused-attention, compile or loss-scale: does the failure need it?",
        metavar="NAME",
    ),
]
Try = Annotated[
    list[str] | None,
    typer.Option("--try", help="Rerun with this fix installed.", metavar="FIX"),
]
Rerun = Annotated[
    bool,
    typer.Option(
        "--rerun",
        help="Rerun uninstrumented, and with each ablation.",
    ),
]
RerunInPlace = Annotated[
    bool,
    typer.Option(
        "--rerun-in-place",
        envvar="DTYPEDOCTOR_RERUN_IN_PLACE",
        show_envvar=False,
        help="Rerun in the working directory, not in a view.",
    ),
]
Budget = Annotated[
    bool,
    typer.Option("--error-budget", help="Measure which modules make the rounding error of the loss and the gradients."),
]
Once = Annotated[bool, typer.Option("--once", help="Run once: try no edit in a copy of the files.")]
Fix = Annotated[
    bool,
    typer.Option("--fix", help="Edit a copy of the program and run it, until it is healthy or no edit helps."),
]
InPlace = Annotated[bool, typer.Option("--in-place", help="With --fix: edit the files of a clean git work tree.")]
Verify = Annotated[
    bool,
    typer.Option(
        "--verify-uninstrumented",
        help="Rerun uninstrumented, and compare.",
    ),
]


def execute(
    script: ScriptArgument,
    arguments: Annotated[list[str] | None, typer.Argument(help="The script's own arguments.", metavar="ARGS")] = None,
    module: Annotated[bool, typer.Option("-m", help="Run a module as `python -m` does.")] = False,
    text: Annotated[bool, typer.Option("-c", help="Run source text as `python -c` does.")] = False,
    out: Out = None,
    time_limit: Annotated[
        int,
        typer.Option(
            "--time-limit", help="Stop the script then.", metavar="SECONDS", min=1, max=WEEK, show_default="a week"
        ),
    ] = WEEK,
    ablate: Ablate = None,
    attempt: Try = None,
    rerun: Rerun = False,
    rerun_in_place: RerunInPlace = False,
    once: Once = False,
    error_budget: Budget = False,
    fix: Fix = False,
    in_place: InPlace = False,
    verify_uninstrumented: Verify = False,
    nproc_per_node: NprocPerNode = None,
    overhead_budget: OverheadBudget = None,
    every_n_steps: EveryNSteps = None,
    capsule_limit: Annotated[
        int, typer.Option("--capsule-limit", help="Largest capsule of the failing call.", metavar="MIB", min=1)
    ] = 64,
    propagate_exit: Annotated[
        bool, typer.Option("--propagate-exit", help="Exit with the script's own status.")
    ] = False,
    open_page: OpenPage = False,
) -> int:
    """Run a script, instrumented, and diagnose it.

    Edits are tried before they are shown: in a copy of the files, without network, for a minute.

    Exits 0 if torch ran, nothing is found and the script succeeds, else 10. The report goes to stderr. Options of the script stand after it.
    """
    from dtypedoctor.runner.command import Program, name_of, program_of

    target = program_of(script, arguments or [], module=module, text=text)
    announce("Running the text of -c" if text else f"Running {script}", terminal_only=True)
    from dtypedoctor.cli.scripts import nodes_of, record_script
    from dtypedoctor.trace.ranks import member, member_of_torchrun

    _tell_of_misplaced(arguments or [])
    program = Program(
        name=name_of(target),
        **target,
        time_limit=time_limit,
        overhead_budget=_budget(overhead_budget or (f"1/{every_n_steps}" if every_n_steps else "auto")),
        processes=nproc_per_node or 0,
        fixes=_fixes(ablate or [], attempt or []),
        error_budget=error_budget,
    )
    # `srun torchrun …`: Slurm's processes are the machines then
    nodes = nodes_of(program.command or [script, *program.args])
    here = member_of_torchrun() if nodes is not None else member()
    is_whole = here is None and nodes is None
    if nproc_per_node is not None:
        _require_to_start_ranks(script, is_launcher=bool(program.command), is_rank=here is not None)
    if rerun:
        _require_to_run_again(script, once=once, is_rank=here is not None)
    certify = here is None and (rerun or verify_uninstrumented)  # only its launcher can start a job once more
    runs_again = certify or rerun or bool(program.fixes)
    if nodes is not None and runs_again:
        raise UsageError(
            "--rerun, --try, --ablate and --verify-uninstrumented: this job has several machines, and one alone cannot start it again",
            "Leave them out, or start the job on one machine.",
        )
    _require_to_edit_files(fix, in_place, alone=is_whole and not (runs_again or once or text or script == "-"))
    if fix:
        return _fix(program, out, in_place=in_place, capsule_limit=capsule_limit << 20)

    def record(folder: "RecordFolder") -> "tuple[Report, int]":
        limit, option = capsule_limit << 20, "--rerun" if is_whole else "--nproc-per-node N --rerun"
        if not runs_again:
            tries = is_whole and not once
            return record_script(program, folder, capsule_limit=limit, rerun=option, tries_edits=tries)
        from dtypedoctor.lab.cli.fixing import treat_script

        asked = {"certify": certify, "ablations": rerun, "capsule_limit": limit, "rerun_option": option}
        return treat_script(program, folder, asked, in_place=rerun_in_place)

    report, status, directory = _recorded(program, [script, *program.args], out, here, nodes, record)
    _show(report, directory, is_first=here is None or here.local_rank == 0, open_page=open_page)
    from dtypedoctor.cli.reported import exit_code

    own = propagate_exit or here is not None  # a launcher ends the whole job where one of its processes fails
    return status if own else exit_code(report)


def _recorded(
    program: "Program",
    words: list[str],
    out: Path | None,
    rank: "Member | None",
    nodes: "Nodes | None",
    record: "Callable[[RecordFolder], tuple[Report, int]]",
) -> "tuple[Report, int, Path]":
    """Has a program recorded where its process, or its machine, stands in a job: the report, the exit status and the directory."""
    from dtypedoctor.cli.scripts import treated_together
    from dtypedoctor.runner.directories import RecordFolder, job_directory, new_record
    from dtypedoctor.trace.ranks import rank_directory

    if rank is not None:
        out = rank_directory(out if out is not None else job_directory(program.name), rank.rank)
    if nodes is not None and out is not None:
        # Recorded in the common folder from the start: what a machine has recorded that is lost must be there.
        return *treated_together(out, nodes, words, lambda own: record(RecordFolder(own, own))), out
    folder = new_record(out, program.name, program.folder)
    return *record(folder), folder.directory


OF_EXEC = ("--fix", "--try")
"""Options that some write behind the script, which gets them then."""


def _tell_of_misplaced(arguments: list[str]) -> None:
    for word in arguments:
        if word.partition("=")[0] in OF_EXEC:
            say(f"dtypedoctor: {word} stands behind the script, which gets it; options of exec stand before it")


def _fix(program: "Program", out: Path | None, *, in_place: bool, capsule_limit: int) -> int:
    """Mends a program, and exits 0 where it is healthy then."""
    from dtypedoctor.errors import ExitCode
    from dtypedoctor.lab.cli.fixing import fix_script, print_fixed
    from dtypedoctor.runner.directories import new_record

    folder = new_record(out, program.name, program.folder)
    report, _, fixed = fix_script(program, folder, in_place=in_place, capsule_limit=capsule_limit)
    _show(report, folder.directory, is_first=True, open_page=False)
    print_fixed(fixed)
    return int(ExitCode.OK if fixed.healthy else ExitCode.FINDINGS)


def _require_to_edit_files(fix: bool, in_place: bool, *, alone: bool) -> None:
    """Rejects ``--fix`` beside what else runs the program again, and where no files are edited."""
    if in_place and not fix:
        raise UsageError("--in-place: without --fix no file is edited", "Add --fix.")
    if fix and not alone:
        raise UsageError(
            "--fix runs a program of files by itself, on one machine",
            "Leave out --rerun, --try, --ablate, --once, --verify-uninstrumented and the launcher's other machines.",
        )


def _require_to_start_ranks(script: str, *, is_launcher: bool, is_rank: bool) -> None:
    """Rejects ``--nproc-per-node`` where something else starts the processes."""
    if is_launcher:
        raise UsageError(
            f"--nproc-per-node starts torchrun itself, not {script}", "Give the script without a launcher."
        )
    if is_rank:
        raise UsageError(
            "--nproc-per-node: this process is one of several already",
            "Leave it out: torchrun, srun or mpirun has started this one.",
        )


def _require_to_run_again(script: str, *, once: bool, is_rank: bool) -> None:
    """Rejects ``--rerun`` where the program cannot be run a second time."""
    if script == "-" and not stat.S_ISREG(os.fstat(0).st_mode):
        raise UsageError("--rerun: standard input can be read once", "Save the program in a file.")
    if once:
        raise UsageError("--rerun: the script is to run once", "Leave out --once.")
    if is_rank:
        hint = "Start it with --nproc-per-node N --rerun."
        raise UsageError("--rerun: only its launcher can start this job again", hint)


def _show(report: "Report", directory: Path, *, is_first: bool, open_page: bool) -> None:
    """Leaves the page of a report, and prints its first screen; a job ends with one on the terminal, and with one command to type next."""
    from dtypedoctor.cli.output import console_for, leave_report_page, left_in
    from dtypedoctor.cli.reported import exit_code
    from dtypedoctor.report.first_screen import print_first_screen

    if open_page or exit_code(report):  # for a healthy script the page would cost as much as all the rest
        leave_report_page(directory, report, open_it=open_page)
    if is_first:
        print_first_screen(report, console_for(sys.stderr), str(directory), left_in(directory))
    else:
        say(f"dtypedoctor: {directory.name}: {report.headline} ({directory})")


def _budget(text: str) -> str:
    """The overhead budget as it is typed; a :class:`UsageError` where it is none."""
    from dtypedoctor.text import SHARE

    if re.fullmatch(SHARE, text) is None:
        raise UsageError(f"--overhead-budget: must be a share, got {text}", "Examples: 5%, 1/16, off.")
    return text


def _fixes(ablate: list[str], attempt: list[str]) -> list[str]:
    """Ids of what the script is to be run again with or without."""
    if not ablate and not attempt:
        return []
    from dtypedoctor.examination.fixes import asked_for

    return asked_for(ablate, attempt)
