"""Runs one job on this worker, from its lease to its last row. Start reading at ``Run.execute``."""

from __future__ import annotations

import errno
import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from api import disk, json_log, tracing
from api.settings import Settings
from api.store.accounts import datasets
from api.store.engine import Sessions
from api.store.queue import jobs, leases, node_slots
from api.store.queue.leases import Failure, Lease, LeaseLost, Order
from quantcore.config.quantization import is_dataset_id
from quantcore.errors import CalibrationError, QuantError
from quantcore.hub.names import is_model_id, is_store_url, store_name
from worker.allocation import Allocation, launch_of
from worker.disk_watch import DiskWatch
from worker.engine import Child, Engine, HubAccess, Stop, StopSwitch
from worker.event_text import EventText
from worker.hub_token import find_hub_token
from worker.joblog import JobLog
from worker.journal import Journal, crash
from worker.launchers import Launcher, Status
from worker.lease import HeldLease
from worker.memory_watch import MemoryLimit
from worker.model_copy import start_copy
from worker.nodes import NODE_LOST, Nodes, NodesMissing
from worker.redaction import Redactor
from worker.torchrun import Node
from worker.workspace import Workspace

logger = logging.getLogger(__name__)

DISK_FULL = Failure(
    disk.DISK_FULL,
    "The disk does not have enough space for this job.",
    "The job is retried when there is space. Delete jobs that are no longer needed, or use a larger disk.",
    retryable=True,
)
READ_ONLY = Failure(disk.DISK_READ_ONLY, "The worker's disk is read-only.", retryable=True)
_DISK_FAULTS = {errno.ENOSPC: DISK_FULL, errno.EDQUOT: DISK_FULL, errno.EROFS: READ_ONLY}
WORKER_ERROR = Failure(
    "worker_error", "An internal error occurred in the worker.", "See its log.", retryable=True, max_failures=2
)
OUT_OF_TIME = Failure(
    "max_runtime_exceeded",
    "The job ran longer than its limits.max_runtime_s allows.",
    hint="Clone it with a larger limit, or retry it: the time limit starts again, and progress that is still kept is "
    "used.",
    retryable=True,
    max_failures=1,
)
_STOPS = {
    Order.CANCEL: Stop.CANCELLED,
    Order.PAUSE: Stop.PAUSED,
    Order.TIME_IS_UP: Stop.TIME_IS_UP,
    Order.NODE_LOST: Stop.NODE_LOST,
    Order.NODE_LEFT: Stop.DRAINED,
}
REJECTED = "gate_failed"


class Run:
    """An attempt at a job. ``stop`` may be called from any thread, at any time."""

    def __init__(
        self, lease: Lease, sessions: Sessions, settings: Settings, *, claimed_at: float, launcher: Launcher | None
    ) -> None:
        """Prepare the attempt. Its engine runs on this machine, or where the ``launcher`` finds room for it."""
        self.lease = lease
        self._launcher = launcher
        self._settings = settings
        self._sessions = sessions
        self._workspace = Workspace(settings, lease)
        self._held = HeldLease(
            lease,
            sessions,
            settings,
            claimed_at=claimed_at,
            renew=node_slots.renew_leader if lease.nodes > 1 and launcher is None else leases.renew,
            on_order=lambda order: self.stop(_STOPS[order]),
            on_lost=lambda: self.stop(Stop.LEASE_LOST),
        )
        # a launcher brings the other nodes: then there are none here to gather
        self._nodes = Nodes(lease if launcher is None else replace(lease, nodes=1), self._held, settings)
        self._redactor = Redactor.of_worker(settings)
        self._hub: HubAccess | None = None
        self._log = JobLog(self._held, self._redactor)
        self._switch = StopSwitch()
        self._may_go_on = False
        self._is_left_alone = False
        self._name = f"{lease.job_id}.{lease.fence}"

    def execute(self) -> None:
        """Do the whole attempt. It ends in a row, or writes nothing at all if the lease was lost."""
        json_log.job_id.set(self.lease.job_id)
        try:
            about: dict[str, Any] = {"bitfoundry.job_id": self.lease.job_id, "bitfoundry.attempt": self.lease.attempt}
            with tracing.span("attempt", parent=self.lease.traceparent, **about), self._held:
                self._execute()
        except LeaseLost:
            self._may_go_on = True
            self._is_left_alone = self._launcher is not None  # whoever has the lease may have taken its folders over
            logger.warning("%s: the lease was lost, nothing was written", self.lease.job_id)
        finally:
            json_log.job_id.set(None)
            self._log.stop()
            if not self._is_left_alone:
                self._workspace.remove(may_go_on=self._may_go_on)

    def stop(self, reason: Stop) -> None:
        """End the engine: with a grace time, or at once when the job is no longer ours."""
        self._switch.stop(reason)

    def _execute(self) -> None:
        try:
            is_taken_over = self._launcher is not None and self._workspace.take_over()
            if not is_taken_over:
                self._prepare()
                if not self._copy_model():
                    return
            engine = self._start() if self._launcher is None else self._launch(self._launcher, is_taken_over)
            journal = self._listen(engine)
            self._conclude(engine, journal)
        except NodesMissing:
            self._may_go_on = True
            self._held.write(leases.put_back)
        except QuantError as error:
            self._fail(Failure(error.code, error.message, error.hint, error.retryable))
        except LeaseLost:
            raise
        except Exception as error:
            logger.exception("%s: the attempt failed", self.lease.job_id)
            number = error.errno if isinstance(error, OSError) else None
            self._fail(_DISK_FAULTS.get(number or 0, WORKER_ERROR))

    def _start(self) -> Engine:
        """Start the engine here, together with those of the other nodes."""
        self._workspace.write_task(self._task())
        return self._start_engine(self._nodes.wait_for_all(lambda: self._switch.reason is not None))

    def _launch(self, launcher: Launcher, is_taken_over: bool) -> Allocation:
        """Start the engine elsewhere, or go on with the one that an earlier attempt has started."""
        launch = launch_of(
            self._settings,
            self.lease,
            self._workspace.launch_dir,
            self._workspace.folder,
            with_hub=self._needs_hub,
            traceparent=tracing.current(),
        )
        if is_taken_over:
            self._held.write(leases.record, happened=[], columns={"lost_count": 0})  # the worker was lost, not the job
        else:
            launch.write(self._task(), None if self._hub is None else self._hub.token)
        return self._switch.start(lambda: Allocation(self._settings, launcher, launch, self._note_status))

    def _note_status(self, status: Status, allocation: str) -> None:
        """Show where the engine runs, or why it waits."""
        told = {
            "launcher": self._settings.launcher, "id": allocation, "state": status.word, "reason": status.reason,
            "nodes": status.nodes,
        }  # fmt: skip
        told = {name: self._redactor.clean(text) for name, text in told.items()}
        place = told["reason"] or told["nodes"]
        self._log.add(f"worker: {told['launcher']} job {told['id']}: {told['state']} {place}", "info")
        self._held.write(leases.note_allocation, told=told, is_running=status.is_running)

    def _prepare(self) -> None:
        self._workspace.create()
        if self._needs_hub:
            name = self.lease.model.get("hub_token")
            self._hub = HubAccess(find_hub_token(self._settings, self.lease, name, self._redactor))

    def _copy_model(self) -> bool:
        """Copy a model in an object store to this machine. Returns False if the attempt has ended with that."""
        model = self.lease.model
        if not is_store_url(model.get("id", "")):
            return True
        limit = MemoryLimit(self._settings, None, f"{self._name}.model")
        copy = self._switch.start(
            lambda: start_copy(self._settings, model["id"], model["sha"], self._workspace.copy_dir, limit)
        )
        journal = self._listen(copy)
        status = copy.wait()
        if status != 0:
            self._log.close()
            self._end(copy, journal, status)
        return status == 0

    def _task(self) -> dict[str, Any]:
        """Return the engine's task: the job's spec, with the folders and files of this machine."""
        spec = self.lease.spec.to_dict()
        calibration = spec["calibration"]
        if "sources" in calibration:
            calibration["sources"] = [
                self._with_source(part, f"/calibration/sources/{number}/source")
                for number, part in enumerate(calibration["sources"])
            ]
        else:
            spec["calibration"] = self._with_source(calibration, "/calibration/source")
        if "source" in spec["evaluation"]:
            spec["evaluation"] = self._with_source(spec["evaluation"], "/evaluation/source")
        for algorithm in spec["config"].get("algo_config", ()):
            if "imatrix" in algorithm:
                found = self._settings.find_input(algorithm["imatrix"], field="/config/algo_config")
                algorithm["imatrix"] = str(found)
        if spec["evaluation"]["tasks"] and self._settings.lm_eval_tasks_dir is not None:
            spec["evaluation"]["include_path"] = str(self._settings.lm_eval_tasks_dir)  # the operator's own tasks
        return (
            spec
            | self._model()
            | {
                "token_on_stdin": self._hub is not None and self._hub.token is not None,
                "output_dir": str(self._workspace.output_dir),
                "resume_dir": str(self._workspace.resume_dir),
            }
        )

    def _with_source(self, text: dict[str, Any], field: str) -> dict[str, Any]:
        """Return ``text`` as the engine finds it: a Hub dataset or the builtin one by name, others by a file's path."""
        source: str = text["source"]
        if source.startswith("/"):
            return text | {"source": str(self._settings.find_input(source, field=field))}
        if not is_dataset_id(source):
            return text
        with self._sessions.begin() as session:
            dataset = datasets.find(session, self.lease.project_id, source)
        if dataset is None:
            raise CalibrationError(
                "The dataset of this job was deleted.", code="dataset_not_found", hint="Clone it with another one."
            )
        return text | {"source": str(self._settings.datasets_dir / datasets.file_name(dataset))}

    def _model(self) -> dict[str, str]:
        """Return the task's model: a commit on the Hub, the copy of a model in an object store, or a folder."""
        model = self.lease.model
        if "id" in model:
            given = {"model_id": model["id"], "revision": model["sha"]}
            if is_store_url(model["id"]):
                given["model_dir"] = str(self._workspace.copy_dir / store_name(model["id"]))
            return given
        # Looked up again: a link may lead elsewhere by now than when the job was submitted.
        folder = self._settings.find_input(model["path"], field="/model/path", is_own=self._is_own)
        return {"model_dir": str(folder)}

    def _is_own(self, folder: Path) -> bool:
        with self._sessions.begin() as session:
            return jobs.owns_artifact(session, self.lease.project_id, folder)

    @property
    def _needs_hub(self) -> bool:
        """True if the model, a text or the data of a task is on the Hub."""
        spec = self.lease.spec
        on_hub = any(text.revision is not None for text in (*spec.calibration.parts, spec.evaluation))
        return is_model_id(self.lease.model.get("id", "")) or on_hub or bool(spec.evaluation.tasks)

    def _start_engine(self, node: Node | None) -> Engine:
        hub, self._hub = self._hub, None
        start = partial(
            Engine,
            self._settings,
            self._workspace.task_file,
            hub=hub,
            traceparent=tracing.current(),
            node=node,
            limit=MemoryLimit(self._settings, self.lease.needs_memory_bytes, self._name),
            project_id=self.lease.project_id,
        )
        return self._switch.start(start)

    def _listen(self, engine: Child | Allocation) -> Journal:
        """Write the engine's events until it ends."""
        journal = Journal(self._held, self._redactor)
        self._log.follow(engine.log_lines())
        phases, text = tracing.Phases(), EventText()
        try:
            with DiskWatch(self._settings, lambda: engine.kill(Stop.NO_ROOM)):
                for line in engine.lines():
                    for line_text, level in text.lines(self._redactor.clean_all(line)):
                        self._log.add(f"engine: {line_text}", level)
                    if line["kind"] == "phase_started":
                        name = self._redactor.clean(str(line.get("phase")))
                        phases.enter(name)
                        self._log.add(f"worker: phase {name} began", "info")
                    journal.note(line)
            journal.close()
        except BaseException as error:
            # its work has no owner any more; of an engine elsewhere only a lost lease takes the owner away
            engine.kill(Stop.LEASE_LOST if isinstance(error, LeaseLost) else Stop.CANCELLED)
            engine.wait()
            raise
        finally:
            phases.leave()
        return journal

    def _conclude(self, engine: Child | Allocation, journal: Journal) -> None:
        status = engine.wait()
        self._is_left_alone = engine.is_left_alone
        how = "goes on without this worker" if self._is_left_alone else f"ended with status {status}"
        self._log.add(f"worker: the engine {how}", "info")
        self._log.close()
        if status == 0 and not self._is_left_alone:  # whole and proven: kept even if a cancel came in the last moment
            self._nodes.wait_for_ends()
            self._publish(journal)
        else:
            self._end(engine, journal, status)

    def _end(self, engine: Child | Allocation, journal: Journal, status: int) -> None:
        """Write the end of an attempt without a result."""
        if engine.stopped_by in (Stop.CANCELLED, Stop.PAUSED, Stop.DRAINED):
            self._release(may_go_on=engine.stopped_by is not Stop.CANCELLED)
        elif engine.stopped_by is Stop.TIME_IS_UP:
            self._fail(OUT_OF_TIME)
        elif engine.stopped_by is Stop.NO_ROOM:
            self._fail(DISK_FULL)
        elif engine.stopped_by is Stop.LEASE_LOST:
            raise LeaseLost
        elif engine.failure is not None:
            self._fail(engine.failure)
        else:
            reported = NODE_LOST if engine.stopped_by else journal.failure or crash(status, self._log.tail)
            failure = self._nodes.explain(reported)
            if failure is None:
                self._release(may_go_on=True)
            else:
                self._fail(self._with_rejected(failure))

    def _release(self, *, may_go_on: bool) -> None:
        self._may_go_on = may_go_on
        self._held.write(leases.release)

    def _publish(self, journal: Journal) -> None:
        if self._launcher is not None:  # another worker may have taken the same folders over: is it still ours?
            self._held.write(leases.record, happened=[], columns={})
        path, manifest = self._workspace.publish()
        self._held.write(
            leases.succeed,
            manifest_sha256=manifest.sha256,
            path=str(path),
            num_bytes=manifest.num_bytes,
            summary=journal.summary or {},
        )
        logger.info("%s: succeeded, %s", self.lease.job_id, path)

    def _with_rejected(self, failure: Failure) -> Failure:
        """Return ``failure``; if the result missed a limit, with the place where the result is kept."""
        kept = self._workspace.keep_rejected() if failure.code == REJECTED else None
        return failure if kept is None else replace(failure, detail=f"The rejected artifact is kept in {kept}.")

    def _fail(self, failure: Failure) -> None:
        self._may_go_on = failure.retryable
        logger.warning("%s: %s: %s", self.lease.job_id, failure.code, failure.message)
        self._held.write(leases.fail, failure=failure, retry_base_s=self._settings.retry_base_s)
