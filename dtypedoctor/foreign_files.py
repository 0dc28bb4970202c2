"""Opens and writes files of directories that may come from a stranger: regular ones only, up to a size, and never out of the directory that was named.

A run directory or a model folder that was downloaded may hold anything under any name: a pipe that never answers, a link to a
device without an end or to somebody's keys, a file of a terabyte that takes no room, brackets nested a hundred thousand deep.
Whoever reads one goes through here, and gets an ``OSError`` or a ``ValueError`` in words that can be shown. What is written goes into a new file, which
then takes the name: a link of that name is replaced and not followed.
"""

import contextlib
import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO, cast

LARGEST_JSON = 64 << 20
"""Bytes of a file that is read and parsed as a whole; a large report takes a few million."""

_PLAIN = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def open_file(path: Path, *, follow: bool = False) -> BinaryIO:
    """Opens a regular file.

    Args:
        path: the file.
        follow: whether it may be a link, as in the cache of the Hugging Face hub, or where the user has named the file itself.

    Raises:
        OSError: it cannot be opened, is a link, or is no regular file.
    """
    return os.fdopen(_regular(path, _PLAIN | (0 if follow else os.O_NOFOLLOW)), "rb")


def append_file(path: Path, *, mode: int = 0o666) -> BinaryIO:
    """Opens a regular file, which is made where there is none, to read it and to write at its end, without a buffer.

    Raises:
        OSError: it cannot be opened, is a link, or is no regular file.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | os.O_NOFOLLOW
    return cast("BinaryIO", os.fdopen(_regular(path, flags, mode), "ab+", buffering=0))


def _regular(path: Path, flags: int, mode: int = 0) -> int:
    """The descriptor of a regular file.

    Raises:
        OSError: it cannot be opened, is a link, or is no regular file.
    """
    try:
        descriptor = os.open(path, flags, mode)
    except ValueError as error:  # a NUL in the name
        raise OSError(errno.EINVAL, str(error)) from error
    except OSError as error:
        if error.errno == errno.ELOOP and flags & os.O_NOFOLLOW:
            raise OSError(errno.ELOOP, "it is a link, and links are not followed here") from error
        if error.errno == errno.ELOOP:  # another place would not help
            raise FileNotFoundError(errno.ENOENT, "it is a link that leads back to itself") from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file")
    return descriptor


def write_file(path: Path, content: str | bytes, *, mode: int = 0o666, replace: bool = True) -> None:
    """Writes a file as a whole: readers see the old content or the new one, never half of it, and no link is followed.

    Raises:
        FileExistsError: something has the name, and is not to be replaced.
        OSError: it cannot be written; what had the name has it still.
    """
    data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name[:200]}.{os.urandom(8).hex()}")
    try:
        with os.fdopen(os.open(temporary, _NEW, mode), "wb") as file:
            file.write(data)
        (os.replace if replace else os.link)(temporary, path)
    finally:
        with contextlib.suppress(OSError):  # its name is gone where it has replaced another one
            os.unlink(temporary)


def read_file(path: Path, limit: int = LARGEST_JSON, *, follow: bool = False) -> bytes:
    """What is in a regular file; see :func:`open_file`.

    Raises:
        OSError: it cannot be opened, or is larger than ``limit`` bytes.
    """
    data = read_head(path, limit + 1, follow=follow)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"it is larger than {limit >> 20} MiB")
    return data


def read_settings(path: Path) -> dict[str, Any]:
    """The object in a JSON file that is a help, never a condition: empty where it cannot be read, or holds anything else."""
    try:
        found = parse_json(read_file(path))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def read_head(path: Path, limit: int, *, follow: bool = False) -> bytes:
    """The first ``limit`` bytes of a regular file, or all where there are fewer.

    Raises:
        OSError: it cannot be opened.
    """
    with open_file(path, follow=follow) as file:
        return file.read(limit)


def read_tail(path: Path, limit: int) -> bytes:
    """The last ``limit`` bytes of a regular file, or all where there are fewer.

    Raises:
        OSError: it cannot be opened.
    """
    with open_file(path) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - limit))
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


def working_directory() -> Path | None:
    """The working directory; None where it has been deleted."""
    try:
        return Path.cwd()
    except OSError:
        return None


def is_real_directory(path: Path) -> bool:
    """Whether it is a directory and no link to one."""
    return path.is_dir() and not path.is_symlink()


def reason(error: Exception) -> str:
    """Why something could not be read, in one line."""
    text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return " ".join(text.split())[:300]
