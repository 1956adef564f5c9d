"""The documentation as a site: it builds strictly, loads nothing from elsewhere, and is true to the code."""

import ast
import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml

from api.settings import Settings
from docs.generate import PACKAGES, PAGES, sites, write
from tests.support.docs import DOCS, LANGUAGES, ROOT, blocks_of

GENERATED = {f"reference/{name}.md" for name in PAGES}
KEPT = sorted(
    str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md") if str(path.relative_to(DOCS)) not in GENERATED
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the documentation with its generated pages, to be built."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(DOCS, folder / "docs", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "mkdocs.yml", folder)
    write(folder / "docs" / "reference")
    return folder


def build(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).with_name("zensical"), "build", "--strict", "--clean"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_it_builds_strictly_and_loads_nothing_from_elsewhere(site: Path) -> None:
    done = build(site)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = list((site / "build" / "site").rglob("*.html"))
    assert len(pages) > len(KEPT)
    for page in pages:
        loaded = re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="(https?:)?//[^"]*"', page.read_text("utf-8"))
        assert not loaded, page
    assert "lease" in (site / "build" / "site" / "search.json").read_text("utf-8")


def test_a_broken_link_fails_the_build(site: Path, tmp_path: Path) -> None:
    """The test above can fail."""
    shutil.copytree(site, tmp_path / "site")
    page = tmp_path / "site" / "docs" / "index.md"
    page.write_text(page.read_text("utf-8") + "\n[x](quickstart.md#nowhere)\n", "utf-8")
    done = build(tmp_path / "site")
    assert done.returncode == 1 and "anchor does not exist" in done.stdout + done.stderr


def test_every_page_is_in_the_navigation_once() -> None:
    """Zensical says nothing of one that is missing."""

    def named(entry: object) -> list[str]:
        if isinstance(entry, dict):
            entry = list(entry.values())
        return [page for each in entry for page in named(each)] if isinstance(entry, list) else [str(entry)]

    assert Counter(named(yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"])) == Counter(
        {*KEPT, *GENERATED}
    )


@pytest.mark.parametrize("page", KEPT)
def test_its_pictures_and_its_json_are_whole(page: str) -> None:
    text = (DOCS / page).read_text("utf-8")
    for picture in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text):
        assert ((DOCS / page).parent / picture).is_file(), picture
    for block in blocks_of(page):
        if block.language == "json":
            json.loads(block.text)


def test_every_block_that_can_run_is_read_by_a_test() -> None:
    """And those that cannot say why. The numbers change with the pages: they are there to be looked at."""
    read = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "read_page":
                assert isinstance(node.args[0], ast.Constant), f"{path.name} reads a page without its name"
                read.add(node.args[0].value)
    recipes = [page for page in KEPT if page.startswith("extending/")]  # tests/extending builds and runs their files
    blocks = [(page, block) for page in [*KEPT, "README.md"] if page not in recipes for block in blocks_of(page)]
    unread = [(page, block.script) for page, block in blocks if block.runs and page not in read]
    assert unread == []
    runnable = [block for _, block in blocks if block.language in LANGUAGES]
    marked = [block for block in runnable if block.reason]
    assert (len(runnable) - len(marked), len(marked)) == (97, 44)


def test_the_error_codes_of_the_code_are_all_on_the_page(site: Path) -> None:
    """Of every module that names one with ``code=``, also where the generator cannot tell the message."""
    page = (site / "docs" / "reference" / "error-codes.md").read_text("utf-8")
    listed = set(re.findall(r"^## (\w+)$", page, flags=re.MULTILINE))
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    written = {code for path in files for code in re.findall(r'\bcode="([a-z_]+)"', path.read_text("utf-8"))}
    assert len(written) > 100 and written <= listed
    explained = {site.code for site in sites() if site.message or site.hint}
    assert len(explained) > 0.95 * len(listed)


@pytest.mark.parametrize("page", ["troubleshooting.md"])
def test_the_codes_that_a_page_explains_exist(site: Path, page: str) -> None:
    reference = (site / "docs" / "reference" / "error-codes.md").read_text("utf-8")
    listed = set(re.findall(r"^## (\w+)$", reference, flags=re.MULTILINE))
    named = set(re.findall(r"^\*\*[^*]*`([a-z]+_[a-z_]+)`", (DOCS / page).read_text("utf-8"), flags=re.MULTILINE))
    states = {"retry_wait"}
    assert len(named) > 8 and named - states <= listed


def test_the_page_of_settings_names_every_setting() -> None:
    page = (DOCS / "reference" / "settings.md").read_text("utf-8")
    names = {name if name.endswith("_url") else f"bitfoundry_{name}" for name in Settings.model_fields}
    assert {name for name in names if name.upper() not in page} == set()


def test_the_glossary_leads_to_files_that_exist() -> None:
    places = re.findall(r"\*Code:\* `([^`]+)`", (DOCS / "concepts" / "glossary.md").read_text("utf-8"))
    assert len(places) >= 40
    assert [place for place in places if not (ROOT / place).exists()] == []
