"""API keys over HTTP: made, listed, rotated, revoked. ``api.http.security`` checks them."""

from api.keys.endpoints import router

__all__ = ["router"]
