"""The examples against the real local stack, with the real engine and a tiny random model."""

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from bitfoundry.client.service import Client
from bitfoundry.local.stack import LocalStack
from tests.support.models import tiny_model

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="module")
def stack() -> Iterator[LocalStack]:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="bf-test-", dir="/tmp") as folder:
        patch.delenv("DATABASE_URL", raising=False)
        patch.delenv("BROKER_URL", raising=False)
        with LocalStack(Path(folder) / "home", 0, model_roots=[Path(folder)]) as stack:
            tiny_model(stack.home.parent / "model", max_position_embeddings=1024)
            yield stack


@pytest.fixture
def environment(stack: LocalStack, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    for name, value in (("BITFOUNDRY_URL", stack.url), ("BITFOUNDRY_API_KEY", stack.api_key), ("NO_PROXY", "*")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    return dict(os.environ)


def run(*command: object, environment: dict[str, str]) -> str:
    done = subprocess.run(
        [str(part) for part in command], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def test_the_shell_script(stack: LocalStack, environment: dict[str, str], tmp_path: Path) -> None:
    script = EXAMPLES / "submit_and_wait.sh"
    said = run(script, stack.home.parent / "model", "int8_dynamic", tmp_path / "result", environment=environment)
    assert said.strip().endswith(f"is in {tmp_path / 'result'}")
    assert (tmp_path / "result" / "MANIFEST.json").is_file() and list((tmp_path / "result").rglob("config.json"))
    refused = subprocess.run([script, "/etc", "fp8", tmp_path / "no"], env=environment, capture_output=True, text=True)
    assert refused.returncode == 1 and "path_not_allowed" in refused.stderr


def test_the_pipeline(stack: LocalStack, environment: dict[str, str], tmp_path: Path) -> None:
    command = (sys.executable, EXAMPLES / "pipeline.py", stack.home.parent / "model", tmp_path / "best")
    said = run(*command, environment=environment)
    assert "is in" in said
    assert (tmp_path / "best" / "MANIFEST.json").is_file()


def test_the_schedulers_task(stack: LocalStack, environment: dict[str, str]) -> None:
    spec = importlib.util.spec_from_file_location("airflow_task", EXAMPLES / "airflow_task.py")
    assert spec and spec.loader
    task = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(task)
    first = task.quantize(str(stack.home.parent / "model"), "int8_dynamic", run_id="manual__1")
    assert task.quantize(str(stack.home.parent / "model"), "int8_dynamic", run_id="manual__1") == first
    with Client(stack.url, stack.api_key) as client:
        assert [job.id for job in client.list(text="manual__1")] == [first]


def test_the_ci_job(stack: LocalStack, environment: dict[str, str], tmp_path: Path) -> None:
    workflow = yaml.safe_load((EXAMPLES / "ci" / "quantize.yml").read_text())
    [job] = workflow["jobs"].values()
    script = job["steps"][-1]["run"]
    assert job["steps"][-2]["run"] == "pip install .", "no package index has it"
    assert {"MODEL", "CONFIG"} <= job["env"].keys()
    model = str(stack.home.parent / "model")
    given = {"MODEL": model, "CONFIG": "int8_dynamic", "GITHUB_STEP_SUMMARY": str(tmp_path / "s")}
    said = run(ROOT / script, environment=environment | given)
    assert "succeeded" in said and "worker: the engine ended with status 0" in said
    assert "succeeded" in (tmp_path / "s").read_text()
