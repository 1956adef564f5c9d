"""The request and response bodies of datasets."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from api.jobs.schemas import RequestBody, Text
from api.store.tables.jobs import Dataset, UploadPart

PART_BYTES = 64 << 20
MAX_PARTS = 10_000

Column = Annotated[Text, Field(description="Column with the text or the chat. [default: text, else messages]")]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$", description="SHA-256 in lower-case hex.")]

DATASET: dict[str, Any] = {
    "id": "dst_01a200dc5edf7cfaa251b183f95c582d",
    "name": "support chats",
    "format": "jsonl.gz",
    "bytes": 120_031,
    "sha256": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "columns": ["id", "messages"],
    "column": "messages",
    "statistics": {
        "num_rows": 512,
        "num_empty": 0,
        "num_duplicates": 3,
        "num_chats": 512,
        "chars": {
            "sum": 523_111,
            "min": 40,
            "median": 900,
            "max": 4000,
            "histogram": [{"from": 512, "to": 1024, "count": 300}],
        },
    },
    "created_at": "2026-11-22T08:00:00Z",
}


class LengthsOut(BaseModel):
    """The lengths of the rows that have text; ``histogram`` counts those with ``from`` <= length < ``to``."""

    sum: int
    min: int
    median: int
    max: int
    histogram: list[dict[str, int]]


class StatisticsOut(BaseModel):
    """The statistics of all rows: rows without text, repeated texts, chats, and lengths in characters."""

    num_rows: int
    num_empty: int
    num_duplicates: int
    num_chats: int
    chars: LengthsOut


class TokensOut(BaseModel):
    """The rows in tokens of a model, with chats in its template.

    ``num_longer`` rows have more than ``seq_len`` tokens; ``num_beyond`` tokens would be lost if rows were cut short.
    A job loses nothing: it joins rows and cuts ``num_windows`` windows. Without ``is_whole`` only the first rows count.
    """

    num_rows: int
    is_whole: bool
    seq_len: int
    num_longer: int
    num_beyond: int
    num_windows: int
    tokens: LengthsOut


class DatasetStatisticsOut(StatisticsOut):
    """The statistics from the upload of a dataset; with a model also its tokens."""

    tokens: TokensOut | None


class DatasetOut(BaseModel):
    """An uploaded data file. A job takes it as ``calibration.source``; ``column`` is its default there."""

    model_config = ConfigDict(json_schema_extra={"examples": [DATASET]})

    id: str
    name: str
    format: str
    bytes: int
    sha256: str
    columns: list[str]
    column: str
    statistics: StatisticsOut
    created_at: datetime

    @classmethod
    def of(cls, dataset: Dataset) -> DatasetOut:
        return cls(
            id=dataset.id,
            name=dataset.name,
            format=dataset.format,
            bytes=dataset.num_bytes,
            sha256=dataset.sha256,
            columns=dataset.columns,
            column=dataset.text_column,
            statistics=StatisticsOut.model_validate(dataset.statistics),
            created_at=dataset.created_at,
        )


class DatasetPage(BaseModel):
    """A page of the list of datasets, newest first; ``next_cursor`` asks for the next page."""

    data: list[DatasetOut]
    has_more: bool
    next_cursor: str | None


class PreviewRow(BaseModel):
    """A row: its place in the file, and its values, with long ones cut short."""

    place: str
    values: dict[str, Any]


class PreviewOut(BaseModel):
    """The first rows of a dataset."""

    rows: list[PreviewRow]


class UploadCreate(RequestBody):
    """The request body for an upload in parts. The suffix of ``filename`` gives the format: ``.jsonl.gz``."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"filename": "chats.jsonl.gz", "name": "support chats"}]})

    filename: Annotated[str, Field(min_length=1, max_length=255)]
    name: Text | None = None
    column: Column | None = None


class UploadComplete(RequestBody):
    """The request body for completing an upload: the hash of the whole file."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"sha256": DATASET["sha256"]}]})

    sha256: Sha256


class PartOut(BaseModel):
    """A part that is stored safely."""

    number: int
    bytes: int
    sha256: str

    @classmethod
    def of(cls, part: UploadPart) -> PartOut:
        return cls(number=part.number, bytes=part.num_bytes, sha256=part.sha256)


class UploadOut(BaseModel):
    """An upload and its stored parts. Parts count from 1 and have at most ``part_bytes``.

    The upload is deleted at ``expires_at``, which every part postpones. ``dataset_id``: the dataset that it became.
    """

    id: str
    name: str
    format: str
    part_bytes: int
    parts: list[PartOut]
    dataset_id: str | None
    created_at: datetime
    expires_at: datetime
