"""Chats over HTTP: a conversation with a job's result and its original.

``endpoints`` has the routes, ``stream`` the answers as they grow, ``schemas`` the bodies.
"""

from api.chats import endpoints

routers = (endpoints.of_jobs, endpoints.router)

__all__ = ["routers"]
