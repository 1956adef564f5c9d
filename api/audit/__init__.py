"""The audit log over HTTP."""

from api.audit.endpoints import router

__all__ = ["router"]
