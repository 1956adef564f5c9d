"""Checks free disk space before a route accepts a job or a file."""

from __future__ import annotations

from fastapi import Depends, Request

from api import disk
from api.http.deps import Context, ContextDep
from api.http.errors import no_room
from api.http.security import Writer


def check_room(context: Context, new_bytes: int = 0) -> None:
    """Check that ``new_bytes`` may be written. Raises Problem 507 ``disk_full`` or ``disk_read_only``."""
    if fault := disk.look(context.settings).fault(new_bytes):
        raise no_room(fault)


def require_room(request: Request, caller: Writer, context: ContextDep) -> None:
    """Require room for the body of this request, and a key that may write: a dependency."""
    length = request.headers.get("content-length", "")
    check_room(context, int(length) if length.isdecimal() else 0)


ROOM = Depends(require_room)
