"""The routes of uploads in parts: any part may be sent again, in any order, after any interruption."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool

from api.datasets import service, storage
from api.datasets.schemas import (
    MAX_PARTS,
    PART_BYTES,
    DatasetOut,
    PartOut,
    Sha256,
    UploadComplete,
    UploadCreate,
    UploadOut,
)
from api.datasets.service import no_such_upload
from api.datasets.storage import Received
from api.http.bounded import bounded_route
from api.http.deps import Context, ContextDep, SessionsDep
from api.http.disk_space import ROOM
from api.http.errors import Problem, may
from api.http.security import Reader, Writer
from api.http.strict_json import StrictJsonRoute
from api.http.turns import while_connected
from api.store.accounts import datasets, projects, uploads
from api.store.accounts.audit import Caller
from api.store.ids import new_id
from api.store.tables.jobs import Dataset, Upload, UploadPart

router = APIRouter(prefix="/uploads", tags=["datasets"], route_class=StrictJsonRoute)
parts_router = APIRouter(prefix="/uploads", tags=["datasets"], route_class=bounded_route(PART_BYTES))

UploadId = Annotated[str, Path(pattern="^upl_[0-9a-f]{32}$")]
Number = Annotated[int, Path(ge=1, le=MAX_PARTS)]
RAW_BODY = {"requestBody": {"required": True, "content": {"application/octet-stream": {"schema": {"type": "string"}}}}}


@router.post("", status_code=201, responses=may(422, 507), dependencies=[ROOM])
def create_upload(body: UploadCreate, caller: Writer, sessions: SessionsDep, response: Response) -> UploadOut:
    """Begin an upload. Then PUT its parts, in any order, and complete it."""
    format = service.read_format(body.filename)
    name = body.name or body.filename[:200]
    with sessions.begin() as session:
        projects.check_room(session, caller.project_id, max_uploads=1, max_datasets=1)
        owner = {"project_id": caller.project_id, "submitted_by": caller.key_id}
        new = Upload(id=new_id("upl"), **owner, name=name, format=format, text_column=body.column)
        upload = uploads.add(session, new)
    response.headers["Location"] = f"/v1/uploads/{upload.id}"
    return _show(upload, [])


@router.get("/{upload_id}", responses=may(404))
def get_upload(upload_id: UploadId, caller: Reader, sessions: SessionsDep) -> UploadOut:
    """Return an upload and its stored parts: after an interruption send only the others."""
    with sessions.begin() as session:
        return _show(
            _open(session, caller, upload_id), [PartOut.of(part) for part in uploads.parts(session, upload_id)]
        )


async def _receive(
    request: Request, upload_id: UploadId, number: Number, context: ContextDep
) -> AsyncIterator[Received]:
    """Yield the part's body in a file of its own, which is removed after the request unless it was moved."""
    with storage.receiving(context.settings, "part") as path:
        yield await storage.write(path, request.stream())


@parts_router.put(
    "/{upload_id}/parts/{number}", responses=may(404, 409, 413, 422, 507), dependencies=[ROOM], openapi_extra=RAW_BODY
)
def put_upload_part(
    upload_id: UploadId,
    number: Number,
    caller: Writer,
    sha256: Annotated[Sha256, Query()],
    context: ContextDep,
    part: Annotated[Received, Depends(_receive)],
) -> PartOut:
    """Store a part: its bytes are the body, their hash is ``sha256``. A part sent again replaces the old one."""
    if part.sha256 != sha256:
        raise _mismatch("The part", sha256, part.sha256)
    row = UploadPart(upload_id=upload_id, number=number, num_bytes=part.num_bytes, sha256=sha256)
    with context.sessions.begin() as session:
        upload = uploads.lock(session, caller.project_id, upload_id)
        if upload is None:
            raise no_such_upload()
        if upload.dataset_id is not None:
            raise _completed(upload)
        _check_size(uploads.parts(session, upload_id), row, context)
        path = storage.part_path(context.settings, upload_id, number, sha256)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        part.path.replace(path)
        before = uploads.put_part(session, upload, row)
    if before is not None and before.sha256 != sha256:
        storage.part_path(context.settings, upload_id, number, before.sha256).unlink(missing_ok=True)
    return PartOut.of(row)


@router.post("/{upload_id}/complete", status_code=201, responses=may(404, 409, 422, 507), dependencies=[ROOM])
async def complete_upload(
    upload_id: UploadId, body: UploadComplete, caller: Writer, context: ContextDep, request: Request, response: Response
) -> DatasetOut:
    """Join the parts, check every row, and make a dataset of them. A repeated call returns the same dataset."""
    dataset = await while_connected(request, _complete(upload_id, body.sha256, caller, context))
    response.headers["Location"] = f"/v1/datasets/{dataset.id}"
    return DatasetOut.of(dataset)


async def _complete(upload_id: str, sha256: str, caller: Caller, context: Context) -> Dataset:
    async with context.turns.take(caller.project_id):
        upload, parts, dataset = await run_in_threadpool(_find_complete, upload_id, sha256, caller, context)
        if dataset is not None:
            return dataset
        paths = [storage.part_path(context.settings, upload_id, part.number, part.sha256) for part in parts]
        with storage.receiving(context.settings, upload.format) as path:
            received = await storage.write(path, storage.chunks_of(paths))  # the hash reveals missing parts
            if received.sha256 != sha256:
                raise _mismatch("The whole file", sha256, received.sha256)
            attributes = (upload.name, upload.format, upload.text_column)
            dataset = await service.take_in(received, *attributes, caller, context, upload)
        await run_in_threadpool(storage.remove_parts, context.settings, upload_id)
        return dataset


def _find_complete(
    upload_id: str, sha256: str, caller: Caller, context: Context
) -> tuple[Upload, Sequence[UploadPart], Dataset | None]:
    """Return the upload, all its parts, and the dataset that it has become already. Raises Problem 404, 409."""
    with context.sessions.begin() as session:
        upload = _open(session, caller, upload_id)
        parts = uploads.parts(session, upload_id)
        dataset = datasets.find(session, caller.project_id, upload.dataset_id) if upload.dataset_id else None
    if dataset is not None and dataset.sha256 != sha256:
        raise _completed(upload)
    if dataset is None:
        _check_complete(parts)
    return upload, parts, dataset


@router.delete("/{upload_id}", status_code=204, responses=may(404))
def abandon_upload(upload_id: UploadId, caller: Writer, context: ContextDep) -> None:
    """Delete an upload and its parts. A dataset that it became stays."""
    with context.sessions.begin() as session:
        if uploads.lock(session, caller.project_id, upload_id) is None:
            raise no_such_upload()
        uploads.delete(session, upload_id)
    storage.remove_parts(context.settings, upload_id)


def _open(session: Session, caller: Caller, upload_id: str) -> Upload:
    upload = uploads.find(session, caller.project_id, upload_id)
    if upload is None:
        raise no_such_upload()
    return upload


def _show(upload: Upload, parts: list[PartOut]) -> UploadOut:
    shown = {name: getattr(upload, name) for name in ("id", "name", "format", "dataset_id", "created_at", "expires_at")}
    return UploadOut(part_bytes=PART_BYTES, parts=parts, **shown)


def _check_size(parts: Sequence[UploadPart], new: UploadPart, context: Context) -> None:
    most = context.settings.max_dataset_bytes
    others = sum(part.num_bytes for part in parts if part.number != new.number)
    if others + new.num_bytes > most:
        raise Problem(
            413,
            "dataset_too_large",
            f"With this part, the file has {others + new.num_bytes} bytes; the limit is {most}.",
            hint="Calibration needs a few megabytes at most: send a part of the data.",
        )


def _check_complete(parts: Sequence[UploadPart]) -> None:
    numbers = [part.number for part in parts]
    missing = sorted(set(range(1, max(numbers, default=1) + 1)) - set(numbers))
    if missing:
        raise Problem(
            409,
            "upload_incomplete",
            f"{len(missing)} part(s) are missing: {', '.join(map(str, missing[:20]))}.",
            hint="GET the upload to see which parts exist.",
        )


def _completed(upload: Upload) -> Problem:
    return Problem(
        409,
        "upload_completed",
        f"The upload is complete; its dataset is {upload.dataset_id}.",
        hint="Start a new one.",
    )


def _mismatch(what: str, expected: str, actual: str) -> Problem:
    return Problem(
        422,
        "checksum_mismatch",
        f"{what} has the SHA-256 {actual}, not {expected}.",
        hint="It was changed in transit: send it again.",
    )
