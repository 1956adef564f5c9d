"""Sign-in of browsers: an API key, or a person of an OpenID provider, becomes a cookie.

``api.http.security`` checks the requests that come with it.
"""

from api.signin.endpoints import project_router, router
from api.signin.oidc import router as oidc_router

__all__ = ["routers"]

routers = (router, project_router, oidc_router)
