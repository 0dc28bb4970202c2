"""Opens files that may come from a stranger: regular ones only, up to a size, and never out of the directory that was named.

A run directory or a model folder that was downloaded may hold anything under any name: a pipe that never answers, a link to a
device without an end or to somebody's keys, a file of a terabyte that takes no room, brackets nested a hundred thousand deep.
Whoever reads one goes through here, and gets an ``OSError`` or a ``ValueError`` in words that can be shown.
"""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

LARGEST_JSON = 64 << 20
"""Bytes of a file that is read and parsed as a whole; a large report takes a few million."""

_PLAIN = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def open_file(path: Path, *, follow: bool = False) -> BinaryIO:
    """Opens a regular file.

    Args:
        path: the file.
        follow: whether it may be a link, as in the cache of the Hugging Face hub, or where the user has named the file itself.

    Raises:
        OSError: it cannot be opened, is a link, or is no regular file.
    """
    try:
        descriptor = os.open(path, _PLAIN | (0 if follow else os.O_NOFOLLOW))
    except ValueError as error:  # a NUL in the name
        raise OSError(errno.EINVAL, str(error)) from error
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a link, and links are not followed here") from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file")
    return os.fdopen(descriptor, "rb")


def read_file(path: Path, limit: int = LARGEST_JSON, *, follow: bool = False) -> bytes:
    """What is in a regular file; see :func:`open_file`.

    Raises:
        OSError: it cannot be opened, or is larger than ``limit`` bytes.
    """
    data = read_head(path, limit + 1, follow=follow)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"it is larger than {limit >> 20} MiB")
    return data


def read_head(path: Path, limit: int, *, follow: bool = False) -> bytes:
    """The first ``limit`` bytes of a regular file, or all where there are fewer.

    Raises:
        OSError: it cannot be opened.
    """
    with open_file(path, follow=follow) as file:
        return file.read(limit)


def parse_json(data: str | bytes) -> Any:
    """What ``json.loads`` makes of it.

    Raises:
        ValueError: it is not JSON, not UTF-8, or nested too deep.
    """
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("nested too deep") from None


def inside(root: Path, relative: str) -> Path:
    """The place ``relative`` in ``root``, where no part of the way leads elsewhere.

    Raises:
        OSError: it is absolute, climbs out by ``..``, or a part of it is a link.
    """
    parts = relative.split("/")
    if any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise OSError(errno.EPERM, "it does not lie in the directory")
    place = root
    for part in parts:
        place = place / part
        if place.is_symlink():
            raise OSError(errno.ELOOP, "it is a link, and links are not followed here")
    return place


def is_real_directory(path: Path) -> bool:
    """Whether it is a directory and no link to one."""
    return path.is_dir() and not path.is_symlink()


def reason(error: Exception) -> str:
    """Why something could not be read, in one line."""
    text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return " ".join(text.split())[:300]
