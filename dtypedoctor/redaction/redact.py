"""Takes out of a report, and of a request on disk, what must not stand in a public ticket: who, where, and every secret."""

import contextlib
import getpass
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from dtypedoctor.foreign_files import read_file, write_file
from dtypedoctor.redaction.secrets import (
    ALLOWED_VARIABLES,
    SECRET,
    Literals,
    is_password,
    literals_of_process,
    masked_by,
    names_a_secret,
    recent_literals,
    without_secrets,
)
from dtypedoctor.unpatched import from_json, to_json

HOMES = re.compile(r"(?:/home/|/Users/|/export/home/|[A-Za-z]:\\+Users\\+)([^\s/\\:'\"<>|,;)\]]+)")
"""A home directory; the group is its owner."""

_PACKAGES = re.compile(r".*/(?:site-packages|dist-packages|lib/python3\.\d+)/(?=.)")
_OWNED = re.compile(r"/(?:export/)?(?:home|Users)/[^/]+|/root|[A-Za-z]:/Users/[^/]+")
_QUOTED = re.compile(
    r"""(?<=")(?:/|[A-Za-z]:\\)[^"\n]*[/\\][^"\n]*(?=")|(?<=')(?:/|[A-Za-z]:\\)[^'\n]*[/\\][^'\n]*(?=')"""
)
_PART = r"[^\s/\\:'\"<>|,;()\[\]{}`=&?*…]+"
_POSIX = re.compile(rf"(?:(?<=file:/)/|(?<![\w./:~\\<-])|(?<=:)(?!//))(?:(?:/{_PART}){{2,}}/?|/root(?![\w.-])/?)")
_WINDOWS = re.compile(rf"(?<![\w/])(?:[A-Za-z]:|\\\\{_PART})(?:[\\/]+{_PART})+[\\/]*")
_TILDE = re.compile(r"(?<![\w/~])~[A-Za-z][\w.-]*(?=/|\s|$)")


def short_paths(text: str) -> str:
    """``text`` with each absolute path shortened; a home directory itself becomes ``~``.

    Paths in quotes may contain spaces; URLs and relative paths stay as they are.
    """
    if "/" not in text and "\\" not in text and "~" not in text:
        return text
    for pattern in (_QUOTED, _WINDOWS, _POSIX):
        text = pattern.sub(_short, text)
    return _TILDE.sub("~", text)


def _short(match: re.Match[str]) -> str:
    path = re.sub(r"[\\/]+", "/", match[0]).rstrip("/")
    inside = _PACKAGES.match(path)
    if inside:
        return path[inside.end() :]
    if _OWNED.fullmatch(path):
        return "~"
    return path.rsplit("/", 1)[-1] or "/"


_Value = TypeVar("_Value")

_VARIABLES = frozenset({"variables", "env", "environ", "environment_variables"})
"""Keys under which a mapping holds environment variables."""

_HOST = re.compile(
    r"(?<![\w.-])(?:[\w-]+\.)+(?:internal|corp|lan|intranet|localdomain|cluster\.local|amazonaws\.com)(?![\w-])"
    r"|(?<![\w-])ip(?:-\d{1,3}){4}(?![\w-])|(?<![\d.])\d{1,3}(?:\.\d{1,3}){3}(?=:\d)"
)
_NOBODY = frozenset({
    "admin", "build", "cpu", "cuda", "data", "debian", "default", "gpu", "guest", "home", "host", "linux", "localhost", "main",
    "model", "models", "nobody", "node", "python", "root", "runner", "server", "test", "torch", "train", "ubuntu", "user",
    "users", "work", "worker",
})  # fmt: skip
"""User and host names that identify nobody, and words that a report needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Private:
    """Names that identify a person or a machine.

    Attributes:
        users: login names.
        hosts: host names, short or full.
        literals: values that must not be shown wherever they stand.
    """

    users: frozenset[str] = frozenset()
    hosts: frozenset[str] = frozenset()
    literals: Literals = field(default_factory=lambda: Literals(iter(())))

    @classmethod
    def of_this_machine(cls) -> "Private":
        """Who runs this process, the machine it runs on, and the secrets in its environment."""
        try:
            users = frozenset({getpass.getuser()})
        except (KeyError, OSError):  # a container may run under a user id that has no name
            users = frozenset()
        host = socket.gethostname()
        return cls(users=users, hosts=frozenset({host, host.split(".")[0]}), literals=literals_of_process())


def redact(report: _Value, private: Private | None = None) -> _Value:
    """``report`` (or any other value made of dataclasses, mappings, sequences and texts) with everything private replaced.

    Replaced are tokens, passwords and credentials in URLs (:mod:`.secrets`), values of environment variables
    outside the allow-list, absolute paths (:mod:`.paths`), e-mail addresses, and the names of users and hosts:
    those in ``private`` (by default of this machine) and those that home directories in the report itself give away.
    Redacting twice changes nothing more.
    """
    known = private if private is not None else Private.of_this_machine()
    texts = list(_texts(report))
    found = {owner for _, text in texts for owner in HOMES.findall(text)}
    recorded = dict(texts)
    users = known.users | found | {name for key, name in recorded.items() if key in ("USER", "LOGNAME", "USERNAME")}
    hosts = known.hosts | {name for key, name in recorded.items() if key in ("HOSTNAME", "HOST")}
    cleaned: dict[str, str] = {}
    clean_names = _without_names(users, hosts)

    def clean(text: str) -> str:
        if text not in cleaned:
            cleaned[text] = clean_names(short_paths(without_secrets(known.literals.masked(text))))
        return cleaned[text]

    result: _Value = _walk(report, clean)
    return result


def without_process_secrets(value: Any, *, recent: bool = False) -> Any:
    """``value``, made of what JSON has, without what is secret in this process or looks so; names and paths stay.

    With ``recent`` the environment is not looked at again.
    """
    return _walk(value, masked_by(recent_literals() if recent else literals_of_process()))


def _walk(value: Any, clean: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return value if isinstance(value, Enum) else clean(value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **dict(_fields(value, clean)))
    if isinstance(value, Mapping):
        return dict(_entries(value, clean))
    if isinstance(value, (list, tuple)) and not {int, float}.issuperset(map(type, value)):
        return type(value)(_sequence(value, clean))
    return value


def _fields(value: Any, clean: Callable[[str], str]) -> Iterator[tuple[str, Any]]:
    for described in fields(value):
        if described.metadata.get("stays"):
            yield described.name, _walk(described.default, clean)
        elif described.init:
            yield described.name, _walk(getattr(value, described.name), clean)


def _entries(items: Mapping[Any, Any], clean: Callable[[str], str]) -> Iterator[tuple[Any, Any]]:
    for key, item in items.items():
        name, values = str(key), item if isinstance(item, list | tuple) else (item,)
        if name.lower() in _VARIABLES and isinstance(item, Mapping):
            allowed = ((k, _walk(v, clean) if k in ALLOWED_VARIABLES else SECRET) for k, v in item.items())
            yield _walk(key, clean), {_walk(k, clean): v for k, v in allowed}
        elif names_a_secret(name) and str in map(type, values):  # the numbers of ``tokens`` are none
            yield _walk(key, clean), SECRET
        else:
            yield _walk(key, clean), _walk(item, clean)


def _sequence(items: Sequence[Any], clean: Callable[[str], str]) -> Iterator[Any]:
    before = ""
    for item in items:  # an argument list keeps an option and its value apart: ["--token", "…"]
        text = item if isinstance(item, str) else ""
        option, sign, value = text.partition("=")
        if text and is_password(before, text):
            yield SECRET
        elif sign and is_password(option, value):
            yield f"{option}={SECRET}"
        else:
            yield _walk(item, clean)
        before = text


def _texts(value: Any, name: str = "", *, are_variables: bool = False) -> Iterator[tuple[str, str]]:
    """Yield every text in a value; one in a mapping of environment variables with the variable's name."""
    if is_dataclass(value):
        value = {f.name: getattr(value, f.name) for f in fields(value)}
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item, key if are_variables else "", are_variables=str(key).lower() in _VARIABLES)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(item)


def _without_names(users: frozenset[str], hosts: frozenset[str]) -> Callable[[str], str]:
    patterns = [(_HOST, "<host>")]
    for names, replacement in ((hosts, "<host>"), (users, "<user>")):
        telling = sorted((n for n in names if len(n) > 2 and n.lower() not in _NOBODY), key=len, reverse=True)
        if telling:
            choice = "|".join(map(re.escape, telling))
            patterns.append((re.compile(rf"(?<![A-Za-z0-9])(?:{choice})(?![A-Za-z0-9])", re.IGNORECASE), replacement))

    def clean(text: str) -> str:
        for pattern, replacement in patterns:
            text = pattern.sub(replacement, text)
        return text

    return clean


PRIVATE_REQUEST = "request.private.json"
REQUEST = "request.json"


def public_text(text: str) -> str:
    """A request's JSON without secrets; the same text where it holds none."""
    value = from_json(text)
    public = without_process_secrets(value)
    return text if public == value else to_json(public)


def write_request_file(directory: Path, text: str) -> None:
    """Writes a request into a new directory.

    Raises:
        OSError: it cannot be written.
    """
    public = public_text(text)
    if public != text:
        descriptor = os.open(directory / PRIVATE_REQUEST, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(text.encode())
    write_file(directory / REQUEST, public)


def read_request(directory: Path) -> bytes:
    """The request as it was made, for the worker.

    Raises:
        OSError: there is none.
    """
    with contextlib.suppress(FileNotFoundError):
        return read_file(directory / PRIVATE_REQUEST)
    return read_file(directory / REQUEST)


def forget_request(directory: Path) -> None:
    """Takes away what only the worker was to read."""
    with contextlib.suppress(OSError):
        (directory / PRIVATE_REQUEST).unlink(missing_ok=True)
