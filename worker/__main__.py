"""``python -m worker``: a worker in the foreground. SIGTERM or Ctrl-C drains it."""

import logging
import warnings

from celery.platforms import SecurityWarning

from worker.app import app


def main() -> None:
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for ours in ("worker", "api"):
        logging.getLogger(ours).setLevel(logging.INFO)
    # Celery warns root because a message could be a pickle, which is code; ours are JSON only.
    warnings.filterwarnings("ignore", category=SecurityWarning)
    # Threads, because a task only sets an event; no chatter between workers, because Postgres knows who is alive.
    options = "--pool threads --concurrency 1 --without-gossip --without-mingle --without-heartbeat --loglevel WARNING"
    app.worker_main(["--quiet", "worker", *options.split()])


if __name__ == "__main__":
    main()
