"""The typed client and the commands against the real service, with a real worker where something must happen."""

import io
import json
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from api.store.accounts import projects
from api.store.engine import Sessions
from api.store.queue import lineage
from bitfoundry.client.project_answers import MemberRef
from bitfoundry.client.service import Client
from bitfoundry.commands import main as cli
from bitfoundry.errors import ApiError
from tests.support.api import JOB
from tests.support.service import Server, WorkerProcess
from worker.supervisor import Supervisor

MakeModel = Callable[..., Path]
StartWorker = Callable[..., WorkerProcess]


@pytest.fixture
def service(server: Server) -> Iterator[Client]:
    with Client(server.url, server.key) as client:
        yield client


@pytest.fixture
def command(server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """``command("list --count")``: what it prints with --json; the exit status must be 0."""
    monkeypatch.setenv("BITFOUNDRY_URL", server.url)
    monkeypatch.setenv("BITFOUNDRY_API_KEY", server.key)

    def run(line: str, *, status: int = 0) -> Any:
        capsys.readouterr()
        assert cli.run([*line.split(), "--json"]) == status
        said = capsys.readouterr()
        text = said.out if status == 0 else said.err
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            return [json.loads(each) for each in text.splitlines()]

    return run


def test_the_client_speaks_the_whole_contract(service: Client, make_model: MakeModel) -> None:
    model = make_model()
    first = service.submit(
        model,
        config="fp8",
        name="one",
        labels={"a": "b"},
        priority=3,
        limits={"max_runtime_s": 60},
        idempotency_key="k",
    )
    again = service.submit(
        model,
        config="fp8",
        name="one",
        labels={"a": "b"},
        priority=3,
        limits={"max_runtime_s": 60},
        idempotency_key="k",
    )
    assert again.id == first.id
    assert (first.priority, first.limits["max_runtime_s"], first.queue_position) == (3, 60, 1)
    assert first.waiting_reason == "no live worker"
    assert set(first.state_times) == {"queued"}
    assert service.plan(model, config="fp8")["num_layers"] == 2

    second = service.clone(first.id, {"name": "two", "labels": {}})
    assert (second.cloned_from, second.priority) == (first.id, 3)
    assert [job.id for job in service.list(page_size=1)] == [second.id, first.id]
    assert [job.id for job in service.list(labels={"a": "b"}, states=["queued"], model=str(model))] == [first.id]
    assert [job.id for job in service.list(text="TWO", created_after=first.created_at)] == [second.id]
    assert list(service.list(created_before=first.created_at)) == []
    assert service.summary(text="one").by_state["queued"] == 1
    assert [(used.name, used.num_jobs, used.best) for used in service.models(page_size=1)] == [(str(model), 2, None)]
    assert service.results_of(model).data == []
    with pytest.raises(ApiError) as unused:
        service.results_of("org/name")
    assert (unused.value.status, unused.value.code) == (404, "model_not_used")

    assert service.edit(first.id, {"priority": 9}).priority == 9
    with pytest.raises(ApiError) as changed:
        service.edit(first.id, {"priority": 1}, etag='"1"')
    assert (changed.value.status, changed.value.code) == (412, "job_changed")

    assert service.pause(first.id).state == "paused"
    assert service.resume(first.id).state == "queued"
    with pytest.raises(ApiError) as wrong:
        service.retry(first.id)
    assert wrong.value.code == "wrong_state"
    assert wrong.value.errors[0]["allowed"] == ["cancelled", "failed"]
    assert service.cancel(first.id).is_final
    again = service.retry(first.id, elsewhere=True)
    assert (again.state, again.avoid_host) == ("queued", None)  # it never ran
    service.cancel(first.id)
    service.delete(first.id)
    with pytest.raises(ApiError, match="no such job"):
        service.get(first.id)

    job = {"model": {"path": str(model)}}
    sweep = service.submit_sweep(job, {"/config/preset": ["fp8", "int8_dynamic"]}, name="s")
    assert (sweep.total, sweep.by_state["queued"], sweep.jobs[1].sweep_values) == (
        2, 2, {"/config/preset": "int8_dynamic"},
    )  # fmt: skip
    assert [job.id for job in service.list(sweep=sweep.id)][::-1] == [job.id for job in sweep.jobs]
    assert service.cancel_sweep(sweep.id).by_state["cancelled"] == 2
    assert service.sweep(sweep.id).jobs[0].is_final


@pytest.mark.slow
def test_events_and_logs_of_a_job_that_runs(service: Client, make_model: MakeModel, start_worker: StartWorker) -> None:
    job = service.submit(make_model(mode="steady", log="WARNING careful"), config="fp8")
    heard: list[int] = []
    listening = threading.Thread(target=lambda: heard.extend(event.seq for event in service.stream_events(job.id)))
    listening.start()
    start_worker()
    ended = service.wait(job.id, timeout_s=30, poll_s=0.1)
    listening.join(10)
    assert ended.state == "succeeded"
    told = [event.seq for event in service.events(job.id)]
    assert heard == told == list(range(1, len(told) + 1))
    assert len(list(service.events(job.id, kinds=["layer_quantized"]))) == 20
    assert list(service.stream_events(job.id, after=told[-1])) == []
    assert [(phase.name, phase.state) for phase in ended.phases] == [("quantize", "done"), ("export", "done")]
    assert (ended.phases[0].done, ended.phases[0].total, ended.phases[0].unit) == (19, 20, "block")
    lines = [line.text for line in service.logs(job.id)]
    assert "engine: block 0: 1 layer to int8, largest error of a weight 1 % (l0)" in lines
    assert sorted(line for line in lines if not line.startswith("engine: ")) == sorted([
        "stub engine starts", "WARNING careful", "worker: phase quantize began", "worker: phase export began",
        "worker: the engine ended with status 0",
    ])  # fmt: skip
    warnings = {line.text for line in service.logs(job.id, level="warning")}
    assert warnings == {"WARNING careful", "engine: said: WARNING careful"}  # what it prints, and its event
    assert [line.text for line in service.logs(job.id, tail=1)] == lines[-1:]
    assert [line.text for line in service.logs(job.id, after=2)] == lines[2:]


def test_the_commands_speak_the_whole_contract(
    command: Callable[..., Any], make_model: MakeModel, tmp_path: Path
) -> None:
    model = make_model()
    job = command(f"submit {model} -c fp8 --name one --label a=b --priority 2 --max-pending-s 600")
    assert (job["priority"], job["limits"]) == (2, {"max_runtime_s": None, "max_pending_s": 600})
    clone = command(f"clone {job['id']} --config int8_dynamic --name two --priority 8")
    assert (clone["preset"], clone["name"], clone["priority"], clone["labels"]) == (
        "int8_dynamic",
        "two",
        8,
        {"a": "b"},
    )
    assert [each["id"] for each in command("list --label a=b --text two")] == [clone["id"]]
    assert command(f"list --model {model} --created-after {job['created_at']} --count")["total"] == 1
    assert command(f"edit {job['id']} --priority 9 --label c=d")["labels"] == {"c": "d"}
    assert command(f"pause {job['id']}")["state"] == "paused"
    refused = command(f"retry {job['id']}", status=1)
    assert refused["error"]["code"] == "wrong_state"
    assert command(f"resume {job['id']}")["state"] == "queued"
    assert command(f"cancel {job['id']}")["state"] == "cancelled"
    assert command(f"retry {job['id']} --elsewhere")["state"] == "queued"
    assert command(f"delete {job['id']}", status=1)["error"]["code"] == "wrong_state"
    command(f"cancel {job['id']}")
    assert command(f"delete {job['id']}") == {"deleted": job["id"]}
    file = tmp_path / "sweep.json"
    matrix = {"/config/preset": ["fp8", "int8_dynamic"], "/calibration/num_samples": [4, 8]}
    file.write_text(json.dumps({"name": "s", "job": {"model": {"path": str(model)}}, "matrix": matrix}))
    sweep = command(f"sweep submit {file}")
    assert command(f"sweep show {sweep['id']}")["total"] == 4
    assert command(f"sweep cancel {sweep['id']}")["by_state"]["cancelled"] == 4
    assert command("list --count")["by_state"] | {"queued": 1, "cancelled": 4} == command("list --count")["by_state"]


def test_a_job_is_named_as_people_do(service: Client, command: Callable[..., Any], make_model: MakeModel) -> None:
    model = make_model()
    first = service.submit(model, config="fp8", name="nightly")
    other = service.submit(model, config="fp8", name="twice")
    newest = service.submit(model, config="int8_dynamic", name="twice")
    names = {"nightly": first, first.id: first, "last": newest}
    start = next(n for n in range(1, 33) if len({job.id[4 : 4 + n] for job in (first, other, newest)}) == 3)
    names |= {job.id[: 4 + start]: job for job in (first, other)} | {newest.id[4 : 4 + start + 1]: newest}
    for name, job in names.items():
        assert service.find(name).id == job.id, name
    assert command("show last")["id"] == newest.id
    assert command("clone nightly --name copy")["preset"] == "fp8"
    assert command("cancel nightly")["id"] == first.id
    refused = command("show twice", status=1)["error"]
    assert refused["code"] == "job_not_unique" and other.id[:12] in refused["message"]
    missing = command("show nightlyy", status=1)["error"]
    assert (missing["code"], missing["hint"]) == ("job_not_found", "`bitfoundry list` shows ids and names.")


def test_the_commands_follow_a_job(
    command: Callable[..., Any], make_model: MakeModel, start_here: Callable[..., Supervisor], sessions: Sessions,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    model = make_model(mode="steady", log="ERROR bad")
    job = command(f"submit {model} -c fp8")
    started = time.monotonic()
    threading.Timer(0.5, start_here).start()
    lines = command(f"logs {job['id']} --follow")
    assert sorted(line["text"] for line in lines if not line["text"].startswith("engine: ")) == [
        "ERROR bad", "stub engine starts", "worker: phase export began", "worker: phase quantize began",
        "worker: the engine ended with status 0",
    ]  # fmt: skip
    assert time.monotonic() - started > 2  # it did wait for the end
    assert [line["text"] for line in [command(f"logs {job['id']} --level error")]] == ["ERROR bad"]
    events = command(f"events {job['id']} --follow --kind state_changed")
    assert [event["data"]["state"] for event in events] == ["queued", "running", "succeeded"]
    assert [each["num_results"] for each in command("models")] == [1]
    assert [each["job_id"] for each in command(f"models {model}")["data"]] == [job["id"]]
    assert str(model) in [each["path"] for each in command("models --folders")["data"]]
    assert "leave MODEL out" in command(f"models {model} --folders", status=1)["error"]["hint"]
    monkeypatch.chdir(tmp_path)
    [whole] = command(f"download {job['id']} --tar").values()
    assert whole == str(tmp_path / f"{job['id']}.tar")
    with tarfile.open(whole) as archive:
        assert {name.partition("/")[2] for name in archive.getnames()} > {"MANIFEST.json"}
    inside = command(f"show {job['id']}")["artifact"]["path"] + "/quark"
    with sessions.begin() as session:
        parents = lineage.find_parents(session, projects.DEFAULT, [inside])
    assert parents == {inside: lineage.Parent(job["id"], str(model))}


def test_the_commands_about_members(command: Callable[..., Any], server: Server) -> None:
    """What they say holds for the keys that they make."""
    ada = command("members add Ada --role editor --expires-at 2099-01-01T00:00:00Z")
    assert (ada["role"], ada["first_key"]["scopes"]) == ("editor", ["jobs:read", "jobs:write", "jobs:chat"])
    assert ada["first_key"]["expires_at"].startswith("2099-01-01T00:00:00")
    assert command("members add Ada --role viewer", status=1)["error"]["code"] == "name_taken"
    more = command(f"keys create laptop --member {ada['id']}")
    assert (more["scopes"], more["member"]) == (ada["first_key"]["scopes"], {"id": ada["id"], "name": "Ada"})
    with Client(server.url, more["key"]) as laptop:
        assert laptop.account.own_key().member == MemberRef(id=ada["id"], name="Ada")
        edited = command(f"members edit {ada['id']} --role viewer --name Ada-L")
        assert (edited["name"], edited["role"], edited["num_keys"]) == ("Ada-L", "viewer", 2)
        with pytest.raises(ApiError) as refused:
            laptop.cancel(JOB)
        assert refused.value.code == "insufficient_scope"
        assert [each["name"] for each in command("members list")] == ["Ada-L"]
        assert command(f"members remove {ada['id']}") == {"deleted": ada["id"]}
        assert command("members list") == []
        with pytest.raises(ApiError) as ended:
            laptop.account.own_key()
        assert ended.value.code == "unauthorized"
    [own] = [key for key in command("keys list") if key["revoked_at"] is None]
    assert command(f"keys revoke {own['id']}", status=1)["error"]["code"] == "last_admin"


def test_the_commands_about_accounts(
    command: Callable[..., Any], make_model: MakeModel, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and projects from the shell, and that what they say holds."""
    made = command("keys create ci --scope jobs:read --expires-at 2099-01-01T00:00:00Z")
    assert made["scopes"] == ["jobs:read"]
    with Client(server.url, made["key"]) as reader:
        assert reader.account.own_key().id == made["id"]
        with pytest.raises(ApiError) as refused:
            reader.submit(make_model(), config="fp8")
        assert (refused.value.code, refused.value.errors[0]["allowed"]) == ("insufficient_scope", ["jobs:write"])
    rotated = command(f"keys rotate {made['id']} --overlap-s 60")
    assert rotated["key"] != made["key"]
    assert command(f"keys revoke {made['id']}")["revoked_at"]
    assert [key["revoked_at"] is None for key in command("keys list")] == [True, False]

    monkeypatch.setattr("sys.stdin", io.StringIO("hf_fromStandardInput\n"))
    assert command("hub-tokens put team")["name"] == "team"
    assert [token["name"] for token in command("hub-tokens list")] == ["team"]
    asked = command("submit org/none -c fp8 --hub-token other", status=1)
    assert asked["error"]["code"] == "hub_token_not_found"
    assert command("hub-tokens delete team") == {"deleted": "team"}
    assert command("hub-tokens delete team", status=1)["error"]["code"] == "hub_token_not_found"

    project = command("projects create search --max-waiting 0 --requests-per-minute 500")
    assert (project["max_waiting"], project["max_running"]) == (0, None)
    key = command(f"keys create first --project {project['id']}")["key"]
    with Client(server.url, key) as other:
        assert list(other.list()) == []
        started = time.monotonic()
        with pytest.raises(ApiError) as full:
            other.submit(make_model("b"), config="fp8")
        assert (full.value.status, full.value.code) == (429, "quota_exceeded")
        assert time.monotonic() - started < 10  # a quota is not waited for
    edited = command(f"projects edit {project['id']} --max-waiting -1 --name find")
    assert (edited["name"], edited["max_waiting"], edited["requests_per_minute"]) == ("find", None, 500)
    assert [each["name"] for each in command("projects list")] == ["default", "find"]
    actions = [entry["action"] for entry in command("audit --project all --limit 3")]
    assert actions == ["project.edit", "key.create", "project.create"]
    [rotation] = command(f"audit --action key.rotate --object {made['id']}")
    assert rotation["detail"] == {"overlap_s": 60}
