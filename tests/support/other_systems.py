"""Makes this Linux look like Windows or macOS to the engine: what does not exist there is hidden from its modules.

``folder_for(system, folder)`` writes a ``sitecustomize.py`` that does so in every Python process with that folder on
PYTHONPATH. Only imports by ``quantcore`` and ``bitfoundry`` are changed: other packages ask for ``sys.platform`` and
would look for libraries that are not here. So this shows what our own code asks for, not that torch works there.
"""

from pathlib import Path

MODULES = {"win32": ("resource", "fcntl", "pwd", "grp", "termios", "pty", "uvloop"), "darwin": ("uvloop",)}
OS = {
    "win32": (
        "sched_getaffinity", "pwrite", "pread", "preadv", "pwritev", "posix_fadvise", "fork", "geteuid", "getuid",
        "chown", "fchmod", "fchown", "mkfifo", "statvfs", "getloadavg", "killpg", "setsid", "sysconf", "nice",
        "O_DIRECTORY", "O_NOFOLLOW", "O_CLOEXEC", "register_at_fork", "sched_setaffinity", "uname",
    ),
    "darwin": ("sched_getaffinity", "sched_setaffinity", "posix_fadvise"),
}  # fmt: skip
SIGNALS = {
    "win32": ("SIGALRM", "SIGKILL", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGCHLD", "setitimer", "alarm"),
    "darwin": (),
}

CODE = '''
import builtins, os, pathlib, sys, types

SYSTEM, MODULES, OS, SIGNALS = {system!r}, {modules!r}, {os!r}, {signals!r}
PREFIXES = ("/proc", "/sys")
real_import, real_exists, real_read_text = builtins.__import__, pathlib.Path.exists, pathlib.Path.read_text
replacements = {{}}


class Other(types.ModuleType):
    """A module without some names, and with others instead."""

    def __init__(self, real, hidden=(), instead=None):
        super().__init__(real.__name__)
        self.__dict__.update(_real=real, _hidden=hidden, **(instead or {{}}))

    def __getattr__(self, name):
        if name in self._hidden:
            raise AttributeError(f"{{self._real.__name__}} has no {{name}} on {{SYSTEM}}")
        return getattr(self._real, name)


def open_(path, flags, *rest, **options):
    if SYSTEM == "win32" and os.path.isdir(path):
        raise PermissionError(13, "a folder cannot be opened", str(path))
    handle = os.open(path, flags & ~BINARY, *rest, **options)
    if SYSTEM == "win32" and flags & (os.O_RDWR | os.O_WRONLY) and not flags & BINARY:
        raise AssertionError(f"{{path}} is opened for text")
    return handle


def fsync(handle):
    if SYSTEM == "win32" and real_import("fcntl").fcntl(handle, 3) & 3 == os.O_RDONLY:  # 3: F_GETFL, O_ACCMODE
        raise OSError(9, "only a file that may be written can be synced")
    os.fsync(handle)


def no_library(name, *rest, **options):
    import ctypes

    if SYSTEM == "win32" and name is None:
        raise TypeError("CDLL needs a name on Windows")
    return ctypes.CDLL(name, *rest, **options)


class Process:
    def memory_info(self):
        import psutil

        memory = psutil.Process().memory_info()
        return types.SimpleNamespace(rss=memory.rss, vms=memory.vms, peak_wset=memory.rss)


def usage_in_bytes(who):
    import resource

    return types.SimpleNamespace(ru_maxrss=resource.getrusage(who).ru_maxrss * 1024)


BINARY = 1 << 40


def replaced(name, module):
    if name == "sys":
        return Other(module, instead={{"platform": SYSTEM}})
    if name == "os":
        more = {{"O_BINARY": BINARY, "name": "nt"}} if SYSTEM == "win32" else {{}}
        return Other(module, OS, {{"open": open_, "fsync": fsync, **more}})
    if name == "signal":
        return Other(module, SIGNALS)
    if name == "ctypes":
        return Other(module, instead={{"CDLL": no_library}})
    if name == "resource":
        return Other(module, instead={{"getrusage": usage_in_bytes}})
    return Other(module, instead={{"Process": Process}})  # psutil


def import_(name, globals=None, locals=None, fromlist=(), level=0):
    asks = (globals or {{}}).get("__name__", "")
    package = (globals or {{}}).get("__package__")
    if level or not (asks.startswith(("quantcore", "bitfoundry")) or package == "quantcore"):
        return real_import(name, globals, locals, fromlist, level)
    if name in MODULES:
        raise ImportError(f"{{name}} does not exist on {{SYSTEM}}")
    module = real_import(name, globals, locals, fromlist, level)
    if name in ("sys", "os", "signal", "ctypes", "psutil", "resource"):
        return replacements.setdefault(name, replaced(name, module))
    return module


def hidden(path):
    return str(path).startswith(PREFIXES)


def exists(self, **options):
    return False if hidden(self) else real_exists(self, **options)


def read_text(self, *rest, **options):
    if hidden(self):
        raise FileNotFoundError(2, "no such file", str(self))
    return real_read_text(self, *rest, **options)


builtins.__import__ = import_
pathlib.Path.exists, pathlib.Path.read_text = exists, read_text
'''


def folder_for(system: str, folder: Path) -> Path:
    """Write a ``sitecustomize.py`` for ``win32`` or ``darwin`` into ``folder``, and return the folder."""
    code = CODE.format(system=system, modules=MODULES[system], os=OS[system], signals=SIGNALS[system])
    (folder / "sitecustomize.py").write_text(code, "utf-8")
    return folder
