"""Runs one node of a job that another worker leads, and reports how it ended. Start reading at ``NodeRun.execute``.

The leader writes events and files. This side only reads from the engine's lines why it failed, and adds its log to the
job's. When the leader's lease ends, the seat ends with it and the engine is killed.
"""

from __future__ import annotations

import json
import logging
import time
from functools import partial

from api import json_log
from api.settings import Settings
from api.store.engine import Sessions
from api.store.queue import node_slots
from api.store.queue.leases import Failure, LeaseLost
from api.store.queue.node_slots import NodeSlotLease
from api.store.tables.node_slots import NodeSlotState
from worker.engine import Engine, EventLost, Stop, StopSwitch
from worker.joblog import JobLog
from worker.journal import crash, failure_of
from worker.lease import HeldLease
from worker.memory_watch import MemoryLimit
from worker.nodes import LOOK_S
from worker.redaction import Redactor
from worker.torchrun import Node
from worker.workspace import Workspace

logger = logging.getLogger(__name__)

NUM_LATE_BEATS = 3  # a new file may take that long to appear on a network disk
WORKER_ERROR = Failure(
    "worker_error",
    "An internal error occurred in a worker of this job.",
    "See its log.",
    retryable=True,
    max_failures=2,
)
NOT_SHARED = Failure(
    "workspace_not_shared",
    "The workers of this job do not see the same files.",
    hint="BITFOUNDRY_DATA_DIR must be the same path to a folder on a disk that all workers share.",
)


class NodeRun:
    """A node's part of an attempt. ``stop`` may be called from any thread, at any time."""

    def __init__(self, lease: NodeSlotLease, sessions: Sessions, settings: Settings, *, claimed_at: float) -> None:
        self.lease = lease
        self._sessions = sessions
        self._settings = settings
        self._workspace = Workspace(settings, lease)
        self._held = HeldLease(
            lease,
            sessions,
            settings,
            claimed_at=claimed_at,
            renew=node_slots.renew,
            on_order=lambda order: None,  # orders are the leader's
            on_lost=lambda: self.stop(Stop.LEASE_LOST),
        )
        self._redactor = Redactor.of_worker(settings)
        self._log = JobLog(self._held, self._redactor, prefix=f"node {lease.node_rank}: ")
        self._switch = StopSwitch()

    def execute(self) -> None:
        """Run the node to its end. The result goes into the seat's row, or nowhere if the seat was lost."""
        json_log.job_id.set(self.lease.job_id)
        try:
            with self._held:
                self._execute()
        except LeaseLost:
            logger.info("%s: over for node %d", self.lease.job_id, self.lease.node_rank)
        finally:
            json_log.job_id.set(None)
            self._log.stop()

    def stop(self, reason: Stop) -> None:
        """End the engine: with a grace time, or at once when the seat is gone."""
        self._switch.stop(reason)

    def _execute(self) -> None:
        try:
            node = self._await_start()
            if node is None:
                self._leave(NodeSlotState.LEFT)
            elif not self._is_shared():
                self._leave(NodeSlotState.FAILED, NOT_SHARED)
            else:
                self._run(node)
        except LeaseLost:
            raise
        except Exception:
            logger.exception("%s: node %d failed", self.lease.job_id, self.lease.node_rank)
            self._leave(NodeSlotState.FAILED, WORKER_ERROR)

    def _await_start(self) -> Node | None:
        """Wait for all nodes. Returns this node with their address, or None if the worker was stopped before."""
        while self._switch.reason is None:
            answers: list[str | None] = []
            self._held.write(lambda session, lease, to=answers: to.append(node_slots.find_endpoint(session, lease)))
            if endpoint := answers[-1]:
                host, _, port = endpoint.rpartition(":")
                return Node(self.lease.node_rank, self.lease.nodes, host, int(port), node_slots.run_id(self.lease))
            time.sleep(LOOK_S)
        if self._switch.reason is Stop.LEASE_LOST:
            raise LeaseLost
        return None

    def _is_shared(self) -> bool:
        """Return True if this worker sees the leader's folder under the same path."""
        deadline = time.monotonic() + NUM_LATE_BEATS * self._settings.heartbeat_s
        while time.monotonic() < deadline and self._switch.reason is None:
            try:
                task = json.loads(self._workspace.task_file.read_text())
            except (OSError, ValueError):  # not there, or not whole yet
                time.sleep(LOOK_S)
            else:
                return bool(task["output_dir"] == str(self._workspace.output_dir))
        return False

    def _run(self, node: Node) -> None:
        name = f"{node_slots.run_id(self.lease)}.{self.lease.node_rank}"
        engine = self._switch.start(
            partial(
                Engine,
                self._settings,
                self._workspace.task_file,
                node=node,
                limit=MemoryLimit(self._settings, self.lease.needs_memory_bytes, name),
                project_id=self.lease.project_id,
            )
        )
        self._log.follow(engine.log_lines())
        failure: Failure | None = None
        try:
            for line in engine.lines():
                if line["kind"] == "failed" and failure is None:
                    failure = failure_of(self._redactor.clean_all(line))
        except EventLost as error:
            failure = failure or Failure(error.code, error.message, error.hint)
            engine.kill(Stop.LEASE_LOST)  # its work has no owner any more
            engine.wait()
            self._leave(NodeSlotState.FAILED, failure)
            return
        status = engine.wait()
        self._log.add(f"worker: the engine ended with status {status}", "info")
        self._log.close()
        if status == 0:
            self._leave(NodeSlotState.DONE)
        elif engine.stopped_by is Stop.LEASE_LOST:
            raise LeaseLost
        elif engine.failure is not None:
            self._leave(NodeSlotState.FAILED, engine.failure)
        elif engine.stopped_by is not None:
            self._leave(NodeSlotState.LEFT)
        else:
            self._leave(NodeSlotState.FAILED, failure or crash(status, self._log.tail))

    def _leave(self, state: NodeSlotState, failure: Failure | None = None) -> None:
        if failure is not None:
            logger.warning("%s: node %d: %s", self.lease.job_id, self.lease.node_rank, failure.code)
        self._held.write(node_slots.leave, state=state, failure=failure)
