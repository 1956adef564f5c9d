"""The model registry over HTTP: models with numbered versions, aliases, and requests to move a protected alias."""

from api.registry import endpoints, requests

routers = endpoints.router, requests.router

__all__ = ["routers"]
