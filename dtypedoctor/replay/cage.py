"""Makes a forked process unable to change anything outside of its own memory: no file, no process, no network, no shared memory.

The process goes on running the code of the program that it was forked from. That code must find what it would have found, and whatever it
writes must not be there twice. So descriptors through which something could leave lead nowhere, shared memory becomes a private copy, and
the kernel (a seccomp filter) rejects system calls that create, change or remove files, start or signal processes, or open connections.
"""

import ctypes
import errno
import fcntl
import mmap
import platform
import posix  # what os has, under names that programs do not replace
import resource
import stat
import struct
import sys
from collections.abc import Collection, Iterator
from io import FileIO
from os import SEEK_CUR, SEEK_SET
from typing import NamedTuple

__all__ = ["forbid_changes", "is_supported", "isolate_descriptors", "isolate_memory", "limit_processor_time"]

MAX_SHARED = 1 << 30
"""Bytes of shared memory that are copied; a process with more is not isolated."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]

_MAP_FIXED = 0x10
_NO_NEW_PRIVILEGES, _SECCOMP, _FILTER = 38, 22, 2
_ALLOW, _ERROR, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_X86_64 = 0xC000003E
_FOREIGN_CALLS = 0x40000000
"""Numbers of system calls from here on are of another interface (x32)."""
_THREAD = 0x00010000
"""The flag of ``clone`` by which a thread is made and no process."""
_WRITING = posix.O_WRONLY | posix.O_RDWR | posix.O_CREAT | posix.O_TRUNC
"""Any of these flags opens a file for more than reading."""

_CHANGE_FILES = {
    "truncate": 76, "ftruncate": 77, "fallocate": 285, "rename": 82, "renameat": 264, "renameat2": 316, "mkdir": 83, "mkdirat": 258,
    "rmdir": 84, "creat": 85, "link": 86, "linkat": 265, "unlink": 87, "unlinkat": 263, "symlink": 88, "symlinkat": 266,
    "chmod": 90, "fchmod": 91, "fchmodat": 268, "fchmodat2": 452, "chown": 92, "fchown": 93, "lchown": 94, "fchownat": 260,
    "utime": 132, "utimes": 235, "futimesat": 261, "utimensat": 280, "mknod": 133, "mknodat": 259, "mount": 165, "umount2": 166,
    "setxattr": 188, "lsetxattr": 189, "fsetxattr": 190, "removexattr": 197, "lremovexattr": 198, "fremovexattr": 199,
}  # fmt: skip
"""Numbers of the system calls that change a file, a directory or what is known of them; opening for writing is looked at below."""
_REACH_OTHERS = {
    "fork": 57, "vfork": 58, "execve": 59, "execveat": 322, "kill": 62, "tkill": 200, "tgkill": 234, "rt_sigqueueinfo": 129,
    "rt_tgsigqueueinfo": 297, "pidfd_send_signal": 424, "ptrace": 101, "process_vm_writev": 311, "socket": 41, "socketpair": 53,
    "connect": 42, "bind": 49, "listen": 50, "sendto": 44, "sendmsg": 46, "sendmmsg": 307, "shmget": 29, "shmat": 30, "shmctl": 31,
    "semget": 64, "semop": 65, "semtimedop": 220, "semctl": 66, "msgget": 68, "msgsnd": 69, "msgrcv": 70, "msgctl": 71,
    "mq_open": 240, "mq_unlink": 241, "mq_timedsend": 242, "add_key": 248, "keyctl": 250, "io_uring_setup": 425,
}  # fmt: skip
"""Numbers of those that start or signal a process, connect to one, or share memory with it."""
_ASK_OTHERWISE = {"clone3": 435, "openat2": 437}
"""``clone3`` and ``openat2``, whose flags lie in memory where a filter cannot read them: C libraries then use the older calls."""
_OPEN, _OPENAT, _CLONE = 2, 257, 56


def is_supported() -> bool:
    """Whether this system can isolate a process like that: Linux on x86-64."""
    return sys.platform == "linux" and platform.machine() == "x86_64"


def isolate_descriptors(keep: Collection[int]) -> None:
    """Makes every open descriptor but those in ``keep`` one of this process alone.

    Files that can be read get a file position of their own; the rest (files only written to, pipes, sockets, terminals) is ``/dev/null``.

    Raises:
        OSError: a descriptor could not be replaced.
    """
    nowhere = posix.open("/dev/null", posix.O_RDWR | posix.O_CLOEXEC)
    for name in posix.listdir("/proc/self/fd"):
        descriptor = int(name)
        if descriptor in keep or descriptor == nowhere:
            continue
        try:
            mode = posix.fstat(descriptor).st_mode
        except OSError:  # the one with which the directory was listed
            continue
        if stat.S_ISDIR(mode):
            continue
        _replace(descriptor, mode, nowhere)
    posix.close(nowhere)


def _replace(descriptor: int, mode: int, nowhere: int) -> None:
    inheritable = posix.get_inheritable(descriptor)
    readable = fcntl.fcntl(descriptor, fcntl.F_GETFL) & posix.O_ACCMODE != posix.O_WRONLY
    if not (stat.S_ISREG(mode) and readable):
        posix.dup2(nowhere, descriptor, inheritable)
        return
    place = posix.lseek(descriptor, 0, SEEK_CUR)
    anew = posix.open(f"/proc/self/fd/{descriptor}", posix.O_RDONLY | posix.O_CLOEXEC)
    posix.lseek(anew, place, SEEK_SET)
    posix.dup2(anew, descriptor, inheritable)
    posix.close(anew)


class _Mapping(NamedTuple):
    address: int
    size: int


def isolate_memory() -> None:
    """Puts a private copy in the place of all memory that is shared with other processes or with files.

    Raises:
        OSError: there is too much of it, or it cannot be replaced.
    """
    shared = list(_shared_mappings())
    if sum(mapping.size for mapping in shared) > MAX_SHARED:
        raise OSError(errno.ENOMEM, posix.strerror(errno.ENOMEM))
    for address, size in shared:
        content = ctypes.string_at(address, size)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
        if _libc.mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) != address:
            raise OSError(ctypes.get_errno(), posix.strerror(ctypes.get_errno()))
        ctypes.memmove(address, content, size)


def _shared_mappings() -> Iterator[_Mapping]:
    with FileIO("/proc/self/maps") as file:
        lines = str(file.readall(), "utf-8", "replace").splitlines()
    for line in lines:
        places, rights = line.split()[:2]
        if rights.startswith("rw") and rights.endswith("s"):
            first, last = (int(place, 16) for place in places.split("-"))
            yield _Mapping(first, last - first)


def limit_processor_time(seconds: int) -> None:
    """Has the kernel kill this process after so much more processor time."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    total = int(used.ru_utime + used.ru_stime) + seconds
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (total, total if hard == resource.RLIM_INFINITY else min(hard, total)))


def forbid_changes() -> None:
    """Has the kernel reject what could change anything outside, for good. Files that are open can still be written to.

    Raises:
        OSError: this kernel cannot do it.
    """
    program = b"".join(struct.pack("<HBBI", *instruction) for instruction in _filter())
    held = ctypes.create_string_buffer(program)
    header = struct.pack("<HxxxxxxQ", len(program) // 8, ctypes.addressof(held))
    for arguments in ((_NO_NEW_PRIVILEGES, 1, 0, 0, 0), (_SECCOMP, _FILTER, ctypes.c_char_p(header), 0, 0)):
        if _libc.prctl(*arguments) != 0:
            raise OSError(ctypes.get_errno(), posix.strerror(ctypes.get_errno()))


_Instruction = tuple[int, int, int, int]
"""Code, instructions to skip where its test holds, instructions to skip where it does not, operand."""


def _filter() -> Iterator[_Instruction]:
    """The filter as a program of the kernel's packet filter, which looks at one system call after another."""
    yield _LOAD, 0, 0, _ARCHITECTURE
    yield _EQUAL, 1, 0, _X86_64
    yield _RETURN, 0, 0, _KILL
    yield _LOAD, 0, 0, _NUMBER
    yield _AT_LEAST, 0, 1, _FOREIGN_CALLS
    yield _RETURN, 0, 0, _ERROR | errno.ENOSYS
    for numbers, error in ((_CHANGE_FILES, errno.EROFS), (_REACH_OTHERS, errno.EPERM), (_ASK_OTHERWISE, errno.ENOSYS)):
        for number in numbers.values():
            yield _EQUAL, 0, 1, number
            yield _RETURN, 0, 0, _ERROR | error
    for number, argument in ((_OPEN, 1), (_OPENAT, 2)):
        yield _EQUAL, 0, 4, number
        yield _LOAD, 0, 0, _ARGUMENTS + 8 * argument
        yield _ANY_BIT, 0, 1, _WRITING
        yield _RETURN, 0, 0, _ERROR | errno.EROFS
        yield _RETURN, 0, 0, _ALLOW
    yield _EQUAL, 0, 3, _CLONE
    yield _LOAD, 0, 0, _ARGUMENTS
    yield _ANY_BIT, 1, 0, _THREAD
    yield _RETURN, 0, 0, _ERROR | errno.EAGAIN
    yield _RETURN, 0, 0, _ALLOW
