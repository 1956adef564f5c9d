"""Uploaded data files over HTTP: ``endpoints`` (upload, list, look into, delete), ``uploads`` (large ones, in parts).
``service`` is what they do, ``storage`` where the files are, ``child`` the process that reads them, ``schemas`` what
is said, ``cleanup_task`` what removes abandoned uploads."""

from api.datasets import endpoints, uploads
from api.datasets.cleanup_task import CleanupTask

routers = (endpoints.router, uploads.router, uploads.parts_router)

__all__ = ["CleanupTask", "routers"]
