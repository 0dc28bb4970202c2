"""What a forked process can still change once it is caged: nothing."""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dtypedoctor.replay import cage

pytestmark = pytest.mark.skipif(not cage.is_supported(), reason="Linux on x86-64 only")


def caged(work: Callable[[], Any]) -> Any:
    """What ``work`` returns in a caged fork of this process."""
    source, sink = os.pipe()
    child = os.fork()
    if child == 0:
        answer: Any = "died"
        try:
            cage.isolate_descriptors(keep=(sink,))
            cage.isolate_memory()
            cage.forbid_changes()
            answer = work()
        except BaseException as error:  # noqa: BLE001 - the test sees it
            answer = repr(error)
        finally:
            os.write(sink, json.dumps(answer).encode())
            os._exit(0)
    os.close(sink)
    with open(source, "rb") as answers:
        said = answers.read()
    os.waitpid(child, 0)
    return json.loads(said)


def error_of(action: Callable[[], Any]) -> str:
    """The name of the exception that ``action`` raises; empty where it raises none."""
    try:
        action()
    except OSError as error:
        return type(error).__name__
    return ""


def write(path: Path) -> None:
    """Opens a file for writing."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT))


CHANGES: dict[str, Callable[[Path], Any]] = {
    "creates": lambda folder: write(folder / "new"),
    "overwrites": lambda folder: (folder / "old").write_text("other"),
    "appends": lambda folder: (folder / "old").open("a").close(),
    "unlinks": lambda folder: (folder / "old").unlink(),
    "renames": lambda folder: (folder / "old").rename(folder / "elsewhere"),
    "chmods": lambda folder: (folder / "old").chmod(0o600),
    "truncates": lambda folder: os.truncate(folder / "old", 0),
    "touches": lambda folder: os.utime(folder / "old"),
    "links": lambda folder: os.link(folder / "old", folder / "second"),
    "symlinks": lambda folder: os.symlink("old", folder / "second"),
    "removes-directory": lambda folder: (folder / "empty").rmdir(),
    "makes-directory": lambda folder: (folder / "made").mkdir(),
    "makes-pipe": lambda folder: os.mkfifo(folder / "made"),
    "signals": lambda _: os.kill(os.getppid(), signal.SIGUSR1),
    "forks": lambda _: os.fork(),
    "starts": lambda _: subprocess.run(["true"], check=False),
    "replaces-itself": lambda _: os.execv("/bin/true", ["true"]),
    "connects": lambda _: socket.create_connection(("127.0.0.1", 9)),
    "makes-sockets": lambda _: socket.socketpair(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_reaches_out_is_rejected(name: str, tmp_path: Path) -> None:
    """Files, processes, connections: an error, and everything is as it was."""
    (tmp_path / "old").write_text("kept")
    (tmp_path / "empty").mkdir()
    before = os.stat(tmp_path / "old")
    assert caged(lambda: error_of(lambda: CHANGES[name](tmp_path))) not in ("", "died")
    after = os.stat(tmp_path / "old")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "old"]
    assert (after.st_size, after.st_mtime_ns, after.st_mode, after.st_nlink) == (
        before.st_size, before.st_mtime_ns, before.st_mode, before.st_nlink,
    )  # fmt: skip


def test_open_files_are_read_from_where_they_were_and_never_written(tmp_path: Path) -> None:
    """The fork reads on with a position of its own; what it writes goes nowhere, and no error tells it so."""
    (tmp_path / "read").write_text("abcdef")
    with (tmp_path / "read").open("rb", buffering=0) as reading, (tmp_path / "log").open("wb", buffering=0) as log:
        reading.read(2)
        log.write(b"one")

        def work() -> str:
            log.write(b"two")
            return reading.read(2).decode()

        assert caged(work) == "cd"
        assert reading.read(2) == b"cd"
    assert (tmp_path / "log").read_text() == "one"


def test_pipes_of_the_program_are_neither_read_nor_written_nor_kept_open() -> None:
    """A reader in the program sees the end of a pipe as soon as the program itself has closed it."""
    source, sink = os.pipe()
    os.write(sink, b"one")

    def work() -> list[int]:
        return [len(os.read(source, 8)), os.write(sink, b"two")]

    assert caged(work) == [0, 3]
    os.close(sink)
    assert os.read(source, 8) == b"one"
    assert os.read(source, 8) == b""
    os.close(source)


def test_shared_memory_becomes_a_copy(tmp_path: Path) -> None:
    """Of a file that is mapped, and of memory that processes share without one."""
    (tmp_path / "mapped").write_bytes(b"a" * 4096)
    with (
        (tmp_path / "mapped").open("r+b") as file,
        mmap.mmap(file.fileno(), 4096) as mapped,
        mmap.mmap(-1, 4096) as shared,
    ):
        shared[0] = 7

        def work() -> list[int]:
            mapped[0], seen = ord("b"), shared[0]
            shared[0] = 9
            return [mapped[0], seen, shared[0]]

        assert caged(work) == [ord("b"), 7, 9]
        assert mapped[0] == ord("a")
        assert shared[0] == 7
    assert (tmp_path / "mapped").read_bytes() == b"a" * 4096


def test_threads_can_still_be_started() -> None:
    """Libraries start some of their own; they belong to the process alone."""

    def work() -> list[int]:
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.append(1))
        thread.start()
        thread.join()
        return found

    assert caged(work) == [1]


def test_system_calls_of_another_interface_are_rejected() -> None:
    """The numbers of x32 name the same calls; ``mkdir`` is 83 there too."""

    def work() -> int:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.syscall(0x40000000 + 83, b"/tmp/never", 0o700)
        return ctypes.get_errno()

    assert caged(work) == errno.ENOSYS
