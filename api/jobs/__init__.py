"""Jobs over HTTP, with a module of routes for each subject.

``endpoints`` (submit, list, read, change), ``control`` (cancel, pause, resume, retry), ``events`` (the event log),
``logs`` (the engines' output), ``artifacts`` (the result, as an ``archive`` too), ``change`` (from another result),
``publishing`` (to the Hub or elsewhere). ``submission`` and ``service`` have the logic, ``schemas`` the request and
response bodies, ``view`` a job as a response, ``models`` the model that is meant, ``targets`` the places where an
artifact may go.
"""

from api.jobs import artifacts, change, control, endpoints, events, logs, publishing

routers = (
    endpoints.router,
    control.router,
    events.router,
    logs.router,
    artifacts.router,
    artifacts.archive_router,
    change.router,
    publishing.router,
)

__all__ = ["routers"]
