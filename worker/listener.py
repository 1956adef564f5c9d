"""Listens to the broker: whatever it sends means "look for work", and nothing more.

No message is decoded or unpacked: whoever reaches the broker can wake a worker, and no more. What ends the listening,
such as bytes that are no message, is logged, and it starts again: meanwhile the worker polls.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from celery import Celery
from celery.worker import WorkController
from celery.worker.consumer import Consumer
from kombu import compression

logger = logging.getLogger(__name__)

PAUSE_S = 1.0  # between the end of the listening and its next start
CONSEQUENCE = "It starts again; meanwhile jobs are found by polling."


class Listener:
    """A thread with Celery's consumer. It ends with the process: it holds nothing that could be lost."""

    def __init__(self, app: Celery, look_now: Callable[[], None]) -> None:
        # a message names its own packing, and is unpacked before anybody has seen it
        for packing in compression.encoders():  # type: ignore[no-untyped-call]
            compression.register(_refuse, _refuse, packing)  # type: ignore[no-untyped-call]
        self._app = app
        self._consumer = _consumer_that_calls(look_now)
        self._thread = threading.Thread(target=self._run, name="listener", daemon=True)
        self._pause = threading.Event()

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                self._listen()
                logger.error("the broker listener ended, see above. %s", CONSEQUENCE)
            except Exception:
                logger.exception("the broker listener failed. %s", CONSEQUENCE)
            self._pause.wait(PAUSE_S)

    def _listen(self) -> None:
        """Listen until something goes wrong. Celery itself connects again to a broker that was away."""
        WorkController(
            app=self._app,
            pool_cls="solo",  # it runs no tasks
            consumer_cls=self._consumer,
            use_eventloop=False,
            without_gossip=True,  # PostgreSQL knows which workers are alive
            without_mingle=True,
            without_heartbeat=True,
        ).start()


def _consumer_that_calls(look_now: Callable[[], None]) -> type[Consumer]:
    class HintConsumer(Consumer):  # type: ignore[misc]
        def create_task_handler(self, *_: Any, **__: Any) -> Callable[[Any], None]:
            return self.on_decode_error

        def on_decode_error(self, message: Any, *_: Any) -> None:
            message.ack()
            look_now()

    return HintConsumer


def _refuse(body: Any) -> Any:
    raise ValueError("no message is unpacked")
