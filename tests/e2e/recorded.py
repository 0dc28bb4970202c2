"""Treatments that were recorded: the runs of corpus scripts and scenarios as they lie on disk, and what is concluded from them.

``tests/unit/recorded/NAME.tar.xz`` holds the trace of each run that was made, by its label. Played back, a treatment asks for the same runs
and gets them from there, so everything between a trace and a verdict, and the edits, is tested on real traces, without torch. With
``--rewrite-snapshot`` the tests that run scripts and scenarios record them anew.
"""

import io
import json
import os
import re
import shutil
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from script_corpus import FOLDER as SCRIPTS

from dtypedoctor.diagnosis.rule import Advice, Confidence, Finding
from dtypedoctor.examination.capsules import CAPSULE_LIMIT
from dtypedoctor.examination.examine import advised, examine
from dtypedoctor.examination.processes import Leading
from dtypedoctor.examination.results import Treatment
from dtypedoctor.lab.scenarios.model import Request
from dtypedoctor.lab.trials.changes import is_script
from dtypedoctor.lab.trials.judge import summarise_against
from dtypedoctor.lab.trials.treatment import Plan, treat
from dtypedoctor.redaction.redact import REQUEST
from dtypedoctor.report.build import build_report, write_report
from dtypedoctor.runner.run import EXIT, Run, WorkerExit, collect
from dtypedoctor.trace.lines import EVENTS, open_lines, seal

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "unit" / "recorded"
NAMES = sorted(path.name.removesuffix(".tar.xz") for path in FOLDER.glob("*.tar.xz"))

KEPT = (EVENTS, EXIT, REQUEST, "cursor.bin")
"""What is kept of the directory of a run."""

CONCLUDED = FOLDER / "concluded.json"
"""What is concluded from each, a line for each finding and each trial."""

RECORDED_SCRIPTS = b"/recorded"
"""Where the scripts lie in a recording."""
HERE = {
    bytes(SCRIPTS): RECORDED_SCRIPTS,
    bytes(ROOT): b"/dtypedoctor",
    os.fsencode(Path(json.__file__).parents[1]): b"/lib/python",
}
"""Folders of this machine, and what a recording calls them."""
_PACKAGES = re.compile(rb"""[^"' ]+(?=/site-packages/)""")

_TELLING = re.compile(r"\bNone\b|`[^`]+`|\S*[\d_.]\S+|\S*\d\S*")
"""What of a sentence is no wording: numbers, dtypes, dotted names, files, code; and a None that slipped in."""


def keep(name: str, directory: Path) -> None:
    """Makes ``NAME.tar.xz`` of the runs in ``directory``."""
    with tarfile.open(FOLDER / f"{name}.tar.xz", "w:xz", preset=9) as archive:
        for events in sorted(directory.glob(f"*/{EVENTS}")):
            for file in (events.parent / kept for kept in KEPT):
                if file.exists():
                    data = _changed(file, _anonymous)
                    member = tarfile.TarInfo(f"{events.parent.name}/{file.name}")
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))


def _anonymous(text: bytes) -> bytes:
    """A text in which no folder of this machine is named."""
    for folder, name in HERE.items():
        text = text.replace(folder, name)
    return _PACKAGES.sub(b"", text)


def _changed(file: Path, change: Callable[[bytes], bytes]) -> bytes:
    """What a file of a run holds after a change of its texts; the lines of a trace are sealed again."""
    data = file.read_bytes()
    if file.name == EVENTS:
        return b"".join(seal(change(body), number) + b"\n" for number, body in open_lines(data).lines)
    return change(data) if file.suffix == ".json" else data


def run_directory(name: str, directory: Path, *renamed: tuple[str, str]) -> Path:
    """A recorded run as it lay on disk, with its report; ``renamed`` are names in its traces, and what they are called instead."""

    def other_names(text: bytes) -> bytes:
        for old, new in renamed:
            text = text.replace(old.encode(), json.dumps(new)[1:-1].encode())
        return text

    treatment = play(name, directory, other_names)
    write_report(directory, build_report(treatment, command=f"dtypedoctor run {name}", files={}, next_command=""))
    return directory


def play(name: str, directory: Path, change: Callable[[bytes], bytes] = lambda text: text) -> Treatment:
    """The recorded treatment, made again from its traces in ``directory``, whose texts ``change`` makes others of.

    Raises:
        AssertionError: it asks for a run that was not made, or for one with another request.
    """
    with tarfile.open(FOLDER / f"{name}.tar.xz") as archive:
        archive.extractall(directory, filter="data")
    scripts = _scripts(name, directory / "scripts")
    for file in chain(directory.glob(f"*/{EVENTS}"), directory.glob(f"*/{REQUEST}")):
        file.write_bytes(_changed(file, lambda text: change(text.replace(RECORDED_SCRIPTS, bytes(scripts)))))
    first = _request(directory / "before")
    script = is_script(first.scenario)
    run = partial(_recorded_run, directory, script)
    if script:  # as exec does
        ran = first.scenario.model_dump(mode="json", exclude_defaults=True)
        treatment = examine(ran, Leading()(run("before", first)), capsule_limit=CAPSULE_LIMIT, rerun="--rerun")
    else:
        treatment = treat(first.scenario, run, Plan())
    watched, twin = _collected(directory / "before", script), directory / "float32-twin"
    exact = _collected(twin, script).trace if twin.is_dir() else None
    return replace(treatment, before_summary=summarise_against("before", watched, first.scenario, exact))


def _scripts(name: str, folder: Path) -> Path:
    """A folder with the script and the package that lies beside the scripts, older than any recording: what was edited since is not read."""
    folder.mkdir()
    for path in (SCRIPTS / f"{name}.py", *SCRIPTS.glob("textkit/*.py")):
        if path.exists():
            copy = folder / path.relative_to(SCRIPTS)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copy)
            os.utime(copy, (0, 0))
    return folder


def _request(directory: Path) -> Request:
    made = json.loads((directory / REQUEST).read_text(encoding="utf-8"))
    made["scenario"].pop("watch_every", None)  # what an earlier version wrote
    return Request.model_validate(made)


def _recorded_run(directory: Path, script: bool, label: str, request: Request) -> Run:
    place = directory / label
    assert place.is_dir(), f"no run {label} was made"
    made = _request(place)
    assert (request.watch, request.scenario) == (made.watch, made.scenario), label
    return _collected(place, script)


def _collected(place: Path, script: bool) -> Run:
    ended = WorkerExit(**json.loads((place / EXIT).read_text(encoding="utf-8")))
    return collect(place, ended, foreign=script)


def concluded(treatment: Treatment) -> dict[str, Any]:
    reference = treatment.reference_summary
    return {
        "findings": [_without_wording(one, "summary", "cause") for one in treatment.findings],
        "trials": [_without_wording(one, "summary", "reason") for one in treatment.trials],
        "before": _without_time(plain(asdict(treatment.before_summary))),
        "reference": _without_time(plain(asdict(reference))) if reference is not None else None,
        "observer": _without_wording(treatment.observer, "reason"),
        "refusals": len(treatment.refusals),
        "edits": [_edit(way) for way in _ways(treatment) if way.edits],
    }


def assert_says_what_it_rests_on(finding: Finding) -> None:
    """One sentence as headline, a cause, measurements, a phase and public references; what proves it where it is proven, as a clause."""
    assert finding.summary.endswith(".")
    assert finding.cause.endswith(".")
    assert finding.evidence
    assert finding.phase
    assert finding.references
    assert all(reference.startswith("https://") for reference in finding.references)
    assert (finding.confidence is Confidence.PROVEN) == bool(finding.proven_by)
    assert not (finding.proven_by or "").endswith(".")


def _ways(treatment: Treatment) -> Iterator[Advice]:
    """What could be edited, the best first, whatever was tried."""
    script = treatment.scenario["steps"][0]["workload"].get("path")
    for advice in advised(treatment.findings, treatment.before, script)[0]:
        yield from (advice, *advice.others)


def _edit(advice: Advice) -> str:
    return f"{advice.finding}: {advice.maker}: " + "; ".join(
        f"{edit.line}: {edit.new.strip()}" for edit in advice.edits
    )


def _without_time(run: dict[str, Any]) -> dict[str, Any]:
    """How long the process took says nothing of its diagnosis."""
    return {name: value for name, value in run.items() if name != "seconds"}


def _without_wording(value: Any, *sentences: str) -> dict[str, Any]:
    said: dict[str, Any] = plain(asdict(value))
    for name in sentences:
        said[name] = telling(said[name])
    if said.get("run") is not None:
        said["run"] = _without_time(said["run"])
    if "evidence" in said:
        said["evidence"] = [telling(line) for line in said["evidence"]]
        said["proven_by"] = said["proven_by"] and telling(said["proven_by"])
    return said


def telling(sentence: str) -> str:
    """The numbers and names in a sentence."""
    return " ".join(word.strip(".,;:()") for word in _TELLING.findall(sentence))


def plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, Sequence | set | frozenset) and not isinstance(value, str):
        return [plain(one) for one in (sorted(value) if isinstance(value, set | frozenset) else value)]
    if isinstance(value, float):
        return float(f"{value:.9g}") if abs(value) < float("inf") else str(value)
    return value if value is None or isinstance(value, str | int) else str(value)


def rendered(document: Mapping[str, Mapping[str, Any]]) -> str:
    """JSON with a line for each finding and each trial, so that a difference reads well."""
    texts = []
    for name, one in sorted(document.items()):
        lines = [f'  "{key}": {_lines(value)}' for key, value in one.items()]
        texts.append(f'"{name}": {{\n' + ",\n".join(lines) + "\n}")
    return "{\n" + ",\n".join(texts) + "\n}\n"


def _lines(value: Any) -> str:
    if not isinstance(value, list) or not value:
        return json.dumps(value)
    return "[\n" + ",\n".join(f"    {json.dumps(one)}" for one in value) + "\n  ]"
