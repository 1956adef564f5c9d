"""A local result is published from this machine: to a stand-in of the Hub, and to a folder behind a URL."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from bitfoundry.commands import main as cli
from quantcore.checkpoint.artifact import seal
from quantcore.report import local_runs
from quantcore.report.values import Report
from tests.support.hub_server import TOKEN, HubServer
from tests.support.reports import report

# huggingface_hub hands files to httpx2 in the older of its two ways
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.fixture(autouse=True)
def out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of a local run."""
    monkeypatch.setenv("BITFOUNDRY_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("BITFOUNDRY_CONFIG", str(tmp_path / "config.toml"))
    return result(tmp_path, report())


def result(tmp_path: Path, content: dict[str, Any]) -> Path:
    folder = tmp_path / "out"
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "report.json").write_text(json.dumps(content))
    seal(folder)
    local_runs.record(folder, Report.model_validate(content), "w4a16")
    return folder


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with HubServer() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr("time.sleep", lambda seconds: None)  # the library waits seconds between its tries
        yield hub


def test_a_result_goes_to_the_hub_with_the_token_of_the_user(
    out: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert cli.run(["push", str(out), "--repo", "org/new", "--private"]) == 0
    repository = hub.repositories["org/new"]
    files = repository.commits[repository.refs["main"]]
    assert repository.private and files["model.safetensors"] == b"weights" and "MANIFEST.json" in files
    assert f"Published: {hub.url}/org/new/commit/" in capsys.readouterr().out
    assert cli.run(["push", "last", "--repo", "org/new"]) == 0
    assert "(it was there already)" in capsys.readouterr().out


def test_a_result_goes_to_a_folder(out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["push", "out", "--to", f"file://{tmp_path}/published", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["is_new"]
    assert (tmp_path / "published" / "model.safetensors").read_bytes() == b"weights"


def test_a_dry_run_sends_nothing(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["push", str(out), "--repo", "org/new", "--dry_run"]) == 0
    said = capsys.readouterr().out
    assert "model.safetensors" in said and "to org/new (main)" in said


@pytest.mark.parametrize(
    ("flags", "code", "text"),
    [
        ([], "bitfoundry_error", "--repo ORG/NAME"),
        (["--repo", "new"], "invalid_publish", "org/name"),
        (["--repo", "org/new", "--hub-token", "mine"], "invalid_publish", "hf auth login"),
        (["--repo", "org/new", "--no-wait"], "bitfoundry_error", "--no-wait"),
        (["--repo", "org/new"], "hub_token_required", "HF_TOKEN"),
    ],
)
def test_what_cannot_be_published_says_how(
    out: Path, flags: list[str], code: str, text: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert cli.run(["push", str(out), *flags]) == 1
    said = capsys.readouterr().err
    assert code in said and text in said


def test_a_damaged_or_poor_result_is_refused(out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    to = ["--to", f"file://{tmp_path}/published"]
    poor = report()
    poor["summary"]["verdict"] = {"level": "broken", "reason": "Most words differ.", "advice": "Use fp8."}
    result(tmp_path, poor)
    assert cli.run(["push", str(out), *to]) == 1
    assert "is broken: Most words differ." in (said := capsys.readouterr().err) and "--force" in said
    (out / "model.safetensors").write_bytes(b"changed")
    assert cli.run(["push", str(out), *to, "--force"]) == 1
    assert "artifact_corrupt" in capsys.readouterr().err
    (out / "MANIFEST.json").unlink()
    assert cli.run(["push", str(out), *to, "--force"]) == 1
    assert "has no MANIFEST.json" in capsys.readouterr().err
