"""What is secret in this process, by value: from its environment, its arguments and the user's netrc.

It is taken where a run is recorded, so that what was secret there is masked in whatever is written, whoever renders it later.
"""

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from urllib.parse import quote, urlsplit

from dtypedoctor.redaction.secrets import SECRET, names_a_secret, without_secrets

_FOLDERS = frozenset({"PWD", "OLDPWD"})
"""Variables of the shell that sound like passwords; paths are shortened wherever they stand."""
_SHORTEST = 4
_PLAIN = re.compile(
    r"(?:bf|fp|tf|u?int|float|bfloat)\d+|true|false|yes|none|null|auto|cuda|cpu|main|default|debug|info|[./].*|\d{1,3}",
    re.IGNORECASE,
)
"""Values that would take words out of a report which nobody means to hide: dtypes, switches, paths."""
_PASSWORD_OPTIONS = frozenset({"-p", "--pass"})
_USER_OPTIONS = frozenset({"-u", "--user"})
_NETRC_LIMIT = 1 << 16
_NETRC = re.compile(r"\bpassword\s+(\S+)")


class Literals:
    """Values that are replaced wherever they stand, as they are, quoted as in a URL, or inside of a literal of Python's.

    Args:
        values: the secrets; those that are too short, or words that a report needs, are passed over.
    """

    def __init__(self, values: Iterator[str]) -> None:
        forms = {form for value in values if _is_telling(value) for form in _forms(value)}
        choice = "|".join(map(_searched, sorted(forms, key=len, reverse=True)))
        self._pattern = re.compile(choice) if choice else None

    def __bool__(self) -> bool:
        """Whether there are any."""
        return self._pattern is not None

    def masked(self, text: str) -> str:
        """``text`` without them."""
        return self._pattern.sub(SECRET, text) if self._pattern is not None else text


def masked(text: str) -> str:
    """``text`` without anything that is secret in this process or looks like a token or a password anywhere."""
    return _masked(text, literals_of_process())


def masked_by(literals: Literals) -> Callable[[str], str]:
    """The same for many texts, by values that are looked up once."""
    return lambda text: _masked(text, literals)


@lru_cache(maxsize=4096)
def _masked(text: str, literals: Literals) -> str:
    return without_secrets(literals.masked(text))


def literals_of_process() -> Literals:
    """Those of the present environment, which a program may have added to since it began."""
    global _recent
    _recent = _literals(tuple(sorted(os.environ.items())), tuple(sys.argv))
    return _recent


def recent_literals() -> Literals:
    """Those of the environment when it was last looked at: for what is asked thousands of times a second."""
    return _recent if _recent is not None else literals_of_process()


_recent: Literals | None = None


@lru_cache(maxsize=2)
def _literals(environment: tuple[tuple[str, str], ...], arguments: tuple[str, ...]) -> Literals:
    return Literals(iter([*_of_environment(dict(environment)), *_of_arguments(arguments), *_of_netrc()]))


def _of_environment(environment: Mapping[str, str]) -> Iterator[str]:
    for name, value in environment.items():
        if name not in _FOLDERS and names_a_secret(name):
            yield value
        elif "://" in value and (password := _password_of(value)):
            yield password


def _password_of(url: str) -> str:
    try:
        return urlsplit(url).password or ""
    except ValueError:
        return ""


def _of_arguments(arguments: Sequence[str]) -> Iterator[str]:
    """Values behind telling options; what has the shape of a token is found without."""
    before = ""
    for argument in arguments:
        option, _, value = argument.partition("=")
        if before and is_password(before, argument):
            yield argument.rpartition(":")[2] if before in _USER_OPTIONS else argument
        elif value and option.startswith("-") and (names_a_secret(option) or option in _PASSWORD_OPTIONS):
            yield value
        before = argument


def is_password(option: str, value: str) -> bool:
    """Whether what stands behind an option of a command is secret: ``--token X``, ``-p X``, ``-u user:X``."""
    if not option.startswith("-") or value.startswith("-"):
        return False
    if option in _USER_OPTIONS:
        return ":" in value and "://" not in value
    return names_a_secret(option) or (
        option in _PASSWORD_OPTIONS and not _PLAIN.fullmatch(value) and not value.isdigit()
    )


def _of_netrc() -> Iterator[str]:
    with contextlib.suppress(OSError, ValueError):
        path = os.environ.get("NETRC") or os.path.expanduser("~/.netrc")
        if os.path.isfile(path):
            with open(path, encoding="utf-8", errors="replace") as file:
                yield from _NETRC.findall(file.read(_NETRC_LIMIT))


def _is_telling(value: str) -> bool:
    return len(value) >= _SHORTEST and not _PLAIN.fullmatch(value)


def _forms(value: str) -> Iterator[str]:
    yield value
    yield repr(value)[1:-1]
    yield quote(value, safe="")


def _searched(value: str) -> str:
    """The value as an expression; a short one, or a number, is no part of a longer word."""
    whole = len(value) < 8 or value.isdigit()
    return rf"(?<![A-Za-z0-9]){re.escape(value)}(?![A-Za-z0-9])" if whole else re.escape(value)
