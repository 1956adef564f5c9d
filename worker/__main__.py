"""``python -m worker``: a worker in the foreground. SIGTERM or Ctrl-C drains it."""

import queue
import signal
import sys

from api import json_log, tracing
from api.settings import read_settings
from api.store.queue.wakeups import make_celery, sender
from quantcore.errors import ConfigError
from worker.listener import Listener
from worker.supervisor import Supervisor


def main() -> None:
    try:
        settings = read_settings()
    except ConfigError as error:
        sys.exit(f"error: {error}")
    json_log.configure(settings.log_format)
    tracing.configure(settings, "bitfoundry-worker")
    app = make_celery(settings.broker_url.get_secret_value())
    supervisor = Supervisor(settings, sender(app))
    listener = Listener(app, supervisor.look_now)

    signals: queue.SimpleQueue[int] = queue.SimpleQueue()  # its `put` may interrupt its `get`, unlike an event's
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: signals.put(number))
    # The threads start last: libpq reads the environment in each of them, and a write to it at that moment ends the
    # process (tests/architecture/test_environment.py).
    supervisor.start()
    listener.start()
    signals.get()
    supervisor.drain()
    supervisor.join()


if __name__ == "__main__":
    main()
