"""The dashboard is built where it can be, once, and the service never waits for more."""

from collections.abc import Callable
from pathlib import Path

import pytest

from bitfoundry.local.dashboard import build_if_missing


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "dashboard").mkdir()
    (tmp_path / "dashboard" / "package.json").write_text("{}")
    (tmp_path / "bin").mkdir()
    return tmp_path


@pytest.fixture
def make_npm(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """``make_npm("exit 0")``: a shell script in npm's place, the only one that is found."""

    def make(script: str) -> None:
        npm = checkout / "bin" / "npm"
        npm.write_text(f"#!/bin/sh\n{script}\n")
        npm.chmod(0o755)

    monkeypatch.setattr("sys.executable", str(checkout / "bin" / "python"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    return make


def test_it_is_built_once(checkout: Path, make_npm: Callable[[str], None]) -> None:
    make_npm("echo $* >> calls; case $* in *build*) mkdir -p ../api/ui && touch ../api/ui/index.html;; esac")
    said: list[str] = []
    for _ in range(2):
        build_if_missing(checkout / "log", said.append, checkout)
    assert (checkout / "dashboard" / "calls").read_text() == "--silent ci\n--silent run build\n"
    assert said == ["building the dashboard (once)"]


def test_what_goes_wrong_is_said_and_kept(checkout: Path, make_npm: Callable[[str], None]) -> None:
    make_npm("echo no network; exit 1")
    said: list[str] = []
    build_if_missing(checkout / "log", said.append, checkout)
    assert "could not be built" in said[-1]
    assert str(checkout / "log") in said[-1]
    assert (checkout / "log").read_text() == "no network\n"


def test_without_sources_nothing_is_tried(tmp_path: Path) -> None:
    said: list[str] = []
    build_if_missing(tmp_path / "log", said.append, tmp_path)
    assert said == []
