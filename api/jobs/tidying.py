"""Jobs that nobody needs any more are forgotten, as the operator and the projects want it, and what killed processes
have left of deleted ones is removed."""

from __future__ import annotations

import logging
import re
import shutil
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from sqlalchemy.orm import Session

from api.settings import Settings
from api.store import retention
from api.store.audit import Caller
from api.store.engine import Sessions
from api.store.retention import Keep

logger = logging.getLogger(__name__)

INTERVAL_S = 3600.0
ORPHAN_AGE_S = 24 * 3600.0
_JOB = re.compile(r"job_[0-9a-f]{32}")


class Tidying:
    """A task of the upkeep, once an hour."""

    def __init__(self, settings: Settings, sessions: Sessions) -> None:
        self._settings = settings
        self._sessions = sessions
        self._next_at = 0.0

    def run(self, session: Session) -> int:
        """Returns 0: the rest waits for the next hour."""
        if time.monotonic() >= self._next_at:
            self._next_at = time.monotonic() + INTERVAL_S
            self.tidy()
        return 0

    def tidy(self) -> None:
        """All that is due now, in short transactions of its own: files go only after their rows have."""
        if (days := self._settings.keep_logs_days) is not None:
            while self._purge_stories(days):
                pass
        if (days := self._settings.keep_jobs_days) is not None:
            while ids := self._purge_jobs(days):
                self._remove_artifacts(ids)
                logger.info("%d jobs that ended more than %g days ago were deleted", len(ids), days)
        for project_id, keep in self._find_policies().items():
            while ids := self._purge_due(project_id, keep):
                self._remove_artifacts(ids)
                logger.info("%d jobs of %s were deleted by its retention policy", len(ids), project_id)
        self._remove_orphans()

    def _remove_artifacts(self, job_ids: Collection[str]) -> None:
        for job_id in job_ids:
            shutil.rmtree(self._settings.artifacts_dir / job_id, ignore_errors=True)

    def _find_policies(self) -> dict[str, Keep]:
        with self._sessions.begin() as session:
            return retention.find_policies(session)

    def _purge_due(self, project_id: str, keep: Keep) -> list[str]:
        service = Caller(project_id, None, frozenset())
        with self._sessions.begin() as session:
            return [due.job_id for due in retention.purge_due(session, service, keep)]

    def _purge_stories(self, days: float) -> int:
        with self._sessions.begin() as session:
            return retention.purge_stories(session, keep_days=days)

    def _purge_jobs(self, days: float) -> Collection[str]:
        with self._sessions.begin() as session:
            return retention.purge_jobs(session, keep_days=days)

    def _remove_orphans(self) -> None:
        """Folders of artifacts whose job is gone: a process was killed between the row and the files.

        A job's row is there before its folder, and its id never comes again: a folder without a row has no owner. A
        day's patience is for operators who go back to an older copy of the database.
        """
        folders = {folder.name: folder for folder in _old_folders(self._settings.artifacts_dir)}
        with self._sessions.begin() as session:
            known = retention.find_known(session, folders.keys())
        for job_id in folders.keys() - known:
            shutil.rmtree(folders[job_id], ignore_errors=True)
            logger.info("%s: its artifact was removed, the job is gone", job_id)


def _old_folders(artifacts_dir: Path) -> Iterator[Path]:
    before = time.time() - ORPHAN_AGE_S
    for folder in artifacts_dir.glob("job_*"):
        with suppress(FileNotFoundError):
            if _JOB.fullmatch(folder.name) and folder.stat().st_mtime < before:
                yield folder
