"""What somebody else needs to see the same: a script that installs the recorded versions and runs it."""

import shlex
from collections.abc import Iterator

import yaml
from pydantic import ValidationError

from dtypedoctor.report.model import Report
from dtypedoctor.report.requirements import install_command
from dtypedoctor.report.text import one_line
from dtypedoctor.report.to_json import plain
from dtypedoctor.scenario.dump import to_yaml
from dtypedoctor.scenario.model import Scenario, Script

__all__ = ["ELSEWHERE", "reproduction_script"]

ELSEWHERE = "On another machine: a script that installs these versions and runs the same"
"""What formats call :func:`reproduction_script`."""

_OWN = "dtypedoctor "
"""How the command of a report begins, unless a program watched itself."""


def reproduction_script(report: Report) -> str:
    """A POSIX shell script for another machine; empty where the report does not say what was run.

    It holds the scenario itself. A user's script is not part of a report, so there it says what has to be put beside it.
    """
    lines = list(_running(report))
    if not lines:
        return ""
    head = ("#!/bin/sh", "set -eu", "python3 -m venv reproduce && . reproduce/bin/activate")
    return "\n".join((*head, install_command(report.environment), *lines, ""))


def _running(report: Report) -> Iterator[str]:
    values = plain(report.scenario)
    if not values:
        return
    try:
        scenario = Scenario.model_validate(values)
    except ValidationError:  # a report may be older than the scenario's present keys, or redacted
        yield from _here_document(yaml.safe_dump(values, sort_keys=False, width=100), report)
        return
    workload = scenario.steps[0].workload
    if isinstance(workload, Script):
        what = workload.path if workload.path != "-" else "The program on standard input"
        if what is not None or workload.module is not None:
            yield f"# {one_line(what or f'The module {workload.module}')} is not part of this report: put it here."
        itself = report.command and not report.command.startswith(_OWN)
        yield report.command if itself else _exec(scenario, workload)
    else:
        yield from _here_document(to_yaml(scenario), report)


def _here_document(scenario: str, report: Report) -> Iterator[str]:
    end = "END_OF_SCENARIO"
    while end in scenario:  # a here-document ends at the first line that is its mark
        end += "_"
    file = shlex.quote(f"{report.name}.yaml")  # a scenario has the name of its file
    yield from (f"cat > {file} <<'{end}'", scenario.rstrip("\n"), end)
    yield f"dtypedoctor {'run' if report.bisection is None else 'bisect'} {file}"


def _exec(scenario: Scenario, script: Script) -> str:
    """The command that watches the script in the same way; its options say what differs from the plain one."""
    words = ["dtypedoctor", "exec"]
    if scenario.distributed is not None:
        words += ["--nproc", str(scenario.distributed.processes)]
    if scenario.watch_every != 1:
        words += ["--watch-every", str(scenario.watch_every)]
    for remedy in scenario.remedies:
        words += ["--try", remedy]
    words += ["-m", script.module] if script.module else ["-c", script.code] if script.code else [str(script.path)]
    return shlex.join([*words, *script.args])
