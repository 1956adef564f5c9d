"""Workers over HTTP: their hardware, their jobs, and orders to stop taking jobs."""

from api.workers.endpoints import router

__all__ = ["router"]
