"""Webhooks: told of events by HTTP, after Standard Webhooks 1.0 (standardwebhooks.com).

``endpoints``: the routes. ``deliverer``: sends what waits. ``addresses``: where a message may go. ``signing``: that it
is from us."""

from api.webhooks.endpoints import router

__all__ = ["router"]
