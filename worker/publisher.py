"""Runs one attempt at a publication on this worker. Start reading at ``Publish.execute``.

The child that sends the files gets its token and its task by standard input: neither is in a file, in its environment
or in its arguments.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from api.settings import Settings
from api.store import manifest
from api.store.engine import Sessions
from api.store.queue import publication_leases
from api.store.queue.events import NewEvent
from api.store.queue.leases import Failure, LeaseLost
from api.store.queue.publication_leases import PublicationLease
from quantcore.errors import QuantError
from quantcore.hub.object_store import key_variables
from worker.engine import Child, Stop, StopSwitch, engine_environment
from worker.hub_token import find_hub_token
from worker.joblog import JobLog
from worker.lease import HeldLease
from worker.memory_watch import MemoryLimit
from worker.redaction import Redactor

logger = logging.getLogger(__name__)

MANIFESTS = ("MANIFEST.json", manifest.MANIFEST)  # they do not list themselves
MAX_FAILURES = 5  # of retryable failures
CRASHED = Failure(
    "publisher_crashed", "The publishing process ended without reporting an error.", retryable=True, max_failures=2
)
WORKER_ERROR = Failure(
    "worker_error", "An internal error occurred in the worker.", "See its log.", retryable=True, max_failures=2
)


class Publish:
    """An attempt at a publication. ``stop`` may be called from any thread, at any time."""

    def __init__(self, lease: PublicationLease, sessions: Sessions, settings: Settings, *, claimed_at: float) -> None:
        self.lease = lease
        self._settings = settings
        self._held = HeldLease(
            lease,
            sessions,
            settings,
            claimed_at=claimed_at,
            renew=publication_leases.renew,
            on_order=lambda order: None,  # publications get no orders
            on_lost=lambda: self.stop(Stop.LEASE_LOST),
        )
        self._redactor = Redactor.of_worker(settings)
        self._log = JobLog(self._held, self._redactor, write=publication_leases.write_log)
        self._switch = StopSwitch()

    def execute(self) -> None:
        """Do the whole attempt. It ends in a row, or writes nothing at all if the lease was lost."""
        try:
            with self._held:
                self._execute()
        except LeaseLost:
            logger.warning("%s: the lease was lost, nothing was written", self.lease.publication_id)
        finally:
            self._log.stop()

    def stop(self, reason: Stop) -> None:
        """End the child: with a grace time, or at once when the publication is no longer ours."""
        self._switch.stop(reason)

    def _execute(self) -> None:
        try:
            stdin_text = f"{self._find_token()}\n{json.dumps(self._task())}"
            child = self._start(stdin_text)
            published, failure = self._listen(child)
            self._conclude(child, published, failure)
        except QuantError as error:
            self._fail(Failure(error.code, error.message, error.hint, error.retryable))
        except LeaseLost:
            raise
        except Exception:
            logger.exception("%s: the attempt failed", self.lease.publication_id)
            self._fail(WORKER_ERROR)

    def _find_token(self) -> str:
        """Return the token for a target on the Hub, else "". Raises ModelError ``hub_token_not_found``."""
        name = self.lease.hub_token
        return "" if name is None else find_hub_token(self._settings, self.lease, name, self._redactor) or ""

    def _task(self) -> dict[str, Any]:
        """Return the fields of a ``quantcore.hub.push_task.PublishTask``.

        Raises ProofError for a damaged artifact, and PublishError for a URL that the operator no longer allows.
        """
        folder = Path(self.lease.folder)
        artifact = manifest.read(folder)
        if artifact.sha256 != self.lease.manifest_sha256:
            raise manifest.corrupt("its manifest has changed")
        target = self.lease.target
        if "to" in target:  # looked up again: a link may lead elsewhere by now
            target = target | {"to": self._settings.find_output(target["to"])}
        files = [file for file in artifact.files.values() if file.path not in MANIFESTS]
        return {
            "publication_id": self.lease.publication_id,
            "attempt": self.lease.attempt,
            "folder": str(folder),
            "files": [{"path": file.path, "size": file.num_bytes, "sha256": file.sha256} for file in files],
            "target": target,
        }

    def _start(self, stdin_text: str) -> Child:
        argv = [sys.executable, "-m", "quantcore", "publish"]
        limit = MemoryLimit(self._settings, None, f"{self.lease.publication_id}.{self.lease.fence}")
        return self._switch.start(
            lambda: Child(self._settings, argv, self._environment(), said=stdin_text, limit=limit)
        )

    def _environment(self) -> Mapping[str, str]:
        variables = engine_environment(self._settings, with_hub=True) | {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        if "to" in self.lease.target:
            variables |= key_variables()
        return variables

    def _listen(self, child: Child) -> tuple[dict[str, Any] | None, Failure | None]:
        """Write the child's events until it ends. Returns its result or its failure."""
        published: dict[str, Any] | None = None
        failure: Failure | None = None
        self._log.follow(child.log_lines())
        try:
            for line in child.lines():
                data = self._redactor.clean_all(line)
                kind = data.pop("kind")[:64]
                if kind == "published":
                    published = data
                elif kind == "failed":
                    details = (data["code"], data["message"], data["hint"], data["retryable"])
                    failure = Failure(*details, max_failures=MAX_FAILURES)
                else:
                    happened = [NewEvent(kind, data)]
                    self._held.write(publication_leases.record, happened=happened)
        except BaseException:
            child.kill(Stop.LEASE_LOST)  # its work has no owner any more
            child.wait()
            raise
        return published, failure

    def _conclude(self, child: Child, published: dict[str, Any] | None, failure: Failure | None) -> None:
        status = child.wait()
        self._log.close()
        if status == 0 and published is not None:
            result = {"revision": published["revision"], "url": published["url"]}
            self._held.write(publication_leases.succeed, **result)
            logger.info("%s: published, %s", self.lease.publication_id, published["url"])
        elif child.stopped_by is Stop.LEASE_LOST:
            raise LeaseLost
        elif child.stopped_by is not None:  # a drain
            self._held.write(publication_leases.release)
        else:
            self._fail(failure or CRASHED)

    def _fail(self, failure: Failure) -> None:
        logger.warning("%s: %s: %s", self.lease.publication_id, failure.code, failure.message)
        self._held.write(publication_leases.fail, failure=failure, retry_base_s=self._settings.retry_base_s)
