"""``exec`` of a launcher on one of several machines, which all name one folder: one report there tells of the ranks of all."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dtypedoctor.cli.launchers import Nodes
from dtypedoctor.errors import DoctorError
from dtypedoctor.interruptions import say
from dtypedoctor.runner.nodes import alone, enter, leave, wait_for_others

if TYPE_CHECKING:
    from dtypedoctor.report.model import Report


def treated_together(
    folder: Path, nodes: Nodes, program: Sequence[str], treat: "Callable[[Path], tuple[Report, int]]"
) -> "tuple[Report, int]":
    """Treats a job in this machine's own directory of ``folder``, and writes the report on all that is there by then into ``folder``.

    Args:
        folder: the same on all machines, if they have it in common.
        nodes: what the launcher's options say of the machines.
        program: the script and its arguments.
        treat: what is done in a new directory; the report on this machine's ranks and the script's exit status.

    Raises:
        UsageError: the folder cannot be used; or what ``treat`` raises.
    """
    job = {"nodes": nodes.most, "meeting": nodes.meeting, "program": list(program)}
    own = enter(folder, job, nodes.number)
    with ExitStack() as refused:
        refused.callback(leave, folder)
        report, status = treat(own)
        refused.pop_all()
    try:
        wait_for_others(folder)
    except KeyboardInterrupt:
        say("dtypedoctor: not waiting for the other machines")
    try:
        return _on_all(folder), status
    except DoctorError as error:
        say(f"dtypedoctor: this report tells of the ranks of this machine only: {error.message}")
        return report, status


def _on_all(folder: Path) -> "Report":
    """The report on the ranks of all machines that have recorded in the folder up to now."""
    from dtypedoctor.cli.output import kept
    from dtypedoctor.cli.reported import as_typed_here
    from dtypedoctor.report.files import report_of_machines

    with alone(folder):
        report = report_of_machines([folder], own_files=True)
        return kept(folder, replace(report, next_command=as_typed_here(report.next_command)))
