"""What is said today of each corpus script and each scenario, as `snapshot.json` keeps it.

An entry holds the status, the exit code and the findings in their order, and of a scenario the outcome of each remedy: words and numbers
are left out, because the former are edited and the latter depend on the processor. After an intended change, write it anew and read
the difference::

    python -m pytest -q tests/e2e/test_exec_corpus.py tests/e2e/test_scenarios.py -m "" --rewrite-snapshot [-k NAME]
    git diff tests/e2e/snapshot.json
"""

import fcntl
import json
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

SNAPSHOT = Path(__file__).parent / "snapshot.json"
FINDING = ("id", "severity", "confidence", "fqn", "op", "phase", "step")
"""What is kept of a finding."""

Entry = dict[str, Any]


def entry(report: Mapping[str, Any], exit_code: int) -> Entry:
    kept: Entry = {
        "status": report["status"],
        "exit": exit_code,
        "findings": [{key: finding[key] for key in FINDING} for finding in report["findings"]],
    }
    if report["trials"]:
        kept["trials"] = {trial["remedy"]: trial["outcome"] for trial in report["trials"]}
    return kept


def read_snapshot() -> dict[str, Any]:
    """The whole document: ``torch`` (the minor version it was made with), ``scripts`` and ``scenarios`` by name."""
    return json.loads(SNAPSHOT.read_text(encoding="utf-8"))


def check_against_snapshot(kind: str, name: str, now: Entry, *, rewrite: bool) -> None:
    """Asserts that the entry of ``name`` is ``now``; with ``rewrite`` makes it so.

    Skips where another version of torch, or a CUDA device, makes other operators fail.
    """
    if rewrite:
        rewrite_entry(kind, name, now)
        return
    document = read_snapshot()
    if document["torch"] != torch_version():
        pytest.skip(f"the snapshot was made with torch {document['torch']}")
    if Path("/dev/nvidia0").exists():
        pytest.skip("the snapshot was made without a CUDA device")
    assert now == document[kind].get(name), f"{kind} {name}: not what tests/e2e/snapshot.json says"


def torch_version() -> str:
    """Major and minor version of the installed torch."""
    return ".".join(version("torch").split(".")[:2])


def rewrite_entry(kind: str, name: str, now: Entry) -> None:
    """Puts one entry into the file; other processes may do the same with other entries."""
    with SNAPSHOT.open("a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        document = json.loads(file.read() or '{"scripts": {}, "scenarios": {}}')
        document["torch"] = torch_version()
        document[kind][name] = now
        file.truncate(0)
        file.write(rendered(document))


def forget_others(kind: str, names: Iterable[str]) -> None:
    """Removes the entries of what is no longer there."""
    for name in read_snapshot()[kind].keys() - set(names):
        document = read_snapshot()
        del document[kind][name]
        SNAPSHOT.write_text(rendered(document), encoding="utf-8")


def rendered(document: Mapping[str, Any]) -> str:
    """JSON with one line for each finding, so that a difference reads well."""
    kinds = [f'  "torch": {json.dumps(document["torch"])}']
    for kind in ("scripts", "scenarios"):
        entries = [f'    "{name}": {_rendered_entry(one)}' for name, one in sorted(document[kind].items())]
        kinds.append(f'  "{kind}": {{\n' + ",\n".join(entries) + "\n  }")
    return "{\n" + ",\n".join(kinds) + "\n}\n"


def _rendered_entry(one: Entry) -> str:
    lines = ",\n".join(f"        {json.dumps(finding)}" for finding in one["findings"])
    fields = [f'"status": {json.dumps(one["status"])}, "exit": {one["exit"]}']
    fields.append(f'"findings": [\n{lines}\n      ]' if lines else '"findings": []')
    if "trials" in one:
        fields.append(f'"trials": {json.dumps(one["trials"])}')
    return "{\n      " + ",\n      ".join(fields) + "\n    }"
