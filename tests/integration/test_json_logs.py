"""Logs as JSON: every line is one object, and says which request or job it is about."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
from pydantic import SecretStr

from api import json_log
from api.json_log import JsonFormatter
from api.settings import Settings
from api.store.engine import Sessions
from tests.support.faults import ApiProcess
from tests.support.service import WorkerProcess
from tests.support.waiting import wait_until


def lines(log: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in log.read_text().splitlines() if line.strip()]


@pytest.mark.slow
def test_a_request_and_a_job_are_named(
    settings: Settings, sessions: Sessions, make_model: Callable[..., Path], submit: Callable[..., str],
    start_worker: Callable[..., WorkerProcess], wait_for: Callable[..., object], tmp_path: Path,
) -> None:  # fmt: skip
    in_json = settings.model_copy(update={"log_format": "json"})
    away = in_json.model_copy(update={"database_url": SecretStr("postgresql+psycopg://x@/x?host=/nowhere")})
    with ApiProcess(away, tmp_path / "api.log") as api:
        answer = httpx2.get(
            f"{api.url}/v1/jobs", headers={"Authorization": f"Bearer bf_{'0' * 12}_{'A' * 43}"}, trust_env=False
        )
        assert answer.status_code == 503
        api.stop()
    of_request = [line for line in lines(tmp_path / "api.log") if line.get("request_id")]
    assert {line["request_id"] for line in of_request} == {answer.json()["request_id"]}
    assert "database" in of_request[0]["message"] and of_request[0]["level"] == "warning"

    worker = start_worker(in_json)
    job_id = submit(make_model(mode="fails"))
    wait_for(job_id, "failed")

    def about() -> list[dict[str, Any]]:
        said = [line for line in worker.log.read_text().splitlines(keepends=True) if line.startswith("{")]
        entries = [json.loads(line) for line in said if line.endswith("\n")]
        return [entry for entry in entries if entry.get("job_id") == job_id]

    wait_until(lambda: any("nonfinite_weights" in entry["message"] for entry in about()), note=about)
    worker.drain()


def test_a_line_cannot_be_forged() -> None:
    record = logging.LogRecord("api", logging.INFO, "f", 1, 'a\n{"level": "error"} %s', ("\x1b[31m",), None)
    json_log.job_id.set("job_1")
    text = JsonFormatter().format(record)
    json_log.job_id.set(None)
    assert "\n" not in text and "\x1b" not in text
    assert json.loads(text)["job_id"] == "job_1"
