"""What a contributor meets first: workflows, hooks and forms that name what there is."""

import re
import subprocess
import tomllib

import pytest
import yaml

import bitfoundry
import quantcore
from tests.support.sources import ROOT

WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "check.yml").read_text())
HOOKS = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
PAGES = ("README.md", "CONTRIBUTING.md", "RELEASING.md", "SECURITY.md", "CODE_OF_CONDUCT.md")


def test_the_workflow_runs_what_a_change_must_pass():
    runs = [step["run"] for job in WORKFLOW["jobs"].values() for step in job["steps"] if "run" in step]
    called = {word for run in runs for word in run.split()[1:] if "=" not in word}
    assert {"lint", "docs", "test"} == called <= TARGETS
    lowest = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"].removeprefix(">=")
    assert WORKFLOW["jobs"]["test"]["strategy"]["matrix"]["python"][0] == lowest
    assert WORKFLOW["permissions"] == {"contents": "read"}


def test_hooks_run_programs_of_the_environment():
    programs = {hook["entry"].split()[0] for hook in HOOKS}
    assert programs <= {".venv/bin/ruff", ".venv/bin/mypy", "make", "sh"}
    assert {hook["language"] for hook in HOOKS} == {"system"}  # the versions of constraints.txt, and no others


@pytest.mark.parametrize(("length", "is_allowed"), [(72, True), (73, False)])
def test_a_subject_has_at_most_72_characters(tmp_path, length, is_allowed):
    [hook] = (hook for hook in HOOKS if hook["id"] == "commit-subject")
    (tmp_path / "message").write_text("x" * length + "\n\nA body may have longer lines." + "y" * 80)
    script = re.fullmatch(r"sh -c '(.*)' --", hook["entry"])
    assert script
    done = subprocess.run(
        ["sh", "-c", script[1], "--", tmp_path / "message"], capture_output=True, text=True, check=False
    )
    assert (done.returncode == 0) is is_allowed
    assert is_allowed or "at most 72 are allowed" in done.stdout


def test_forms_ask_for_something():
    for form in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        content = yaml.safe_load(form.read_text())
        fields = [part for part in content.get("body", ()) if part["type"] != "markdown"]
        assert form.name == "config.yml" or any(field.get("validations", {}).get("required") for field in fields)


def test_pages_name_files_that_exist():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", (ROOT / page).read_text()):
            assert target.startswith(("http", "mailto")) or (ROOT / target).exists(), (page, target)


def test_both_packages_have_the_version_of_the_changelog():
    newest = re.search(r"^## \[(\d[^]]*)\] - \d{4}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest and bitfoundry.__version__ == quantcore.__version__ == newest[1]
