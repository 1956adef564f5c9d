"""Members of a project over HTTP: added, listed, changed, removed. A member signs in with a key."""

from api.members.endpoints import router

__all__ = ["router"]
