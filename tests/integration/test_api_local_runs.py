"""What the command line made, as the service of ``bitfoundry up`` shows it to operators."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from api.settings import Settings
from quantcore.report import local_runs
from quantcore.report.local_runs import LocalRun
from quantcore.report.values import Report
from tests.support.api import bearer
from tests.support.reports import report


@pytest.fixture(autouse=True)
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BITFOUNDRY_HOME", str(tmp_path / "user"))


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"show_local_runs": True})


def recorded(folder: Path) -> LocalRun:
    content = report(size=19000)
    folder.mkdir()
    (folder / "MANIFEST.json").write_text("{}")
    (folder / "report.json").write_text(json.dumps(content))
    return local_runs.record(folder, Report.model_validate(content), "w4a16")


def test_the_newest_come_first_and_have_a_report(client: TestClient, tmp_path: Path) -> None:
    assert client.get("/v1/local-runs").json() == {"data": [], "total": 0}
    one, two = recorded(tmp_path / "one"), recorded(tmp_path / "<two>")
    listed = client.get("/v1/local-runs", params={"limit": 1}).json()
    assert listed["total"] == 2
    [shown] = listed["data"]
    expected = {name: value for name, value in two.to_dict().items() if name not in ("command", "working_dir")}
    assert shown == expected | {"name": "<two>"}
    page = client.get(f"/v1/local-runs/{two.id}/report")
    assert page.status_code == 200 and "&lt;two&gt;" in page.text and "<script" not in page.text
    assert "default-src 'none'" in page.headers["content-security-policy"]
    shutil.rmtree(tmp_path / "<two>")
    assert client.get(f"/v1/local-runs/{two.id}/report").json()["code"] == "local_run_not_found"
    (tmp_path / "one" / "report.json").write_text("{}")
    broken = client.get(f"/v1/local-runs/{one.id}/report")
    assert (broken.status_code, broken.json()["code"]) == (404, "no_report")


def test_other_keys_see_none(client: TestClient, tmp_path: Path) -> None:
    run = recorded(tmp_path / "one")
    key = client.post("/v1/keys", json={"name": "k", "scopes": ["jobs:read", "jobs:write", "admin"]}).json()["key"]
    for path in ("", f"/{run.id}/report"):
        assert client.get(f"/v1/local-runs{path}", headers=bearer(key)).status_code == 403


class TestOfAService:
    @pytest.fixture
    def settings(self, settings: Settings) -> Settings:
        return settings.model_copy(update={"show_local_runs": False})

    def test_that_is_not_of_this_machine_alone(self, client: TestClient, tmp_path: Path) -> None:
        run = recorded(tmp_path / "one")
        assert client.get("/v1/local-runs").json() == {"data": [], "total": 0}
        assert client.get(f"/v1/local-runs/{run.id}/report").status_code == 404
