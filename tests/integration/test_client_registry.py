"""The model registry from Python and by the commands, against the real service with a real worker."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from api.store.engine import Sessions
from bitfoundry.client.service import Client
from bitfoundry.commands import main as cli
from bitfoundry.errors import BitfoundryError
from tests.support.service import Server, WorkerProcess

Command = Callable[..., Any]


@pytest.fixture
def command(server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """``command("registry list", key=...)``: what it prints with --json, or its error with ``status=1``."""
    monkeypatch.setenv("BITFOUNDRY_URL", server.url)

    def run(*words: str, status: int = 0, key: str = server.key) -> Any:
        monkeypatch.setenv("BITFOUNDRY_API_KEY", key)
        capsys.readouterr()
        assert cli.run([*words, "--json"]) == status, capsys.readouterr().err
        said = capsys.readouterr()
        return json.loads(said.err)["error"] if status else json.loads(said.out)

    return run


@pytest.fixture
def jobs(server: Server, make_model: Callable[..., Path], start_worker: Callable[..., WorkerProcess]) -> list[str]:
    """The ids of two succeeded jobs."""
    start_worker()
    with Client(server.url, server.key) as client:
        made = [client.submit(make_model(name), config="fp8", name=name).id for name in ("first", "second")]
        assert [client.wait(job_id, timeout_s=300).state for job_id in made] == ["succeeded", "succeeded"]
    return made


def test_from_a_job_to_production(
    command: Command, server: Server, jobs: list[str], sessions: Sessions, tmp_path: Path
) -> None:
    keys = {name: command("members", "add", name, "--role", "admin")["first_key"]["key"] for name in ("Ada", "Grace")}
    for number, job in enumerate(("first", jobs[1]), 1):
        assert command("registry", "add", "support-bot", job)["version"] == number
    moved = command("registry", "promote", "support-bot@1", "candidate")
    assert [(each["alias"], each["version"]) for each in moved["aliases"]] == [("candidate", 1)]
    assert command("registry", "promote", "support-bot@2", "candidate", "--reason", "x", status=1)["code"] == (
        "reason_not_needed"
    )
    assert command("registry", "promote", "support-bot@1", "production", status=1)["code"] == "reason_required"
    ask = ("registry", "promote", "support-bot@candidate", "production", "--reason", "It answers better.")
    asked = command(*ask, key=keys["Ada"])
    assert (asked["state"], asked["to_version"]) == ("pending", 1)
    assert [each["id"] for each in command("registry", "requests")] == [asked["id"]]
    assert command("registry", "approve", "last", status=1, key=keys["Ada"])["code"] == "own_request"
    approved = command("registry", "approve", asked["id"], "--comment", "Tried it.", key=keys["Grace"])
    assert (approved["state"], approved["decided_by"]["member"]["name"]) == ("approved", "Grace")

    shown = command("registry", "show", "support-bot@production")
    pulled = command("pull", "support-bot@production", "-o", str(tmp_path / "bot"))
    assert pulled == {name: shown[name] for name in ("model", "version", "job_id", "sha256")} | {
        "folder": str(tmp_path / "bot"), "num_files": pulled["num_files"],
    }  # fmt: skip
    assert hashlib.sha256((tmp_path / "bot" / "MANIFEST.json").read_bytes()).hexdigest() == shown["sha256"]
    assert command("pull", "support-bot@1", "-o", str(tmp_path / "bot")) == pulled  # again
    (tmp_path / "bot" / "model-00002.safetensors").touch()
    mixed = command("pull", "support-bot@2", "-o", str(tmp_path / "bot"), status=1)
    assert mixed["code"] == "folder_not_empty" and "model-00002.safetensors" in mixed["message"]
    with sessions.begin() as session:
        session.execute(
            text("UPDATE artifact SET manifest_sha256 = repeat('0', 64) WHERE job_id = :id"), {"id": jobs[1]}
        )
    damaged = command("pull", "support-bot@2", "-o", str(tmp_path / "2"), status=1)
    assert damaged["code"] == "artifact_corrupt" and not (tmp_path / "2").exists()

    assert command("show", "support-bot@production")["id"] == jobs[0]  # as every command that takes a job
    assert command("show", "support-bot@prod", status=1)["code"] == "alias_not_found"
    assert command("show", "no-such-bot@1", status=1)["code"] == "job_not_found"
    assert command("delete", "first", status=1)["code"] == "job_in_registry"

    command("registry", "promote", "support-bot@2", "production", "--reason", "Newer.")
    assert command("registry", "withdraw", "last")["state"] == "withdrawn"
    command("registry", "promote", "support-bot@2", "production", "--reason", "Newer.")
    assert command("registry", "refuse", "last", "--comment", "No.", key=keys["Ada"])["state"] == "refused"
    assert len(command("registry", "requests", "--all")) == 3 and command("registry", "requests") == []
    command("registry", "remove", "support-bot@production", "--reason", "Not used.")
    command("registry", "approve", "last", key=keys["Ada"])
    for name in ("support-bot@candidate", "support-bot@2", "support-bot"):
        assert command("registry", "remove", name) == {"deleted": name}
    assert command("registry", "list") == []


def test_the_protected_aliases(command: Command) -> None:
    assert command("registry", "protect") == {"aliases": ["production"]}
    assert command("registry", "protect", "champion", "production") == {"aliases": ["champion", "production"]}
    assert command("registry", "protect", "--none") == {"aliases": []}


def test_what_people_read(
    server: Server, jobs: list[str], sessions: Sessions, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for name, value in (server.environment | {"COLUMNS": "200"}).items():
        monkeypatch.setenv(name, value)

    def said(line: str) -> str:
        capsys.readouterr()
        assert cli.run(line.split()) == 0
        return capsys.readouterr().out

    assert said("registry add support-bot first") == "support-bot@1\n"
    assert said("registry promote support-bot@1 candidate") == "support-bot@candidate is version 1 now.\n"
    assert "pending" in said("registry promote support-bot@1 production --reason better")
    shown = said("registry show support-bot")
    assert "candidate: 1" in shown and "none → 1" in shown and "compressed_tensors" in shown
    assert jobs[0] in said("registry show support-bot@candidate")
    with sessions.begin() as session:
        verdict = 'jsonb_set(summary, \'{verdict}\', \'{"level": "good", "reason": "near"}\')'
        session.execute(text(f"UPDATE job SET summary = {verdict} WHERE id = :id"), {"id": jobs[0]})
    listed, requests = said("registry list"), said("registry requests")
    assert "support-bot" in listed and " good " in listed and "pending" in requests and " good " in requests


def test_a_result_that_may_not_be_shipped_is_added_with_a_warning(
    server: Server, jobs: list[str], sessions: Sessions, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)

    def warned(line: str) -> str:
        capsys.readouterr()
        assert cli.run(line.split()) == 0
        return capsys.readouterr().err

    def judge(level: str) -> None:
        verdict = {"level": level, "reason": "far", "sentence": "Do not ship it: it is far."}
        change = "UPDATE job SET summary = jsonb_set(summary, '{verdict}', CAST(:verdict AS jsonb)) WHERE id = :id"
        with sessions.begin() as session:
            session.execute(text(change), {"id": jobs[0], "verdict": json.dumps(verdict)})

    judge("good")
    assert warned("registry add support-bot first") == "" == warned("registry promote support-bot@1 candidate")
    judge("broken")
    warning = "warning support-bot@1 is broken. Do not ship it: it is far.\n"
    assert warned("registry add support-bot first") == warning
    assert warned("registry add support-bot first --json") == warning
    assert warned("registry promote support-bot@1 candidate") == warning
    assert warned("registry promote support-bot@1 production --reason better") == warning


def test_a_reference_has_one_form(server: Server) -> None:
    with Client(server.url, server.key) as client:
        for text_ in ("support-bot", "support-bot@", "support-bot@0", "Support@1", "a@b@c"):
            with pytest.raises(BitfoundryError, match="does not name a version"):
                client.registry.version(text_)
            assert client.registry.find_version(text_) is None
        assert client.registry.find_version("support-bot@1") is None
