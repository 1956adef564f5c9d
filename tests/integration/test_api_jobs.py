"""Jobs over HTTP, with the real database and no worker."""

import base64
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import text

from api.jobs.stored_types import PlanOut
from api.store.engine import Sessions
from api.store.queue import leases
from api.store.queue.events import NewEvent
from api.store.tables.jobs import Job
from quantcore.config import presets
from quantcore.config.recipes import recipe
from tests.support.api import body
from tests.support.service import write_safetensors

MakeModel = Callable[..., Path]


def test_submit_answers_with_the_whole_job(client: TestClient, make_model: MakeModel) -> None:
    model = make_model()
    labels = {"team": "x", "emoji": "é"}
    answer = client.post("/v1/jobs", json=body(model, name="first", labels=labels, export=["quark"]))
    assert answer.status_code == 202
    job = answer.json()
    assert answer.headers["location"] == f"/v1/jobs/{job['id']}"
    assert int(answer.headers["retry-after"]) > 0
    assert re.fullmatch(r"job_[0-9a-f]{12}7[0-9a-f]{19}", job["id"])
    varying = {"id": "", "config": "", "created_at": "", "state_times": "", "needs_memory_bytes": 0}
    assert job | varying | {"submitted_by": job["submitted_by"]["name"]} == {
        "id": "",
        "name": "first",
        "labels": labels,
        "priority": 5,
        "limits": {"max_runtime_s": None, "max_pending_s": None},
        "state": "queued",
        "state_times": "",
        "waiting_reason": "no live worker",
        "allocation": None,
        "queue_position": 1,
        "phase": None,
        "progress": None,
        "eta_s": None,
        "phases": [],
        "model": {"path": str(model)},
        "preset": "int8_dynamic",
        "config": "",
        "calibration": {"source": "builtin", "num_samples": 32, "seq_len": 512, "seed": 0},
        "export": ["quark"],
        "max_shard_size": "5GB",
        "gate": "warn",
        "nodes": 1,
        "evaluation": {
            "num_windows": 12,
            "seq_len": 512,
            "num_prompts": 4,
            "num_answers": 24,
            "tasks": [],
            "batch_size": 8,
        },
        "file2file": False,
        "mix": None,
        "goal": None,
        "shard_blocks": None,
        "publish": None,
        "publication": None,
        "submitted_by": "test",
        "needs_memory_bytes": 0,
        "avoid_host": None,
        "progress_kept_until": None,
        "cloned_from": None,
        "sweep_id": None,
        "sweep_values": None,
        "attempt": 0,
        "created_at": "",
        "started_at": None,
        "finished_at": None,
        "error": None,
        "summary": None,
        "artifact": None,
        "cancel_requested": False,
        "pinned": False,
    }
    assert job["config"]["global_quant_config"]["weight"]["dtype"] == "int8"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]+Z", job["created_at"])
    assert client.get(answer.headers["location"]).json() == job


def test_a_whole_config_is_accepted(client: TestClient, make_model: MakeModel) -> None:
    spec = {"dtype": "uint4", "qscheme": "per_group", "group_size": 32, "symmetric": False, "ch_axis": 1}
    config = {"global_quant_config": {"weight": spec}, "exclude": ["*q_proj0"]}
    answer = client.post("/v1/jobs", json=body(make_model(), config=config))
    assert answer.status_code == 202, answer.text
    assert answer.json()["preset"] is None
    assert answer.json()["config"]["global_quant_config"]["weight"]["group_size"] == 32


def test_the_order_of_patterns_is_kept(client: TestClient, make_model: MakeModel, sessions: Sessions) -> None:
    """The first pattern that matches counts, and Postgres' JSONB would sort them by length."""
    kept: dict[str, Any] = {"weight": None}
    patterns = ["*zzzzzzzzz*", "*layers.1*", "*w*", "*b*"]
    config = {**FULL, "layer_quant_config": dict.fromkeys(patterns, kept)}
    answer = client.post("/v1/jobs", json=body(make_model(), config=config))
    assert answer.status_code == 202, answer.text
    job = client.get(answer.headers["location"]).json()
    assert list(job["config"]["layer_quant_config"]) == patterns
    with sessions.begin() as session:
        lease = leases.claim(session, worker="w", lease_s=60)
    assert lease
    assert list(lease.spec.config.layer_quant_config) == patterns


FULL = {"global_quant_config": {"weight": {"dtype": "int8"}}}
GROUP_48 = {"weight": {"dtype": "uint4", "qscheme": "per_group", "group_size": 48, "symmetric": False}}
DEEP: Any = {}
for _ in range(40):
    DEEP = {"x": DEEP}

# what is wrong: (changes to a good body, code, pointer or None)
REFUSED: dict[str, tuple[dict[str, Any], str, str | None]] = {
    "unknown field": ({"modle": 1}, "unknown_field", "#/modle"),
    "no model": ({"model": None}, "invalid_request", "#/model"),
    "no path and no id": ({"model": {}}, "invalid_model", "#/model"),
    "path and id": ({"model": {"path": "/x", "id": "a/b"}}, "invalid_model", "#/model"),
    "unknown model field": ({"model": {"path": "/x", "token": "hf_secret"}}, "unknown_field", "#/model/token"),
    "relative path": ({"model": {"path": "models/tiny"}}, "invalid_model", "#/model"),
    "path outside the roots": ({"model": {"path": "/etc"}}, "path_not_allowed", "#/model/path"),
    "path climbs out": ({"model": {"path": "{root}/../../etc"}}, "path_not_allowed", "#/model/path"),
    "path through a link": ({"model": {"path": "{root}/link"}}, "path_not_allowed", "#/model/path"),
    "no such folder": ({"model": {"path": "{root}/none"}}, "model_not_found", None),
    "hub id climbs": ({"model": {"id": "../x"}}, "invalid_model_id", "#/model"),
    "hub id with a scheme": ({"model": {"id": "file://x"}}, "invalid_model_id", "#/model"),
    "hub id too deep": ({"model": {"id": "a/b/c"}}, "invalid_model_id", "#/model"),
    "hub id too long": ({"model": {"id": "a/" + "b" * 300}}, "invalid_model_id", "#/model"),
    "bad revision": ({"model": {"id": "a/b", "revision": "../x y"}}, "invalid_request", "#/model/revision"),
    "config is a list": ({"config": []}, "invalid_request", "#/config"),
    "unknown preset": ({"config": {"preset": "fp9"}}, "unknown_preset", "#/config/preset"),
    "preset is a number": ({"config": {"preset": 8}}, "invalid_config", "#/config/preset"),
    "preset and more": ({"config": {"preset": "fp8", "algo": 1}}, "invalid_config", "#/config/algo"),
    "unknown config field": ({"config": {**FULL, "bits": 3}}, "invalid_config", "#/config/bits"),
    "unknown dtype": (
        {"config": {"global_quant_config": {"weight": {"dtype": "int7"}}}},
        "invalid_config",
        "#/config/global_quant_config/weight/dtype",
    ),
    "string for a number": (
        {"config": {"global_quant_config": {"weight": {"dtype": "int4", "group_size": "128"}}}},
        "invalid_config",
        "#/config/global_quant_config/weight/group_size",
    ),
    "group size does not divide": (
        {"config": {"global_quant_config": GROUP_48}},
        "group_size_not_dividing",
        "#/config/global_quant_config/weight/group_size",
    ),
    "preset's group size does not divide": (
        {"config": {"preset": "w4a16", "group_size": 48}},
        "group_size_not_dividing",
        "#/config/group_size",
    ),
    "group size without groups": (
        {"config": {"preset": "fp8", "group_size": 64}},
        "invalid_config",
        "#/config/group_size",
    ),
    "nothing left": ({"config": {"preset": "fp8", "exclude": ["*"]}}, "nothing_to_quantize", "#/config/exclude"),
    "unknown export": ({"export": ["gguf9"]}, "unknown_export_format", None),
    "file to file with a scheme that learns": (
        {"config": {"preset": "fp8"}, "file2file": True},
        "needs_calibration",
        "#/file2file",
    ),
    "file to file with an algorithm": (
        {"config": {**FULL, "algo_config": [{"name": "gptq"}]}, "file2file": True},
        "needs_calibration",
        "#/file2file",
    ),
    "shards with an algorithm that needs whole blocks": (
        {"config": {**FULL, "algo_config": [{"name": "autoround"}]}, "shard_blocks": True},
        "unsupported_config",
        "#/shard_blocks",
    ),
    "a word for yes": ({"file2file": "yes"}, "invalid_request", "#/file2file"),
    "tasks of a model that is not run": (
        {"file2file": True, "evaluation": {"tasks": ["piqa"]}},
        "unsupported_config",
        "#/evaluation/tasks",
    ),
    "tasks of a model that is not measured": (
        {"evaluation": {"num_windows": 0, "tasks": ["piqa"]}},
        "unsupported_config",
        "#/evaluation/tasks",
    ),
    "an unknown dtype of a KV cache": (
        {"evaluation": {"kv_cache_dtypes": ["fp8", "q8"]}},
        "unknown_cache_dtype",
        "#/evaluation/kv_cache_dtypes",
    ),
    "shards of what is not run": ({"file2file": True, "shard_blocks": True}, "unsupported_config", "#/shard_blocks"),
    "tasks in a folder of the machine": (
        {"evaluation": {"include_path": "/etc"}},
        "unknown_field",
        "#/evaluation/include_path",
    ),
    "a task that is a path": ({"evaluation": {"tasks": ["../x"]}}, "invalid_request", "#/evaluation/tasks/0"),
    "short windows": ({"evaluation": {"seq_len": 8}}, "invalid_request", "#/evaluation/seq_len"),
    "a stride without a text": ({"evaluation": {"stride": 64}}, "invalid_request", "#/evaluation"),
    "a column without a text": ({"evaluation": {"column": "a"}}, "invalid_request", "#/evaluation"),
    "text to measure on outside": (
        {"evaluation": {"source": "/etc/passwd"}},
        "path_not_allowed",
        "#/evaluation/source",
    ),
    "no text to measure on": (
        {"evaluation": {"source": "{root}/none.txt"}},
        "calibration_not_found",
        "#/evaluation/source",
    ),
    "no dataset to measure on": (
        {"evaluation": {"source": "dst_" + "0" * 32}},
        "dataset_not_found",
        "#/evaluation/source",
    ),
    "a gate of another kind": ({"gate": "maybe"}, "invalid_request", "#/gate"),
    "shards of no size": ({"max_shard_size": "5 apples"}, "invalid_max_shard_size", "#/max_shard_size"),
    "a mix of one": ({"mix": {"schemes": ["fp8"], "max_bits": 5}}, "invalid_schemes", "#/mix/schemes"),
    "a mix of twice the same": (
        {"mix": {"schemes": ["fp8", "fp8"], "max_bits": 5}},
        "invalid_schemes",
        "#/mix/schemes",
    ),
    "a mix without a budget": ({"mix": {"schemes": ["fp8", "w4a16"]}}, "invalid_budget", "#/mix"),
    "a mix with two budgets": (
        {"mix": {"schemes": ["fp8", "w4a16"], "max_bits": 5, "max_size": "1MB"}},
        "invalid_budget",
        "#/mix",
    ),
    "a mix of no size": (
        {"mix": {"schemes": ["fp8", "w4a16"], "max_size": "plenty"}},
        "invalid_max_size",
        "#/mix/max_size",
    ),
    "a mix of less than nothing": ({"mix": {"schemes": ["fp8", "w4a16"], "max_bits": -1}}, "invalid_budget", "#/mix"),
    "a word for bits": ({"mix": {"schemes": ["fp8", "w4a16"], "max_bits": "5"}}, "invalid_request", "#/mix/max_bits"),
    "an unknown scheme in a mix": (
        {"config": {}, "mix": {"schemes": ["fp8", "keep", "w5"], "max_bits": 5}},
        "unknown_preset",
        "#/mix/schemes/2",
    ),
    "a scheme of a mix that does not fit": (
        {"config": {}, "mix": {"schemes": ["fp8", "gguf_q4_k"], "max_bits": 5}},
        "group_size_not_dividing",
        "#/mix/schemes/1",
    ),
    "a mix in a format of one scheme": (
        {"config": {}, "mix": {"schemes": ["uint4_wo_32", "w4a16"], "max_bits": 5}, "export": ["awq"]},
        "incompatible_export",
        "#/export",
    ),
    "a mix and a preset": (
        {"mix": {"schemes": ["fp8", "w4a16"], "max_bits": 5}},
        "unsupported_config",
        "#/config/preset",
    ),
    "a mix and a scheme": (
        {"config": FULL, "mix": {"schemes": ["fp8", "w4a16"], "max_bits": 5}},
        "unsupported_config",
        "#/config/global_quant_config",
    ),
    "a mix and layers to exclude": (
        {"config": {"exclude": ["*"]}, "mix": {"schemes": ["fp8", "w4a16"], "max_bits": 5}},
        "unsupported_config",
        "#/config/exclude",
    ),
    "a mix from file to file": (
        {"config": {}, "mix": {"schemes": ["w4a16", "int8_weight_only"], "max_bits": 5}, "file2file": True},
        "unsupported_config",
        "#/file2file",
    ),
    "no config and no mix": ({"config": {}}, "invalid_config", "#/config/global_quant_config"),
    "export twice": ({"export": ["quark", "quark"]}, "invalid_export", "#/export"),
    "seq_len above the model's": ({"calibration": {"seq_len": 2048}}, "seq_len_too_long", "#/calibration/seq_len"),
    "no samples": ({"calibration": {"num_samples": 0}}, "invalid_request", "#/calibration/num_samples"),
    "true for a number": ({"calibration": {"num_samples": True}}, "invalid_request", "#/calibration/num_samples"),
    "huge number": ({"calibration": {"seed": 2**63}}, "invalid_request", "#/calibration/seed"),
    "calibration file outside": (
        {"calibration": {"source": "/etc/passwd"}},
        "path_not_allowed",
        "#/calibration/source",
    ),
    "no calibration file": (
        {"calibration": {"source": "{root}/none.txt"}},
        "calibration_not_found",
        "#/calibration/source",
    ),
    "direction mark in the name": ({"name": "a\u202eb"}, "invalid_text", "#/name"),
    "line break in a label": ({"labels": {"a": "b\nc"}}, "invalid_text", "#/labels/a"),
    "number as label": ({"labels": {"a": 1}}, "invalid_request", "#/labels/a"),
    "too many labels": ({"labels": {str(n): "" for n in range(17)}}, "invalid_request", "#/labels"),
    "empty name": ({"name": ""}, "invalid_request", "#/name"),
}


def test_bad_requests_are_told_what_is_wrong(
    subtests: pytest.Subtests, client: TestClient, make_model: MakeModel, sessions: Sessions
) -> None:
    model = make_model()
    (model.parent / "link").symlink_to("/usr")
    for case, (changes, code, pointer) in REFUSED.items():
        with subtests.test(case):
            request = body(model, **fill_in(changes, str(model.parent)))
            for path in ("/v1/jobs", "/v1/plans"):
                if path == "/v1/plans" and changes.keys() & {"name", "labels", "max_shard_size", "gate", "evaluation"}:
                    continue
                answer = client.post(path, json=request)
                assert answer.status_code == 422, answer.text
                assert answer.headers["content-type"] == "application/problem+json"
                problem = answer.json()
                assert problem["code"] == code, problem
                assert problem["type"] == f"urn:bitfoundry:error:{code}"
                assert (problem["status"], problem["instance"]) == (422, path)
                assert problem["request_id"] == answer.headers["x-request-id"]
                assert problem["detail"]
                if pointer is not None:
                    assert [error["pointer"] for error in problem["errors"]] == [pointer]
                assert "hf_secret" not in answer.text
                assert "Traceback" not in answer.text
            with sessions.begin() as session:
                assert session.scalar(text("SELECT count(*) FROM job")) == 0


def fill_in(value: Any, root: str) -> Any:
    if isinstance(value, dict):
        return {name: fill_in(member, root) for name, member in value.items()}
    return value.replace("{root}", root) if isinstance(value, str) else value


def test_errors_list_what_is_allowed(client: TestClient, make_model: MakeModel) -> None:
    model = make_model()
    problem = client.post("/v1/jobs", json=body(model, config={"preset": "fp9"})).json()
    assert "int8_dynamic" in problem["errors"][0]["allowed"]
    problem = client.post("/v1/jobs", json=body(model, config={"global_quant_config": GROUP_48})).json()
    assert "32" in problem["errors"][0]["allowed"]
    assert "q_proj" in problem["detail"]


@pytest.mark.parametrize(
    ("content", "status", "code"),
    [
        (b"{", 400, "invalid_json"),
        (b'{"name": NaN}', 400, "invalid_json"),
        (b'{"name": -Infinity}', 400, "invalid_json"),
        (b'{"name": "a", "name": "b"}', 400, "invalid_json"),
        (b'{"name": "a\\u0000b"}', 400, "invalid_json"),
        (b'{"name": "\\ud800"}', 400, "invalid_json"),
        (b'{"name": "\xff"}', 400, "invalid_json"),
        (b"[" * 100_000, 400, "invalid_json"),
        (b"[" * 40 + b"]" * 40, 400, "invalid_json"),
        (b"[]", 422, "invalid_request"),
        (b"", 422, "missing_field"),
        (b'{"name": "' + b"a" * 1_100_000 + b'"}', 413, "body_too_large"),
    ],
    ids=lambda value: None if isinstance(value, str | int) else value[:12].decode("latin-1") + f" {len(value)}",
)
def test_bodies_that_are_not_plain_json(content: bytes, status: int, code: str, client: TestClient) -> None:
    answer = client.post("/v1/jobs", content=content, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["code"]) == (status, code), answer.text
    assert answer.headers["content-type"] == "application/problem+json"


def test_other_types_methods_and_paths(client: TestClient) -> None:
    answer = client.post("/v1/jobs", content=b"{}", headers={"Content-Type": "text/plain"})
    assert (answer.status_code, answer.json()["code"]) == (415, "unsupported_media_type")
    answer = client.put("/v1/jobs", json={})
    assert (answer.status_code, answer.json()["code"]) == (405, "method_not_allowed")
    answer = client.get("/v1/none")
    assert (answer.status_code, answer.json()["code"]) == (404, "not_found")
    for bad in ("job_1", "1", "job_" + "g" * 32, "job_%00"):
        assert client.get(f"/v1/jobs/{bad}").status_code in (404, 422), bad
    answer = client.get("/v1/jobs/job_" + "0" * 32)
    assert (answer.status_code, answer.json()["code"]) == (404, "job_not_found")


def test_the_order_of_the_queue_is_that_of_the_positions(client: TestClient, submit: Callable[..., str]) -> None:
    """The dashboard had the newest hundred of two hundred, so #2 to #106 were missing."""
    made = [submit(priority=priority) for priority in (5, 5, 9, 0, 5)]
    wanted = [made[2], made[0], made[1], made[4], made[3]]
    query: dict[str, Any] = {"order": "queue", "state": "queued", "limit": 2}
    found: list[str] = []
    positions: list[int] = []
    for _ in range(3):
        page = client.get("/v1/jobs", params=query).json()
        found += [job["id"] for job in page["data"]]
        positions += [job["queue_position"] for job in page["data"]]
        if page["has_more"]:
            submit(priority=9)  # moves no job to another page
            query["cursor"] = page["next_cursor"]
    assert found == wanted and not page["has_more"] and positions[0] == 1
    at, _, filtered = json.loads(base64.b64decode(query["cursor"] + "=="))
    forged = base64.b64encode(json.dumps([at, "x job_1", filtered]).encode()).decode().rstrip("=")
    for cursor, order in ((query["cursor"], "newest"), (forged, "queue")):
        refused = client.get("/v1/jobs", params=query | {"order": order, "cursor": cursor})
        assert (refused.status_code, refused.json()["code"]) == (422, "invalid_cursor")


def test_jobs_are_listed_by_their_numbers_with_those_without_any_last(
    client: TestClient, submit: Callable[..., str], sessions: Sessions
) -> None:
    kl = [0.25, None, 1e-7, 0.0585271, 12.0, 0.0585271]
    made = [submit() for _ in kl]
    with sessions.begin() as session:
        for number, (job_id, value) in enumerate(zip(made, kl, strict=True)):
            summary = {"kl_mean": value, "size_after_bytes": 100 - number, "perplexity_ratio": 1 + number / 7}
            session.get_one(Job, job_id).summary = None if value is None else summary
    without = made.pop(1)
    by_kl = [made[1], *sorted((made[2], made[4])), made[0], made[3]]
    wanted = {
        "kl": [*by_kl, without],
        "size": [*made[::-1], without],
        "perplexity": [*made, without],
        "oldest": [made[0], without, *made[1:]],
    }
    for order, ids in wanted.items():
        query: dict[str, Any] = {"order": order, "limit": 2}
        found: list[str] = []
        for _ in range(3):
            page = client.get("/v1/jobs", params=query).json()
            found += [job["id"] for job in page["data"]]
            query["cursor"] = page["next_cursor"]
        assert found == ids and not page["has_more"], order
    cursor = client.get("/v1/jobs", params={"order": "kl", "limit": 2}).json()["next_cursor"]
    at, place, filtered = json.loads(base64.b64decode(cursor + "=="))
    for bad in (place.replace("0.", "0.0.", 1), f"nan {made[0]}", f"1e999999 {made[0]}", made[0]):
        forged = base64.b64encode(json.dumps([at, bad, filtered]).encode()).decode().rstrip("=")
        refused = client.get("/v1/jobs", params={"order": "kl", "cursor": forged})
        assert (refused.status_code, refused.json()["code"]) == (422, "invalid_cursor"), bad


def test_jobs_are_counted_by_the_values_of_a_label(client: TestClient, submit: Callable[..., str]) -> None:
    submit(labels={"team": "search", "a.b": "1"})
    cancelled = submit(labels={"team": "search", "Größe": "7 B"})
    submit()
    submit(labels={"team": "chat"})
    client.post(f"/v1/jobs/{cancelled}/cancel")
    names = client.get("/v1/jobs/labels").json()
    assert [(each["name"], each["num_jobs"]) for each in names["data"]] == [("team", 3), ("Größe", 1), ("a.b", 1)]
    groups = client.get("/v1/jobs/groups", params={"by": "team"}).json()
    assert [(each["value"], each["total"]) for each in groups["data"]] == [("chat", 1), (None, 1), ("search", 2)]
    search = groups["data"][2]
    assert {state: n for state, n in search["by_state"].items() if n} == {"queued": 1, "cancelled": 1}
    assert search["newest_at"] == client.get(f"/v1/jobs/{cancelled}").json()["created_at"]
    assert not names["has_more"] and not groups["has_more"]
    filtered = client.get("/v1/jobs/groups", params={"by": "a.b", "state": "cancelled"}).json()
    assert [(each["value"], each["total"]) for each in filtered["data"]] == [(None, 1)]
    assert client.get("/v1/jobs/groups").status_code == 422
    for number in range(101):
        submit(labels={"run": str(number)})
    groups = client.get("/v1/jobs/groups", params={"by": "run"}).json()
    assert groups["has_more"] and [each["value"] for each in groups["data"]] == [str(n) for n in range(100, 0, -1)]


def test_list_pages_do_not_shift(client: TestClient, make_model: MakeModel, submit: Callable[..., str]) -> None:
    ids = [submit() for _ in range(7)][::-1]
    seen: list[str] = []
    url: str | None = "/v1/jobs?limit=3"
    while url:
        answer = client.get(url)
        page = answer.json()
        seen += [job["id"] for job in page["data"]]
        submit()  # arrives meanwhile; must not push an old one onto the next page again
        assert page["has_more"] == (page["next_cursor"] is not None)
        link = re.fullmatch(r'<(.*)>; rel="next"', answer.headers.get("link", ""))
        assert (link is not None) == page["has_more"]
        url = link[1] if link else None
    assert seen == ids


def test_list_filters_by_state(client: TestClient, submit: Callable[..., str], sessions: Sessions) -> None:
    first, second = submit(), submit()
    with sessions.begin() as session:
        leases.claim(session, worker="w", lease_s=60)

    def ids(query: str) -> list[str]:
        return [job["id"] for job in client.get(f"/v1/jobs?{query}").json()["data"]]

    assert ids("state=running") == [first]
    assert ids("state=queued") == [second]
    assert ids("state=queued&state=running") == [second, first]
    assert ids("state=failed") == []


BAD_QUERIES = (
    "limit=0",
    "limit=1000000000",
    "limit=x",
    "state=dreaming",
    "cursor=abc",
    "cursor=",
    "cursor=" + "9" * 600,
    "cursor=WyIyMDI2IiwgImpvYl8iLCBbXV0",
    "cursor=bnVsbA",
    "cursor=%00",
)


def test_bad_list_queries(subtests: pytest.Subtests, client: TestClient) -> None:
    for query in BAD_QUERIES:
        with subtests.test(query):
            answer = client.get(f"/v1/jobs?{query}")
            assert answer.status_code == 422, answer.text
            assert answer.json()["code"] in ("invalid_request", "invalid_cursor")


def test_a_cursor_belongs_to_its_filter(client: TestClient, submit: Callable[..., str]) -> None:
    submit(), submit()
    cursor = client.get("/v1/jobs?limit=1&state=queued").json()["next_cursor"]
    assert client.get(f"/v1/jobs?limit=1&state=queued&cursor={cursor}").status_code == 200
    assert client.get(f"/v1/jobs?limit=1&cursor={cursor}").json()["code"] == "invalid_cursor"


def test_polling_with_an_etag(client: TestClient, submit: Callable[..., str], sessions: Sessions) -> None:
    job_id = submit()
    first = client.get(f"/v1/jobs/{job_id}")
    tag = first.headers["etag"]
    again = client.get(f"/v1/jobs/{job_id}", headers={"If-None-Match": tag})
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    assert client.get(f"/v1/jobs/{job_id}", headers={"If-None-Match": f'"other", W/{tag}'}).status_code == 304
    assert client.get(f"/v1/jobs/{job_id}", headers={"If-None-Match": "*"}).status_code == 304
    with sessions.begin() as session:
        lease = leases.claim(session, worker="w", lease_s=60)
        assert lease
    changed = client.get(f"/v1/jobs/{job_id}", headers={"If-None-Match": tag})
    assert (changed.status_code, changed.json()["state"]) == (200, "running")
    with sessions.begin() as session:
        leases.renew(session, lease, lease_s=60)
    tag = changed.headers["etag"]
    assert client.get(f"/v1/jobs/{job_id}", headers={"If-None-Match": tag}).status_code == 304


def test_events_are_read_in_pieces(client: TestClient, submit: Callable[..., str], sessions: Sessions) -> None:
    job_id = submit()
    with sessions.begin() as session:
        lease = leases.claim(session, worker="w", lease_s=60)
        assert lease
        news = [NewEvent("warning", {"code": str(n), "message": ""}) for n in range(3)]
        leases.record(session, lease, happened=news, columns={})
    page = client.get(f"/v1/jobs/{job_id}/events?limit=2").json()
    assert [(event["seq"], event["data"].get("state")) for event in page["data"]] == [(1, "queued"), (2, "running")]
    assert page["has_more"] is True
    page = client.get(f"/v1/jobs/{job_id}/events?after=2").json()
    assert [(event["seq"], event["data"]["code"]) for event in page["data"]] == [(3, "0"), (4, "1"), (5, "2")]
    assert page["has_more"] is False
    assert client.get(f"/v1/jobs/{job_id}/events?after=99").json() == {"data": [], "has_more": False}
    assert client.get(f"/v1/jobs/{job_id}/events?after=-1").status_code == 422
    assert client.get("/v1/jobs/job_" + "0" * 32 + "/events").status_code == 404


def test_cancel_waiting_running_and_final(client: TestClient, submit: Callable[..., str], sessions: Sessions) -> None:
    waiting = submit()
    answer = client.post(f"/v1/jobs/{waiting}/cancel")
    assert (answer.status_code, answer.json()["state"]) == (202, "cancelled")
    assert answer.json()["finished_at"] is not None
    answer = client.post(f"/v1/jobs/{waiting}/cancel")
    assert (answer.status_code, answer.json()["code"]) == (409, "job_already_final")
    with sessions.begin() as session:
        assert leases.claim(session, worker="w", lease_s=60) is None

    running = submit()
    with sessions.begin() as session:
        leases.claim(session, worker="w", lease_s=60)
    for _ in range(2):  # asking twice is asking once
        answer = client.post(f"/v1/jobs/{running}/cancel")
        assert (answer.status_code, answer.json()["state"]) == (202, "cancelling")
        assert answer.json()["cancel_requested"] is True
    kinds = [event["data"]["state"] for event in client.get(f"/v1/jobs/{running}/events").json()["data"]]
    assert kinds == ["queued", "running", "cancelling"]
    assert client.post("/v1/jobs/job_" + "0" * 32 + "/cancel").status_code == 404


def test_plans_and_presets(client: TestClient, make_model: MakeModel, sessions: Sessions) -> None:
    rows = {preset["name"]: preset for preset in client.get("/v1/presets").json()["data"]}
    assert {"int8_dynamic", "fp8", "w4a16"} <= rows.keys()
    assert rows["fp8"]["needs_calibration"] is True
    model = make_model()
    usable = {name for name, preset in rows.items() if preset["exports"] != ["fake_quantized"]}
    assert {"mxfp4", "nvfp4", "int4_fp8", "fp8", "nf4"} <= usable and "mxint8" not in usable
    assert rows["fp8"]["exports"] == ["compressed_tensors", "quark", "fp8", "onnx", "modelopt", "fake_quantized"]
    for name in usable - {"uint4_wo_128", "int4_wo_128", "fp8_block"}:  # the model is narrower
        export = rows[name]["exports"][:1]
        answer = client.post("/v1/plans", json=body(model, config={"preset": name}, export=export))
        assert answer.status_code == 200, answer.text
        plan = answer.json()
        assert plan["num_layers"] == 2
        assert plan["size_after_bytes"] < plan["size_before_bytes"]
        assert plan["config"] == rows[name]["config"] | {"algo_config": rows[name]["recipes"]["balanced"]}
    with sessions.begin() as session:
        assert session.scalar(text("SELECT count(*) FROM job")) == 0


GOAL = {"goal": {"runtime": "transformers", "device": "24GB"}}
MIX = {"mix": {"schemes": ["w4a16", "int8_weight_only"], "max_bits": 6}}


@pytest.mark.parametrize("asked", [{"config": {"preset": "fp8"}, "hardware": {"devices": "1x80GB"}}, GOAL, MIX])
def test_a_plan_is_as_documented(client: TestClient, make_model: MakeModel, asked: dict[str, Any]) -> None:
    """Nothing is validated on its way out: the document says what the engine's plan has."""
    answer = client.post("/v1/plans", json={"model": {"path": str(make_model())}, **asked})
    assert answer.status_code == 200, answer.text
    plan = answer.json()
    assert plan.keys() <= PlanOut.model_fields.keys()
    assert PlanOut.model_validate(plan).model_dump(mode="json", exclude_unset=True) == plan


def test_an_effort_chooses_the_algorithms_of_a_scheme(client: TestClient, make_model: MakeModel) -> None:
    model, whole = make_model(), presets.resolve("w4a16").to_dict()
    gptq = {"algo_config": [{"name": "gptq"}]}

    def algorithms(**asked: Any) -> list[str]:
        answer = client.post("/v1/plans", json=body(model, **asked))
        assert answer.status_code == 200, answer.text
        return [algorithm["name"] for algorithm in answer.json()["config"]["algo_config"]]

    balanced = [algorithm.name for algorithm in recipe([presets.resolve("w4a16")], "balanced")]
    assert balanced and algorithms(config={"preset": "w4a16"}) == balanced
    assert algorithms(config=whole, effort="balanced") == balanced
    assert algorithms(config={"preset": "w4a16"}, effort="fast") == []
    assert algorithms(config={"preset": "w4a16", "algo_config": []}) == []
    assert algorithms(config={"preset": "w4a16", **gptq}) == ["gptq"]
    assert algorithms(config=whole) == []
    assert algorithms(config={"preset": "w_uint4_per_group_asym"}) == []  # AMD Quark's names mean the scheme alone
    assert algorithms(config={"preset": "w4a16"}, file2file=True) == []
    mix = {"schemes": ["w4a16", "int8_weight_only"], "max_bits": 6}
    assert algorithms(mix=mix, config={}) == [] and algorithms(mix=mix, config={}, effort="balanced") == balanced
    for asked in ({"config": {"preset": "w4a16", **gptq}}, {"config": {"preset": "w4a16"}, "file2file": True}):
        problem = client.post("/v1/jobs", json=body(model, effort="best", **asked)).json()
        assert (problem["code"], problem["errors"][0]["pointer"]) == ("conflicting_effort", "#/effort")


def test_a_clone_with_an_effort_has_its_algorithms(client: TestClient, make_model: MakeModel) -> None:
    config = {"preset": "w4a16", "algo_config": [{"name": "rtn"}]}
    job = client.post("/v1/jobs", json=body(make_model(), config=config)).json()
    clone = client.post(f"/v1/jobs/{job['id']}/clone", json={"effort": "fast"}).json()
    assert clone["config"] == job["config"] | {"algo_config": []}


def test_a_clone_with_another_scheme_has_its_default_format(client: TestClient, make_model: MakeModel) -> None:
    model = make_model()

    def exports_of(config: dict[str, Any], **more: Any) -> tuple[list[str], list[str]]:
        job = client.post("/v1/jobs", json=body(model, config=config, **more)).json()
        clone = client.post(f"/v1/jobs/{job['id']}/clone", json={"config": {"preset": "fp8"}}).json()
        return job["export"], clone["export"]

    assert exports_of({"preset": "w4a16"}) == (["awq"], ["compressed_tensors"])
    assert exports_of({"preset": "w4a16"}, export=["quark"]) == (["quark"], ["quark"])  # named, so kept


def test_a_clone_for_a_goal_is_told_nothing_that_a_goal_decides(client: TestClient, make_model: MakeModel) -> None:
    """A verdict advises it, with the flags of ``clone``."""
    goal = {"goal": {"runtime": "vllm", "device": "24GB"}}
    mix = {"schemes": ["w4a16", "int8_weight_only"], "max_bits": 6}
    model = make_model()
    for asked in ({"effort": "fast", "export": ["quark"]}, {"file2file": True}, {"config": {}, "mix": mix}):
        job = client.post("/v1/jobs", json=body(model, **asked)).json()
        answer = client.post(f"/v1/jobs/{job['id']}/clone", json=goal)
        assert answer.status_code == 202, answer.text
        assert answer.json()["goal"]["runtime"] == "vllm"


def test_a_preset_with_a_kv_cache_a_quark_config_and_the_schema(client: TestClient, make_model: MakeModel) -> None:
    import jsonschema

    schema = client.get("/v1/config-schema").json()
    jsonschema.Draft202012Validator.check_schema(schema)
    model = make_model()
    names = [f"model.layers.{block}.self_attn.{part}_proj.weight" for block in range(2) for part in "qkv"]
    write_safetensors(model / "model.safetensors", {name: [64, 64] for name in names})
    unknown = client.post("/v1/plans", json=body(model, config={"preset": "fp8", "kv_cache": "fp9"}))
    assert (unknown.status_code, unknown.json()["code"]) == (422, "unknown_kv_cache_scheme")
    assert unknown.json()["errors"][0]["pointer"] == "#/config/kv_cache"
    towers = client.post("/v1/plans", json=body(model, config={"preset": "fp8", "towers": "int8"}))
    assert (towers.status_code, towers.json()["code"]) == (422, "no_towers")
    drafts = client.post("/v1/plans", json=body(model, config={"preset": "fp8", "drafts": "int8"}))
    assert (drafts.status_code, drafts.json()["code"]) == (422, "no_drafts")
    plan = client.post("/v1/plans", json=body(model, config={"preset": "fp8", "kv_cache": "fp8"})).json()
    assert plan["config"]["kv_cache_quant_config"]["*k_proj"]["output_tensors"]["dtype"] == "fp8_e4m3"
    jsonschema.Draft202012Validator(schema).validate(plan["config"])
    spec = {"dtype": "int8", "qscheme": "per_channel", "ch_axis": 0, "group_size": None, "scale_type": "float"}
    quark = {"quant_method": "quark", "global_quant_config": {"weight": spec, "input_tensors": None}, "exclude": []}
    answer = client.post("/v1/plans", json=body(model, config=quark))
    assert answer.status_code == 200 and answer.json()["layers"][0]["scheme"] == "int8 per_channel"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"algo_config": [{"name": "rotation", "r3": True}]}, "/config/algo_config"),
        ({"quant_mode": "fx_graph_mode"}, "/config/quant_mode"),
        ({"layer_type_quant_config": {"Embedding": {"weight": {"dtype": "int8"}}}}, "/config/layer_type_quant_config"),
    ],
)
def test_what_would_be_left_undone_is_refused(
    client: TestClient, make_model: MakeModel, change: dict[str, Any], field: str
) -> None:
    config = {"global_quant_config": {"weight": {"dtype": "int8"}}, **change}
    answer = client.post("/v1/plans", json=body(make_model(), config=config))
    assert (answer.status_code, answer.json()["code"]) == (422, "unsupported_config")
    assert answer.json()["errors"][0]["pointer"] == f"#{field}"


def test_a_damaged_model_is_refused_at_the_door(client: TestClient, make_model: MakeModel) -> None:
    model = make_model()
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    answer = client.post("/v1/jobs", json=body(model))
    assert (answer.status_code, answer.json()["code"]) == (422, "corrupt_weights")
    (model / "config.json").unlink()
    assert client.post("/v1/jobs", json=body(model)).json()["code"] == "no_config"
