"""The OpenAPI document says what the service does: every route, its errors, examples that are true."""

import re
from typing import Any

import jsonschema
import pytest
from fastapi.testclient import TestClient

from api.jobs import examples
from api.jobs.schemas import JobOut
from api.main import create_app
from api.settings import Settings
from tests.support.api import DOORS, OPEN_ROUTES, SHARED_ROUTES


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    settings = Settings(
        database_url="postgresql+psycopg://nobody@/nothing",
        broker_url="redis://nowhere",
        data_dir=tmp_path_factory.mktemp("data"),
    )  # type: ignore[arg-type]
    return create_app(settings).openapi()


def operations(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        f"{method.upper()} {path}": operation
        for path, item in document["paths"].items()
        for method, operation in item.items()
        if path.startswith("/v1/")
    }


JOB = "/v1/jobs/{job_id}"
CHAT = "/v1/chats/{chat_id}"
SWEEP = "/v1/sweeps/{sweep_id}"
DATASET = "/v1/datasets/{dataset_id}"
UPLOAD = "/v1/uploads/{upload_id}"
FILES = {"POST /v1/datasets": "multipart/form-data", f"PUT {UPLOAD}/parts/{{number}}": "application/octet-stream"}
PROJECT = "/v1/projects/{project_id}"
KEY = "/v1/keys/{key_id}"
MEMBER = "/v1/members/{member_id}"
WORKER = "/v1/workers/{worker_id}"
WEBHOOK = "/v1/webhooks/{webhook_id}"
REGISTERED = "/v1/registry/models/{name}"
REQUEST = "/v1/registry/requests/{request_id}"


def test_the_routes_are_these(document: dict[str, Any]) -> None:
    """A route that comes or goes is a change of the contract: it belongs into the changelog, too."""
    assert set(operations(document)) == {
        "POST /v1/plans", "GET /v1/presets", "GET /v1/config-schema", "GET /v1/models/inspect",
        "GET /v1/models", "GET /v1/models/results", "GET /v1/models/folders",
        "POST /v1/jobs", "GET /v1/jobs", "GET /v1/jobs/summary",
        "GET /v1/jobs/labels", "GET /v1/jobs/groups",
        f"GET {JOB}", f"PATCH {JOB}", f"DELETE {JOB}", f"POST {JOB}/clone",
        *(f"POST {JOB}/{action}" for action in ("cancel", "pause", "resume", "retry")),
        f"GET {JOB}/events", f"GET {JOB}/events/stream", f"GET {JOB}/logs", f"GET {JOB}/logs/download",
        f"GET {JOB}/logs/stream", f"GET {JOB}/artifacts", f"GET {JOB}/artifacts/{{path}}", f"POST {JOB}/publish",
        f"GET {JOB}/artifacts.tar", f"GET {JOB}/change",
        f"POST {JOB}/shares", f"GET {JOB}/shares", f"DELETE {JOB}/shares/{{share_id}}",
        "GET /v1/shared/{token}", "GET /v1/shared/{token}/report.json",
        f"POST {JOB}/chat", f"GET {JOB}/chat", f"GET {CHAT}", f"DELETE {CHAT}", f"POST {CHAT}/turns",
        f"GET {CHAT}/stream",
        "GET /v1/registry/protected-aliases", "PUT /v1/registry/protected-aliases",
        "GET /v1/registry/models", f"GET {REGISTERED}", f"DELETE {REGISTERED}",
        f"GET {REGISTERED}/versions", f"POST {REGISTERED}/versions",
        f"GET {REGISTERED}/versions/{{version}}", f"DELETE {REGISTERED}/versions/{{version}}",
        f"PUT {REGISTERED}/aliases/{{alias}}", f"DELETE {REGISTERED}/aliases/{{alias}}",
        f"POST {REGISTERED}/requests", "GET /v1/registry/requests", f"GET {REQUEST}",
        *(f"POST {REQUEST}/{decision}" for decision in ("approve", "refuse", "withdraw")),
        "POST /v1/sweeps", "GET /v1/sweeps", f"GET {SWEEP}", f"POST {SWEEP}/cancel",
        "POST /v1/datasets", "GET /v1/datasets", f"GET {DATASET}", f"DELETE {DATASET}",
        f"GET {DATASET}/preview", f"GET {DATASET}/statistics",
        "POST /v1/uploads", f"GET {UPLOAD}", f"DELETE {UPLOAD}",
        f"PUT {UPLOAD}/parts/{{number}}", f"POST {UPLOAD}/complete",
        "GET /v1/projects",
        "GET /v1/usage", "POST /v1/projects", f"GET {PROJECT}", f"PATCH {PROJECT}",
        "GET /v1/keys", "POST /v1/keys", "GET /v1/keys/self", f"GET {KEY}", f"POST {KEY}/rotate", f"POST {KEY}/revoke",
        "GET /v1/members", "POST /v1/members", f"PATCH {MEMBER}", f"DELETE {MEMBER}",
        "GET /v1/webhooks", "POST /v1/webhooks", f"GET {WEBHOOK}", f"PATCH {WEBHOOK}", f"DELETE {WEBHOOK}",
        f"POST {WEBHOOK}/test", f"GET {WEBHOOK}/deliveries", f"POST {WEBHOOK}/deliveries/{{delivery_id}}/redeliver",
        "GET /v1/workers", f"GET {WORKER}", f"POST {WORKER}/drain", f"POST {WORKER}/uncordon",
        "POST /v1/sign-in", "GET /v1/sign-in", "DELETE /v1/sign-in", "POST /v1/sign-in/project",
        "GET /v1/sign-in/oidc", "POST /v1/sign-in/oidc", "POST /v1/sign-in/oidc/callback",
        "GET /v1/retention", "PUT /v1/retention", "POST /v1/retention/preview", "POST /v1/retention/run",
        "GET /v1/local-runs", "GET /v1/local-runs/{run_id}/report",
        "GET /v1/audit", "GET /v1/hub-tokens", "PUT /v1/hub-tokens/{name}", "DELETE /v1/hub-tokens/{name}",
    }  # fmt: skip


def test_every_route_says_what_it_does_and_what_can_go_wrong(document: dict[str, Any]) -> None:
    for name, operation in operations(document).items():
        assert operation["description"], name
        assert len(operation["tags"]) == 1, name
        responses = operation["responses"]
        assert "application/problem+json" in responses["default"]["content"], name
        if "{" in name and not name.startswith("PUT "):  # which makes what is not there
            assert "404" in responses, name
        if any(f"/{action}" in name for action in ("cancel", "pause", "resume", "retry")) and JOB in name:
            assert "409" in responses, name
        for status, response in responses.items():
            if status.startswith("4"):
                [(kind, body)] = response["content"].items()
                assert kind == "application/problem+json", (name, status)
                assert body["example"]["status"] == int(status), name
                jsonschema.validate(body["example"], body["schema"])


def test_operation_ids_name_a_method_of_a_generated_client(document: dict[str, Any]) -> None:
    """Verb and noun, as ``submit_job``. A name that changes breaks the clients that were generated."""
    ids = [operation["operationId"] for methods in document["paths"].values() for operation in methods.values()]
    assert len(ids) > 70 and len(set(ids)) == len(ids)
    assert [name for name in ids if not re.fullmatch("[a-z]+(_[a-z]+){1,3}", name)] == []
    found = operations(document)
    names = {name: found[name]["operationId"] for name in ("POST /v1/jobs", "GET /v1/jobs", f"GET {JOB}")}
    assert list(names.values()) == ["submit_job", "list_jobs", "get_job"]


def test_operations_name_the_keys_that_open_them(document: dict[str, Any]) -> None:
    schemes = document["components"]["securitySchemes"]
    assert {(each["type"], each.get("scheme"), each.get("in")) for each in schemes.values()} == {
        ("http", "bearer", None),
        ("apiKey", None, "cookie"),
    }
    either = [{"apiKey": []}, {"signIn": []}]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            is_open = path in OPEN_ROUTES | SHARED_ROUTES or (method.upper(), path) in DOORS
            assert operation.get("security") == (None if is_open else either), (method, path)
            assert "authorization" not in {each["name"] for each in operation.get("parameters", ())}, (method, path)


def test_the_docs_list_every_operation_and_load_nothing(client: TestClient) -> None:
    page = client.get("/docs", headers={"Authorization": ""})
    assert page.status_code == 200
    for methods in client.get("/openapi.json").json()["paths"].values():
        for operation in methods.values():
            assert f"<code>{operation['operationId']}</code>" in page.text
    assert "<script" not in page.text and "src=" not in page.text and "://" not in page.text
    assert "default-src 'none'" in page.headers["content-security-policy"]


def test_conditional_requests_are_documented(document: dict[str, Any]) -> None:
    found = operations(document)
    for name in ("GET /v1/jobs", f"GET {JOB}", f"GET {SWEEP}"):
        assert "304" in found[name]["responses"], name
        assert "if-none-match" in {each["name"] for each in found[name]["parameters"]}, name
    assert {"412", "428"} <= found[f"PATCH {JOB}"]["responses"].keys()
    for name in ("POST /v1/jobs", f"POST {JOB}/clone", "POST /v1/sweeps"):
        assert "idempotency-key" in {each["name"] for each in found[name]["parameters"]}, name
    assert "204" in found[f"GET {JOB}/events/stream"]["responses"]
    assert "text/event-stream" in found[f"GET {JOB}/events/stream"]["responses"]["200"]["content"]


def name_of(schema: dict[str, Any]) -> str:
    """Also of a body that may be left out."""
    return str(schema.get("anyOf", [schema])[0].get("$ref", "")).rpartition("/")[2]


def test_every_body_has_an_example_that_fits(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    bodies = {
        name_of(operation["requestBody"]["content"]["application/json"]["schema"])
        for name, operation in operations(document).items()
        if "requestBody" in operation and name not in FILES
    }
    jobs = {"PlanCreate", "JobCreate", "JobPatch", "JobClone", "SweepCreate", "UploadCreate", "UploadComplete"}
    assert bodies == jobs | {
        "PublishTo",
        "ProjectCreate", "ProjectPatch", "KeyCreate", "KeyRotate", "HubTokenPut", "WebhookCreate", "WebhookPatch",
        "MemberCreate", "MemberPatch", "SignInCreate", "PolicyIn", "ChatCreate", "ChatPrompt",
        "ShareCreate", "VersionCreate", "AliasPut", "AliasRequestCreate", "Decision", "ProtectedAliases",
        "OidcCallback", "ProjectChange",
    }  # fmt: skip
    for name, kind in FILES.items():
        assert set(operations(document)[name]["requestBody"]["content"]) == {kind}
    for name in bodies:
        for example in schemas[name]["examples"]:
            jsonschema.validate(example, {"$ref": f"#/components/schemas/{name}", "components": {"schemas": schemas}})


def test_the_example_of_an_answer_is_one() -> None:
    shown = JobOut.model_validate(examples.JOB)
    assert shown.model_dump(mode="json") == examples.JOB
    assert examples.JOB.keys() == JobOut.model_fields.keys()
