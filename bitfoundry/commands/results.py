"""Finds a result by any of its names: a local run, or a job of the service with its files."""

from pathlib import Path

from bitfoundry.client.answers import Job
from bitfoundry.client.named import the_one
from bitfoundry.client.service import Client
from bitfoundry.commands import terminal
from bitfoundry.commands.options import connect_if_any
from bitfoundry.errors import ApiError, BitfoundryError
from quantcore.report import local_runs
from quantcore.report.local_runs import LocalRun as LocalRun


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
