"""Holds one chat on this worker: two models in a short-lived engine process, prompts from rows, answers into rows.

Start reading at ``Conversation.execute``. The chat ends with its process: when a client ends it, when it is idle or has
lasted long enough, when a job needs the worker, or when the worker stops.
"""

from __future__ import annotations

import json
import logging
import shlex
import shutil
import sys
import threading
from collections import deque
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from api import confinement
from api.settings import Settings
from api.store import manifest
from api.store.engine import Sessions
from api.store.queue import chat_leases, jobs
from api.store.queue.chat_leases import Asked, ChatLease, Limits
from api.store.queue.leases import LeaseLost, Order
from api.store.tables.chats import EndReason
from quantcore.errors import QuantError
from quantcore.hub.names import is_model_id, is_store_url, store_name
from worker.engine import Child, EventLost, Stop, StopSwitch, engine_environment
from worker.hub_token import find_hub_token
from worker.lease import HeldLease
from worker.memory_watch import MemoryLimit
from worker.model_copy import start_copy
from worker.redaction import Redactor
from worker.workspace import chat_folder

logger = logging.getLogger(__name__)

LOOK_S = 0.3
"""Seconds between two looks for a prompt."""
_STOPS = {
    Order.TIME_IS_UP: Stop.TIME_IS_UP,
    Order.WORKER_NEEDED: Stop.WORKER_NEEDED,
    Order.IDLE: Stop.IDLE,
}
_REASONS = {
    Stop.TIME_IS_UP: EndReason.TIME_IS_UP,
    Stop.WORKER_NEEDED: EndReason.WORKER_NEEDED,
    Stop.IDLE: EndReason.IDLE,
    Stop.DRAINED: EndReason.WORKER_STOPPED,
}
CRASHED = {"code": "engine_crashed", "message": "The chat process ended without reporting an error.", "hint": ""}
WORKER_ERROR = {"code": "worker_error", "message": "An internal error occurred in the worker.", "hint": "See its log."}
Line = dict[str, Any]


class Conversation:
    """A chat on this worker. ``stop`` may be called from any thread, at any time."""

    def __init__(self, lease: ChatLease, sessions: Sessions, settings: Settings, *, claimed_at: float) -> None:
        self.lease = lease
        self._sessions = sessions
        self._settings = settings
        self._folder = chat_folder(settings, lease.chat_id, lease.fence)
        limits = Limits(settings.chat_idle_s, settings.chat_max_s, settings.poll_s, settings.memory_bytes)
        self._held = HeldLease(
            lease,
            sessions,
            settings,
            claimed_at=claimed_at,
            renew=partial(chat_leases.renew, limits=limits),
            on_order=lambda order: self.stop(_STOPS[order]),
            on_lost=lambda: self.stop(Stop.LEASE_LOST),
        )
        self._redactor = Redactor.of_worker(settings)
        self._switch = StopSwitch()
        self._failure: dict[str, Any] | None = None
        self._told = 0  # the number of the last prompt that the process was given

    def execute(self) -> None:
        """Hold the chat until it ends. Nothing is written if a client ended it, or the lease was lost."""
        try:
            with self._held:
                self._execute()
        except LeaseLost:
            logger.info("%s: ended", self.lease.chat_id)
        finally:
            if self._switch.child is not None:
                self._switch.child.kill(Stop.LEASE_LOST)
                self._switch.child.wait()
            shutil.rmtree(self._folder, ignore_errors=True)

    def stop(self, reason: Stop) -> None:
        """End the process: with a grace time, or at once when the chat is no longer ours."""
        self._switch.stop(reason)

    def _execute(self) -> None:
        try:
            child = self._start()
            self._talk(child)
            self._conclude(child)
        except QuantError as error:
            self._end(EndReason.FAILED, {"code": error.code, "message": error.message, "hint": error.hint})
        except LeaseLost:
            raise
        except Exception:
            logger.exception("%s: the chat failed", self.lease.chat_id)
            self._end(EndReason.FAILED, WORKER_ERROR)

    def _start(self) -> Child:
        """Start the process of the chat. Raises ModelError and ProofError for models that are not there any more."""
        self._folder.mkdir(mode=0o700, parents=True)
        if is_store_url(self.lease.model.get("id", "")):
            self._copy_original()
        on_hub = is_model_id(self.lease.model.get("id", ""))
        task = {
            "artifact_dir": str(self._artifact()),
            "max_new_tokens": self.lease.max_new_tokens,
            "token_on_stdin": on_hub,
            **self._original(),
        }
        task_file = self._folder / "task.json"
        task_file.write_text(json.dumps(task))
        command = [part.replace("{python}", sys.executable) for part in shlex.split(self._settings.chat_command)]
        argv, environment = [*command, str(task_file)], engine_environment(self._settings, with_hub=on_hub)
        if self._settings.confine_engine:
            reach = confinement.reach_of(self._settings, self._folder, task, with_hub=on_hub)
            argv, environment = reach.command(argv), environment | reach.environment()
        token = None
        if on_hub:
            name = self.lease.model.get("hub_token")
            token = f"{find_hub_token(self._settings, self.lease, name, self._redactor) or ''}\n"
        limit = MemoryLimit(self._settings, self.lease.needs_memory_bytes, f"{self.lease.chat_id}.{self.lease.fence}")
        return self._switch.start(
            lambda: Child(self._settings, argv, environment, said=token, listens=True, limit=limit)
        )

    def _artifact(self) -> Path:
        """Return the folder of the result, or of the first of its formats. Raises ProofError for a changed one."""
        folder = Path(self.lease.folder)
        if manifest.read(folder).sha256 != self.lease.manifest_sha256:
            raise manifest.corrupt("its manifest has changed")
        paths = [export["path"] for export in self.lease.exports.values()]
        return folder / paths[0] if paths else folder

    def _copy_original(self) -> None:
        """Copy the original from its object store to this machine. Raises QuantError."""
        model = self.lease.model
        limit = MemoryLimit(self._settings, None, f"{self.lease.chat_id}.{self.lease.fence}.model")
        copy = self._switch.start(
            lambda: start_copy(self._settings, model["id"], model["sha"], self._folder / "model", limit)
        )
        failure: dict[str, Any] = {}
        threading.Thread(target=lambda: deque(copy.log_lines(), 0), name="log", daemon=True).start()
        for line in copy.lines():
            failure = line if line["kind"] == "failed" else failure
        if copy.wait() != 0 and copy.stopped_by is None:
            raise QuantError(
                failure.get("message", "The original could not be copied from its object store."),
                code=failure.get("code", "store_unreachable"),
                hint=failure.get("hint", ""),
            )

    def _original(self) -> dict[str, str]:
        model = self.lease.model
        if is_store_url(model.get("id", "")):
            return {"model_dir": str(self._folder / "model" / store_name(model["id"]))}
        if "id" in model:
            return {"model_id": model["id"], "revision": model["sha"]}
        return {"model_dir": str(self._settings.find_input(model["path"], field="/model/path", is_own=self._is_own))}

    def _is_own(self, folder: Path) -> bool:
        with self._sessions.begin() as session:
            return jobs.owns_artifact(session, self.lease.project_id, folder)

    def _talk(self, child: Child) -> None:
        """Pass prompts to the process, and what it answers into rows, until it ends."""
        heard: SimpleQueue[Line | EventLost | None] = SimpleQueue()
        threading.Thread(target=self._listen, args=(child, heard), name="chat-lines", daemon=True).start()
        threading.Thread(target=self._follow_log, args=(child,), name="chat-log", daemon=True).start()
        is_ready = False
        while True:
            try:
                line = heard.get(timeout=LOOK_S)
            except Empty:
                line = {}
            if line is None:
                return
            if isinstance(line, EventLost):
                raise line
            if line:
                is_ready = self._note(line) or is_ready
            elif is_ready:
                self._pass_on_prompt(child)
            else:
                self._held.write(chat_leases.check)

    def _listen(self, child: Child, heard: SimpleQueue[Line | EventLost | None]) -> None:
        try:
            for line in child.lines():
                heard.put(self._redactor.clean_all(line))
        except EventLost as error:
            heard.put(error)
        heard.put(None)

    def _follow_log(self, child: Child) -> None:
        for line in child.log_lines():
            logger.info("%s: %s", self.lease.chat_id, self._redactor.clean(line.decode("utf-8", "replace").rstrip()))

    def _note(self, line: Line) -> bool:
        """Write an event of the process. Returns True if it says that the models are in memory."""
        kind = line["kind"]
        if kind == "chat_ready":
            self._held.write(chat_leases.start, has_template=bool(line["has_template"]))
        elif kind == "chat_turn":
            arguments = {"number": line["number"], "answer": line["turn"], "is_whole": bool(line["is_whole"])}
            self._held.write(chat_leases.record, **arguments)
        elif kind == "chat_turn_failed":
            error = {name: line[name] for name in ("code", "message", "hint")}
            self._held.write(chat_leases.fail_turn, number=line["number"], error=error)
        elif kind == "failed":
            self._failure = {name: line[name] for name in ("code", "message", "hint")}
        return bool(kind == "chat_ready")

    def _pass_on_prompt(self, child: Child) -> None:
        found: list[Asked | None] = []
        told = self._told
        self._held.write(lambda session, lease: found.append(chat_leases.take_prompt(session, lease, after=told)))
        asked = found[-1]
        if asked is not None:
            self._told = asked.number
            child.tell(json.dumps({"number": asked.number, "prompt": asked.prompt}) + "\n")

    def _conclude(self, child: Child) -> None:
        status = child.wait()
        if child.stopped_by is Stop.LEASE_LOST:
            raise LeaseLost
        if child.limit.is_exceeded:
            failure = child.limit.failure()
            self._end(EndReason.FAILED, {name: getattr(failure, name) for name in ("code", "message", "hint")})
            return
        if child.stopped_by is not None:
            self._end(_REASONS[child.stopped_by])
        else:
            logger.warning("%s: the process ended with status %d", self.lease.chat_id, status)
            self._end(EndReason.FAILED, self._failure or CRASHED)

    def _end(self, reason: EndReason, error: dict[str, Any] | None = None) -> None:
        logger.info("%s: %s", self.lease.chat_id, reason)
        self._held.write(chat_leases.finish, reason=reason, error=error)
