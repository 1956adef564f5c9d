"""The leader starts and ends the nodes of a job here; ``worker.node_run`` is the side of the others.

The leader is the worker that has claimed the job. It waits for the others, tells them where its first process listens,
and finds out which node failed when the engine does not end well. A job for one worker needs none of this.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence

from sqlalchemy.orm import Session

from api.settings import Settings
from api.store.queue import leases, node_slots
from api.store.queue.events import NewEvent
from api.store.queue.leases import MAX_LOST, Failure, Lease
from api.store.tables.node_slots import NodeSlot, NodeSlotState
from quantcore.errors import ConfigError
from worker.journal import CRASHED
from worker.lease import HeldLease
from worker.torchrun import Node

LOOK_S = 0.5
NODE_LOST = Failure(
    "node_lost",
    "One of the workers of this job was lost.",
    hint="The job is retried with the workers that are available then.",
    retryable=True,
    max_failures=MAX_LOST + 1,
)
SECONDHAND = {NODE_LOST.code, CRASHED, "rank_lost"}  # codes of failures that another process may have caused


class NodesMissing(Exception):
    """Raised when the other workers did not come in time, or the leader was stopped before they came."""


class Nodes:
    """All nodes of a job, from the view of its leader."""

    def __init__(self, lease: Lease, held: HeldLease, settings: Settings) -> None:
        self._lease = lease
        self._held = held
        self._settings = settings

    def wait_for_all(self, is_stopped: Callable[[], bool]) -> Node | None:
        """Wait for the other nodes and tell them where to meet. Returns the leader's node; None if it is alone.

        Raises NodesMissing, and ConfigError ``invalid_node_address``.
        """
        if self._lease.nodes == 1:
            return None
        host = self._settings.node_address
        node = Node(0, self._lease.nodes, host, find_free_port(host), node_slots.run_id(self._lease))
        phase = {"phase": "gather"}
        self._held.write(leases.record, happened=[NewEvent("phase_started", phase)], columns=phase)
        deadline = time.monotonic() + self._settings.gather_s
        while not self._start(f"{host}:{node.port}"):
            if is_stopped() or time.monotonic() > deadline:
                raise NodesMissing
            time.sleep(LOOK_S)
        return node

    def wait_for_ends(self) -> None:
        """Wait until the other nodes that live have ended too.

        They can write to the log only while the leader's lease lives.
        """
        deadline = time.monotonic() + self._settings.lease_s
        while self._lease.nodes > 1 and len(self._find_ended()) < self._lease.nodes - 1 and time.monotonic() < deadline:
            time.sleep(LOOK_S)

    def explain(self, failure: Failure) -> Failure | None:
        """Find the failure that caused ``failure``, which may be another node's.

        Returns None if a node was drained: that is no failure. Waits a short time for the nodes' reports.
        """
        if self._lease.nodes == 1 or failure.code not in SECONDHAND:
            return failure
        deadline = time.monotonic() + 2 * self._settings.heartbeat_s
        while True:
            slots = self._find_ended()
            if any(slot.state == NodeSlotState.LEFT for slot in slots):
                return None
            if cause := _find_cause(slots):
                return cause
            if len(slots) == self._lease.nodes - 1 and failure.code == CRASHED:
                return failure
            if len(slots) == self._lease.nodes - 1 or time.monotonic() > deadline:
                return _lost(slots)
            time.sleep(LOOK_S)

    def _start(self, endpoint: str) -> bool:
        answers: list[bool] = []
        self._held.write(lambda session, lease: answers.append(node_slots.start(session, lease, endpoint=endpoint)))
        return answers[-1]

    def _find_ended(self) -> Sequence[NodeSlot]:
        answers: list[Sequence[NodeSlot]] = []

        def look(session: Session, lease: Lease) -> None:
            answers.append(node_slots.find_ended(session, lease))

        self._held.write(look)
        return answers[-1]


def find_free_port(host: str) -> int:
    """Return a port that no process listens on. Raises ConfigError if ``host`` cannot be looked up."""
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        raise ConfigError(
            f"The other workers cannot find this one: its address '{host}' is unknown ({error}).",
            code="invalid_node_address",
            hint="Set BITFOUNDRY_NODE_ADDRESS of every worker to a name or IP address that the others can reach.",
        ) from error
    with socket.create_server(("", 0)) as probe:
        return int(probe.getsockname()[1])


def _find_cause(seats: Sequence[NodeSlot]) -> Failure | None:
    """Return the first failure that a node itself caused."""
    errors = (seat.error for seat in seats if seat.error is not None)
    return next((Failure(**error) for error in errors if error["code"] not in SECONDHAND), None)


def _lost(seats: Sequence[NodeSlot]) -> Failure:
    """Return NODE_LOST with the details that the nodes have reported."""
    details = [f"node {seat.node_rank} ({seat.worker}): {seat.error['detail']}" for seat in seats if seat.error]
    return Failure(**{**vars(NODE_LOST), "detail": "\n".join(details)})
