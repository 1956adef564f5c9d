"""Projects over HTTP: who shares the service, and how much of it each may take."""

from api.projects.endpoints import router

__all__ = ["router"]
