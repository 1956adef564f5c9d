"""Requests to the API, and readers of its answers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.testclient import TestClient

from api.store.accounts import projects

OPEN_ROUTES = {"/healthz/live", "/healthz/ready", "/openapi.json", "/docs", "/v1/sign-in/oidc"}
SHARED_ROUTES = {"/v1/shared/{token}", "/v1/shared/{token}/report.json"}
"""Routes that a link opens, without a key."""
DOORS = {("POST", "/v1/sign-in"), ("POST", "/v1/sign-in/oidc"), ("POST", "/v1/sign-in/oidc/callback")}
"""Routes that sign in: the key, or what stands for it, is in the body."""
JOB = "job_" + "0" * 32
PLACES = {"job_id": JOB, "sweep_id": "swp_" + "0" * 32, "path": "model.safetensors"} | {
    "dataset_id": "dst_" + "0" * 32,
    "chat_id": "chat_" + "0" * 32,
    "upload_id": "upl_" + "0" * 32,
    "number": "1",
    "project_id": "prj_" + "1" * 32,
    "key_id": "0" * 12,
    "member_id": "mem_" + "0" * 32,
    "name": "team",
    "worker_id": "host:1:0",
    "webhook_id": "whk_" + "0" * 32,
    "delivery_id": "msg_" + "0" * 32,
    "share_id": "shr_" + "0" * 32,
    "version": "1",
    "alias": "candidate",
    "request_id": "rqs_" + "0" * 32,
    "token": "0" * 43,
    "run_id": "run_" + "0" * 32,
}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def walk(app: FastAPI) -> Iterator[tuple[str, str]]:
    """Yield (method, path) of everything that the OpenAPI document names."""
    for path, methods in app.openapi()["paths"].items():
        for method in methods:
            yield method.upper(), path


def body(folder: Path, **changes: Any) -> dict[str, Any]:
    return {"model": {"path": str(folder)}, "config": {"preset": "int8_dynamic"}, **changes}


def limit(client: TestClient, **quotas: Any) -> None:
    answer = client.patch(f"/v1/projects/{projects.DEFAULT}", json=quotas)
    assert answer.status_code == 200, answer.text


def refused_for(answer: Any, quota: str) -> bool:
    problem = answer.json()
    assert (answer.status_code, problem["code"], problem["errors"][0]["parameter"]) == (429, "quota_exceeded", quota)
    return int(answer.headers["retry-after"]) > 0


def post(client: TestClient, model: Path, **fields: Any) -> str:
    answer = client.post("/v1/jobs", json={"model": {"path": str(model)}, "config": {"preset": "fp8"}} | fields)
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])
