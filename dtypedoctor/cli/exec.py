"""``dtypedoctor exec``: any script, unchanged, run instrumented. ``dtypedoctor treat``: with corrections and without instrumentation."""

import json
import os
import shutil
import stat
import sys
import tempfile
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dtypedoctor.cli import completion
from dtypedoctor.cli.output import EveryNSteps, NprocPerNode, OpenPage, Out, OverheadBudget, announce
from dtypedoctor.errors import UsageError
from dtypedoctor.interruptions import say

if TYPE_CHECKING:
    from dtypedoctor.report.model import Report

WEEK = 604_800


def register(app: typer.Typer) -> None:
    """Adds the verbs."""
    app.command(
        name="exec",
        epilog="Example:  dtypedoctor exec --out runs/first train.py --epochs 3",
        context_settings={"allow_interspersed_args": False},
    )(execute)
    app.command(
        name="treat",
        epilog="Example:  dtypedoctor treat --with quant-state-dtype train.py --epochs 3",
        context_settings={"allow_interspersed_args": False},
    )(treat)


ScriptArgument = Annotated[
    str,
    typer.Argument(
        help="Script, directory or archive; - for standard input; a module's name after -m, source text after -c.",
        metavar="SCRIPT",
    ),
]
Ablate = Annotated[
    list[str] | None,
    typer.Option(
        "--ablate",
        help="Rerun without this, to see whether the failure requires it: autocast, fused-attention, compile or loss-scale.",
        metavar="NAME",
        autocompletion=completion.ablations,
    ),
]
Try = Annotated[
    list[str] | None,
    typer.Option(
        "--try",
        help="Rerun with this fix installed in the script.",
        metavar="FIX",
        autocompletion=completion.fixes,
    ),
]
Rerun = Annotated[
    bool,
    typer.Option(
        "--rerun",
        help="Run the script again for what one run cannot tell: uninstrumented, with ablations.",
    ),
]
RerunInPlace = Annotated[
    bool,
    typer.Option(
        "--rerun-in-place",
        envvar="DTYPEDOCTOR_RERUN_IN_PLACE",
        help="Rerun in the working directory itself, not in a copy-on-write view of it: the rerun may change files there.",
    ),
]
Once = Annotated[
    bool, typer.Option("--once", hidden=True, help="Run the script one time only, as without this option.")
]
Verify = Annotated[
    bool,
    typer.Option(
        "--verify-uninstrumented",
        help="Rerun without instrumentation and compare: did instrumentation change anything?",
    ),
]


def execute(
    script: ScriptArgument,
    arguments: Annotated[list[str] | None, typer.Argument(help="The script's own arguments.", metavar="ARGS")] = None,
    module: Annotated[bool, typer.Option("-m", help="Run a module as `python -m` does.")] = False,
    text: Annotated[bool, typer.Option("-c", help="Run source text as `python -c` does.")] = False,
    out: Out = None,
    time_limit: Annotated[
        int, typer.Option("--time-limit", help="Seconds after which the script is stopped.", min=1, max=WEEK)
    ] = WEEK,
    ablate: Ablate = None,
    attempt: Try = None,
    rerun: Rerun = False,
    rerun_in_place: RerunInPlace = False,
    once: Once = False,
    verify_uninstrumented: Verify = False,
    nproc_per_node: NprocPerNode = None,
    every_n_steps: EveryNSteps = None,
    overhead_budget: OverheadBudget = None,
    capsule_limit: Annotated[
        int, typer.Option("--capsule-limit", help="Largest capsule of the failing call, in MiB.", metavar="MIB", min=1)
    ] = 64,
    propagate_exit: Annotated[
        bool, typer.Option("--propagate-exit", help="Exit with the script's own status.")
    ] = False,
    open_page: OpenPage = False,
) -> int:
    """Run a script once, instrumented, and diagnose it.

    Exits 0 if nothing is found and the script succeeds, 10 otherwise. The script's output stays on its own streams; the report
    goes to stderr. Options of dtypedoctor stand before SCRIPT, those of the script after it.
    """
    target = program_of(script, arguments or [], module=module, text=text)
    announce("Running the text of -c" if text else f"Running {script}", terminal_only=True)
    from dtypedoctor.cli.nodes import nodes_of
    from dtypedoctor.cli.scripts import treat_script
    from dtypedoctor.runner.directories import RecordFolder, job_directory, new_record
    from dtypedoctor.scenario.model import Distributed, Scenario, ScenarioStep, Script
    from dtypedoctor.trace.ranks import member, member_of_torchrun, rank_directory
    from dtypedoctor.trials.plan import Plan

    remedies = _remedies(ablate or [], attempt or [])
    if every_n_steps not in (None, 1) and overhead_budget not in (None, "off"):
        raise UsageError("--every-n-steps and --overhead-budget: each says what is measured when", "Give one of them.")
    scenario = Scenario(
        name=name_of(target),
        summary="A script, run unchanged.",
        time_limit=time_limit,
        deterministic=False,
        watch_every=1 if every_n_steps is None else every_n_steps,
        overhead_budget=_budget(overhead_budget),
        remedies=remedies,
        distributed=Distributed(processes=nproc_per_node) if nproc_per_node is not None else None,
        steps=[ScenarioStep(workload=Script(kind="script", **target))],
    )
    if nproc_per_node is not None and target.get("command"):
        raise UsageError(
            f"--nproc-per-node starts torchrun itself, not {script}", "Give the script without a launcher."
        )
    if rerun and script == "-" and not stat.S_ISREG(os.fstat(0).st_mode):
        raise UsageError("--rerun: standard input can be read once", "Save the program in a file.")
    # `srun torchrun …`: Slurm's processes are the machines then
    nodes = nodes_of(target.get("command") or [script, *target["args"]])
    here = member_of_torchrun() if nodes is not None else member()
    if here is not None and nproc_per_node is not None:
        raise UsageError(
            "--nproc-per-node: this process is one of several already",
            "Leave it out: torchrun, srun or mpirun has started this one.",
        )
    if rerun and (once or here is not None):
        why = "the script is to run once" if once else "only its launcher can start this job again"
        raise UsageError(
            f"--rerun: {why}", "Leave out --once." if once else "Start it with --nproc-per-node N --rerun."
        )
    if here is not None:
        out = rank_directory(out if out is not None else job_directory(scenario.name), here.rank)
    plan = Plan(
        certify=here is None and (rerun or verify_uninstrumented),  # only its launcher can start a job once more
        only=frozenset(remedies),
        ablations=rerun,
        rerun_option="--rerun" if here is None and nodes is None else "--nproc-per-node N --rerun",
        capsule_limit=capsule_limit << 20,
    )
    if nodes is not None and plan.runs_again:
        raise UsageError(
            "--rerun, --try, --ablate and --verify-uninstrumented: this job has several machines, and one alone cannot start it again",
            "Leave them out, or start the job on one machine.",
        )

    if nodes is None or out is None:
        folder = new_record(
            out, scenario.name, Path(target["path"]).resolve().parent if target.get("path", "-") != "-" else None
        )
        report, status = treat_script(scenario, folder, plan, in_place=rerun_in_place)
        directory = folder.directory
    else:
        from dtypedoctor.cli.nodes import treated_together

        def treat_here(own: Path) -> "tuple[Report, int]":
            # Recorded in the common folder from the start: what a machine has recorded that is lost must be there.
            return treat_script(scenario, RecordFolder(own, own), plan, in_place=rerun_in_place)

        directory = out
        report, status = treated_together(out, nodes, [script, *target["args"]], treat_here)
    from dtypedoctor.cli.output import console_for, leave_report_page, left_in
    from dtypedoctor.cli.reported import exit_code
    from dtypedoctor.report.first_screen import print_first_screen

    if open_page or exit_code(report):  # for a healthy script the page would cost as much as all the rest
        leave_report_page(directory, report, open_it=open_page)
    if here is None or here.local_rank == 0:
        print_first_screen(report, console_for(sys.stderr), str(directory), left_in(directory))
    else:  # a job ends with one report on the terminal, and with one command to type next
        say(f"dtypedoctor: {directory.name}: {report.headline} ({directory})")
    own = propagate_exit or here is not None  # a launcher ends the whole job where one of its processes fails
    return status if own else exit_code(report)


def _budget(text: str | None) -> str:
    """A budget as a scenario has it.

    Raises:
        UsageError: it is none.
    """
    from pydantic import TypeAdapter, ValidationError

    from dtypedoctor.scenario.model import OVERHEAD_BUDGET

    try:
        return TypeAdapter(OVERHEAD_BUDGET).validate_python("off" if text is None else text)
    except ValidationError:
        raise UsageError(f"--overhead-budget: must be a share, got {text}", "Examples: 5%, 1/16, off.") from None


def _remedies(ablate: list[str], attempt: list[str]) -> list[str]:
    """Ids of what the script is to be run again with or without."""
    if not ablate and not attempt:
        return []
    from dtypedoctor.trials.remedies import asked_for

    return asked_for(ablate, attempt)


def program_of(script: str, arguments: list[str], *, module: bool, text: bool) -> dict[str, Any]:
    """What to run, as fields of a scenario's ``script``.

    Raises:
        UsageError: there is no such script and no such program.
    """
    if module and text:
        raise UsageError("give either -m or -c", "-m runs a module, -c source text.")
    if module or text:
        return {"module" if module else "code": script, "args": arguments}
    program = None if script.endswith(("-", ".py")) else _program(script)
    if program is not None:
        return {"command": [*program, *arguments], **_named_among(script, arguments)}
    if script != "-" and not os.path.exists(script):
        hint = "Give a file, -m and the name of a module, or a command such as torchrun."
        raise UsageError(f"{script}: no such script{_meant_beside(script)}", hint)
    return {"path": script, "args": arguments}


def _named_among(program: str, arguments: list[str]) -> dict[str, Any]:
    """The script that a launcher is given, which names the run and is edited; nothing else depends on which word it is."""
    at = next((at for at, word in enumerate(arguments) if word.endswith(".py") and os.path.isfile(word)), -1)
    return {"path": arguments[at] if at >= 0 else program, "args": arguments[at + 1 :]}


_MODULES = {"torchrun": "torch.distributed.run", "accelerate": "accelerate.commands.accelerate_cli"}
"""Programs by name, with the module that does the same where they are installed in another environment than the package."""


def _program(name: str) -> list[str] | None:
    """A program: one of this environment first, which need not be activated; None for a script of Python, or if there is none."""
    beside = shutil.which(name, path=os.path.dirname(sys.executable))
    if beside is None and name in _MODULES and find_spec(_MODULES[name].partition(".")[0]) is not None:
        return [sys.executable, "-m", _MODULES[name]]
    found = beside or shutil.which(name)
    return [found] if found is not None else None


def name_of(target: dict[str, Any]) -> str:
    """The name of the run of a program."""
    from dtypedoctor.runner.directories import scenario_name

    if "code" in target:
        return "command"
    return "stdin" if target.get("path") == "-" else scenario_name(target.get("path") or target["module"])


def _meant_beside(script: str) -> str:
    """The end of a sentence that names the script of that folder which may be meant; empty where none is near."""
    from dtypedoctor.text import did_you_mean

    try:
        return did_you_mean(script, [str(path) for path in Path(script).parent.glob("*.py")])
    except OSError:
        return ""


With = Annotated[
    list[str],
    typer.Option(
        "--with", help="Correction to put in place.", metavar="CORRECTION", autocompletion=completion.corrections
    ),
]


def treat(
    script: ScriptArgument,
    corrections: With,
    arguments: Annotated[list[str] | None, typer.Argument(help="The script's own arguments.", metavar="ARGS")] = None,
    module: Annotated[bool, typer.Option("-m", help="Run a module as `python -m` does.")] = False,
    text: Annotated[bool, typer.Option("-c", help="Run source text as `python -c` does.")] = False,
) -> None:
    """Run a script with a correction in place, without instrumentation, until the library has the fix itself.

    Prints one line for each corrected file or model and exits with the script's own status; 2 if a library's source is not what a correction
    was written for. A correction of a library costs what the same lines would in the library.
    """
    target = program_of(script, arguments or [], module=module, text=text)
    from dtypedoctor.plugins import Correction, known, registered
    from dtypedoctor.report.library_patch import check

    wanted: list[Correction] = []
    for name in corrections:
        found = registered(Correction).get(name)
        if found is None:
            from dtypedoctor.text import did_you_mean

            meant = did_you_mean(name, registered(Correction))
            raise UsageError(f"--with: there is no correction {name!r}{meant}", known(Correction))
        if found.needs_modules or not found.in_scripts:
            raise UsageError(f"--with: {name} is for scenarios only", f"What it does: {found.summary}.")
        wanted.append(found)
    folder = Path.cwd() if module or text or script == "-" else Path(script).resolve().parent
    for one in wanted:
        check(one, [str(folder), *sys.path])
    treated = [
        {"id": one.id, "library": one.library, "seen": one.seen, "edits": [asdict(edit) for edit in one.edits]}
        for one in wanted
    ]
    from dtypedoctor.runner.command import TREATED, command_of_program, hooked

    descriptor, notes = tempfile.mkstemp(prefix="dtypedoctor-treat-")
    os.close(descriptor)
    family = {"root": os.getpid(), "notes": notes, "python": [sys.prefix, sys.version], "corrections": treated}
    words = command_of_program(**target)
    os.execve(words[0], words, hooked({TREATED: json.dumps(family)}))
