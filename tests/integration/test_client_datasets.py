"""The client and the commands about datasets and models, against the real service."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bitfoundry.client import datasets
from bitfoundry.client.service import Client
from bitfoundry.client.transport import Transport
from bitfoundry.commands import main as cli
from bitfoundry.errors import ApiError, BitfoundryError
from tests.support.grids import on_grids
from tests.support.service import Server


@pytest.fixture
def service(server: Server) -> Iterator[Client]:
    with Client(server.url, server.key) as client:
        yield client


@pytest.fixture
def command(server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """``command("datasets", "list")``: what it prints with --json; ``status`` is the exit status that must come."""
    monkeypatch.setenv("BITFOUNDRY_URL", server.url)
    monkeypatch.setenv("BITFOUNDRY_API_KEY", server.key)

    def run(*words: str, status: int = 0, as_json: bool = True) -> Any:
        capsys.readouterr()
        assert cli.run([*words, *(["--json"] if as_json else [])]) == status
        said = capsys.readouterr()
        text = said.out if status == 0 else said.err
        return json.loads(text) if as_json else text

    return run


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"body": f"row {number}", "n": number}) + "\n" for number in range(3000)))
    return path


def test_the_commands(command: Callable[..., Any], file: Path, make_model: Callable[..., Path]) -> None:
    problem = command("datasets", "upload", str(file), status=1)["error"]
    assert (problem["code"], problem["errors"][0]["allowed"]) == ("no_text_column", ["body", "n"])
    made = command("datasets", "upload", str(file), "--column", "body", "--name", "mine")
    assert (made["name"], made["column"], made["statistics"]["num_rows"]) == ("mine", "body", 3000)
    assert [each["id"] for each in command("datasets", "list")] == [made["id"]]
    assert command("datasets", "show", made["id"])["statistics"]["tokens"] is None
    assert command("datasets", "preview", made["id"], "-n", "1") == [
        {"place": "Line 1", "values": {"body": "row 0", "n": 0}}
    ]
    assert "3,000" in command("datasets", "list", as_json=False)
    assert "body (text), n" in command("datasets", "show", made["id"], as_json=False)
    assert 'Line 1: {"body": "row 0", "n": 0}' in command("datasets", "preview", made["id"], as_json=False)

    model = str(make_model())
    job = command("submit", model, "--config", "fp8", "--calibration-source", made["id"], "--num-samples", "4")
    assert job["calibration"] == {"source": made["id"], "column": "body", "num_samples": 4, "seq_len": 512, "seed": 0}
    assert command("datasets", "delete", made["id"], status=1)["error"]["code"] == "dataset_in_use"
    refused = command("plan", model, "-c", "fp8", "--calibration-split", "train", status=1)["error"]
    assert refused["errors"][0]["pointer"] == "#/calibration"
    command("cancel", job["id"])
    assert command("datasets", "delete", made["id"]) == {"deleted": made["id"]}
    assert command("datasets", "show", made["id"], status=1)["error"]["code"] == "dataset_not_found"
    assert "No datasets" in command("datasets", "list", as_json=False)
    assert cli.run(["datasets", "upload"]) == 2
    assert "cannot be read" in command("datasets", "upload", "/nowhere.jsonl", status=1)["error"]["message"]


def test_inspect(command: Callable[..., Any], service: Client, make_model: Callable[..., Path]) -> None:
    model = make_model()
    found = command("inspect", str(model))
    assert (found["num_blocks"], found["model"]) == (2, {"path": str(model)})
    assert service.inspect(model).linear_layers == [{"name": "q_proj", "shape": [64, 64], "count": 2}]
    shown = command("inspect", str(model), as_json=False)
    assert "2 × q_proj [64, 64]" in shown and "gguf_q8_0" in shown
    weights = load_file(model / "model.safetensors")
    save_file(
        {name: torch.randn(weight.shape).to(weight.dtype) for name, weight in weights.items()},
        model / "model.safetensors",
    )
    on_grids(model, {"_proj": "gguf_q4_1"})
    assert command("inspect", str(model))["grids"][0]["title"] == "Q4_1, groups of 32"
    assert "Q4_1, groups of 32 (100 %)" in command("inspect", str(model), as_json=False)
    assert command("inspect", str(model / "nothing"), status=1)["error"]["code"] == "model_not_found"


def test_a_large_file_goes_in_parts_and_goes_on_after_a_break(
    service: Client, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets, "SMALL_BYTES", 1000)
    monkeypatch.setattr(datasets, "PART_BYTES", 20_000)
    begun: list[str] = []
    sent: list[str] = []
    send = Transport.send

    def cut(self: Transport, method: str, path: str, **more: Any) -> Any:
        if method == "PUT":
            sent.append(path.rpartition("/")[2])
            if sent == ["1", "2", "3"]:
                raise BitfoundryError("the line was cut")
        return send(self, method, path, **more)

    monkeypatch.setattr(Transport, "send", cut)
    with pytest.raises(BitfoundryError, match="cut"):
        service.datasets.upload(file, column="body", on_begin=begun.append)
    done: list[int] = []
    made = service.datasets.upload(file, upload_id=begun[0], on_bytes=done.append)
    assert sent == ["1", "2", "3", *map(str, range(3, len(done) + 1))] and len(done) > 4
    assert sum(done) == file.stat().st_size == made.bytes
    assert made.column == "body" and made.statistics["num_rows"] == 3000
    assert service.datasets.upload(file, upload_id=begun[0]) == made  # complete already
    with pytest.raises(ApiError, match="is complete") as caught:
        file.write_text(file.read_text() + "{}\n")
        service.datasets.upload(file, upload_id=begun[0])
    assert caught.value.code == "upload_completed"


def test_lists_go_on_from_page_to_page(service: Client, file: Path) -> None:
    made = [service.datasets.upload(file, column="body", name=str(number)) for number in range(3)]
    assert [each.name for each in service.datasets.list(page_size=2)] == ["2", "1", "0"]
    assert service.datasets.get(made[0].id) == made[0]
    assert service.datasets.statistics(made[0].id)["num_rows"] == 3000
    for each in made:
        service.datasets.delete(each.id)
    assert list(service.datasets.list()) == []
