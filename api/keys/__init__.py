"""API keys over HTTP: made, listed, rotated, revoked. What a key is, and how it is checked, is in ``api.security``."""

from api.keys.endpoints import router

__all__ = ["router"]
