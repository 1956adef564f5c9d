"""Retention policies over HTTP: see the policy, set it, see what it would remove, remove it."""

from api.retention.endpoints import router

__all__ = ["router"]
