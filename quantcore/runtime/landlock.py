"""Runs a command that can reach only the given files: Landlock, Linux 5.19 and later. No torch.

    python -I -S landlock.py RULES_FILE COMMAND [ARGUMENT ...]

The rules are JSON, ``{"list": [...], "read": [...], "write": [...]}``, each with a list of paths; their file is deleted
once it is read. The command and all that it starts may list folders, read (and run) and write files at and below these
paths, and nothing else of any file system, even if their user may; nor can they look into other processes
(/proc/<pid>/environ, ptrace). Missing paths are skipped. Uses only the standard library, because it is run by its path.
See landlock(7).
"""

import ctypes
import json
import os
import stat
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

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
"""Number of rights that an ABI knows; later ones add no rights for files."""


class _Ruleset(ctypes.Structure):
    _fields_ = (("handled_access_fs", ctypes.c_uint64),)


class _Below(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def abi() -> int:
    """Return the Landlock version of this kernel; 0 if it is missing or too old."""
    if sys.platform != "linux":
        return 0
    version = ctypes.CDLL(None).syscall(CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    return int(version) if version >= MIN_ABI else 0


def confine(rules: Mapping[str, Sequence[str]]) -> None:
    """Restrict this thread and all that it starts. Raises OSError; then nothing is restricted."""
    all_rights = (1 << NUM_RIGHTS[min(abi(), max(NUM_RIGHTS))]) - 1
    rights = {"list": LIST, "read": READ, "write": all_rights}
    ruleset = _call(CREATE_RULESET, ctypes.byref(_Ruleset(all_rights)), ctypes.c_size_t(ctypes.sizeof(_Ruleset)), 0)
    for kind, paths in rules.items():
        for path in paths:
            _allow(ruleset, path, rights[kind] & all_rights)
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    for capability in set(range(64)) - KEPT_CAPABILITIES:
        prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)  # fails for users other than root, who do not have them
    if prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "no_new_privs")
    _call(RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        at = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:  # missing, or not accessible to us: then there is nothing to allow
        return
    try:
        if not stat.S_ISDIR(os.fstat(at).st_mode):
            rights &= OF_FILES
        if rights:
            _call(ADD_RULE, ruleset, 1, ctypes.byref(_Below(rights, at)), 0)
    finally:
        os.close(at)


def _call(number: int, *arguments: object) -> int:
    result = ctypes.CDLL(None, use_errno=True).syscall(number, *arguments)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"Landlock (system call {number}): {os.strerror(error)}")
    return int(result)


if __name__ == "__main__":
    rules = Path(sys.argv[1]).read_text("utf-8")
    Path(sys.argv[1]).unlink()
    confine(json.loads(rules))
    os.execvp(sys.argv[2], sys.argv[2:])
