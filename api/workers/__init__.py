"""Workers over HTTP: who is there, with what, doing what; and orders to stop taking jobs."""

from api.workers.endpoints import router

__all__ = ["router"]
