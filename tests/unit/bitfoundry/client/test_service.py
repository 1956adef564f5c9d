"""The client against a scripted service: what it sends, what it makes of answers, and what it refuses to write."""

import hashlib
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from bitfoundry.client import service as module
from bitfoundry.client.bodies import model_of
from bitfoundry.client.service import Client
from bitfoundry.errors import ApiError, BitfoundryError, WaitTimeout

JOB: dict[str, Any] = {
    "id": "job_1",
    "state": "queued",
    "priority": 5,
    "pinned": False,
    "attempt": 0,
    "cancel_requested": False,
    "model": {"path": "/m"},
    "config": {},
    "created_at": "2026-11-21T12:00:00Z",
    "a_field_of_tomorrow": 1,
}
Handler = Callable[[httpx2.Request], httpx2.Response]


@pytest.fixture(autouse=True)
def no_sleep(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    slept: list[float] = []
    monkeypatch.setattr(module.time, "sleep", slept.append)
    return slept


def client_of(handler: Handler) -> Client:
    return Client("http://service", "bf_key", transport=httpx2.MockTransport(handler))


def answering(*answers: httpx2.Response | Exception) -> tuple[Client, list[httpx2.Request]]:
    """A client of a service that gives these answers in turn, and the list of what was asked."""
    asked: list[httpx2.Request] = []
    left = list(answers)

    def handle(request: httpx2.Request) -> httpx2.Response:
        asked.append(request)
        answer = left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return client_of(handle), asked


def test_submit_sends_the_contracts_body(tmp_path: Path) -> None:
    client, asked = answering(httpx2.Response(202, json=JOB))
    job = client.submit(
        tmp_path, config="fp8", export=["quark"], calibration={"num_samples": 4}, name="n", labels={"a": "b"}
    )
    assert job.id == "job_1"
    assert asked[0].headers["Authorization"] == "Bearer bf_key"
    assert json.loads(asked[0].content) == {
        "model": {"path": str(tmp_path)},
        "config": {"preset": "fp8"},
        "export": ["quark"],
        "calibration": {"num_samples": 4},
        "name": "n",
        "labels": {"a": "b"},
    }


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ("org/name", {"id": "org/name"}),
        ("/abs/model", {"path": "/abs/model"}),
        ({"id": "org/name", "revision": "v1"}, {"id": "org/name", "revision": "v1"}),
    ],
)
def test_a_model_is_a_path_or_a_hub_id(given: Any, sent: dict[str, str]) -> None:
    assert model_of(given) == sent


def test_a_problem_becomes_an_error_with_its_code() -> None:
    problem = {"code": "unknown_preset", "detail": "no such preset", "errors": [{"pointer": "#/config/preset"}]}
    client, asked = answering(httpx2.Response(422, json=problem))
    with pytest.raises(ApiError, match="no such preset") as refused:
        client.submit("/m", config="fp9")
    assert (refused.value.status, refused.value.code) == (422, "unknown_preset")
    assert refused.value.errors == [{"pointer": "#/config/preset"}]
    assert len(asked) == 1


def test_a_wrong_key_is_answered_with_where_to_give_one() -> None:
    """The service's own hint, a header, is for programs."""
    problem = {"code": "unauthorized", "detail": "This needs a valid API key.", "hint": "Send the header 'A: B'."}
    client, _ = answering(httpx2.Response(401, json=problem))
    with pytest.raises(ApiError) as refused:
        client.get("job_1")
    assert "--api-key" in str(refused.value) and "BITFOUNDRY_API_KEY" in str(refused.value)
    assert "header" not in str(refused.value)


@pytest.mark.parametrize(
    ("ask", "parameter", "part"),
    [
        (lambda client: client.get("tiny-a"), "job_id", "client.find(NAME)"),
        (lambda client: client.download("tiny-a", Path("x")), "job_id", "client.find(NAME)"),
        (lambda client: next(client.stream_events("tiny-a")), "job_id", "client.find(NAME)"),
        (lambda client: client.change("job_1", "tiny-a"), "base", "client.find(NAME)"),
        (lambda client: client.sweep("both"), "sweep_id", "client.sweeps()"),
    ],
)
def test_a_name_in_place_of_an_id_is_answered_with_how_to_find_it(
    ask: Callable[[Client], Any], parameter: str, part: str
) -> None:
    fault = {"parameter": parameter, "detail": "it must be an id", "code": "invalid_request"}
    problem = {"code": "invalid_request", "detail": "It is not valid: it must be an id.", "errors": [fault]}
    client, _ = answering(httpx2.Response(422, json=problem))
    with pytest.raises(ApiError) as refused:
        ask(client)
    assert part in refused.value.hint and part in str(refused.value)


def test_a_service_that_is_away_is_a_whole_sentence() -> None:
    client, _ = answering(*[httpx2.ConnectError("refused")] * 4)
    with pytest.raises(ApiError) as refused:
        client.get("job_1")
    assert "does not answer: refused. Is the service up?" in str(refused.value)


def test_reading_is_tried_again(no_sleep: list[float]) -> None:
    away = httpx2.ConnectError("refused")
    busy = httpx2.Response(503, headers={"Retry-After": "3"})
    client, asked = answering(away, busy, httpx2.Response(200, json=JOB))
    assert client.get("job_1").state == "queued"
    assert len(asked) == 3
    assert no_sleep[1] == 3.0


def test_what_makes_something_is_tried_again_under_one_key() -> None:
    """The first try may have been understood and only its answer lost: the key makes both one request."""
    lost = httpx2.ReadError("cut off")
    makers: list[Callable[[Client], Any]] = [
        lambda client: client.submit("/m", config="fp8"),
        lambda client: client.clone("job_1"),
    ]
    keys = set()
    for make in makers:
        client, asked = answering(lost, lost, httpx2.Response(202, json=JOB))
        make(client)
        [key] = {request.headers["Idempotency-Key"] for request in asked}
        assert len(asked) == 3
        keys.add(key)
    assert len(keys) == len(makers)
    client, asked = answering(httpx2.Response(202, json=JOB))
    client.submit("/m", config="fp8", idempotency_key="mine")
    assert asked[0].headers["Idempotency-Key"] == "mine"


def test_what_moves_a_job_is_not_tried_again() -> None:
    for action in ("cancel", "pause", "resume", "retry"):
        client, asked = answering(httpx2.ConnectError("refused"))
        with pytest.raises(ApiError) as lost:
            getattr(client, action)("job_1")  # a second retry could come after a worker has ended the first
        assert (lost.value.status, lost.value.code, len(asked)) == (0, "no_answer", 1)
        assert "bitfoundry up" in lost.value.hint


def test_an_answer_that_is_no_problem_document_is_still_an_error() -> None:
    client, _ = answering(httpx2.Response(500, text="<html>oops"))
    with pytest.raises(ApiError, match="HTTP status 500"):
        client.get("job_1")


@pytest.mark.parametrize(
    "ask", ["get", "events", "stream_events", "logs", "cancel", "pause", "resume", "retry", "clone", "artifacts"]
)
def test_ids_cannot_leave_their_place_in_the_url(ask: str) -> None:
    client, asked = answering(httpx2.Response(404, json={}))
    with pytest.raises(ApiError):
        list(getattr(client, ask)("../../v2/x?y"))
    assert asked[0].url.raw_path.startswith(b"/v1/jobs/..%2F..%2Fv2%2Fx%3Fy")


def test_list_follows_the_cursor() -> None:
    first = {"data": [JOB, JOB | {"id": "job_2"}], "has_more": True, "next_cursor": "c1"}
    last = {"data": [JOB | {"id": "job_3"}], "has_more": False, "next_cursor": None}
    client, asked = answering(httpx2.Response(200, json=first), httpx2.Response(200, json=last))
    assert [job.id for job in client.list(states=["queued"])] == ["job_1", "job_2", "job_3"]
    assert "state=queued" in str(asked[1].url)
    assert "cursor=c1" in str(asked[1].url)


def test_events_go_on_after_the_last_seen() -> None:
    event = {"seq": 4, "at": "2026-11-21T12:00:00Z", "kind": "progress", "data": {"done": 1}}
    first = {"data": [event], "has_more": True}
    last = {"data": [event | {"seq": 5}], "has_more": False}
    client, asked = answering(httpx2.Response(200, json=first), httpx2.Response(200, json=last))
    assert [event.seq for event in client.events("job_1", after=3)] == [4, 5]
    assert [request.url.params["after"] for request in asked] == ["3", "4"]


def event_text(seq: int) -> str:
    data = {"seq": seq, "at": "2026-11-21T12:00:00Z", "kind": "progress", "data": {"text": "é"}}
    return f"id: {seq}\nevent: progress\ndata: {json.dumps(data)}\n\n"


def test_a_stream_is_taken_up_where_it_broke_off() -> None:
    def stream(text: str) -> httpx2.Response:
        return httpx2.Response(200, text="retry: 3000\n\n: nothing new\n\n" + text)

    cut = event_text(5) + "id: 6\nevent: progress\nda"  # half a message counts for nothing
    end = 'event: end\ndata: {"state": "succeeded"}\n\n'
    client, asked = answering(
        httpx2.ConnectError("refused"),
        stream(event_text(4)),
        httpx2.Response(503, json={}),
        stream(cut),
        stream(event_text(6) + end),
    )
    assert [event.seq for event in client.stream_events("job_1", after=3)] == [4, 5, 6]
    assert [request.headers["Last-Event-ID"] for request in asked] == ["3", "3", "4", "4", "5"]
    client, asked = answering(httpx2.Response(204))
    assert list(client.stream_events("job_1", after=9)) == []


def test_a_stream_gives_up_when_the_service_stays_away() -> None:
    client, asked = answering(*[httpx2.ConnectError("refused")] * 9)
    with pytest.raises(ApiError, match="does not answer"):
        list(client.stream_events("job_1"))
    assert len(asked) == 5
    client, asked = answering(httpx2.Response(404, json={"code": "job_not_found"}))
    with pytest.raises(ApiError) as refused:
        list(client.stream_events("job_1"))
    assert (refused.value.code, len(asked)) == ("job_not_found", 1)


def test_wait_reports_each_change_once() -> None:
    running = JOB | {"state": "running"}
    answers = [JOB, JOB, running, running, JOB | {"state": "succeeded"}]
    client, _ = answering(*(httpx2.Response(200, json=answer) for answer in answers))
    seen: list[str] = []
    job = client.wait("job_1", on_change=lambda job: seen.append(job.state))
    assert job.is_final
    assert seen == ["queued", "running", "succeeded"]


def test_wait_gives_up_in_time() -> None:
    client = client_of(lambda request: httpx2.Response(200, json=JOB))
    with pytest.raises(WaitTimeout, match="still queued after 0 s"):
        client.wait("job_1", timeout_s=0)


def serve_files(files: dict[str, bytes], *, sent: dict[str, bytes] | None = None) -> tuple[Client, list[str]]:
    """A service with one artifact; `sent` replaces what really travels. And the paths of what was fetched."""
    fetched: list[str] = []

    def handle(request: httpx2.Request) -> httpx2.Response:
        name = request.url.path.partition("/artifacts")[2].lstrip("/")
        if not name:
            listed = [
                {"path": path, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
                for path, content in files.items()
            ]
            return httpx2.Response(200, json={"data": listed})
        fetched.append(name)
        return httpx2.Response(200, content=(sent or files)[name])

    return client_of(handle), fetched


def test_download_checks_and_keeps_what_is_there(tmp_path: Path) -> None:
    files = {"quark/model.safetensors": b"weights", "report.json": b"{}"}
    client, fetched = serve_files(files)
    (tmp_path / "report.json").write_bytes(b"{}")
    client.download("job_1", tmp_path)
    assert fetched == ["quark/model.safetensors"]
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} == files.keys()
    assert (tmp_path / "quark/model.safetensors").read_bytes() == b"weights"


def test_a_damaged_file_is_not_kept(tmp_path: Path) -> None:
    client, _ = serve_files({"model.safetensors": b"weights"}, sent={"model.safetensors": b"weight!"})
    with pytest.raises(BitfoundryError, match="arrived damaged"):
        client.download("job_1", tmp_path)
    assert list(tmp_path.iterdir()) == []


def tar_of(files: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for path, content in files.items():
            entry = tarfile.TarInfo(f"model-123456/{path}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return file.getvalue()


FILES = {"quark/model.safetensors": b"weights" * 200, "MANIFEST.json": b"{}"}


def test_a_tar_file_is_downloaded_and_checked(tmp_path: Path) -> None:
    client, _ = serve_files(FILES, sent={".tar": tar_of(FILES)})
    assert client.download_tar("job_1", tmp_path / "new" / "a.tar") == tmp_path / "new" / "a.tar"
    assert (tmp_path / "new" / "a.tar").read_bytes() == tar_of(FILES)
    with pytest.raises(BitfoundryError, match="is a folder"):
        client.download_tar("job_1", tmp_path / "new")


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (tar_of(FILES | {"MANIFEST.json": b"[]"}), "does not hold"),
        (tar_of({"MANIFEST.json": b"{}"}), "does not hold"),
        (tar_of(FILES | {"more": b""}), "does not hold"),
        (tar_of(FILES)[:1000], "arrived damaged"),
        (b"no tar file", "arrived damaged"),
    ],
)
def test_a_damaged_tar_file_is_not_kept(tmp_path: Path, sent: bytes, message: str) -> None:
    client, _ = serve_files(FILES, sent={".tar": sent})
    (tmp_path / "a.tar").write_bytes(b"an earlier one")
    with pytest.raises(BitfoundryError, match=message):
        client.download_tar("job_1", tmp_path / "a.tar")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"an earlier one"]


@pytest.mark.parametrize("path", ["../evil", "/etc/evil", "a/../../evil", "..\\evil", "", "a\0b"])
def test_a_file_cannot_leave_its_folder(tmp_path: Path, path: str) -> None:
    client, fetched = serve_files({path: b"evil"})
    with pytest.raises(BitfoundryError, match="unsafe file"):
        client.download("job_1", tmp_path / "inside")
    assert fetched == []
    assert not (tmp_path / "evil").exists()


def test_a_loopback_service_is_not_asked_through_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    with Client("http://127.0.0.1:1", "bf_key") as client, pytest.raises(ApiError, match=r"127\.0\.0\.1:1 does not"):
        client.get("job_1")
    assert client._service.trusts_environment is False


def test_results_of_a_model_come_from_all_pages() -> None:
    result = {"job_id": "job_1", "finished_at": "2026-11-21T12:00:00Z", "recipe": {"preset": "fp8"}}
    pages = [
        {"model": "org/name", "derived_from": None, "data": [result | {"kl_mean": kl}], "next_cursor": more}
        for kl, more in ((0.1, "c"), (0.2, None))
    ]
    client, asked = answering(
        *(httpx2.Response(200, json=page | {"has_more": bool(page["next_cursor"])}) for page in pages)
    )
    found = client.results_of("org/name")
    assert [each.kl_mean for each in found.data] == [0.1, 0.2]
    assert found.data[0].recipe.preset == "fp8"
    assert [dict(request.url.params) for request in asked] == [
        {"model": "org/name", "limit": "100"}, {"model": "org/name", "limit": "100", "cursor": "c"},
    ]  # fmt: skip
