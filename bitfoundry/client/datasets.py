"""Calls for datasets: `client.datasets`. A large file is uploaded in parts and can be resumed."""

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from bitfoundry.client.answers import Dataset, PreviewRow
from bitfoundry.client.transport import Form, Transport
from bitfoundry.errors import BitfoundryError

SMALL_BYTES = 8 << 20
PART_BYTES = 8 << 20
READING_S = 400.0  # the service checks every row before it answers


class Datasets:
    """Calls for uploaded data files. Every method raises ApiError, whose `code` is the service's stable code."""

    def __init__(self, service: Transport) -> None:
        self._service = service

    def upload(
        self,
        file: str | Path,
        *,
        name: str | None = None,
        column: str | None = None,
        upload_id: str | None = None,
        on_bytes: Callable[[int], None] | None = None,
        on_begin: Callable[[str], None] | None = None,
    ) -> Dataset:
        """Upload a .jsonl, .json, .csv, .parquet or .txt file, or one of these as .gz; `column` holds its text.

        A large file is sent in parts. `on_begin` receives the id of the upload: pass it as `upload_id`, with the same
        file, to resume after a break. Parts that have arrived are not sent again.
        """
        path = Path(file)
        try:
            size = path.stat().st_size
            fields = {key: value for key, value in (("name", name), ("column", column)) if value is not None}
            if upload_id is None and size <= SMALL_BYTES:
                form = Form(fields, {"file": (path.name, path.read_bytes())})
                answer = self._service.send("POST", "/v1/datasets", body=form, timeout_s=READING_S)
                return Dataset.model_validate_json(answer.content)
            return self._upload_parts(path, fields, upload_id, on_bytes, on_begin)
        except OSError as error:
            raise BitfoundryError(f"{path} cannot be read: {error.strerror}") from error

    def list(self, *, page_size: int = 50) -> Iterator[Dataset]:
        """Yield datasets, newest first, loaded page by page."""
        query: dict[str, Any] = {"limit": page_size}
        while True:
            page = self._service.send("GET", "/v1/datasets", query=query).json()
            yield from (Dataset.model_validate(row) for row in page["data"])
            if not page["has_more"]:
                return
            query["cursor"] = page["next_cursor"]

    def get(self, dataset_id: str) -> Dataset:
        """Return a dataset. Raises ApiError `dataset_not_found`."""
        return Dataset.model_validate_json(self._service.send("GET", _path(dataset_id)).content)

    def preview(self, dataset_id: str, *, rows: int = 5) -> "tuple[PreviewRow, ...]":
        """Return the first rows."""
        answer = self._service.send("GET", f"{_path(dataset_id)}/preview", query={"rows": rows}, timeout_s=READING_S)
        return tuple(PreviewRow.model_validate(row) for row in answer.json()["rows"])

    def statistics(
        self, dataset_id: str, *, model: str | Path | None = None, revision: str = "main", seq_len: int = 512
    ) -> dict[str, Any]:
        """Return the numbers of rows, empty rows and duplicates, and the lengths of rows.

        With a `model` (a folder on the service's machine, or a Hub id) also `tokens`: the lengths in its tokens."""
        query = {} if model is None else {"model": str(model), "revision": revision, "seq_len": seq_len}
        answer = self._service.send("GET", f"{_path(dataset_id)}/statistics", query=query, timeout_s=READING_S)
        return dict(answer.json())

    def delete(self, dataset_id: str) -> None:
        """Delete a dataset. Raises ApiError `dataset_in_use` while a job that has not ended needs it."""
        self._service.send("DELETE", _path(dataset_id))

    def _upload_parts(
        self,
        path: Path,
        fields: dict[str, str],
        upload_id: str | None,
        on_bytes: Callable[[int], None] | None,
        on_begin: Callable[[str], None] | None,
    ) -> Dataset:
        if upload_id is None:
            body = {"filename": path.name, **fields}
            upload_id = str(self._service.send("POST", "/v1/uploads", body=body).json()["id"])
        if on_begin is not None:
            on_begin(upload_id)
        address = f"/v1/uploads/{quote(upload_id, safe='')}"
        uploaded = {part["number"]: part["sha256"] for part in self._service.send("GET", address).json()["parts"]}
        whole = hashlib.sha256()
        with path.open("rb") as file:
            for number, part in enumerate(iter(lambda: file.read(PART_BYTES), b""), start=1):
                whole.update(part)
                sha256 = hashlib.sha256(part).hexdigest()
                if uploaded.get(number) != sha256:
                    place = f"{address}/parts/{number}"
                    self._service.send("PUT", place, query={"sha256": sha256}, body=part, repeat=True)
                if on_bytes is not None:
                    on_bytes(len(part))
        body = {"sha256": whole.hexdigest()}
        answer = self._service.send("POST", f"{address}/complete", body=body, repeat=True, timeout_s=READING_S)
        return Dataset.model_validate_json(answer.content)


def _path(dataset_id: str) -> str:
    return f"/v1/datasets/{quote(dataset_id, safe='')}"
