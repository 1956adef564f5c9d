"""One trace from a client's request over the API and the worker to the engine, with whole processes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from api import tracing
from api.http.security import create_key
from api.settings import Settings
from api.store.engine import Sessions
from api.store.tables.jobs import Job
from quantcore.errors import ConfigError
from tests.support.faults import ApiProcess
from tests.support.service import WorkerProcess

TRACE, CLIENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def spans(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_from_the_request_to_the_engine(
    settings: Settings, sessions: Sessions, make_model: Callable[..., Path],
    start_worker: Callable[..., WorkerProcess], wait_for: Callable[..., Job], tmp_path: Path,
) -> None:  # fmt: skip
    file, environment = tmp_path / "spans.jsonl", tmp_path / "environment.json"
    traced = settings.model_copy(update={"trace_file": file})
    body = {"model": {"path": str(make_model(environment=str(environment)))}, "config": {"preset": "fp8"}}
    headers = {"Authorization": f"Bearer {create_key(sessions, 'k')}", "traceparent": f"00-{TRACE}-{CLIENT}-01"}
    with ApiProcess(traced, tmp_path / "api.log") as api:
        made = httpx2.post(f"{api.url}/v1/jobs", json=body, headers=headers, trust_env=False)
        assert made.status_code == 202, made.text
        seen = httpx2.get(f"{api.url}/v1/jobs/{made.json()['id']}", headers=headers, trust_env=False)
        assert seen.status_code == 200
        token = "t" * 43
        assert httpx2.get(f"{api.url}/v1/shared/{token}", trust_env=False).status_code == 404
        api.stop()
    assert "GET /v1/shared/{token}" in file.read_text() and token not in file.read_text()
    worker = start_worker(traced)
    wait_for(made.json()["id"], "succeeded")
    worker.drain()

    ours = [span for span in spans(file) if span["context"]["trace_id"] == f"0x{TRACE}"]
    names = {span["name"]: span for span in ours}
    assert set(names) == {"POST /v1/jobs", "GET /v1/jobs/{job_id}", "attempt", "engine.quantize", "engine.export"}
    request, attempt = names["POST /v1/jobs"], names["attempt"]
    assert request["parent_id"] == f"0x{CLIENT}"
    assert request["attributes"]["http.response.status_code"] == 202
    assert request["attributes"]["bitfoundry.request_id"] == made.headers["x-request-id"]
    assert attempt["parent_id"] == request["context"]["span_id"]
    assert attempt["attributes"]["bitfoundry.job_id"] == made.json()["id"]
    for phase in ("engine.quantize", "engine.export"):
        assert names[phase]["parent_id"] == attempt["context"]["span_id"]
    given = json.loads(environment.read_text())["TRACEPARENT"]
    assert given == f"00-{TRACE}-{attempt['context']['span_id'][2:]}-01"
    resources = {name: names[name]["resource"]["attributes"]["service.name"] for name in ("POST /v1/jobs", "attempt")}
    assert resources == {"POST /v1/jobs": "bitfoundry-api", "attempt": "bitfoundry-worker"}


def test_without_the_extra_it_says_so(settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.trace", None)
    tracing.configure(settings, "x")
    assert tracing.current() is None
    with tracing.span("nothing") as none:
        assert none is None
    with pytest.raises(ConfigError, match="not installed"):
        tracing.configure(settings.model_copy(update={"trace_file": tmp_path / "f"}), "x")
