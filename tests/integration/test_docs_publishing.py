"""The page about publishing: its examples run against a real service, its tables are true."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from api.jobs.schemas import PublishTo
from api.settings import Settings
from api.store.tables.publications import PublicationState
from tests.support.docs import DOCS, read_page
from tests.support.hub_server import TOKEN, HubServer
from tests.support.service import Server, WorkerProcess

ROOT = Path(__file__).parents[2]
PAGE = (DOCS / "how-to" / "publish.md").read_text()


@pytest.fixture
def settings(settings: Settings, tmp_path: Path) -> Settings:
    return settings.model_copy(update={"publish_urls": (f"file://{tmp_path}/out",)})


def first_column(heading: str) -> list[str]:
    section = PAGE.partition(heading)[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return [name for cell in rows for name in re.findall(r"`([a-z_]+)`", cell) if name != "code"]


def test_the_tables_are_true() -> None:
    assert set(first_column("## With the job")) == set(PublishTo.model_fields)
    assert first_column("## States of a publication") == list(PublicationState)
    paths = [path for package in ("api", "quantcore", "worker") for path in (ROOT / package).rglob("*.py")]
    source = "".join(path.read_text() for path in paths)
    codes = {*first_column("## Errors"), *re.findall(r"`([a-z_]+)`", PAGE.partition("A request can")[2])}
    assert len(codes) > 20
    assert [code for code in codes if f'"{code}"' not in source] == ["hf_xet"]


def test_every_code_of_the_publishing_modules_is_listed() -> None:
    of_hub = "push push_errors push_progress push_task target storage access".split()
    names = ("worker/publisher.py", "api/jobs/targets.py", *(f"quantcore/hub/{name}.py" for name in of_hub))
    modules = [ROOT / name for name in names]
    codes = {code for path in modules for code in re.findall(r'code="([a-z_]+)"', path.read_text())}
    assert len(codes) > 12
    assert codes - {"invalid_task"} <= set(re.findall(r"`([a-z_]+)`", PAGE))


@pytest.mark.slow
def test_the_examples(
    server: Server, hub: HubServer, make_model: Callable[..., Path], start_worker: Callable[..., WorkerProcess],
    tmp_path: Path, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    start_worker()
    model = make_model()
    names = {"URL": server.url, "KEY": server.key, "MODEL": str(model)}
    more = {"MODEL": str(model), "WRITE_TOKEN": TOKEN, "ALLOWED": f"file://{tmp_path}/out"}
    reading = read_page("how-to/publish.md", tmp_path, names=names, **more, **server.environment)
    assert TOKEN not in reading.output
    assert f"to {hub.url}/org/another, which will be created" in reading.output
    assert reading.output.count("published to org/another (main)") == 2
    another = hub.repositories["org/another"]
    assert another.private and another.history[0].title == "fp8, proven"
    assert any(name.startswith("fp8/") for name in another.commits[another.refs["refs/pr/1"]])
    weights = (tmp_path / "from-the-service/model.safetensors").read_bytes()
    for folder in ("from-the-hub", "out/nightly"):
        assert (tmp_path / folder / "model.safetensors").read_bytes() == weights
        assert (tmp_path / folder / "MANIFEST.json").is_file()

    sha = hub.repositories["org/from-python"].refs["main"]
    assert f"published {sha} {hub.url}/org/from-python/commit/{sha}" in capsys.readouterr().out
