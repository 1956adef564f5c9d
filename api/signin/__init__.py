"""Sign-in of browsers: an API key becomes a cookie. ``api.http.security`` checks the requests that come with it."""

from api.signin.endpoints import router

__all__ = ["router"]
