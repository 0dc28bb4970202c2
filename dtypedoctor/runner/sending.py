"""What is sent to other machines: this package, the local files that scenarios name, and nothing that is secret.

Hidden files, keys and tokens by their name or folder, texts that hold one, and what git ignores stay here. Everything is listed.
"""

import hashlib
import os
import re
import stat
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import NoReturn

from dtypedoctor import __version__
from dtypedoctor.errors import UsageError
from dtypedoctor.patterns import regex
from dtypedoctor.redaction.redact import public_text
from dtypedoctor.redaction.secrets import ALLOWED_VARIABLES, literals_of_process, without_shapes
from dtypedoctor.runner.directories import make_directory
from dtypedoctor.runner.job import HERE, OUT, PACKAGE, PYTHON
from dtypedoctor.runner.machines import Job, SubmittedJob, Where, unpack
from dtypedoctor.runner.run import STDERR, Run, WorkerExit, collect, write_request
from dtypedoctor.scenario.model import REQUEST, Request, Scenario, Script
from dtypedoctor.unpatched import to_json
from dtypedoctor.values import dataclass

SENT = "sent.json"
"""Where it is listed what was sent, in the run directory."""
MOST_BYTES = 256 << 20
"""That are sent with a job; larger models lie in a folder that all machines have."""

_HERE_ONLY = frozenset({"CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "NO_COLOR", "RANK", "WORLD_SIZE"})
_SECRET_NAME = regex(
    r"\..*|.*\.(env|pem|key|p12|pfx|jks|kdbx|ppk|gpg|asc|keystore)|id_(rsa|dsa|ecdsa|ed25519).*|_?netrc|"
    r".*(credential|secret|password|passwd).*|(.*[-_.])?(api|access|auth|hf|wandb)[-_]?(key|token)s?(\..*)?|tokens?(\.(txt|json))?",
    re.IGNORECASE | re.DOTALL,
)
_KEY_FOLDERS = frozenset({".aws", ".azure", ".docker", ".gnupg", ".kube", ".ssh"})
_PRIVATE_KEY = regex(r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY|PuTTY-User-Key-File-")
_LARGEST_TEXT = 1 << 20
"""Bytes of a file that is searched for secrets: tokenizers and weights are larger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What goes to each machine.

    Attributes:
        files: their content by the path in the folder of a job, the package included.
        environment: variables that steer precision, as they are here.
        withheld: files that were named, directly or by their folder, and stay here, with the reason.
        moved: names in scenarios that stand for files here, and what they are called there.
    """

    files: dict[str, bytes]
    environment: dict[str, str]
    withheld: dict[str, str]
    moved: dict[str, str]

    def there(self, scenario: Scenario) -> Scenario:
        """The scenario with the paths that its files have on the other machine."""
        steps = scenario.model_dump()["steps"]
        for step in steps:
            if step["model"] is not None:
                step["model"]["name"] = self.moved.get(step["model"]["name"], step["model"]["name"])
            if step["workload"]["kind"] == "script" and step["workload"]["path"] is not None:
                step["workload"]["path"] = self.moved.get(step["workload"]["path"], step["workload"]["path"])
        return scenario.with_changes(steps=steps)

    def in_words(self) -> str:
        """One line for the user."""
        own = {name: len(content) for name, content in self.files.items() if not name.startswith(f"{PACKAGE}/")}
        files = f", {len(own)} file{'s' * (len(own) != 1)} of yours ({_size(sum(own.values()))})" if own else ""
        variables = f", {', '.join(self.environment)}" if self.environment else ""
        kept = f"; withheld: {', '.join(list(self.withheld)[:5])}" if self.withheld else ""
        more = f" and {len(self.withheld) - 5} more" if len(self.withheld) > 5 else ""
        return f"Sent to each machine: the scenario, dtypedoctor {__version__}{files}{variables}{kept}{more}"

    def write(self, directory: Path) -> None:
        """Lists it in the run directory.

        Raises:
            OSError: it cannot be written.
        """
        sizes = {name: len(content) for name, content in sorted(self.files.items())}
        found = {"files": sizes, "environment": self.environment, "withheld": self.withheld}
        (directory / SENT).write_text(to_json(found) + "\n", encoding="utf-8")


def packed(scenarios: Iterable[Scenario], where: Where, wheels: Path | None = None) -> Sent:
    """Reads what the scenarios need; nothing where jobs run in this machine's own folders.

    Raises:
        UsageError: a file that a scenario names may not be sent, or all of them are too large.
    """
    environment = {name: os.environ[name] for name in sorted(ALLOWED_VARIABLES - _HERE_ONLY) if name in os.environ}
    if not where.is_elsewhere:
        return Sent(files={}, environment={}, withheld={}, moved={})
    files = dict(_package())
    withheld: dict[str, str] = {}
    moved: dict[str, str] = {}
    room = MOST_BYTES
    for name, path in _asked(scenarios, where, wheels).items():
        if any(_absolute(path).is_relative_to(_absolute(shared)) for shared in where.shared):
            moved[name] = str(_absolute(path))
            continue
        moved[name] = _there(path)
        may = list(_files(path))
        stays = _staying(may, path, even_ignored=path in where.send)
        withheld |= {str(one): why for one, why in stays.items()}
        if len(stays) == len(may):
            raise UsageError(
                f"{path} is not sent to other machines: {next(iter(stays.values()), 'it is empty')}",
                f"--send {path} sends what git ignores; --shared FOLDER is for what all machines have at the same path.",
            )
        for one in (one for one in may if one not in stays):
            content = _read(one, room)
            room -= len(content)
            files[os.path.normpath(Path(moved[name], one.relative_to(path)))] = content
    return Sent(files=files, environment=environment, withheld=withheld, moved=moved)


def _asked(scenarios: Iterable[Scenario], where: Where, wheels: Path | None) -> dict[str, Path]:
    """What has to be there, by the name that scenarios use for it."""
    asked = {str(path): path for path in where.send}
    for scenario in scenarios:
        _require_no_secret(scenario)
        asked |= dict(_local(scenario))
        asked |= {str(path): path for path in _releases(scenario, wheels)}
    return asked


def _staying(paths: Sequence[Path], named: Path, *, even_ignored: bool) -> dict[Path, str]:
    """The files below a named one that must not leave this machine, with the reason."""
    if named.name.startswith(".") and named.name != "..":
        return dict.fromkeys(paths, _HIDDEN)
    reasons = {one: _why_not(one) for one in paths}
    if not even_ignored:
        reasons |= dict.fromkeys(_ignored([one for one, why in reasons.items() if not why]), "ignored by git")
    return {one: why for one, why in reasons.items() if why}


def _read(path: Path, room: int) -> bytes:
    try:
        if path.stat().st_size <= room:
            return path.read_bytes()
    except OSError as error:
        raise _unreadable(error, path) from error
    raise UsageError(
        f"{path}: with it more than {_size(MOST_BYTES)} would be sent with each job",
        "Put it into a folder that all machines have at the same path, and name that by --shared FOLDER.",
    )


def _unreadable(error: OSError, path: Path | None = None) -> UsageError:
    return UsageError(f"{path or error.filename}: cannot be read ({error.strerror})", "Check its permissions.")


def _require_no_secret(scenario: Scenario) -> None:
    text = scenario.model_dump_json()
    if public_text(text) != text:
        raise UsageError(
            f"{scenario.name} holds what looks like a password or token, so it is not sent to other machines",
            "Take it out of the scenario: let the program read it there from a file or a variable.",
        )


def _package() -> Iterator[tuple[str, bytes]]:
    """This package as a wheel holds it."""
    root = Path(__file__).resolve().parents[1]
    for path in sorted(root.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            yield f"{PACKAGE}/dtypedoctor/{path.relative_to(root)}", path.read_bytes()
    pages = root.parent / "docs" / "findings"
    if (root.parent / "pyproject.toml").is_file() and not (root / "data" / "findings").exists():
        for path in sorted(pages.glob("*.md")):
            yield f"{PACKAGE}/dtypedoctor/data/findings/{path.name}", path.read_bytes()


def _local(scenario: Scenario) -> Iterator[tuple[str, Path]]:
    """What a scenario names that lies here: folders of models, scripts, and the modules of factories."""
    for step in scenario.steps:
        name = step.model.name if step.model is not None else ""
        if os.path.exists(name):
            yield name, Path(name)
        elif ":" in name:
            top = name.partition(":")[0].partition(".")[0]
            yield from ((str(path), path) for path in (Path(top), Path(f"{top}.py")) if path.exists())
        if isinstance(step.workload, Script) and step.workload.path and os.path.exists(step.workload.path):
            yield step.workload.path, Path(step.workload.path)


def _releases(scenario: Scenario, wheels: Path | None) -> Iterator[Path]:
    for wanted in scenario.requires if wheels is not None else ():
        folder = wheels / wanted.replace("==", "-")  # type: ignore[operator]
        if folder.is_dir():
            yield folder


def _files(path: Path) -> Iterator[Path]:
    """Its files; hidden folders and caches are not entered."""
    if not path.is_dir():
        yield path
        return
    for folder, folders, names in os.walk(path, onerror=_refuse_folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "__pycache__")
        yield from (Path(folder, name) for name in sorted(names))


def _refuse_folder(error: OSError) -> NoReturn:
    raise _unreadable(error) from error


_HIDDEN = "hidden, or named like a key or token"


def _why_not(path: Path) -> str:
    """Why a file must not leave this machine; empty where it may."""
    places = (_absolute(path), _real(path))
    if any(_SECRET_NAME.fullmatch(one.name) for one in places):
        return _HIDDEN
    if any(not _KEY_FOLDERS.isdisjoint(one.parts) for one in places):
        return "in a folder of keys"
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            return "not a file"  # reading a pipe would not come to an end
        content = path.read_bytes() if found.st_size <= _LARGEST_TEXT else b""
    except OSError as error:
        raise _unreadable(error, path) from error
    return "it holds what looks like a password or token" if _holds_a_secret(content) else ""


def _holds_a_secret(content: bytes) -> bool:
    if b"\0" in content:  # no text
        return False
    text = content.decode("utf-8", "replace")
    return bool(_PRIVATE_KEY.search(text)) or without_shapes(literals_of_process().masked(text)) != text


def _ignored(paths: Iterable[Path]) -> set[Path]:
    """Those that git ignores, by the name that they are given or that of the file behind a link.

    Raises:
        UsageError: git cannot tell.
    """
    names: dict[Path, dict[bytes, set[Path]]] = {}
    for path in paths:
        for place in (_real(path.parent) / path.name, _real(path)):
            name = b"./" + os.fsencode(place.name)  # git takes a colon at the beginning for a pattern
            names.setdefault(place.parent, {}).setdefault(name, set()).add(path)
    asked = {folder: below for folder, below in names.items() if _is_in_a_repository(folder)}
    return {path for folder, below in asked.items() for name in _ignored_in(folder, below) for path in below[name]}


def _is_in_a_repository(folder: Path) -> bool:
    return any(os.path.lexists(above / ".git") for above in (folder, *folder.parents))


def _ignored_in(folder: Path, names: Iterable[bytes]) -> list[bytes]:
    command = ["git", "-C", str(folder), "check-ignore", "--stdin", "-z"]
    try:
        done = subprocess.run(command, input=b"\0".join(names), capture_output=True, check=False)
        if done.returncode in (0, 1):  # 1: none of them is ignored
            return [name for name in done.stdout.split(b"\0") if name]
        why = done.stderr.decode("utf-8", "replace").strip().partition("\n")[0]
    except OSError as error:
        why = str(error.strerror)
    raise UsageError(
        f"{folder}: git cannot tell which files it ignores ({why})",
        "What --send names is sent without asking git.",
    )


def _there(path: Path) -> str:
    """Where it lies in the folder of a job: as it lies in the working directory, or in a folder of its own."""
    here, place = Path.cwd(), _absolute(path)
    if place.is_relative_to(here) and place != here:
        return str(place.relative_to(here))
    return f"elsewhere/{hashlib.sha256(str(place).encode()).hexdigest()[:8]}/{place.name}"


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))


def _absolute(path: Path) -> Path:
    return Path(os.path.abspath(path))


def _size(count: int) -> str:
    return f"{count / 1e6:,.1f} MB" if count >= 100_000 else f"{count / 1000:,.1f} kB"


class RemoteRun:
    """A request that another machine runs.

    Args:
        executor: runs it.
        request: what is to be done.
        directory: where everything that it leaves will lie; must not exist yet.
        sent: what goes with it.
        say: is called with what the user should know.

    Raises:
        UsageError: the directory cannot be written, or the request holds a secret.
    """

    def __init__(
        self, executor: Executor, request: Request, directory: Path, sent: Sent, say: Callable[[str], None]
    ) -> None:
        _require_no_secret(request.scenario)
        make_directory(directory)
        write_request(directory, request)
        there = request.model_copy(update={"scenario": sent.there(request.scenario)})
        self.directory = directory
        self._job = SubmittedJob(
            executor,
            Job(
                name=directory.name,
                outlives=False,
                common=sent.files,
                own={f"{OUT}/run/{REQUEST}": there.model_dump_json().encode()},
                command=[PYTHON, "-P", "-c", _WORK, f"{HERE}{OUT}/run"],
                environment=sent.environment,
                limit=float(request.scenario.time_limit),
            ),
            say,
        )

    def wait(self, seconds: float) -> bool:
        """Waits at most so long; whether it has ended."""
        return self._job.wait(seconds)

    def stop(self) -> None:
        """Ends it."""
        self._job.stop()

    def collect(self) -> Run:
        """What it has left.

        Raises:
            NodeLostError: no machine has run it to its end.
            UsageError: it cannot be run at all.
        """
        ended = self._job.ended()
        unpack(ended["files"], "run", self.directory, keep=(REQUEST,))
        if not (self.directory / STDERR).exists():  # not even our own code was begun
            last = ended["said"].strip().rpartition("\n")[2]
            raise UsageError(f"the other machine cannot run dtypedoctor: {last}", "Install its dependencies there.")
        status = WorkerExit(code=ended["status"], timed_out=ended["timed_out"], seconds=ended["seconds"])
        return collect(self.directory, status)


_WORK = "import sys; from dtypedoctor.runner.launch import work; work(sys.argv[1])"
