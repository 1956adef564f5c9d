"""Models over HTTP, on the real database: what became of each, which came from which, and what it costs to ask."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import text

from api.http.security import create_key
from api.lineage import schemas
from api.store.accounts import projects
from api.store.engine import Sessions
from api.store.queue import control, jobs, leases, lineage, publications
from api.store.tables.jobs import Project
from quantcore.config import presets
from quantcore.config.goal import Goal
from quantcore.config.quantization import Config, parse_config
from tests.support.reports import report

Submit = Callable[..., str]
Succeed = Callable[..., str]
HUB = {"id": "org/Llama-3", "revision": "main", "sha": "a" * 40}
ARTIFACT = "/data/artifacts/{}/" + "f" * 64


@pytest.fixture
def succeed(sessions: Sessions, submit: Submit) -> Succeed:
    """``succeed("/m", level="good", size=90, kl=0.1, name="n")``: the id of a job that has succeeded."""

    def succeed(path: str = "/m", *, level: str | None = None, size: int = 100, kl: float = 0.1, **asked: Any) -> str:
        summary = report(size=size, kl=kl)["summary"] | {"kl_stderr": 0.01}
        summary |= {"verdict": {"level": level, "reason": "x"}} if level else {}
        job_id = submit(path, priority=9, **asked)
        with sessions.begin() as session:
            lease = leases.claim(session, worker="w", lease_s=60)
            assert lease and lease.job_id == job_id
            folder = ARTIFACT.format(job_id)
            leases.succeed(session, lease, manifest_sha256="f" * 64, path=folder, num_bytes=1, summary=summary)
        return job_id

    return succeed


def models(client: TestClient, **query: Any) -> list[dict[str, Any]]:
    answer = client.get("/v1/models", params=query)
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["data"]
    return found


def results(client: TestClient, model: str) -> dict[str, Any]:
    answer = client.get("/v1/models/results", params={"model": model})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_one_entry_a_model_with_its_best_and_its_newest_result(
    client: TestClient, sessions: Sessions, submit: Submit, succeed: Succeed
) -> None:
    succeed("/m", level="good", size=49, kl=0.09)
    small = succeed("/m", level="good", size=50, kl=0.05)  # hardly larger, and nearer to the original
    succeed("/m", level="good", size=60, kl=0.01)
    broken = succeed("/m", level="broken", size=10)
    unmeasured = succeed("/m/other")
    waiting = submit(model=HUB)
    with sessions.begin() as session:
        control.cancel(session, submit("/m"))
    (mine, hub, other) = models(client)
    assert [each["name"] for each in (mine, hub, other)] == ["/m", "org/Llama-3", "/m/other"]
    assert (mine["num_jobs"], mine["num_results"]) == (5, 4)
    assert (mine["best"]["job_id"], mine["best"]["size_after_bytes"]) == (small, 50)
    assert (mine["newest"]["job_id"], mine["newest"]["verdict"]) == (broken, "broken")
    assert (hub["num_jobs"], hub["num_results"], hub["best"], hub["newest"]) == (1, 0, None, None)
    assert hub["active_at"] == client.get(f"/v1/jobs/{waiting}").json()["created_at"]
    assert (other["best"], other["newest"]["job_id"], other["newest"]["verdict"]) == (None, unmeasured, None)


def test_results_over_time_with_what_made_them(client: TestClient, sessions: Sessions, succeed: Succeed) -> None:
    config = parse_config(presets.resolve("w4a16").to_dict() | {"algo_config": [{"name": "gptq"}]})
    first = succeed(model=HUB, config=config, preset="w4a16", export=("awq", "quark"), name="one", level="good")
    goal = Goal(runtime="vllm", device="24GB")
    second = succeed(model=HUB, config=Config(global_quant_config={}), preset=None, goal=goal, cloned_from=first)
    with sessions.begin() as session:
        job = jobs.lock(session, first)
        assert job
        publications.ask(session, job, {"repo_id": "org/out", "hub_token": "team"})
        done = "UPDATE publication SET state = 'published', revision = 'r', url = 'https://x', finished_at = now()"
        session.execute(text(done))
    page = results(client, "org/Llama-3")
    (newest, oldest) = page["data"]
    assert (page["model"], page["derived_from"], page["has_more"]) == ("org/Llama-3", None, False)
    assert newest["recipe"]["goal"]["runtime"] == "vllm" and newest["recipe"]["algorithms"] is None
    assert (newest["job_id"], newest["cloned_from"], newest["publication"]) == (second, first, None)
    assert oldest == {
        "job_id": first,
        "name": "one",
        "finished_at": client.get(f"/v1/jobs/{first}").json()["finished_at"],
        "recipe": {"preset": "w4a16", "mix": None, "goal": None, "algorithms": ["gptq"]},
        "size_before_bytes": 38000,
        "size_after_bytes": 100,
        "verdict": "good",
        "kl_mean": 0.1,
        "kl_stderr": 0.01,
        "sha": "a" * 40,
        "export": ["awq", "quark"],
        "perplexity_ratio": 1.005,
        "cloned_from": None,
        "publication": {"state": "published", "url": "https://x"},
        "derived_models": [],
    }


def test_a_chain_is_walked_both_ways(client: TestClient, sessions: Sessions, submit: Submit, succeed: Succeed) -> None:
    first = succeed("/m")
    middle = ARTIFACT.format(first) + "/quark"
    second = succeed(middle)
    last = ARTIFACT.format(second)
    submit(last)
    near_miss = ARTIFACT.format(first) + "-not"
    submit(near_miss)
    down = results(client, "/m")["data"][0]["derived_models"]
    assert down == [middle]
    assert results(client, middle)["data"][0]["derived_models"] == [last]
    assert results(client, last) | {"data": []} == {
        "model": last, "derived_from": {"job_id": second, "model": middle}, "data": [], "has_more": False,
        "next_cursor": None,
    }  # fmt: skip
    parents = {each["name"]: each["derived_from"] for each in models(client)}
    assert parents == {
        "/m": None, near_miss: None, middle: {"job_id": first, "model": "/m"},
        last: {"job_id": second, "model": middle},
    }  # fmt: skip
    assert client.delete(f"/v1/jobs/{first}").status_code == 204
    assert results(client, middle)["derived_from"] is None


def test_nothing_of_another_project(client: TestClient, sessions: Sessions, submit: Submit, succeed: Succeed) -> None:
    first = succeed("/m")
    other = f"prj_{'1' * 32}"
    with sessions.begin() as session:
        session.add(Project(id=other, name="other"))
    inside = ARTIFACT.format(first)
    submit(inside, project_id=other)
    theirs = {"Authorization": f"Bearer {create_key(sessions, 'theirs', project_id=other)}"}
    (seen,) = client.get("/v1/models", headers=theirs).json()["data"]
    assert (seen["name"], seen["derived_from"]) == (inside, None)
    answer = client.get("/v1/models/results", params={"model": "/m"}, headers=theirs)
    assert (answer.status_code, answer.json()["code"]) == (404, "model_not_used")
    assert results(client, "/m")["data"][0]["derived_models"] == []
    assert len(models(client)) == 1


def test_pages_lead_to_all_of_them(client: TestClient, succeed: Succeed) -> None:
    wanted = [succeed("/m é/" + "x" * n) for n in range(3)][::-1]
    seen: list[str] = []
    url: str | None = "/v1/models?limit=1"
    while url:
        answer = client.get(url)
        seen += [each["newest"]["job_id"] for each in answer.json()["data"]]
        url = answer.links["next"]["url"] if answer.links else None
    assert seen == wanted
    more = [succeed("/m é/xx") for _ in range(2)]
    seen, url = [], "/v1/models/results?limit=1&model=/m é/xx"
    while url:
        answer = client.get(url)
        seen += [each["job_id"] for each in answer.json()["data"]]
        url = answer.links["next"]["url"] if answer.links else None
    assert seen == [*more[::-1], wanted[0]]
    cursor = client.get("/v1/models?limit=1").json()["next_cursor"]
    for query in ({"model": "/m é/xx", "cursor": cursor}, {"model": "/m é/xx", "cursor": "nonsense"}):
        assert client.get("/v1/models/results", params=query).json()["code"] == "invalid_cursor"


def test_a_page_that_has_not_changed_is_a_304(client: TestClient, submit: Submit) -> None:
    job_id = submit("/m")
    for url in ("/v1/models", "/v1/models/results?model=/m"):
        tag = client.get(url).headers["etag"]
        assert client.get(url, headers={"If-None-Match": tag}).status_code == 304
        client.post(f"/v1/jobs/{job_id}/cancel")
        is_list = url == "/v1/models"  # the end of a job is its model's activity, and no result
        assert client.get(url, headers={"If-None-Match": tag}).status_code == (200 if is_list else 304)


@pytest.mark.parametrize("query", ["", "model=", "model=a%00", "model=/m&limit=0", "model=/m&what=x"])
def test_bad_questions(query: str, client: TestClient) -> None:
    answer = client.get(f"/v1/models/results?{query}")
    assert answer.status_code == 422, answer.text


def test_the_examples_are_true() -> None:
    for schema in (schemas.ModelPage, schemas.ResultPage):
        (example,) = schema.model_config["json_schema_extra"]["examples"]  # type: ignore[index, call-overload]
        assert schema.model_validate(example).model_dump(mode="json") == example


def test_the_indexes_answer(sessions: Sessions, submit: Submit, succeed: Succeed) -> None:
    """With few rows the planner reads them all, whatever the indexes are: here it may not."""
    first = succeed("/m")
    submit(ARTIFACT.format(first))
    asked = {"project_id": projects.DEFAULT, "limit": 5, "after_at": None, "after_id": None, "job_ids": [first]}
    with sessions.begin() as session:
        session.execute(text("SET LOCAL enable_seqscan = off"))
        session.execute(text("SET LOCAL enable_bitmapscan = off"))
        plans = {}
        for query in (lineage._MODELS, lineage._CHILDREN):
            names = {name: asked[name] for name in query._bindparams}
            plans[query] = "\n".join(session.scalars(text(f"EXPLAIN {query.text}"), names))
    of_one_model = r"ix_job_results on job \S+ .*\n +Index Cond: \(\(project_id = [^)]+\) AND \(COALESCE\("
    assert len(re.findall(of_one_model, plans[lineage._MODELS])) == 2, plans[lineage._MODELS]
    assert "ix_job_parent" in plans[lineage._CHILDREN]
