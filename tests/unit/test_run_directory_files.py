"""Files of run directories are opened by one guarded reader and one guarded writer, `foreign_files.py`, and by nothing else."""

import ast
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtypedoctor.foreign_files import append_file, open_file, read_tail, write_file

PACKAGE = Path(__file__).resolve().parents[2] / "dtypedoctor"
PACKAGES = (
    "report",
    "cli",
    "examination",
    "trace",
    "runner",
    "redaction",
    "lab/cli",
    "lab/trials",
    "lab/bisect",
    "lab/runner",
)
OPENS = {"open", "read_text", "read_bytes", "write_text", "write_bytes", "copyfile", "FileIO", "NamedTemporaryFile"}
ELSEWHERE = {
    "cli/enabling.py": {  # the user's site-packages; of this package; an agent's folder
        "resources.files('dtypedoctor').joinpath('skills', _SKILL, 'SKILL.md').read_text", "place.write_text", "place.read_text",
    },
    "cli/output.py": {"os.open", "webbrowser.open"},  # the null device
    "lab/cli/fixing.py": {"Path(path).write_text", "Path(path).read_text"},  # of a copy of the program, or of its work tree
    "lab/cli/scenario_files.py": {"Path(folder, 'version.py').read_text"},  # of torch
    "redaction/redact.py": {"os.open"},  # a new file that only the user may read
    "redaction/secrets.py": {"_TABLE.read_bytes", "open"},  # of this package; what the environment names
    "report/fixes.py": {"file.read_text", "files('dtypedoctor.lab.corrections.libraries').joinpath(correction.test).read_text"},
    "report/to_html.py": {"resources.files('dtypedoctor.report').joinpath('assets', name).read_text"},
    "report/to_json.py": {"resources.files('dtypedoctor.report').joinpath('schema.json').read_text"},
    "runner/directories.py": {"Path(f'/proc/{os.getppid()}/stat').read_text", "Path('/proc/stat').read_text"},
    "cli/scripts.py": {"Path('/proc/sys/kernel/random/boot_id').read_text"},
    "runner/process.py": {
        "os.open", "open", "(directory / STATES).write_text", "(directory / REPEATS).write_text",  # new files
        "(process / 'environ').read_bytes", "(process / 'comm').read_text", "(process / 'maps').read_bytes",  # /proc
    },
    "runner/view.py": {  # own temporary folders
        "(run / FAILED).read_text", "settings.write_text", "Path(copies[path]).write_text", "open", "os.open",
        "Path('/proc/self/mountinfo').read_text",
    },
    "lab/bisect/measurements.py": {"self._path.open", "shutil.copyfile"},  # a new file; in the place of what was removed
    # the recorder, inside the program, in a directory that it has made
    "trace/reader.py": {"part.write_bytes"},
    "trace/lines.py": {"os.open"},
    "trace/writer.py": {"os.open", "path.read_bytes"},
}  # fmt: skip
"""What opens a file in another way, and where that lies."""


def opening(source: str) -> Iterator[str]:
    """Each call in a module that opens a file by its path, as it is written."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in OPENS:
                yield ast.unparse(node.func)


def test_nothing_opens_a_file_of_a_run_directory_otherwise() -> None:
    """Each other call in the packages that know run directories is on a list, with the reason; the list has no line too many."""
    found: dict[str, set[str]] = {}
    for package in PACKAGES:
        for path in sorted((PACKAGE / package).rglob("*.py")):
            calls = {call for call in opening(path.read_text("utf-8")) if call != "os.fdopen"}
            if calls:
                found[str(path.relative_to(PACKAGE))] = calls
    assert found == ELSEWHERE


@pytest.mark.parametrize("kind", ["file", "link", "device", "pipe", "folder", "new"])
def test_a_file_is_written_under_its_name_whatever_has_the_name(kind: str, tmp_path: Path) -> None:
    """What a link of that name leads to keeps what it holds; no pipe is waited for, and nothing else stays behind."""
    path, victim = tmp_path / "run" / "report.json", tmp_path / "victim.txt"
    path.parent.mkdir()
    victim.write_text("precious")
    {
        "file": lambda: path.write_text("old"), "link": lambda: path.symlink_to(victim), "device": lambda: path.symlink_to("/dev/full"),
        "pipe": lambda: os.mkfifo(path), "folder": path.mkdir, "new": lambda: None,
    }[kind]()  # fmt: skip
    if kind == "folder":
        with pytest.raises(OSError, match="directory"):
            write_file(path, "new")
    else:
        write_file(path, "new \udcff")
        assert path.read_text() == "new \\udcff"
        assert stat.S_ISREG(path.lstat().st_mode)
    assert [one.name for one in path.parent.iterdir()] == ["report.json"]
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("kind", ["link", "device", "pipe", "folder"])
def test_nothing_but_a_regular_file_is_read_or_appended_to(kind: str, tmp_path: Path) -> None:
    """Neither through a link nor from a pipe, which nobody is waited for at."""
    path, victim = tmp_path / "journal", tmp_path / "victim.txt"
    victim.write_text("precious")
    {
        "link": lambda: path.symlink_to(victim), "device": lambda: path.symlink_to("/dev/zero"), "pipe": lambda: os.mkfifo(path),
        "folder": path.mkdir,
    }[kind]()  # fmt: skip
    for opened in (open_file, append_file):
        with pytest.raises(OSError):  # noqa: PT011
            opened(path)
    with pytest.raises(OSError):  # noqa: PT011
        read_tail(path, 10)
    assert victim.read_text() == "precious"


def test_lines_are_appended_and_the_end_is_read(tmp_path: Path) -> None:
    """Of a file that is made where there is none."""
    path = tmp_path / "journal"
    for text in (b"one\n", b"two\n"):
        with append_file(path) as file:
            file.write(text)
    assert path.read_bytes() == b"one\ntwo\n"
    assert (read_tail(path, 4), read_tail(path, 100)) == (b"two\n", b"one\ntwo\n")
