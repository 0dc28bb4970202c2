"""``dtypedoctor replay``: the failing call of a capsule, without the program that it was taken from."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dtypedoctor.cli.output import TERMINAL, Device, FormatOption, Out, announce, show
from dtypedoctor.errors import UsageError
from dtypedoctor.interruptions import say

if TYPE_CHECKING:
    from dtypedoctor.lab.scenarios.model import Scenario
    from dtypedoctor.replay.capsule import Capsule


_LONGEST, _SECONDS, _BYTES_PER_SECOND = 300, 60, 10 << 20
"""Seconds that a replay may take: at most so many; of a stranger's capsule so many and one more for so many bytes of tensors."""
_MOST_NAMED = 20
"""Things in one warning."""


def register(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command(name="replay", epilog="Example:  dtypedoctor replay runs/first/capsule --script > repro.py")(replay)


def replay(
    capsule: Annotated[Path, typer.Argument(help="A capsule, or the run directory that holds one.", metavar="CAPSULE")],
    out: Out = None,
    device: Device = None,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help="Make the call in this dtype: float16, bfloat16 or float32."),
    ] = None,
    attempt: Annotated[
        list[str] | None,
        typer.Option("--try", help="Also try this fix.", metavar="FIX"),
    ] = None,
    script: Annotated[
        bool, typer.Option("--script", help="Print a stand-alone script that fails with the same error; run nothing.")
    ] = False,
    allow_code: Annotated[
        bool,
        typer.Option(
            "--allow-code", help="Run the source code that the capsule holds, and replay without a limit of memory."
        ),
    ] = False,
    format: FormatOption = TERMINAL,
) -> int:
    """Make the failing call of a capsule again: diagnose it and try each proposed fix on it.

    Needs torch and the library of the module, not the script. Exits 10 if it still fails, 0 if it does not; with `--script`, 0.
    """
    if not script:
        announce(f"Replaying {capsule}")
    from dtypedoctor.lab.cli.scenario_files import allow_capsule
    from dtypedoctor.replay.capsule import read_capsule

    found = read_capsule(capsule)
    if script:
        _print_script(found)
        return 0
    may_run_code = allow_capsule(found, allowed=allow_code)
    from dtypedoctor.cli.reported import exit_code
    from dtypedoctor.examination.fixes import asked_for
    from dtypedoctor.lab.cli.running import treat_scenario
    from dtypedoctor.lab.scenarios.loading import override
    from dtypedoctor.lab.trials.treatment import Plan
    from dtypedoctor.redaction.redact import redact
    from dtypedoctor.report.run_document import run_document
    from dtypedoctor.runner.directories import new_directory

    scenario = override(
        scenario_of(found, asked_for([], attempt or []), allow_code=may_run_code), dtype=dtype, device=device
    )
    plan = Plan(certify=False)
    report = treat_scenario(scenario, new_directory(out, scenario.name), plan, preload=found.modules())
    show(run_document(report if format == TERMINAL else redact(report)), format)
    return exit_code(report)


def _print_script(capsule: "Capsule") -> None:
    from dtypedoctor.replay.capsule import AGAIN, CAPSULE_TENSORS
    from dtypedoctor.replay.script import TENSORS, CannotBeWrittenError, capsule_script
    from dtypedoctor.text import one_line

    try:
        text = capsule_script(capsule, inline=True)
    except CannotBeWrittenError as error:
        raise UsageError(f"{capsule.directory}: no script can be made of it: {error}", AGAIN) from error
    print(text, end="")
    if named := list(capsule.code()):
        shown = [one_line(name, 100) for name in named[:_MOST_NAMED]]
        more = [f"and {len(named) - len(shown)} more"] if len(named) > len(shown) else []
        say(f"Read it before you run it: it runs code of its own: {', '.join(shown + more)}")
    if f'"{TENSORS}"' in text or f"'{TENSORS}'" in text:
        say(f"The script reads {TENSORS} beside it: copy {capsule.directory / CAPSULE_TENSORS} there.")


def scenario_of(capsule: "Capsule", remedies: Sequence[str], *, allow_code: bool = False) -> "Scenario":
    """The scenario that makes the call of a capsule.

    Args:
        capsule: read already.
        remedies: to try beside those that are proposed.
        allow_code: whether it may run code of its own.
    """
    from pydantic import ValidationError

    from dtypedoctor.lab.scenarios.model import Autocast, Model, Plugin, Scenario, ScenarioStep
    from dtypedoctor.replay.capsule import MODEL

    regions = capsule.description["call"].get("autocast") or []
    try:
        autocast = Autocast(dtype=regions[0][1]) if regions else None
    except ValidationError as error:
        raise UsageError(f"{capsule.directory}: {regions[0][1]!r} is no dtype of autocast") from error
    dtype: Any = capsule.dtype
    step = ScenarioStep(
        model=Model(
            name=f"{MODEL}{capsule.directory.resolve()}",
            dtype=dtype,
            options={"allow_code": True} if allow_code else {},
        ),
        workload=Plugin(kind="plugin", name="capsule-call"),
        autocast=autocast,
    )
    return Scenario(
        name="replay",
        summary=f"The failing call of {capsule.fqn or capsule.cls}.",
        steps=[step],
        deterministic=False,
        time_limit=_LONGEST if allow_code else min(_LONGEST, _SECONDS + capsule.memory // _BYTES_PER_SECOND),
        remedies=list(dict.fromkeys([*remedies, "bfloat16"])),
    )
