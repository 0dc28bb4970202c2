"""Reads a scenario's file into text."""

import codecs
import stat
from pathlib import Path

from yaml.reader import Reader

from dtypedoctor.errors import UsageError
from dtypedoctor.scenario.problems import Place, Problem, printable, refusal

__all__ = ["LARGEST_FILE", "read_text"]

LARGEST_FILE = 128 * 1024
"""Bytes. A scenario takes one or two thousand, and PyYAML about ten seconds for a million."""

_FOREIGN = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}  # UTF-32's mark begins with UTF-16's, so it is looked for first


def read_text(path: Path) -> str:
    """The text of a UTF-8 file, without a byte order mark and with nothing that YAML forbids in it.

    Raises:
        FileNotFoundError: there is no such file.
        UsageError: it is no file, cannot be opened, is too large, or is not text in UTF-8.
    """
    data = _read_bytes(path)
    for mark, encoding in _FOREIGN.items():
        if data.startswith(mark):
            raise _refused(path, Place(1, 1), f"the file is in {encoding}, not UTF-8")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start].decode("utf-8-sig")
        raise _refused(path, Place.after(before), f"byte 0x{data[error.start]:02x} is not UTF-8") from error
    forbidden = Reader.NON_PRINTABLE.search(text)
    if forbidden:
        place = Place.after(text[: forbidden.start()])
        raise _refused(path, place, f"the character U+{ord(forbidden[0]):04X} is not allowed in YAML")
    return text


def _read_bytes(path: Path) -> bytes:
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise UsageError(f"{printable(path)}: this is a directory, not a scenario file", _files_in(path))
        if not stat.S_ISREG(mode):
            raise UsageError(f"{printable(path)}: this is not a regular file", "Give a YAML file.")
        with path.open("rb") as file:
            data = file.read(LARGEST_FILE + 1)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(
            f"{printable(path)}: cannot be read: {reason}", "Check the path and its permissions."
        ) from error
    if len(data) > LARGEST_FILE:
        raise UsageError(f"{printable(path)}: larger than {LARGEST_FILE // 1024} KiB", "Is this a scenario file?")
    return data


def _files_in(directory: Path) -> str:
    names = sorted(printable(path) for path in directory.glob("*.yaml"))
    if not names:
        return "Give a YAML file."
    return "Give one of its files: " + ", ".join(names[:5]) + (", …" if len(names) > 5 else "")


def _refused(path: Path, place: Place, text: str) -> UsageError:
    return refusal(path, [Problem(place, text)], "Save the file as plain UTF-8 text.")
