"""Projects over HTTP: who shares the service, and how much of it each may take."""

from api.projects import endpoints, usage

routers = (endpoints.router, usage.router)

__all__ = ["routers"]
