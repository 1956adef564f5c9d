"""A file that nobody may open, watched by the kernel: an open by any process and library is seen."""

from __future__ import annotations

import ctypes
import os
import secrets
from pathlib import Path

IN_ACCESS, IN_OPEN = 0x1, 0x20
FORMS = ("an absolute path", "a relative path", "a link", "a link by its name", "a URL")


class Canary:
    """The file ``path``, whose ``secret`` is unique."""

    def __init__(self, folder: Path, content: str = "{secret} {secret}\n") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.secret = f"canary{secrets.token_hex(8)}"
        self.path = folder / "canary.txt"
        self.path.write_text(content.format(secret=self.secret))
        libc = ctypes.CDLL(None, use_errno=True)
        self._watch = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._watch < 0 or libc.inotify_add_watch(self._watch, os.fsencode(self.path), IN_OPEN | IN_ACCESS) < 0:
            raise OSError(ctypes.get_errno(), "inotify")

    def was_opened(self) -> bool:
        """Return True if any process has opened the file since the last call."""
        try:
            return bool(os.read(self._watch, 65536))
        except BlockingIOError:
            return False

    def close(self) -> None:
        os.close(self._watch)

    def named(self, form: str, model: Path) -> str:
        """Return a name of the file as a file of the folder ``model`` could give it; ``form`` is one of FORMS.

        A link is made in the folder for forms that need one.
        """
        linked = model / "linked.txt"
        if "link" in form:
            linked.symlink_to(self.path)
        return {
            "an absolute path": str(self.path),
            "a relative path": os.path.relpath(self.path, model),
            "a link": str(linked),
            "a link by its name": linked.name,
            "a URL": self.path.as_uri(),
        }[form]
