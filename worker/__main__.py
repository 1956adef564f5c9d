"""``python -m worker``: a worker in the foreground. SIGTERM or Ctrl-C drains it."""

import logging

from worker.app import app


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # Threads, because a task only sets an event; no chatter between workers, because Postgres knows who is alive.
    options = "--pool threads --concurrency 1 --without-gossip --without-mingle --without-heartbeat --loglevel WARNING"
    app.worker_main(["worker", *options.split()])


if __name__ == "__main__":
    main()
