"""An adapter on the Hub, against our stand-in: resolved once, and only its own files are fetched."""

from pathlib import Path

import pytest
from huggingface_hub import constants

from quantcore.checkpoint.adapter import adapter_digest
from quantcore.config.task import AdapterSource, Task
from quantcore.errors import ModelError
from quantcore.events import silence
from quantcore.hub.adapter import resolve_adapter, with_adapter
from tests.support.hub_server import HubServer
from tests.support.jobs import task

FILES = {
    "adapter_config.json": b'{"peft_type": "LORA"}',
    "adapter_model.safetensors": b"weights",
    "tokenizer_config.json": b"{}",
    "adapter_model.bin": b"pickle",
    "README.md": b"card",
}


def job(tmp_path: Path, **adapter: str) -> Task:
    return task(tmp_path / "model", tmp_path / "out", adapter=AdapterSource(**adapter))


def test_an_adapter_is_downloaded_at_its_commit(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    sha = hub.add("org/style", FILES)
    assert resolve_adapter("org/style", "main") == sha
    found = with_adapter(job(tmp_path, id="org/style", revision=sha), silence)
    assert found.adapter is not None
    assert found.adapter_folder is not None
    assert {path.name for path in found.adapter_folder.iterdir()} == FILES.keys() - {"adapter_model.bin", "README.md"}
    assert found.adapter.digest == adapter_digest(found.adapter_folder)


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_repository_without_an_adapter_is_named(hub: HubServer, missing: str) -> None:
    hub.add("org/style", {name: data for name, data in FILES.items() if name != missing})
    with pytest.raises(ModelError, match=f"has no {missing}") as caught:
        resolve_adapter("org/style", "main")
    assert caught.value.code == "no_adapter"
