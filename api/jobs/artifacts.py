"""The routes of a job's result: its files, whole or in ranges."""

from __future__ import annotations

from fastapi import APIRouter, Response
from fastapi.responses import FileResponse, StreamingResponse
from pydantic import BaseModel

from api.http.conditional import IfNoneMatch, matches
from api.http.deps import SessionsDep
from api.http.errors import Problem, may
from api.http.security import Reader
from api.jobs import service
from api.jobs.archive import Archive
from api.jobs.endpoints import JobId, open_job
from api.store import manifest
from api.store.accounts.audit import Caller
from api.store.engine import Sessions
from api.store.queue import jobs
from api.store.tables.jobs import Artifact, Job
from quantcore.report.values import Report

router = APIRouter(prefix="/jobs/{job_id}/artifacts", tags=["artifacts"], responses=may(404, 409))
archive_router = APIRouter(prefix="/jobs/{job_id}/artifacts.tar", tags=["artifacts"], responses=may(404, 409))
"""Beside ``router``, whose paths are the names of files."""


class FileOut(BaseModel):
    """A file of an artifact."""

    path: str
    bytes: int
    sha256: str


class FileList(BaseModel):
    """All files of an artifact, its manifest included."""

    data: list[FileOut]


def files_of(contents: manifest.Manifest) -> list[FileOut]:
    """Return the files that a manifest names, which itself is not among them."""
    return [FileOut(path=file.path, bytes=file.num_bytes, sha256=file.sha256) for file in contents.files.values()]


@router.get("")
def list_artifacts(job_id: JobId, caller: Reader, sessions: SessionsDep) -> FileList:
    """List the files of the result with their sizes and hashes."""
    artifact, _job = find_artifact(sessions, caller, job_id)
    contents = service.read_manifest(artifact)
    files = files_of(contents)
    size = contents.num_bytes - sum(file.bytes for file in files)
    return FileList(data=[*files, FileOut(path=manifest.MANIFEST, bytes=size, sha256=contents.sha256)])


class StoredFile(FileResponse):
    """A response with a file of an artifact, whatever is in it."""

    media_type = "application/octet-stream"


@router.get(
    "/{path:path}",
    response_class=StoredFile,
    responses={200: {"model": Report, "description": "The bytes of the file; the schema is that of report.json."}},
)
def download_artifact(
    job_id: JobId, path: str, caller: Reader, sessions: SessionsDep, if_none_match: IfNoneMatch = None
) -> Response:
    """Send a file, whole or in ranges. Its ETag is its SHA-256, and a file that no longer has that hash is not sent."""
    artifact, _job = find_artifact(sessions, caller, job_id)
    file_path, file = service.find_file(artifact, path)
    headers = {"ETag": f'"{file.sha256}"', "Cache-Control": "private, max-age=31536000, immutable"}
    if matches(if_none_match, headers["ETag"]):
        return Response(status_code=304, headers=headers)
    return StoredFile(file_path, headers=headers, filename=file_path.name)


@archive_router.get(
    "",
    response_class=StreamingResponse,
    responses={200: {"content": {"application/x-tar": {"schema": {"type": "string", "format": "binary"}}}}},
)
def download_all_artifacts(job_id: JobId, caller: Reader, sessions: SessionsDep) -> StreamingResponse:
    """Send all files of the result as one tar file. A damaged file ends it before its Content-Length."""
    archive = Archive.of(*find_artifact(sessions, caller, job_id))
    headers = {
        "Content-Disposition": f'attachment; filename="{archive.name}.tar"',
        "Content-Length": str(archive.num_bytes()),
        "Cache-Control": "private, no-store",
    }
    return StreamingResponse(archive.content(), media_type="application/x-tar", headers=headers)


def find_artifact(sessions: Sessions, caller: Caller, job_id: str) -> tuple[Artifact, Job]:
    """Return the result of a job, and the job. Raises Problem 404, and 409 for a job without a result."""
    with open_job(sessions, caller, job_id) as (session, job):
        artifact = jobs.find_artifact(session, job)
    if artifact is None:
        raise Problem(409, "not_ready", f"The job is {job.state}: only a succeeded job has artifacts.")
    return artifact, job
