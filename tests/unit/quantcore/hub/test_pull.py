"""A model fetched whole from our stand-in of the Hub."""

import json
from pathlib import Path

import pytest

from quantcore.cli import main as cli
from quantcore.errors import QuantError
from quantcore.hub.pull import pull
from quantcore.hub.push import push
from tests.support.hub_server import TOKEN, HubServer
from tests.support.publishing import make_task, silence

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


def read(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file() and ".cache" not in path.parts]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_what_was_pushed_comes_back(hub: HubServer, tmp_path: Path) -> None:
    done = push(make_task(tmp_path / "artifact"), TOKEN, silence)
    files = hub.repositories["org/new"].commits[done.revision]
    files["evil.py"] = files["pytorch_model.bin"] = files["../outside.txt"] = b"x"
    hub.drops["model.safetensors"] = [100_000]
    found = pull("org/new", "main", tmp_path / "out", silence)
    assert found["sha"] == done.revision
    assert sorted(found["left_out"]) == ["../outside.txt", "evil.py", "pytorch_model.bin"]
    assert read(tmp_path / "out") == {name: data for name, data in files.items() if name not in found["left_out"]}
    hub.requests.clear()
    pull("org/new", done.revision, tmp_path / "out", silence)
    assert not hub.asked("/cdn/")


def test_what_is_not_the_commits_is_refused(hub: HubServer, tmp_path: Path) -> None:
    done = push(make_task(tmp_path / "artifact"), TOKEN, silence)
    hub.tampered["config.json"] = b'{"a": 2}'
    with pytest.raises(QuantError, match="differs from the file on the Hub") as caught:
        pull("org/new", "main", tmp_path / "out", silence)
    assert caught.value.code == "hub_hash_mismatch"
    hub.tampered.clear()
    hub.repositories["org/new"].commits[done.revision]["config.json"] = b'{"a": 3}'  # in the commit, not the manifest
    with pytest.raises(QuantError, match=r"MANIFEST.json") as caught:
        pull("org/new", "main", tmp_path / "other", silence)
    assert caught.value.code == "hub_hash_mismatch"


def test_the_command_and_a_gated_model(
    hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    hub.add("org/closed", {"config.json": b"{}", "model.safetensors": b"w"}, private=True)
    arguments = ["pull", "org/closed", "--output_dir", str(tmp_path / "out"), "--json"]
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setattr("huggingface_hub.utils._auth._get_token_from_file", lambda: None)
    assert cli.main(arguments) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["code"] == "hub_not_found"
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert cli.main(arguments) == 0
    said = capsys.readouterr()
    assert json.loads(said.out.splitlines()[-1])["summary"]["num_files"] == 2
    assert TOKEN not in said.out + said.err
    hub.add("org/gated", {"config.json": b"{}"}, gated=True)
    assert cli.main(["pull", "org/gated", "--output_dir", str(tmp_path / "gated"), "--json"]) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["code"] == "hub_gated"
    assert cli.main(["pull", "../x", "--output_dir", str(tmp_path / "x"), "--json"]) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["code"] == "invalid_model_id"
