"""Finds a result by any of its names: a local run, or a job of the service with its files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitfoundry.client.answers import Job
from bitfoundry.client.named import the_one
from bitfoundry.client.service import Client
from bitfoundry.commands import terminal
from bitfoundry.commands.options import connect_if_any
from bitfoundry.errors import ApiError, BitfoundryError
from quantcore.report import local_runs
from quantcore.report.local_runs import LocalRun as LocalRun

if TYPE_CHECKING:
    from quantcore.report.values import Report


@dataclass(frozen=True)
class Result:
    """A result by one of its names: the ``folder`` of a local one, or an ended ``job``; no report of a failed job."""

    id: str
    name: str
    report: Report | None
    folder: Path | None = None
    job: Job | None = None


def read_result(name: str, url: str | None, api_key: str | None, home: Path | None) -> Result:
    """Return the folder, the local run or the job that ``name`` means, with its report.

    Raises BitfoundryError as ``find_result``, and ``not_ready`` for a job that has not ended.
    """
    from quantcore.report.values import Report

    folder = Path(name)
    if folder.is_dir():
        return Result(str(folder.absolute()), folder.name, _report_in(folder), folder)
    client = connect_if_any(url, api_key, home)
    try:
        found = find_result(name, client)
        if isinstance(found, LocalRun):
            return Result(found.id, found.name, _report_in(Path(found.folder)), Path(found.folder))
        assert client is not None
        if not found.is_final:
            raise BitfoundryError(
                f"The job {found.name or found.id} is {found.state}.",
                code="not_ready",
                hint=f"`bitfoundry watch {found.id}` waits for its end.",
            )
        read: Any = client.report(found.id) if found.state == "succeeded" else None
    finally:
        if client is not None:
            client.close()
    report = None if read is None else Report.model_validate(read)
    return Result(found.id, found.name or found.id, report, job=found)


def _report_in(folder: Path) -> Report:
    from quantcore.errors import QuantError
    from quantcore.report.compare import read_report

    try:
        return read_report(folder)
    except QuantError as error:
        raise BitfoundryError.of(error) from error


def find_result(name: str, client: Client | None) -> LocalRun | Job:
    """Return the local run or the job with this id, start of an id, or name; of `last` the newest of both.

    Raises BitfoundryError `job_not_found` or `job_not_unique`, which names the candidates.
    """
    found: list[LocalRun | Job] = [*local_runs.find(name), *(_jobs(name, client) if client else ())]
    if name == "last":
        found = sorted(found, key=lambda each: each.created_at[:19])[-1:]
    return the_one(found, name, "run or job")


def find_folder(name: str) -> Path | None:
    """Return the folder with the files of a result; None if there is none of this name.

    Those of a job are downloaded into the cache, unless its service is on this machine.
    """
    client = connect_if_any(None, None, None)
    try:
        result = find_result(name, client)
        if isinstance(result, LocalRun):
            return Path(result.folder)
        assert client is not None
        return _files_of(result, client)
    except BitfoundryError as error:
        if error.code == "job_not_found" or (isinstance(error, ApiError) and error.status == 0):
            return None
        raise
    finally:
        if client is not None:
            client.close()


def _jobs(name: str, client: Client) -> list[Job]:
    try:
        return [client.find(name)]
    except BitfoundryError as error:
        if error.code != "job_not_found":
            raise
        return []


def _files_of(job: Job, client: Client) -> Path:
    if job.artifact is None:
        raise BitfoundryError(
            f"The job {job.name or job.id} has no files: it is {job.state}.",
            code="not_ready",
            hint=f"`bitfoundry watch {job.id}` waits for its end.",
        )
    if job.artifact.path and (Path(job.artifact.path) / "MANIFEST.json").is_file():
        return Path(job.artifact.path)
    from bitfoundry.local.folders import cache_dir

    terminal.err.print(f"· downloading the files of {job.name or job.id}")
    return client.download(job.id, cache_dir() / "jobs" / job.id)
