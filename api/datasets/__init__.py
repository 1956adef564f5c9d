"""Uploaded data files over HTTP: ``endpoints`` (upload, list, look into, delete), ``uploads`` (large ones, in parts).
``service`` is what they do, ``storage`` where the files are, ``child`` the process that reads them, ``schemas`` what
is said, ``tidying`` what removes abandoned uploads."""

from api.datasets import endpoints, uploads
from api.datasets.tidying import Tidying

routers = (endpoints.router, uploads.router, uploads.parts_router)

__all__ = ["Tidying", "routers"]
