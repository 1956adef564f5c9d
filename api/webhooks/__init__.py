"""Webhooks: they receive events by HTTP, after Standard Webhooks 1.0 (standardwebhooks.com).

``endpoints``: the routes. ``deliverer`` sends the waiting messages. ``addresses`` checks where a message may go.
``bodies`` writes it in the webhook's format. ``signing`` signs it.
"""

from api.webhooks.endpoints import router

__all__ = ["router"]
