"""Jobs over HTTP, a module of routes for each of: ``endpoints`` (submit, list, look, change), ``control`` (what moves a
job), ``events`` (what happened), ``logs`` (what its engines printed), ``artifacts`` (its result),
``publishing`` (to the Hub or elsewhere). ``submission`` and ``service`` are what they do, ``schemas`` what they say,
``view`` a job as an answer, ``models`` what model is meant, ``targets`` where an artifact may go."""

from api.jobs import artifacts, control, endpoints, events, logs, publishing

routers = (endpoints.router, control.router, events.router, logs.router, artifacts.router, publishing.router)

__all__ = ["routers"]
