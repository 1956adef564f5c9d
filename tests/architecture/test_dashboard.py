"""What the dashboard promises of its files: types that fit the API, a small first load, nothing from elsewhere."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from api import openapi
from quantcore.config import changes_schema

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "dashboard"
BUILT = ROOT / "api" / "ui"
FIRST_LOAD_BYTES = 200_000
RUNTIME = {
    "react",
    "react-dom",
    "@noble/hashes",
    "@tanstack/react-query",
    "@tanstack/react-router",
    "@tanstack/react-virtual",
}


@pytest.fixture(scope="module")
def index() -> str:
    assert (BUILT / "index.html").is_file(), "the dashboard is not built: run `make ui`"
    return (BUILT / "index.html").read_text()


def test_its_types_are_made_from_the_api_as_it_is() -> None:
    assert (DASHBOARD / "openapi.json").read_text() == openapi.document(), "the API has changed: run `make openapi`"


def test_its_form_has_the_changes_to_a_preset_as_they_are() -> None:
    written = (DASHBOARD / "preset-changes.json").read_text()
    assert written == changes_schema.document(), "the changes to a preset are others: run `make openapi`"


def test_the_first_load_is_small(index: str) -> None:
    named = re.findall(r'(?:src|href)="/ui/(assets/[^"]+)"', index)
    assert any(name.endswith(".js") for name in named)
    assert any(name.endswith(".css") for name in named)
    files = [index.encode(), *((BUILT / name).read_bytes() for name in named)]
    assert sum(len(gzip.compress(file, 9)) for file in files) <= FIRST_LOAD_BYTES


def test_the_page_loads_nothing_from_elsewhere_and_has_no_inline_script(index: str) -> None:
    assert not re.search(r'(?:src|href)="(?!/ui/)', index)
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", index)
    for file in (BUILT / "assets").iterdir():
        assert re.search(r"-[\w-]{8}\.\w+$", file.name), file.name  # its hash: it may be kept for ever
        assert file.suffix != ".map"
        text = file.read_text()
        assert "eval(" not in text and "new Function" not in text, file.name
        addresses = set(re.findall(r"https?://[\w.-]+", text))
        # names and texts, nothing to load
        known = {"http://www.w3.org", "https://react.dev", "https://ci.example.org", "http://localhost"}
        assert addresses <= known, file.name


def test_what_runs_in_the_browser_is_little_and_pinned() -> None:
    package = json.loads((DASHBOARD / "package.json").read_text())
    assert package["dependencies"].keys() == RUNTIME
    for version in (package["dependencies"] | package["devDependencies"]).values():
        assert re.fullmatch(r"\d+\.\d+\.\d+", version)
    lock = (DASHBOARD / "package-lock.json").read_text()
    assert '"resolved"' not in lock  # npm takes the registry that is set up, not the one of whoever wrote the file
    assert lock.count('"integrity"') > 50


@pytest.mark.usefixtures("index")
def test_the_wheel_packs_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
    assert "api/ui/index.html" in names
    assert any(re.fullmatch(r"api/ui/assets/index-[\w-]+\.js", name) for name in names)
    assert not any("node_modules" in name for name in names)
