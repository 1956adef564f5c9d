"""The worker's Celery app; its start and shutdown signals start and drain the supervisor."""

from __future__ import annotations

from typing import Any

from celery.signals import worker_init, worker_shutdown, worker_shutting_down

from api.settings import read_settings
from api.store.queue.wakeups import make_celery, sender
from worker.supervisor import Supervisor

settings = read_settings()
app = make_celery(settings.broker_url.get_secret_value())
app.conf.include = ["worker.tasks"]
supervisor = Supervisor(settings, sender(app))


def start(**_: Any) -> None:
    supervisor.start()


def drain(**_: Any) -> None:
    supervisor.drain()


def join(**_: Any) -> None:
    supervisor.join()


worker_init.connect(start)
worker_shutting_down.connect(drain)  # from the handler of SIGTERM and Ctrl-C
worker_shutdown.connect(join)
