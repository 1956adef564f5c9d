"""Writes logs as JSON lines with the ids of the request and of the job. ``BITFOUNDRY_LOG_FORMAT=json`` turns it on."""

from __future__ import annotations

import json
import logging
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Literal

TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
job_id: ContextVar[str | None] = ContextVar("job_id", default=None)


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object a line: control characters of a message cannot start another line."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "request_id": request_id.get(),
            "job_id": job_id.get(),
            "error": self.formatException(record.exc_info) if record.exc_info else None,
        }
        return json.dumps({name: value for name, value in line.items() if value is not None}, ensure_ascii=False)


def configure(format: Literal["text", "json"]) -> None:
    """Set up the logs that our processes write to stderr: ``info`` and above of ours, warnings of others."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if format == "json" else logging.Formatter(TEXT))
    logging.basicConfig(handlers=[handler])
    for ours in ("worker", "api"):
        logging.getLogger(ours).setLevel(logging.INFO)
