"""A folder full of modules that have the names of others, each of which notes that it was imported, and breaks."""

from collections.abc import Sequence
from pathlib import Path

HOSTILE = """
from os import path
with open(path.join(path.dirname(path.abspath(__file__)), "IMPORTED"), "a") as file:
    file.write(__name__ + "\\n")
raise ImportError("this is not the module that was meant")
"""

NAMES = [
    "accelerate", "argparse", "asyncio", "base64", "bisect", "calendar", "concurrent", "configparser", "contextlib",
    "copy", "csv", "ctypes", "dataclasses", "datasets", "datetime", "decimal", "difflib", "email", "errno", "fcntl",
    "fractions", "getpass", "gzip", "hashlib", "html", "http", "importlib_metadata", "inspect", "ipaddress", "json",
    "logging", "lzma", "multiprocessing", "numbers", "numpy", "pathlib", "peft", "pickle", "pip", "platform",
    "pydantic", "queue", "random", "resource", "secrets", "select", "selectors", "shlex", "shutil", "signal",
    "socket", "statistics", "string", "struct", "subprocess", "tempfile", "textwrap", "threading", "token",
    "tokenize", "torch", "traceback", "transformers", "triton", "trl", "typer", "types", "typing",
    "typing_extensions", "unittest", "urllib", "uuid", "warnings", "weakref", "xml", "yaml", "zipfile", "zlib",
]  # fmt: skip


def hostile_folder(place: Path, names: Sequence[str] = NAMES) -> Path:
    place.mkdir()
    for name in names:
        (place / f"{name}.py").write_text(HOSTILE)
    return place


def imported(folder: Path) -> list[str]:
    note = folder / "IMPORTED"
    return note.read_text().split() if note.exists() else []
