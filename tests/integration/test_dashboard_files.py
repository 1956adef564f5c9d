"""How the page is served: built or not, what may be kept for ever, what the browser may do with it."""

from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from api.http import dashboard


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "ui" / "assets").mkdir(parents=True)
    return tmp_path / "ui"


@pytest.fixture
def client(folder: Path) -> TestClient:
    app = FastAPI()
    dashboard.install(app, folder)
    return TestClient(app)


@pytest.fixture
def built(folder: Path) -> Path:
    (folder / "index.html").write_text("<!doctype html><title>Bitfoundry</title>")
    (folder / "assets" / "index-abc123.js").write_text("1;" * 2000)
    (folder.parent / "secret.txt").write_text("secret")
    return folder


def test_before_it_is_built_the_page_says_how(client: TestClient) -> None:
    for path in ("/ui/", "/ui/jobs/x"):
        answer = client.get(path)
        assert answer.status_code == 503
        assert "<code>make ui</code>" in answer.text
        assert answer.headers["cache-control"] == "no-store"


@pytest.mark.usefixtures("built")
def test_every_address_is_the_same_page(client: TestClient) -> None:
    assert str(client.get("/").url).endswith("/ui/")
    for path in ("/ui", "/ui/", "/ui/jobs/job_1?x=1", "/ui/compare"):
        answer = client.get(path)
        assert answer.status_code == 200, path
        assert "<title>Bitfoundry</title>" in answer.text
        assert answer.headers["cache-control"] == "no-cache"
    assert client.post("/ui/").status_code == 405


@pytest.mark.usefixtures("built")
def test_assets_are_kept_for_ever_and_sent_small(client: TestClient) -> None:
    answer = client.get("/ui/assets/index-abc123.js")
    assert answer.status_code == 200
    assert "immutable" in answer.headers["cache-control"]
    assert answer.headers["content-encoding"] == "gzip"
    assert "javascript" in answer.headers["content-type"]
    missing = client.get("/ui/assets/index-old.js")
    assert missing.status_code == 404
    assert "immutable" not in missing.headers.get("cache-control", "")


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("path", ["../secret.txt", "%2e%2e/%2e%2e/secret.txt", "..%2f..%2fsecret.txt"])
def test_no_other_file_is_there(path: str, client: TestClient) -> None:
    assert "secret" not in client.get(f"/ui/assets/{path}").text


@pytest.mark.usefixtures("built")
def test_the_browser_may_load_and_run_only_what_is_ours(client: TestClient) -> None:
    for path in ("/ui/", "/ui/assets/index-abc123.js", "/ui/assets/none.js"):
        headers = client.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy
        assert "frame-ancestors 'none'" in policy
        for lax in ("unsafe", "http", "*"):
            assert lax not in policy
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["x-frame-options"] == "DENY"
