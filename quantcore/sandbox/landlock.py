"""Runs a command that can reach only the given files and hosts: Landlock, Linux 5.19 and later. No torch.

    python -I -S landlock.py RULES_FILE COMMAND [ARGUMENT ...]

The rules are JSON (see ``confine``), and their file is deleted once it is read. The command and all that it starts may
list, read (and run) and write what they name, and nothing else of any file system, even if their user may; nor can they
look into other processes (ptrace, /proc/<pid>/environ) or send them signals. Missing paths are skipped.

They can make sockets of the given families alone, and change no owner, mode or attribute by a file's path (seccomp;
Landlock has no rights for these): such calls do nothing. They can connect to the given TCP ports. Older kernels enforce
less: ports need Linux 6.7, signals 6.12. See landlock(7), seccomp(2).

Uses only the standard library, because it is run by its path.
"""

import ctypes
import json
import os
import platform
import stat
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # of all architectures
PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 24, 38
KEPT_CAPABILITIES = frozenset({0, 1, 2, 3, 4, 5, 14, 23, 24})
"""Capabilities that root keeps: files and processes of others, locked memory, priorities, limits; not tracing."""
MIN_ABI = 2  # the first one forbids renames between folders, which artifacts need

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
TRUNCATE, IOCTL_DEV = 1 << 14, 1 << 15
LIST = READ_DIR
READ = EXECUTE | READ_FILE | READ_DIR
OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV
NUM_RIGHTS = {2: 14, 3: 15, 4: 15, 5: 16}
"""Number of rights that an ABI knows; later ones add no rights for files that are used here."""
TRUNCATE_ABI, TCP_ABI, SCOPE_ABI = 3, 4, 6
CONNECT_TCP = 1 << 1
SCOPES = 1 << 0 | 1 << 1  # abstract sockets and signals, to processes outside

PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
# Of BPF, see linux/bpf_common.h.
LOAD, AND, JUMP_IF_EQUAL, JUMP_IF_AT_LEAST, RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
ALLOW, REFUSE, PRETEND, KILL = 0x7FFF0000, 0x00050000 | 13, 0x00050000, 0x80000000  # 13 is EACCES
NUMBER, MACHINE, ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data; each argument has 8 bytes
OTHER_ABI = 0x40000000  # the system calls of x32, whose numbers begin there


class Calls(NamedTuple):
    """The numbers of a machine's system calls. ``opens`` are those that open a path, with the place of their flags."""

    machine: int
    socket: int
    truncate: int
    opens: tuple[tuple[int, int], ...]
    metadata: tuple[int, ...]


CALLS = {
    "x86_64": Calls(0xC000003E, 41, 76, ((2, 1), (257, 2)), (90, 92, 94, 188, 189, 197, 198, 260, 268)),
    "aarch64": Calls(0xC00000B7, 198, 45, ((56, 2),), (5, 6, 14, 15, 53, 54)),
}
"""``metadata``: chmod, chown, lchown, setxattr, lsetxattr, removexattr, lremovexattr, fchownat, fchmodat."""
# Those that have the same number on all machines: io_uring_setup could make sockets past this filter.
OPENAT2, IO_URING_SETUP, FCHMODAT2, SETXATTRAT, REMOVEXATTRAT, FILE_SETATTR = 437, 425, 452, 463, 466, 469


class _Ruleset(ctypes.Structure):
    _fields_ = (
        ("handled_access_fs", ctypes.c_uint64),
        ("handled_access_net", ctypes.c_uint64),
        ("scoped", ctypes.c_uint64),
    )


class _Port(ctypes.Structure):
    _fields_ = (("allowed_access", ctypes.c_uint64), ("port", ctypes.c_uint64))


class _Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint16), ("yes", ctypes.c_uint8), ("no", ctypes.c_uint8), ("k", ctypes.c_uint32))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction)))


class _Below(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def abi() -> int:
    """Return the Landlock version of this kernel; 0 if it is missing or too old."""
    if sys.platform != "linux":
        return 0
    version = ctypes.CDLL(None).syscall(CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    return int(version) if version >= MIN_ABI else 0


def confine(rules: Mapping[str, Any]) -> None:
    """Restrict this thread and all that it starts. Raises OSError; then it may be restricted in part.

    ``rules``: "list", "read" and "write" with paths, "same" with [path, device, inode] of what may be read if it still
    is the same file or folder; "families" of sockets, and "tcp" with [first, last] ports, or null for all of them.
    """
    all_rights, version = (1 << NUM_RIGHTS[min(abi(), max(NUM_RIGHTS))]) - 1, abi()
    rights = {"list": LIST, "read": READ, "write": all_rights}
    ports = rules["tcp"] if version >= TCP_ABI else None
    made = _Ruleset(all_rights, 0 if ports is None else CONNECT_TCP, SCOPES if version >= SCOPE_ABI else 0)
    size = 8 if version < TCP_ABI else 16 if version < SCOPE_ABI else 24  # as the kernel knows it
    ruleset = _call(CREATE_RULESET, ctypes.byref(made), ctypes.c_size_t(size), 0)
    for kind in rights:
        for path in rules[kind]:
            with suppress(OSError):  # missing, or not accessible to us: then there is nothing to allow
                _allow(ruleset, os.open(path, os.O_PATH | os.O_CLOEXEC), rights[kind] & all_rights)
    for path, device, inode in rules["same"]:
        _allow(ruleset, _open_same(path, (device, inode)), READ & all_rights)
    for first, last in ports or ():
        rule = _Port(CONNECT_TCP)
        for rule.port in range(first, last + 1):
            _call(ADD_RULE, ruleset, 2, ctypes.byref(rule), 0)
    prctl = _libc().prctl
    for capability in set(range(64)) - KEPT_CAPABILITIES:
        prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)  # fails for users other than root, who do not have them
    if prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "no_new_privs")
    _call(RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)
    if platform.machine() in CALLS:
        _refuse_calls(CALLS[platform.machine()], rules["families"], may_truncate=version >= TRUNCATE_ABI)


def _open_same(path: str, identity: tuple[int, int]) -> int:
    """Open ``path`` without following any link. Raises OSError if it is not the file or folder of ``identity``."""
    names = Path(path).parts
    at = os.open(names[0], os.O_PATH | os.O_CLOEXEC)
    for name in names[1:]:
        above, at = at, os.open(name, os.O_PATH | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=at)
        os.close(above)
    status = os.fstat(at)
    if (status.st_dev, status.st_ino) != identity:
        raise OSError(f"{path} is no longer the file that was checked")
    return at


def _allow(ruleset: int, at: int, rights: int) -> None:
    """Allow the open file or folder ``at`` and all below it, and close it."""
    try:
        if not stat.S_ISDIR(os.fstat(at).st_mode):
            rights &= OF_FILES
        if rights:
            _call(ADD_RULE, ruleset, 1, ctypes.byref(_Below(rights, at)), 0)
    finally:
        os.close(at)


def _refuse_calls(calls: Calls, families: Sequence[int], *, may_truncate: bool) -> None:
    """Refuse socket(2) for all but ``families``, and let what changes a file's metadata by its path do nothing.

    The latter reports success: libraries that download files change modes and owners, and fail if they cannot.
    socketpair(2) stays: its two ends are of one process. So does fchmod(2), whose file has been opened. Unless Landlock
    knows the right to truncate, files are truncated only if they were opened for writing.
    """
    program = [
        (LOAD, 0, 0, MACHINE), (JUMP_IF_EQUAL, 1, 0, calls.machine), (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER), (JUMP_IF_AT_LEAST, 0, 1, OTHER_ABI), (RETURN, 0, 0, REFUSE),
    ]  # fmt: skip
    pretended = (*calls.metadata, FCHMODAT2, SETXATTRAT, REMOVEXATTRAT, FILE_SETATTR)
    refused = [IO_URING_SETUP]
    if not may_truncate:
        refused += [calls.truncate, OPENAT2]  # the flags of openat2 are out of the filter's sight
        for number, place in calls.opens:
            program += [
                (JUMP_IF_EQUAL, 0, 5, number), (LOAD, 0, 0, ARGUMENTS + 8 * place),
                (AND, 0, 0, os.O_ACCMODE | os.O_TRUNC), (JUMP_IF_EQUAL, 0, 1, os.O_RDONLY | os.O_TRUNC),
                (RETURN, 0, 0, REFUSE), (RETURN, 0, 0, ALLOW),
            ]  # fmt: skip
    for numbers, action in ((pretended, PRETEND), (refused, REFUSE)):
        for number in numbers:
            program += [(JUMP_IF_EQUAL, 0, 1, number), (RETURN, 0, 0, action)]
    program += [(JUMP_IF_EQUAL, 1, 0, calls.socket), (RETURN, 0, 0, ALLOW), (LOAD, 0, 0, ARGUMENTS)]
    for family in families:
        program += [(JUMP_IF_EQUAL, 0, 1, family), (RETURN, 0, 0, ALLOW)]
    program.append((RETURN, 0, 0, REFUSE))
    instructions = (_Instruction * len(program))(*(_Instruction(*each) for each in program))
    filter_ = _Program(len(program), instructions)
    if _libc().prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(filter_), 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp")


def _call(number: int, *arguments: object) -> int:
    result = _libc().syscall(number, *arguments)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"system call {number} of Landlock: {os.strerror(error)}")
    return int(result)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


if __name__ == "__main__":
    rules = Path(sys.argv[1]).read_text("utf-8")
    Path(sys.argv[1]).unlink()
    confine(json.loads(rules))
    os.execvp(sys.argv[2], sys.argv[2:])
