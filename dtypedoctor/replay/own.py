"""Whose capsule it is: `exec` marks those that it makes, so that `replay` runs the code of these without asking.

The mark is a code of authentication of ``capsule.json`` under a random key that never leaves the user's home directory. A capsule from
somebody else, one that was edited, and one made by the report on somebody else's record have none that fits.
"""

import hashlib
import hmac
import os
import secrets
from contextlib import suppress
from pathlib import Path

from dtypedoctor.foreign_files import read_file, write_file
from dtypedoctor.replay.capsule import CAPSULE

_MARK = "made-here"
_BYTES = 32


def mark_as_own(directory: Path) -> None:
    """Mark the capsule in ``directory`` as made by this user; not where nothing can be kept at home."""
    with suppress(OSError):
        write_file(directory / _MARK, _mark_of(directory, _key(make=True)))


def is_own(directory: Path) -> bool:
    """Whether this user has made the capsule in ``directory``, on this machine, as it is now."""
    try:
        mark = read_file(directory / _MARK, 1000).decode()
        return hmac.compare_digest(mark, _mark_of(directory, _key(make=False)))
    except (OSError, ValueError, TypeError):
        return False


def _mark_of(directory: Path, key: bytes) -> str:
    return hmac.new(key, read_file(directory / CAPSULE), hashlib.sha256).hexdigest()


def _key(*, make: bool) -> bytes:
    """The key of this user.

    Raises:
        OSError: there is none and none is to be made, or others may read or have written it.
    """
    place = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state", "dtypedoctor", "key")
    if make:
        place.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            write_file(place, secrets.token_bytes(_BYTES), mode=0o600, replace=False)
    status = place.stat(follow_symlinks=False)
    if status.st_uid != os.getuid() or status.st_mode & 0o077 or status.st_size != _BYTES:
        raise PermissionError(f"{place} is not this user's alone")
    return read_file(place, _BYTES)
