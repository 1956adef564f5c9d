"""Lists, counts and submissions over HTTP, on the real database: filters, keys that make a request count once."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import func, select, text

from api.store.engine import Sessions
from api.store.queue import control
from api.store.states import State
from api.store.tables.accounts import IdempotencyKey
from api.store.tables.jobs import Job

MakeModel = Callable[..., Path]
Submit = Callable[..., str]


def body(folder: Path, **changes: Any) -> dict[str, Any]:
    return {"model": {"path": str(folder)}, "config": {"preset": "int8_dynamic"}, **changes}


def do(sessions: Sessions, change: Callable[..., Any], *args: Any, **named: Any) -> Any:
    with sessions.begin() as session:
        return change(session, *args, **named)


def count(sessions: Sessions, table: Any) -> int:
    return do(sessions, lambda session: session.scalar(select(func.count()).select_from(table)))  # type: ignore[no-any-return]


# asked twice, done once


def test_the_same_key_makes_one_job(client: TestClient, make_model: MakeModel, sessions: Sessions) -> None:
    model = make_model()
    key = {"Idempotency-Key": "a-b-c"}
    first = client.post("/v1/jobs", json=body(model), headers=key)
    (model / "config.json").unlink()  # a replay needs no plan
    again = client.post("/v1/jobs", json=body(model), headers=key)
    assert (first.status_code, again.status_code) == (202, 202)
    assert again.json() == first.json()
    assert again.headers["location"] == first.headers["location"]
    assert (first.headers.get("idempotency-replayed"), again.headers["idempotency-replayed"]) == (None, "true")
    other = client.post("/v1/jobs", json=body(model, name="other"), headers=key)
    assert (other.status_code, other.json()["code"]) == (422, "idempotency_key_reused")
    assert count(sessions, Job) == 1
    do(sessions, control.cancel, first.json()["id"])
    client.delete(first.headers["location"])
    gone = client.post("/v1/jobs", json=body(model), headers=key)
    assert (gone.status_code, gone.json()["code"]) == (410, "job_deleted")


def test_a_key_is_one_clients_and_one_routes(client: TestClient, make_model: MakeModel, sessions: Sessions) -> None:
    from api.http.security import create_key

    asked = body(make_model())
    key = {"Idempotency-Key": "k"}
    first = client.post("/v1/jobs", json=asked, headers=key).json()
    other = {"Authorization": f"Bearer {create_key(sessions, 'other')}"}
    assert client.post("/v1/jobs", json=asked, headers=key | other).json()["id"] != first["id"]
    assert client.post(f"/v1/jobs/{first['id']}/clone", headers=key).json()["id"] != first["id"]
    assert count(sessions, Job) == 3
    for wrong in ("", "x" * 256, "caf\u00e9"):
        answer = client.post("/v1/jobs", json=asked, headers={"Idempotency-Key": wrong.encode()})
        assert (answer.status_code, answer.json()["errors"][0]["parameter"]) == (422, "idempotency-key")


def test_the_same_key_at_the_same_time_makes_one_job(
    client: TestClient, make_model: MakeModel, sessions: Sessions
) -> None:
    asked = body(make_model())
    start, ids = threading.Barrier(6), []

    def send() -> None:
        start.wait()
        answer = client.post("/v1/jobs", json=asked, headers={"Idempotency-Key": "race"})
        ids.append((answer.status_code, answer.json()["id"]))

    threads = [threading.Thread(target=send) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ids) == 6 and len(set(ids)) == 1 and ids[0][0] == 202
    assert count(sessions, Job) == 1


def test_keys_are_forgotten_after_a_day(client: TestClient, make_model: MakeModel, sessions: Sessions) -> None:
    from api.store.accounts import idempotency

    client.post("/v1/jobs", json=body(make_model()), headers={"Idempotency-Key": "k"})
    do(sessions, idempotency.purge)
    assert count(sessions, IdempotencyKey) == 1
    aged = text("UPDATE idempotency_key SET created_at = now() - interval '25 h'")
    do(sessions, lambda session: session.execute(aged))
    do(sessions, idempotency.purge)
    assert count(sessions, IdempotencyKey) == 0


def test_a_dry_run_plans_and_stores_nothing(client: TestClient, make_model: MakeModel, sessions: Sessions) -> None:
    asked = body(make_model(), name="n", priority=3)
    answer = client.post("/v1/jobs?dry_run=true", json=asked, headers={"Idempotency-Key": "k"})
    assert answer.status_code == 200
    plan = client.post("/v1/plans", json={name: asked[name] for name in ("model", "config")})
    measured = {"num_windows": 12, "seq_len": 512, "num_prompts": 4, "num_answers": 24, "tasks": [], "batch_size": 8}
    assert answer.json() == plan.json() | {"evaluation": measured}
    wrong = body(make_model("other"), config={"preset": "fp9"})
    assert client.post("/v1/jobs?dry_run=true", json=wrong).status_code == 422
    assert (count(sessions, Job), count(sessions, IdempotencyKey)) == (0, 0)


# lists


def ids(client: TestClient, query: dict[str, Any]) -> list[str]:
    answer = client.get("/v1/jobs", params=query)
    assert answer.status_code == 200, answer.text
    return [job["id"] for job in answer.json()["data"]]


def test_filters_of_the_list_and_of_the_counts(client: TestClient, sessions: Sessions, submit: Submit) -> None:
    hub = {"id": "org/Llama-3", "revision": "main", "sha": "a" * 40}
    one = submit("/models/tiny", name="50%_off", labels={"team": "x", "tier": "a=b"})
    two = submit("/models/tiny", name="5000 off", labels={"team": "x"})
    three = submit(model=hub, labels={"team": "y"}, preset="w4a16")
    do(sessions, control.cancel, two)
    middle = client.get(f"/v1/jobs/{two}").json()["created_at"]
    cases: list[tuple[dict[str, Any], list[str]]] = [
        ({"label": "team=x"}, [two, one]),
        ({"label": ["team=x", "tier=a=b"]}, [one]),
        ({"label": "team="}, []),
        ({"model": "/models/tiny"}, [two, one]),
        ({"model": "org/Llama-3"}, [three]),
        ({"q": "llama"}, [three]),
        ({"q": "W4A"}, [three]),
        ({"q": "50%_"}, [one]),
        ({"q": one[-9:]}, [one]),
        ({"created_after": middle}, [three]),
        ({"created_before": middle}, [one]),
        ({"label": "team=x", "state": "queued"}, [one]),
        ({"state": ["queued", "cancelled"], "q": "tiny"}, [two, one]),
    ]
    for query, wanted in cases:
        assert ids(client, query) == wanted, query
        summary = client.get("/v1/jobs/summary", params=query).json()
        assert summary["total"] == len(wanted) == sum(summary["by_state"].values())
    counts = client.get("/v1/jobs/summary").json()
    assert counts == {"total": 3, "by_state": dict.fromkeys(State, 0) | {"queued": 2, "cancelled": 1}}


@pytest.mark.parametrize(
    "query",
    [
        "label=team",
        "label==x",
        "q=",
        "q=a%00",
        "created_after=yesterday",
        "created_after=2026-01-01T00:00:00",
        "stat=x",
    ],
)
def test_bad_filters(query: str, client: TestClient) -> None:
    for path in ("/v1/jobs", "/v1/jobs/summary"):
        answer = client.get(f"{path}?{query}")
        assert answer.status_code == 422, answer.text
        assert answer.json()["errors"][0]["parameter"].startswith(query.partition("=")[0])


def test_links_and_cursors_keep_the_filter(client: TestClient, submit: Submit) -> None:
    wanted = [submit(labels={"a": "b"}) for _ in range(3)][::-1]
    submit()
    seen: list[str] = []
    url: str | None = "/v1/jobs?label=a%3Db&limit=1"
    while url:
        answer = client.get(url)
        seen += [job["id"] for job in answer.json()["data"]]
        url = answer.links["next"]["url"] if answer.links else None
    assert seen == wanted
    cursor = client.get("/v1/jobs?label=a%3Db&limit=1").json()["next_cursor"]
    assert client.get(f"/v1/jobs?label=a%3Dc&cursor={cursor}").json()["code"] == "invalid_cursor"


def test_a_list_that_has_not_changed_is_a_304(client: TestClient, submit: Submit) -> None:
    job_id = submit()
    tag = client.get("/v1/jobs").headers["etag"]
    answer = client.get("/v1/jobs", headers={"If-None-Match": tag})
    assert (answer.status_code, answer.content, answer.headers["etag"]) == (304, b"", tag)
    client.post(f"/v1/jobs/{job_id}/cancel")
    assert client.get("/v1/jobs", headers={"If-None-Match": tag}).status_code == 200
