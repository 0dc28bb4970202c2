"""Scripts of the corpus that were seen to do what their headers say: `vouched.json`, by name, a hash of the file under one torch."""

import fcntl
import hashlib
import json
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from script_corpus import Case, cases

VOUCHED = Path(__file__).parent / "vouched.json"


@cache
def vouched() -> dict[str, Any]:
    """The whole document: ``torch``, its version, and ``scripts``, a hash by name."""
    return json.loads(VOUCHED.read_text(encoding="utf-8"))


def is_vouched_for(case: Case) -> bool:
    """Whether this very script was seen to be as its header says, under the torch that is installed."""
    return vouched()["torch"] == _torch() and vouched()["scripts"].get(case.name) == _hash(case)


def vouch(case: Case) -> None:
    """Enters a script; other processes may do the same with other scripts. What another torch has seen is forgotten."""
    with VOUCHED.open("r+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        document = json.loads(file.read())
        scripts = document["scripts"] if document["torch"] == _torch() else {}
        scripts = {one.name: scripts[one.name] for one in cases() if one.name in scripts} | {case.name: _hash(case)}
        file.seek(0)
        file.truncate()
        file.write(json.dumps({"torch": _torch(), "scripts": scripts}, indent=2, sort_keys=True) + "\n")


def _hash(case: Case) -> str:
    return hashlib.sha256(case.path.read_bytes()).hexdigest()[:16]


def _torch() -> str:
    return version("torch").split("+")[0]
