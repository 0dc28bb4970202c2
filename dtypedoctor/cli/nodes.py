"""``exec`` of a launcher on one of several machines, which all name one folder: one report there tells of the ranks of all."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from dtypedoctor.errors import DoctorError
from dtypedoctor.interruptions import say
from dtypedoctor.runner.nodes import alone, enter, leave, wait_for_others
from dtypedoctor.trace.ranks import LAUNCHERS

if TYPE_CHECKING:
    from dtypedoctor.report.model import Report


@dataclass(frozen=True, kw_only=True, slots=True)
class Nodes:
    """What a launcher's options say of several machines.

    Attributes:
        most: how many there are; with ``--nnodes MIN:MAX`` at most.
        number: of this one, where the options say it.
        meeting: what is the same on all of them: the id of the rendezvous, and the port of its endpoint.
    """

    most: int
    number: int | None
    meeting: str


_COUNT, _NUMBER = ("nnodes", "num_machines", "num_nodes"), ("node_rank", "machine_rank")
_ENDPOINT = ("rdzv_endpoint", "master_port", "main_process_port")
"""Options of torchrun, accelerate and deepspeed that mean the same."""


def nodes_of(command: Sequence[str], environment: Mapping[str, str] = os.environ) -> Nodes | None:
    """The machines that the options of a launcher's command, or torchrun's variables in their place, name; None where it is one, or no launcher."""
    if LAUNCHERS.isdisjoint({os.path.basename(word) for word in command[:3]}):
        return None
    script = next((at for at, word in enumerate(command) if word.endswith(".py")), len(command))
    variables = {
        name.removeprefix("PET_").lower(): value
        for name, value in environment.items()
        if value and name.startswith("PET_")
    }
    options = variables | dict(_options(command[:script]))

    def value(names: Sequence[str]) -> str:
        return next((options[name].rpartition(":")[2] for name in names if name in options), "")

    most, number = value(_COUNT), value(_NUMBER)
    if not most.isdecimal() or int(most) < 2:
        return None
    meeting = (
        f"{value(['rdzv_id'])}:{value(_ENDPOINT)}"  # without the host, which each machine may call by another name
    )
    return Nodes(most=int(most), number=int(number) if number.isdecimal() else None, meeting=meeting)


def _options(launcher: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The options of a launcher, with underscores in their names, and the value of each, if it has one."""
    for word, following in zip(launcher, [*launcher[1:], ""], strict=True):
        option, equals, behind = word.partition("=")
        if option.startswith("-"):
            yield option.lstrip("-").replace("-", "_"), behind if equals else following


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
