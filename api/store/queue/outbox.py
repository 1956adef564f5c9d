"""Messages that are sent after the transaction that wrote them. The only one so far wakes the workers.

A wake-up carries no payload, may be lost (workers poll as well) and may come twice (a claim happens once).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

from sqlalchemy import Select, bindparam, delete, select
from sqlalchemy.orm import Session

from api.store.queue import workers
from api.store.tables.jobs import Outbox

logger = logging.getLogger(__name__)

WAKE = "bitfoundry.wake"

Send = Callable[[str, dict[str, Any]], None]


class Undelivered(Exception):
    """The broker did not take a message."""


def wake(session: Session) -> None:
    """Notify the workers, once this transaction has committed, that there is work to claim."""
    session.add(Outbox(topic=WAKE, payload={"v": 1}))


def relay(session: Session, send: Send, *, limit: int = 100) -> int:
    """Send the waiting messages, oldest first, and delete them. Stops at the first failure; the rest waits.

    Of many wake-ups at once only so many are sent as there are slots to wake. Rows are locked with SKIP LOCKED: any
    number of relays can run. A crash between send and commit sends twice.
    """
    done = []
    for number, message in enumerate(session.execute(_oldest(), {"limit": limit}).all()):
        if number < max(1, message.num_slots):
            try:
                send(message.topic, message.payload)
            except Undelivered as error:  # the message is safe in its row
                logger.warning("the broker does not accept messages (%s); workers find their jobs by polling", error)
                break
        done.append(message.id)
    if done:
        session.execute(delete(Outbox).where(Outbox.id.in_(done)))
    return len(done)


@cache
def _oldest() -> Select[int, str, dict[str, Any], int]:
    """Return the query for the oldest messages. Made once: it runs after every submission."""
    columns = select(Outbox.id, Outbox.topic, Outbox.payload, workers.count_slots().label("num_slots"))
    return columns.order_by(Outbox.id).limit(bindparam("limit")).with_for_update(skip_locked=True, of=Outbox)
