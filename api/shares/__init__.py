"""Read-only links to a job's report, for people without a key.

``endpoints``: the routes that make, list and revoke links. ``viewing``: the routes that a link opens, without a key.
``public_report``: the report as it is shown to them.
"""

from api.shares import endpoints, viewing

router, open_router = endpoints.router, viewing.router

__all__ = ["open_router", "router"]
