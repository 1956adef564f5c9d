"""The HTTP app. ``python -m api serve`` runs it."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

from anyio import to_thread
from fastapi import Depends, FastAPI
from sqlalchemy.orm import Session
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api import (
    audit,
    catalog,
    chats,
    confinement,
    datasets,
    hub_tokens,
    jobs,
    keys,
    lineage,
    local_runs,
    members,
    projects,
    registry,
    retention,
    shares,
    signin,
    sweeps,
    webhooks,
    workers,
)
from api.http import dashboard, docs, errors, health, metrics
from api.http.deps import Context
from api.http.event_stream import Feed
from api.http.rate_limit import RateLimiter
from api.http.security import authenticate
from api.http.stream_permits import StreamPermits
from api.http.trace_requests import TraceRequests
from api.integrity.watch import Watch
from api.jobs.retention_task import RetentionTask
from api.json_log import request_id as current_request_id
from api.oidc.provider import Provider
from api.readers import Readers
from api.settings import Settings, read_settings
from api.store.engine import connect, dispose
from api.store.queue.maintenance import Maintenance
from api.store.queue.wakeups import make_celery, sender
from api.webhooks.deliverer import Deliverer
from quantcore.config.time_limits import API_ANSWER_S, API_WAIT_S

NUM_THREADS = 20  # more than there are connections: some wait for the Hub, or read files


def create_app(settings: Settings | None = None) -> FastAPI:
    """Create the app with its parts. The settings come from the environment unless given."""
    settings = settings or read_settings()
    _ = settings.vault  # a key that others may read is refused now, not at the first secret
    confinement.tell(settings)
    database_url = settings.database_url.get_secret_value()
    sessions = connect(database_url, wait_s=API_WAIT_S, answer_s=API_ANSWER_S)
    celery = make_celery(settings.broker_url.get_secret_value())
    feed = Feed(sessions, StreamPermits(settings.broker_url.get_secret_value()))
    cleanup_task = datasets.CleanupTask(settings, sessions)
    retention_task = RetentionTask(settings, sessions)
    rates = RateLimiter(settings.broker_url.get_secret_value())
    readiness = health.Readiness(connect(database_url, pool_size=1, wait_s=API_WAIT_S, answer_s=API_ANSWER_S), celery)

    def extra_task(session: Session) -> int:
        return cleanup_task.run(session) + retention_task.run(session)

    upkeep = Maintenance(
        sessions, sender(celery), interval_s=settings.poll_s, lease_s=settings.lease_s, extra_task=extra_task
    )
    watch = Watch(settings, sessions)
    readers = Readers(settings)
    provider = Provider(settings.oidc) if settings.oidc else None

    @asynccontextmanager
    async def live(app: FastAPI) -> AsyncIterator[None]:
        to_thread.current_default_thread_limiter().total_tokens = NUM_THREADS
        upkeep.start()
        deliverer = Deliverer(sessions, settings)
        deliverer.start()
        watch.start()
        yield
        watch.stop()
        await deliverer.stop()
        await feed.stop()
        upkeep.stop()
        readiness.close()
        readers.close()
        celery.close()
        rates.close()
        dispose(sessions)

    app = FastAPI(
        title="Bitfoundry",
        summary="Quantization of language models as a service.",
        version="1",
        lifespan=live,
        docs_url=None,  # Swagger's page would load scripts from another host; `api.http.docs` has our own
        redoc_url=None,
        responses=errors.RESPONSES,
        generate_unique_id_function=lambda route: route.name,
    )
    app.state.context = Context(settings, sessions, celery, upkeep, feed, rates, readers, provider)
    app.state.readiness = readiness
    app.add_middleware(TraceRequests)
    app.add_middleware(RequestId)  # outermost: the span has the request's id
    errors.install(app)
    app.include_router(health.router)
    people = members.router, keys.router, audit.router
    accounts = (*projects.routers, *people, retention.router, hub_tokens.router, webhooks.router)
    guarded: dict[str, Any] = {
        "dependencies": [Depends(authenticate)],
        "responses": errors.may(401, 403, 429),
    }
    for router in signin.routers:
        app.include_router(router, prefix="/v1")
    app.include_router(shares.open_router, prefix="/v1")
    app.include_router(metrics.router, **guarded)
    work = *jobs.routers, shares.router, *chats.routers, sweeps.router, *datasets.routers
    model_routers = catalog.router, lineage.router, *registry.routers
    for router in (*work, *model_routers, *accounts, workers.router, local_runs.router):
        app.include_router(router, prefix="/v1", **guarded)
    app.include_router(docs.router)
    dashboard.install(app)
    return app


class RequestId:
    """Gives every request an id that its response, problem and logs share. No response's type may be guessed."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = scope["request_id"] = f"req_{secrets.token_hex(8)}"
        current_request_id.set(request_id)
        answer_headers: dict[str, str] = {}
        scope["answer_headers"] = answer_headers  # headers that every response to this request has

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = request_id
                headers["X-Content-Type-Options"] = "nosniff"
                headers.update(answer_headers)
                if "json" in headers.get("content-type", ""):
                    headers.setdefault("Cache-Control", "no-store")  # nobody on the way keeps what a key showed
                if "location" in headers:  # never with the Host of the request, which anyone may choose
                    parts = urlsplit(headers["location"])
                    headers["location"] = f"/{parts.path.lstrip('/')}" + (f"?{parts.query}" if parts.query else "")
            await send(message)

        await self._app(scope, receive, send_with_id)
