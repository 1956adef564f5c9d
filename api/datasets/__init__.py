"""Uploaded data files over HTTP: ``endpoints`` (upload, list, inspect, delete), ``uploads`` (large files, in parts).

``service`` has the logic of the routes, ``storage`` the files, ``child`` the process that reads them, ``schemas`` the
request and response bodies. ``cleanup_task`` removes abandoned uploads.
"""

from api.datasets import endpoints, uploads
from api.datasets.cleanup_task import CleanupTask

routers = (endpoints.router, uploads.router, uploads.parts_router)

__all__ = ["CleanupTask", "routers"]
