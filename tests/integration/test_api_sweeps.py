"""Sweeps: a matrix of values becomes jobs, all or none, that are looked at and cancelled together."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import func, select, update

from api.http.errors import Problem
from api.jobs import models
from api.store.engine import Sessions
from api.store.queue import jobs, leases
from api.store.tables.jobs import Job, Outbox, Sweep
from api.sweeps.matrix import combinations, fill_in
from tests.support.reports import report

MakeModel = Callable[..., Path]


def asked(folder: Path, matrix: dict[str, list[Any]] | None = None, **changes: Any) -> dict[str, Any]:
    axes = {"/config/preset": ["fp8", "int8_dynamic"], "/calibration/num_samples": [4, 8, 16]}
    job = {"model": {"path": str(folder)}, "labels": {"team": "x"}, **changes}
    return {"name": "both", "job": job, "matrix": axes if matrix is None else matrix}


def num_jobs(sessions: Sessions) -> int:
    with sessions.begin() as session:
        return session.scalar(select(func.count()).select_from(Job)) or 0


def test_every_combination_is_one_job(client: TestClient, make_model: MakeModel, sessions: Sessions) -> None:
    body = asked(make_model(), priority=7)
    answer = client.post("/v1/sweeps", json=body)
    assert answer.status_code == 202, answer.text
    sweep = answer.json()
    assert answer.headers["location"] == f"/v1/sweeps/{sweep['id']}"
    assert (sweep["name"], sweep["total"], sweep["by_state"]["queued"]) == ("both", 6, 6)
    assert list(sweep["matrix"].items()) == list(body["matrix"].items())
    made = [(job["preset"], job["calibration"]["num_samples"]) for job in sweep["jobs"]]
    assert made == [(preset, number) for preset in ("fp8", "int8_dynamic") for number in (4, 8, 16)]
    assert sweep["jobs"][1]["sweep_values"] == {"/config/preset": "fp8", "/calibration/num_samples": 8}
    assert {(job["sweep_id"], job["priority"]) for job in sweep["jobs"]} == {(sweep["id"], 7)}
    assert [job["queue_position"] for job in sweep["jobs"]] == [1, 2, 3, 4, 5, 6]
    assert client.get(answer.headers["location"]).json() == sweep
    listed = client.get("/v1/jobs", params={"sweep": sweep["id"], "limit": 100}).json()["data"]
    assert [job["id"] for job in listed[::-1]] == [job["id"] for job in sweep["jobs"]]
    client.post("/v1/jobs", json={"model": body["job"]["model"], "config": {"preset": "fp8"}})
    assert client.get("/v1/jobs/summary", params={"sweep": sweep["id"]}).json()["total"] == 6
    assert client.get(f"/v1/sweeps/swp_{'0' * 32}").json()["code"] == "sweep_not_found"


def test_one_job_that_cannot_work_refuses_all(client: TestClient, make_model: MakeModel, sessions: Sessions) -> None:
    matrix = {"/config/preset": ["fp8", "fp9"], "/calibration/num_samples": [4, "x"], "/priority": [1]}
    answer = client.post("/v1/sweeps", json=asked(make_model(), matrix))
    assert answer.status_code == 422, answer.text
    problem = answer.json()
    assert problem["code"] == "invalid_sweep"
    assert problem["detail"].startswith("1 of 4 jobs of this sweep are valid")
    places = [(error["pointer"], error["values"]) for error in problem["errors"]]
    assert places == [
        ("#/job/calibration/num_samples", {"/calibration/num_samples": "x", "/priority": 1}),
        ("#/job/config/preset", {"/config/preset": "fp9", "/priority": 1}),
    ]
    assert num_jobs(sessions) == 0


def test_each_fault_of_a_sweep_is_told_once_with_the_nearest_name(client: TestClient, make_model: MakeModel) -> None:
    """A wrong field hides no other fault."""
    matrix: dict[str, list[Any]] = {
        "/config/preset": ["fp8", "int8dynamic"],
        "/calibration/num_samples": [4, 8],
        "/calibration/samples": [1],
    }
    problem = client.post("/v1/sweeps", json=asked(make_model(), matrix)).json()
    assert problem["detail"] == (
        "0 of 4 jobs of this sweep are valid. Nothing was queued. There are 2 different faults."
    )
    field, preset = problem["errors"]
    assert (field["pointer"], field["hint"]) == ("#/job/calibration/samples", "Did you mean 'num_samples'?")
    assert field["values"] == {"/calibration/samples": 1} and problem["hint"] == field["hint"]
    assert preset["detail"] == "Unknown preset 'int8dynamic'." and "Did you mean 'int8_dynamic'?" in preset["hint"]
    assert preset["values"] == {"/config/preset": "int8dynamic", "/calibration/samples": 1}
    wrong_scheme = asked(make_model("other"), {"/priority": [1, 2]}, config="fp8", calibration={"seed": "x"})
    places = [error["pointer"] for error in client.post("/v1/sweeps", json=wrong_scheme).json()["errors"]]
    assert sorted(places) == ["#/job/calibration/seed", "#/job/config"], "no fault that the others make"


def test_a_fault_in_the_middle_leaves_nothing(
    client: TestClient, make_model: MakeModel, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, calls = jobs.submit, []

    def fail_at_the_fourth(*args: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            raise Problem(500, "internal_error", "on purpose")
        return submit(*args, **named)

    monkeypatch.setattr(jobs, "submit", fail_at_the_fourth)
    assert client.post("/v1/sweeps", json=asked(make_model())).status_code == 500
    assert len(calls) == 4
    with sessions.begin() as session:
        for table in (Job, Sweep, Outbox):
            assert session.scalar(select(func.count()).select_from(table)) == 0


def test_a_model_is_looked_at_once(client: TestClient, make_model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, seen = models.plan, []
    monkeypatch.setattr(models, "plan", lambda model, *rest: seen.append(model) or plan(model, *rest))
    assert client.post("/v1/sweeps", json=asked(make_model())).status_code == 202
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("matrix", "code", "pointer"),
    [
        ({}, "invalid_request", "#/matrix"),
        ({"/priority": []}, "invalid_request", "#/matrix/~1priority"),
        ({"/nonsense/x": [1]}, "invalid_pointer", "#/matrix/~1nonsense~1x/[key]"),
        ({"priority": [1]}, "invalid_pointer", "#/matrix/priority/[key]"),
        ({"/labels/team/deeper": [1]}, "invalid_pointer", "#/matrix/~1labels~1team~1deeper"),
        ({"/priority": [1, 2, 1]}, "invalid_sweep", "#/matrix/~1priority"),
        ({"/priority": [*range(10)], "/calibration/seed": [*range(11)]}, "sweep_too_large", "#/matrix"),
    ],
)
def test_bad_matrices(
    matrix: dict[str, Any], code: str, pointer: str, client: TestClient, make_model: MakeModel, sessions: Sessions
) -> None:
    answer = client.post("/v1/sweeps", json=asked(make_model(), matrix, config={"preset": "fp8"}))
    assert (answer.status_code, answer.json()["code"]) == (422, code), answer.text
    assert answer.json()["errors"][0]["pointer"] == pointer
    assert num_jobs(sessions) == 0


def test_cancel_ends_all_that_have_not_ended(client: TestClient, make_model: MakeModel, sessions: Sessions) -> None:
    sweep = client.post("/v1/sweeps", json=asked(make_model())).json()
    other = client.post("/v1/jobs", json={"model": sweep["jobs"][0]["model"], "config": {"preset": "fp8"}}).json()
    with sessions.begin() as session:
        ended, running = (leases.claim(session, worker="w", lease_s=60) for _ in range(2))
        assert ended and running
        leases.fail(session, ended, leases.Failure("bad", "bad"), retry_base_s=1)
    tag = client.get(f"/v1/sweeps/{sweep['id']}").headers["etag"]
    for _ in range(2):
        answer = client.post(f"/v1/sweeps/{sweep['id']}/cancel")
        assert answer.status_code == 202
        counts = {state: number for state, number in answer.json()["by_state"].items() if number}
        assert counts == {"failed": 1, "cancelling": 1, "cancelled": 4}
    assert client.get(f"/v1/jobs/{other['id']}").json()["state"] == "queued"
    url, seen = f"/v1/sweeps/{sweep['id']}", client.get(f"/v1/sweeps/{sweep['id']}", headers={"If-None-Match": tag})
    assert seen.status_code == 200
    assert client.get(url, headers={"If-None-Match": seen.headers["etag"]}).status_code == 304
    assert client.post(f"/v1/sweeps/swp_{'0' * 32}/cancel").status_code == 404


def test_the_same_key_makes_one_sweep(client: TestClient, make_model: MakeModel, sessions: Sessions) -> None:
    body, key = asked(make_model()), {"Idempotency-Key": "s"}
    first, again = (client.post("/v1/sweeps", json=body, headers=key) for _ in range(2))
    assert first.json() == again.json()
    assert again.headers["idempotency-replayed"] == "true"
    assert num_jobs(sessions) == 6


def test_values_go_where_their_pointers_say() -> None:
    job = {"a": {"b": 1}, "list": [1, {"x": 2}]}
    values = {"/a/b": 9, "/new/deep": [1], "/list/1/x": 3, "/a/sl~1ash~0": 4}
    filled = fill_in(job, values)
    assert filled == {"a": {"b": 9, "sl/ash~": 4}, "list": [1, {"x": 3}], "new": {"deep": [1]}}
    assert job == {"a": {"b": 1}, "list": [1, {"x": 2}]}
    assert list(combinations({"/a": [1, 2], "/b": [3]})) == [{"/a": 1, "/b": 3}, {"/a": 2, "/b": 3}]
    for wrong in ("/list/7", "/list/x", "/a/b/c"):
        with pytest.raises(Problem):
            fill_in(job, {wrong: 0})


def test_sweeps_are_listed_with_their_axes_states_and_best_result(
    client: TestClient, make_model: MakeModel, sessions: Sessions
) -> None:
    folder = make_model()
    first, second = (
        client.post("/v1/sweeps", json=asked(folder, {"/config/preset": presets})).json()["id"]
        for presets in (["fp8"], ["fp8", "int8_dynamic", "w4a16"])
    )
    with sessions.begin() as session:
        for size, kl in ((100, 0.02), (103, 0.01), (200, 0.001)):  # the last is too large for its small divergence
            session.execute(
                update(Job).where(Job.sweep_id == second).values(priority=9)
            )  # claimed before those of the other sweep
            lease = leases.claim(session, worker="w", lease_s=60)
            assert lease
            summary = report(size=size, kl=kl)["summary"] | {"verdict": {"level": "good", "reason": "x"}}
            leases.succeed(session, lease, manifest_sha256="f" * 64, path=lease.job_id, num_bytes=1, summary=summary)
    page = client.get("/v1/sweeps", params={"limit": 1}).json()
    (newest,) = page["data"]
    assert (newest["id"], newest["name"], newest["model"], newest["total"]) == (second, "both", str(folder), 3)
    assert newest["axes"] == {"/config/preset": ["fp8", "int8_dynamic", "w4a16"]}
    assert (newest["by_state"]["succeeded"], newest["by_state"]["queued"]) == (3, 0)
    assert (newest["best"]["size_after_bytes"], newest["best"]["kl_mean"]) == (103, 0.01)
    assert page["has_more"]
    client.post("/v1/jobs", json={"model": {"path": str(folder)}, "config": {"preset": "fp8"}})
    listed = client.get("/v1/jobs", params={"one_per_sweep": True}).json()["data"]
    assert [job["sweep_id"] for job in listed] == [None, second, first]
    assert listed[1]["sweep_values"] == {"/config/preset": "w4a16"}  # the newest of the three
    rest = client.get("/v1/sweeps", params={"cursor": page["next_cursor"]}).json()
    assert [(sweep["id"], sweep["best"]) for sweep in rest["data"]] == [(first, None)] and not rest["has_more"]
