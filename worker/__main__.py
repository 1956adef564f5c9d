"""``python -m worker``: a worker in the foreground. SIGTERM or Ctrl-C drains it."""

import sys
import warnings

from celery.platforms import SecurityWarning

from api import json_log, tracing
from quantcore.errors import ConfigError


def main() -> None:
    try:
        from worker.app import app, settings
    except ConfigError as error:
        sys.exit(f"error: {error}")
    json_log.configure(settings.log_format)
    tracing.configure(settings, "bitfoundry-worker")
    # Celery warns root because a message could be a pickle, which is code; ours are JSON only.
    warnings.filterwarnings("ignore", category=SecurityWarning)
    # Threads, because a task only sets an event; no chatter between workers, because Postgres knows who is alive.
    options = "--pool threads --concurrency 1 --without-gossip --without-mingle --without-heartbeat --loglevel WARNING"
    app.worker_main(["--quiet", "worker", *options.split()])


if __name__ == "__main__":
    main()
