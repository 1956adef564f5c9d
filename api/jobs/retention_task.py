"""Carries out data retention once an hour: deletes old jobs and event logs, and artifacts that have no job."""

from __future__ import annotations

import logging
import re
import shutil
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from sqlalchemy.orm import Session

from api.jobs import being_sent
from api.settings import Settings
from api.store.accounts.audit import Caller
from api.store.engine import Sessions
from api.store.queue import jobs, retention
from api.store.queue.hourly import Hourly
from api.store.queue.retention import Keep
from api.store.states import FINAL

logger = logging.getLogger(__name__)

ORPHAN_AGE_S = 24 * 3600.0
_JOB = re.compile(r"job_[0-9a-f]{32}")
_ARTIFACT = re.compile(r"[0-9a-f]{64}(\.orphan)?")


class RetentionTask:
    """Deletes once an hour what neither the settings nor the projects' policies keep; a task of ``Maintenance``."""

    def __init__(self, settings: Settings, sessions: Sessions) -> None:
        self._settings = settings
        self._sessions = sessions
        self._hourly = Hourly()

    def run(self, session: Session) -> int:
        """Purge if an hour has passed. Returns 0: nothing is left for this round."""
        if self._hourly.is_due():
            self.purge()
        return 0

    def purge(self) -> None:
        """Delete all that is due now, in short transactions. Files are deleted after their rows."""
        if (days := self._settings.keep_logs_days) is not None:
            while self._purge_event_logs(days):
                pass
        if (days := self._settings.keep_jobs_days) is not None:
            while ids := self._purge_jobs(days):
                remove_artifacts(self._settings, ids)
                logger.info("%d jobs that ended more than %g days ago were deleted", len(ids), days)
        for project_id, keep in self._find_policies().items():
            while ids := self._purge_due(project_id, keep):
                remove_artifacts(self._settings, ids)
                logger.info("%d jobs of %s were deleted by its retention policy", len(ids), project_id)
        remove_orphans(self._settings, self._sessions)

    def _find_policies(self) -> dict[str, Keep]:
        with self._sessions.begin() as session:
            return retention.find_policies(session)

    def _purge_due(self, project_id: str, keep: Keep) -> list[str]:
        service = Caller(project_id, None, frozenset())
        with self._sessions.begin() as session:
            return [due.job_id for due in retention.purge_due(session, service, keep)]

    def _purge_event_logs(self, days: float) -> int:
        with self._sessions.begin() as session:
            return retention.purge_event_logs(session, keep_days=days)

    def _purge_jobs(self, days: float) -> Collection[str]:
        with self._sessions.begin() as session:
            return retention.purge_jobs(session, keep_days=days)


def remove_artifacts(settings: Settings, job_ids: Collection[str]) -> None:
    """Remove the artifacts of deleted jobs, after the commit: a row must never lack its files.

    If the process is killed in between, ``remove_orphans`` removes the rest; also what somebody is downloading now.
    """
    for job_id in job_ids:
        folder = settings.artifacts_dir / job_id
        if not any(map(being_sent.is_held, folder.glob("*"))):
            shutil.rmtree(folder, ignore_errors=True)


def find_orphans(settings: Settings, sessions: Sessions) -> list[Path]:
    """Find folders of artifacts that have no row: a process was killed between the row and the files.

    A job's row exists before its folder, and its id is never used again: a folder without a row has no owner. The
    folder of a job that has ended may have artifacts that a lost worker brought too late. A day's delay is for
    operators who go back to an older copy of the database.
    """
    folders = {folder.name: folder for folder in settings.artifacts_dir.glob("job_*") if _JOB.fullmatch(folder.name)}
    with sessions.begin() as session:
        job_ids = retention.find_known(session, folders.keys())
        ended = retention.find_artifacts_of_ended(session, folders.keys())
    gone = [folder for job_id, folder in folders.items() if job_id not in job_ids]
    late = [
        folder
        for job_id, paths in ended.items()
        for folder in folders[job_id].iterdir()
        if _ARTIFACT.fullmatch(folder.name) and folder.name not in paths
    ]
    return [folder for folder in (*gone, *late) if _is_old(folder)]


def remove_orphans(settings: Settings, sessions: Sessions) -> None:
    for folder in find_orphans(settings, sessions):
        if folder.parent == settings.artifacts_dir:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            _remove_late(folder, sessions)
        logger.info("%s was removed: no job has this artifact", folder.relative_to(settings.artifacts_dir))


def _remove_late(folder: Path, sessions: Sessions) -> None:
    """Remove a folder after it was set aside under the job's lock.

    Else a retry might bring the same artifact and find this one half removed.
    """
    aside = folder.with_suffix(".orphan")
    with sessions.begin() as session:
        job = jobs.lock(session, folder.parent.name)
        if job is not None and job.state in FINAL:
            folder.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def _is_old(folder: Path) -> bool:
    with suppress(FileNotFoundError):
        return folder.stat().st_mtime < time.time() - ORPHAN_AGE_S
    return False
