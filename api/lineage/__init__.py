"""Models over HTTP: those that the project's jobs used, the results of each, and which came from which."""

from api.lineage.endpoints import router

__all__ = ["router"]
