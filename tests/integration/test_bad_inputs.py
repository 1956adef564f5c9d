"""Bad requests as one table: the status and the code of each, over HTTP.

What is wrong with uploaded files is in ``test_api_datasets``, more of model folders in ``test_hostile_models``.
"""

import json
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi.testclient import TestClient

from api.http.security import create_key
from api.store.engine import Sessions
from api.store.queue import control
from tests.support.api import body
from tests.support.service import Server

MakeModel = Callable[..., Path]
INT8 = {"dtype": "int8"}
GROUPS = {"dtype": "uint4", "qscheme": "per_group", "symmetric": False}
NONE = "job_" + "0" * 32


def weight(**spec: Any) -> dict[str, Any]:
    return {"config": {"global_quant_config": {"weight": spec}}}


def static(**changes: Any) -> dict[str, Any]:
    return {"config": {"preset": "int8_static"}, "calibration": changes}


# name -> (what is asked for beside a good model, status, code)
PLANS: dict[str, tuple[dict[str, Any], int, str]] = {
    "unknown field": ({"bits": 3}, 422, "unknown_field"),
    "unknown scheme": ({"config": {"preset": "int9"}}, 422, "unknown_preset"),
    "3 bits by a name that does not exist": (weight(dtype="bits3"), 422, "invalid_config"),
    "group size 0": (weight(**GROUPS, group_size=0), 422, "invalid_config"),
    "group size -1": (weight(**GROUPS, group_size=-1) | {"export": ["fp8"]}, 422, "incompatible_export"),
    "group size that does not divide": (weight(**GROUPS, group_size=48), 422, "group_size_not_dividing"),
    "groups without a size": (weight(**GROUPS), 422, "invalid_config"),
    "an axis that weights have not": (
        weight(dtype="int8", qscheme="per_channel", ch_axis=7), 422, "invalid_config"),
    "a text for a number": (weight(**GROUPS, group_size="32"), 422, "invalid_config"),
    "true for a number": (static(num_samples=True), 422, "invalid_request"),
    "no samples": (static(num_samples=0), 422, "invalid_request"),
    "too large for an integer": (static(seed=2**63), 422, "invalid_request"),
    "an exponent": (static(num_samples=1e308), 422, "invalid_request"),
    "longer than the model's text": (static(seq_len=100_000), 422, "seq_len_too_long"),
    "nothing to quantize": ({"config": {"preset": "fp8", "exclude": ["*"]}}, 422, "nothing_to_quantize"),
    "a format that cannot": ({"config": {"preset": "fp8"}, "export": ["gguf"]}, 422, "incompatible_export"),
    "a format that nobody knows": ({"export": ["gguf9"]}, 422, "unknown_export_format"),
    **{f"model {name}": ({"model": {"id": name}}, 422, "invalid_model_id")
       for name in ("../x", "/etc", "a/b/c", "file://x", "a/" + "b" * 300, "a\\b", "")},
}  # fmt: skip


def test_plans_that_cannot_be(subtests: pytest.Subtests, client: TestClient, make_model: MakeModel) -> None:
    model = make_model()
    for case, (changes, status, code) in PLANS.items():
        with subtests.test(case):
            answer = client.post("/v1/plans", json=body(model, **changes))
            assert (answer.status_code, answer.json()["code"]) == (status, code), answer.text
            assert answer.headers["content-type"] == "application/problem+json"


def test_a_glob_that_would_take_for_ever_as_a_regular_expression(client: TestClient, make_model: MakeModel) -> None:
    began = time.monotonic()
    assert client.post("/v1/plans", json=body(make_model("plain"))).status_code == 200
    plain_s, began = time.monotonic() - began, time.monotonic()
    config = {"preset": "fp8", "exclude": ["(a+)+$" * 20, "*a" * 40 + "b"]}
    assert client.post("/v1/plans", json=body(make_model(), config=config)).status_code == 200
    assert time.monotonic() - began < 5 + 20 * plain_s


# name -> (method, path, headers, body, status, code); {ended}: a job that was cancelled, {waiting}: one that waits
REQUESTS: dict[str, tuple[str, str, dict[str, str], bytes | None, int, str]] = {
    "malformed": ("POST", "/v1/jobs", {}, b"{", 400, "invalid_json"),
    "NaN": ("POST", "/v1/jobs", {}, b'{"name": NaN}', 400, "invalid_json"),
    "more than a megabyte": ("POST", "/v1/jobs", {}, b'"' + b"a" * (1 << 20) + b'"', 413, "body_too_large"),
    "ten thousand deep": ("POST", "/v1/jobs", {}, b"[" * 10_000 + b"]" * 10_000, 400, "invalid_json"),
    "a key twice": ("POST", "/v1/jobs", {}, b'{"name": "a", "name": "b"}', 400, "invalid_json"),
    "NUL in a name": ("POST", "/v1/jobs", {}, b'{"name": "a\\u0000"}', 400, "invalid_json"),
    "no key": ("GET", "/v1/jobs", {"Authorization": ""}, None, 401, "unauthorized"),
    "a wrong key": ("GET", "/v1/jobs", {"Authorization": "Bearer bf_x"}, None, 401, "unauthorized"),
    "no such job": ("GET", f"/v1/jobs/{NONE}", {}, None, 404, "job_not_found"),
    "an id that is none": ("GET", "/v1/jobs/1", {}, None, 422, "invalid_request"),
    "no such path": ("GET", "/v1/nothing", {}, None, 404, "not_found"),
    "a page of 10^9": ("GET", "/v1/jobs?limit=1000000000", {}, None, 422, "invalid_request"),
    "a cursor that is none": ("GET", "/v1/jobs?cursor=abc", {}, None, 422, "invalid_cursor"),
    "a cancel of what has ended": ("POST", "/v1/jobs/{ended}/cancel", {}, None, 409, "job_already_final"),
    "a resume of what waits": ("POST", "/v1/jobs/{waiting}/resume", {}, None, 409, "wrong_state"),
    "files of what waits": ("GET", "/v1/jobs/{waiting}/artifacts", {}, None, 409, "not_ready"),
    "no event's number": (
        "GET", "/v1/jobs/{ended}/events/stream", {"Last-Event-ID": "x"}, None, 400, "invalid_last_event_id"),
    "another type": ("POST", "/v1/jobs", {"Content-Type": "text/plain"}, b"{}", 415, "unsupported_media_type"),
    "another method": ("PUT", "/v1/jobs", {}, b"{}", 405, "method_not_allowed"),
    "a change without If-Match": ("PATCH", "/v1/jobs/{waiting}", {}, b'{"name": "x"}', 428, "if_match_required"),
    "a change of something older": (
        "PATCH", "/v1/jobs/{waiting}", {"If-Match": '"0"'}, b'{"name": "x"}', 412, "job_changed"),
    **{f"a webhook to {url}": (
        "POST", "/v1/webhooks", {}, json.dumps({"url": url, "event_types": ["job.failed"]}).encode(),
        422, "webhook_url_not_allowed")
       for url in ("https://169.254.169.254/", "https://localhost/", "https://2130706433/", "file:///etc/passwd")},
}  # fmt: skip


def test_requests_that_cannot_be(
    subtests: pytest.Subtests, client: TestClient, sessions: Sessions, submit: Callable[..., str]
) -> None:
    jobs = {"ended": submit(), "waiting": submit()}
    with sessions.begin() as session:
        control.cancel(session, jobs["ended"])
    for case, (method, path, headers, content, status, code) in REQUESTS.items():
        with subtests.test(case):
            sent = {"Content-Type": "application/json"} | headers if content is not None else headers
            answer = client.request(method, path.format(**jobs), headers=sent, content=content)
            assert (answer.status_code, answer.json()["code"]) == (status, code), answer.text
            assert answer.headers["content-type"] == "application/problem+json"


def test_another_projects_job_a_scope_and_a_key_that_comes_twice(
    client: TestClient, sessions: Sessions, make_model: MakeModel
) -> None:
    model = make_model()
    first = client.post("/v1/jobs", json=body(model), headers={"Idempotency-Key": "k"}).json()["id"]
    other = client.post("/v1/projects", json={"name": "other"}).json()["id"]
    reader = {"Authorization": f"Bearer {create_key(sessions, 'r', ['jobs:read'])}"}
    stranger = {"Authorization": f"Bearer {create_key(sessions, 's', project_id=other)}"}
    found = [
        client.get(f"/v1/jobs/{first}", headers=stranger),
        client.post("/v1/jobs", json=body(model), headers=reader),
        client.post("/v1/jobs", json=body(model, name="x"), headers={"Idempotency-Key": "k"}),
    ]
    expected = [(404, "job_not_found"), (403, "insufficient_scope"), (422, "idempotency_key_reused")]
    assert [(answer.status_code, answer.json()["code"]) for answer in found] == expected


# name -> (what is done to a good folder, code)
FOLDERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda folder: (folder / "config.json").unlink(), "no_config"),
    "a config that is no JSON": (lambda folder: (folder / "config.json").write_text("{"), "invalid_json"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "no_weights"),
    "pickles only": (lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
                     "unsafe_weights_format"),
    "half a file": (lambda folder: _cut(folder / "model.safetensors"), "corrupt_weights"),
    "a header of 2^63 bytes": (lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 8 + b"{}"),
                               "corrupt_weights"),
    "an index that leads out": (lambda folder: _index(folder, "../other/model.safetensors"), "unsafe_path"),
    "an index to a file that is absent": (lambda folder: _index(folder, "b.safetensors"), "missing_shard"),
    "ten million blocks": (lambda folder: _config(folder, num_hidden_layers=10**7), "config_implausible"),
    "a width of 10^9": (lambda folder: _config(folder, hidden_size=10**9), "config_implausible"),
}  # fmt: skip


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def _index(folder: Path, file: str) -> None:
    content = json.dumps({"weight_map": {"model.layers.0.self_attn.q_proj.weight": file}})
    (folder / "model.safetensors.index.json").write_text(content)


def _config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("case", FOLDERS)
def test_models_that_cannot_be(case: str, client: TestClient, make_model: MakeModel) -> None:
    change, code = FOLDERS[case]
    model = make_model()
    shutil.copytree(model, model.parent / "other")
    change(model)
    answer = client.post("/v1/plans", json=body(model))
    assert (answer.status_code, answer.json()["code"]) == (422, code), answer.text


def test_headers_of_a_megabyte_and_ranges_without_number(server: Server) -> None:
    with server.connect() as client:
        with suppress(httpx2.TransportError):  # cut off, or told so
            assert client.get("/healthz/live", headers={"X-Large": "a" * (1 << 20)}).status_code in (400, 431)
        began = time.monotonic()
        assert client.get(f"/v1/jobs/{NONE}/artifacts/x").status_code == 404
        plain_s, began = time.monotonic() - began, time.monotonic()
        ranges = "bytes=" + ",".join(f"{number}-{number}" for number in range(5000))
        assert client.get(f"/v1/jobs/{NONE}/artifacts/x", headers={"Range": ranges}).status_code == 404
        content_type = "application/json; " + "a=b;" * 12_000
        client.post("/v1/jobs", content=b"{}", headers={"Content-Type": content_type})
        assert time.monotonic() - began < 3 + 20 * plain_s
