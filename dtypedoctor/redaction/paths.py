"""Shortens absolute paths to what a stranger needs: the part inside site-packages, or the file's name."""

import re

__all__ = ["HOMES", "short_paths"]

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
