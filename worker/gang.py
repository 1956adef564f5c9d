"""The leader's side of a job that several workers do together; ``worker.member`` is the other.

The leader is the worker that has claimed the job. It waits for the others, says where its first process is to be met,
and finds out whose fault it was when the engine does not end well. Of a job for one worker there is nothing to do.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence

from sqlalchemy.orm import Session

from api.settings import Settings
from api.store.queue import gangs, leases
from api.store.queue.events import NewEvent
from api.store.queue.leases import MAX_LOST, Failure, Lease
from api.store.tables.seats import Seat, SeatState
from quantcore.errors import ConfigError
from worker.journal import CRASHED
from worker.launcher import Node
from worker.lease import HeldLease

LOOK_S = 0.5
NODE_LOST = Failure(
    "node_lost",
    "A worker that did this job together with others was lost.",
    hint="It is tried again, with the workers that are there then.",
    retryable=True,
    max_failures=MAX_LOST + 1,
)
SECONDHAND = {NODE_LOST.code, CRASHED, "rank_lost"}  # what a process says that another one may have caused


class NotGathered(Exception):
    """The other workers did not come in time, or the leader was stopped before they did."""


class Gang:
    """All nodes of the job, seen from the leader."""

    def __init__(self, lease: Lease, held: HeldLease, settings: Settings) -> None:
        self._lease = lease
        self._held = held
        self._settings = settings

    def gather(self, is_stopped: Callable[[], bool]) -> Node | None:
        """Wait for the others, and tell all where to meet: the leader's node; None of a job for one worker.

        Raises NotGathered, and ConfigError ``invalid_node_address``.
        """
        if self._lease.nodes == 1:
            return None
        host = self._settings.node_address
        node = Node(0, self._lease.nodes, host, find_free_port(host), gangs.run_id(self._lease))
        phase = {"phase": "gather"}
        self._held.write(leases.record, happened=[NewEvent("phase_started", phase)], columns=phase)
        deadline = time.monotonic() + self._settings.gather_s
        while not self._start(f"{host}:{node.port}"):
            if is_stopped() or time.monotonic() > deadline:
                raise NotGathered
            time.sleep(LOOK_S)
        return node

    def let_end(self) -> None:
        """Wait until the others have ended as well, if they live: they log what they have to say only while the
        leader's lease lives."""
        deadline = time.monotonic() + self._settings.lease_s
        while self._lease.nodes > 1 and len(self._find_ended()) < self._lease.nodes - 1 and time.monotonic() < deadline:
            time.sleep(LOOK_S)

    def explain(self, failure: Failure) -> Failure | None:
        """Why the attempt failed: what a node knows better than the leader, if one does.

        None if a node was drained: that is nobody's failure. Waits for what the nodes have to say, but not for long.
        """
        if self._lease.nodes == 1 or failure.code not in SECONDHAND:
            return failure
        deadline = time.monotonic() + 2 * self._settings.heartbeat_s
        while True:
            seats = self._find_ended()
            if any(seat.state == SeatState.LEFT for seat in seats):
                return None
            if cause := _find_cause(seats):
                return cause
            if len(seats) == self._lease.nodes - 1 and failure.code == CRASHED:
                return failure
            if len(seats) == self._lease.nodes - 1 or time.monotonic() > deadline:
                return _lost(seats)
            time.sleep(LOOK_S)

    def _start(self, endpoint: str) -> bool:
        answers: list[bool] = []
        self._held.write(lambda session, lease: answers.append(gangs.start(session, lease, endpoint=endpoint)))
        return answers[-1]

    def _find_ended(self) -> Sequence[Seat]:
        answers: list[Sequence[Seat]] = []

        def look(session: Session, lease: Lease) -> None:
            answers.append(gangs.find_ended(session, lease))

        self._held.write(look)
        return answers[-1]


def find_free_port(host: str) -> int:
    """A port of this machine that nobody listens on. Raises ConfigError if others could not look ``host`` up."""
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        raise ConfigError(
            f"The other workers cannot find this one: its address '{host}' is unknown ({error}).",
            code="invalid_node_address",
            hint="Set BITFOUNDRY_NODE_ADDRESS at every worker to a name or an IP address that the others reach.",
        ) from error
    with socket.create_server(("", 0)) as probe:
        return int(probe.getsockname()[1])


def _find_cause(seats: Sequence[Seat]) -> Failure | None:
    """What a node says of itself."""
    said = (seat.error for seat in seats if seat.error is not None)
    return next((Failure(**error) for error in said if error["code"] not in SECONDHAND), None)


def _lost(seats: Sequence[Seat]) -> Failure:
    """That a node is lost, with the last words of those that have said something."""
    words = [f"node {seat.node_rank} ({seat.worker}): {seat.error['detail']}" for seat in seats if seat.error]
    return Failure(**{**vars(NODE_LOST), "detail": "\n".join(words)})
