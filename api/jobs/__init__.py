"""Jobs over HTTP. ``endpoints``: the routes; ``control``: those that move a job; ``events``: its story; ``artifacts``:
its result. ``submission`` and ``service``: what they do; ``schemas``: what they say; ``view``: a job as an answer;
``models``: what model is meant."""

from api.jobs import artifacts, control, endpoints, events

routers = (endpoints.router, control.router, events.router, artifacts.router)

__all__ = ["routers"]
