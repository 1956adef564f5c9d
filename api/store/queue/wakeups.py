"""The connection to the workers: a Celery app with our settings. API and worker build the same; the worker has tasks.

Celery is never trusted with a job: messages carry no payload, are acknowledged early and may be lost. No result
backend (a task's result is a row), json only (a pickle from the broker would be code).
"""

from __future__ import annotations

from typing import Any

from celery import Celery

from api.store.queue.outbox import Send, Undelivered
from quantcore.config.time_limits import BROKER_S

QUEUE = "bitfoundry"


def make_celery(broker_url: str) -> Celery:
    app = Celery("bitfoundry", broker=broker_url, set_as_current=False)
    app.conf.update(
        task_default_queue=QUEUE,
        task_ignore_result=True,
        result_backend=None,
        task_serializer="json",
        accept_content=["json"],
        task_acks_late=False,
        worker_prefetch_multiplier=1,
        task_publish_retry=False,  # the outbox is the retry
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,  # a worker outlives its broker: it polls meanwhile
        # One quick try to connect: a sender must not wait, a worker has its own loop (broker_connection_max_retries).
        broker_transport_options={
            "socket_connect_timeout": BROKER_S,
            "socket_timeout": BROKER_S,  # a broker that hangs is one that is away
            "socket_keepalive": True,
            "max_retries": 1,
            "interval_start": 0,
        },
        worker_hijack_root_logger=False,
        worker_enable_remote_control=False,
        worker_send_task_events=False,
    )
    return app


def sender(app: Celery) -> Send:
    """Return a function that sends one task by name, or raises Undelivered at once."""

    def send(topic: str, payload: dict[str, Any]) -> None:
        try:
            app.send_task(topic, kwargs={"payload": payload}, queue=QUEUE, retry=False)
        except Exception as error:  # whatever a broker says, or a stranger who wrote into it: the row is safe
            raise Undelivered(type(error).__name__) from error

    return send
