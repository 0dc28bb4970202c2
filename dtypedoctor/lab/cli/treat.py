"""``dtypedoctor treat``: a script with corrections and without instrumentation."""

import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from dtypedoctor.cli.output import ScriptArgument
from dtypedoctor.errors import UsageError

TREATED, FOLLOW = "DTYPEDOCTOR_TREATED", "dtypedoctor.lab.corrections.treated:follow"
"""Environment variable with what Python processes are corrected with, and what does that in each."""


def register(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command(
        name="treat",
        epilog="Example:  dtypedoctor treat --with quant-state-dtype train.py --epochs 3",
        context_settings={"allow_interspersed_args": False},
    )(treat)


With = Annotated[
    list[str],
    typer.Option("--with", help="Correction to put in place.", metavar="CORRECTION"),
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
    from dtypedoctor.runner.command import BEGIN, Program, hooked, name_of, program_of

    target = program_of(script, arguments or [], module=module, text=text)
    from dtypedoctor.plugins import Correction, known, registered
    from dtypedoctor.report.fixes import check

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

    descriptor, notes = tempfile.mkstemp(prefix="dtypedoctor-treat-")
    os.close(descriptor)
    family = {"root": os.getpid(), "notes": notes, "python": [sys.prefix, sys.version], "corrections": treated}
    words = Program(name=name_of(target), **target).words
    os.execve(words[0], words, hooked({TREATED: json.dumps(family), BEGIN: FOLLOW}))
