"""Jobs over HTTP, a module of routes for each of: ``endpoints`` (submit, list, look, change), ``control`` (what moves a
job), ``events`` (its story), ``logs`` (what its engines printed), ``artifacts`` (its result). ``submission`` and
``service`` are what they do, ``schemas`` what they say, ``view`` a job as an answer, ``models`` what model is meant."""

from api.jobs import artifacts, control, endpoints, events, logs

routers = (endpoints.router, control.router, events.router, logs.router, artifacts.router)

__all__ = ["routers"]
