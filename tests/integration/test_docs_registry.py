"""The page about the model registry: its examples run against a real service."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from api.settings import Settings
from bitfoundry.client.service import Client
from tests.support.docs import read_page
from tests.support.service import Server, WorkerProcess


@pytest.fixture
def settings(settings: Settings, tmp_path: Path) -> Settings:
    return settings.model_copy(update={"publish_urls": (f"file://{tmp_path}/out",)})


@pytest.mark.slow
def test_the_examples(
    server: Server, make_model: Callable[..., Path], start_worker: Callable[..., WorkerProcess], tmp_path: Path
) -> None:
    start_worker()
    with Client(server.url, server.key) as client:
        jobs = [client.submit(make_model(name), config="fp8", name=name).id for name in ("nightly", "weekly")]
        assert all(client.wait(job_id, timeout_s=300).state == "succeeded" for job_id in jobs)
        grace = client.account.add_member("Grace", "admin").first_key
        assert grace and grace.key
        more = {"GRACE": grace.key, "JOB": jobs[0], "ALLOWED": f"file://{tmp_path}/out"}
        reading = read_page("how-to/registry.md", tmp_path, **more, **server.environment)
        assert "support-bot@1" in reading.output and "approved by Grace" in reading.output
        [model] = client.registry.models()
        assert [(each.alias, each.version) for each in model.aliases] == [("candidate", 2), ("production", 2)]
    manifest = json.loads((tmp_path / "serving" / "MANIFEST.json").read_text())
    assert manifest["files"] and (tmp_path / "candidate" / "MANIFEST.json").is_file()
