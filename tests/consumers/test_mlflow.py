"""Results in a real MLflow server, as MLflow's own client finds them there."""

import json
import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from api.store.tables.jobs import Job
from bitfoundry.commands.main import app
from bitfoundry.errors import BitfoundryError
from quantcore.engine.pipeline.job import run
from tests.support.attempts import StartHere
from tests.support.jobs import task
from tests.support.models import tiny_model
from tests.support.service import Server
from tests.support.sources import ROOT
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

PYTHON = ROOT / ".venv-consumers" / "mlflow" / "bin" / "python"
READ = """
import json, sys, mlflow
from mlflow import MlflowClient
mlflow.set_tracking_uri(sys.argv[1])
client = MlflowClient()
experiment = client.get_experiment_by_name(sys.argv[2])
found = []
for run in client.search_runs([experiment.experiment_id]):
    files = [each.path for each in client.list_artifacts(run.info.run_id)]
    report = client.download_artifacts(run.info.run_id, "report.json") if "report.json" in files else None
    found.append({
        "name": run.info.run_name, "status": run.info.status, "params": run.data.params, "metrics": run.data.metrics,
        "tags": run.data.tags, "files": files, "report": report and json.load(open(report)),
        "layers": [each.value for each in client.get_metric_history(run.info.run_id, "layer_relative_error")],
    })
models = {m.name: [[int(v.version), v.tags] for v in client.search_model_versions(f"name='{m.name}'")]
          for m in client.search_registered_models()}
print(json.dumps({"runs": found, "models": models}))
"""


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A tracking server with a database and artifacts of its own."""
    assert PYTHON.exists(), f"run `make consumers` first: {PYTHON} is missing"
    folder = tmp_path_factory.mktemp("mlflow")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [PYTHON, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    places = ["--backend-store-uri", f"sqlite:///{folder}/db", "--artifacts-destination", str(folder / "artifacts")]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*command, *places], stdout=log, stderr=log, start_new_session=True)
    address = f"http://127.0.0.1:{port}"

    def is_up() -> bool:
        assert process.poll() is None, (folder / "log").read_text()
        try:
            return httpx2.get(f"{address}/health", trust_env=False).is_success
        except httpx2.HTTPError:
            return False

    wait_until(is_up, timeout_s=300)
    yield address
    os.killpg(process.pid, 15)
    process.wait()


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("out")
    model = tiny_model(folder / "model", rank=8)
    run(task(model, folder / "quantized", "w4a16"), lambda event: None)
    return folder / "quantized"


def track(*arguments: object) -> int:
    try:
        app([*map(str, ("track", *arguments))], standalone_mode=False)
    except SystemExit as error:
        return int(error.code or 0)
    return 0


def in_mlflow(uri: str, experiment: str) -> dict[str, Any]:
    command = [PYTHON, "-c", READ, uri, experiment]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    return found


def test_a_result_is_logged_once_with_all_it_has(uri: str, out: Path) -> None:
    """And a second time gives the same run and the same version of the model."""
    for _ in range(2):
        assert track(out, "--mlflow", uri, "--experiment", "tiny", "--register", "tiny-w4a16") == 0
    found = in_mlflow(uri, "tiny")
    (logged,) = found["runs"]
    report = json.loads((out / "report.json").read_text())
    assert (logged["name"], logged["status"]) == ("quantized", "FINISHED")
    assert logged["report"] == report and sorted(logged["files"]) == ["layers.csv", "report.json"]
    assert logged["metrics"]["kl_mean"] == report["summary"]["kl_mean"]
    assert logged["metrics"]["size_after_bytes"] == report["summary"]["size_after_bytes"]
    assert logged["layers"] == [layer["relative_error"] for layer in report["layers"]]
    assert logged["params"]["config.global_quant_config.weight.dtype"] == "uint4"
    assert logged["tags"]["bitfoundry.verdict"] == report["summary"]["verdict"]["level"]
    assert found["models"] == {"tiny-w4a16": [[1, {"bitfoundry.files": str(out)}]]}


def test_a_failed_job_is_logged_with_its_error(
    uri: str, server: Server, make_model: Callable[..., Path], submit: Callable[..., str], start_here: StartHere,
    wait_for: Callable[..., Job], capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    start_here()
    job_id = submit(make_model(mode="fails"), name="nightly")
    wait_for(job_id, "failed")
    place = ("--mlflow", uri, "--experiment", "nightly", "--url", server.url, "--api-key", server.key)
    assert track(job_id, *place, "--json") == 0
    assert json.loads(capsys.readouterr().out)["version"] is None
    (logged,) = in_mlflow(uri, "nightly")["runs"]
    assert (logged["name"], logged["status"], logged["files"]) == ("nightly", "FAILED", [])
    assert logged["tags"]["bitfoundry.error"] == "nonfinite_weights"
    assert "NaN in a" in logged["tags"]["bitfoundry.error_message"]
    with pytest.raises(BitfoundryError, match="no files to register"):
        track(job_id, *place, "--register", "nothing")


def test_what_is_no_server_is_said(out: Path, uri: str) -> None:
    for address, code in (("sqlite:///x", "mlflow_uri"), ("http://127.0.0.1:9", "mlflow_failed")):
        with pytest.raises(BitfoundryError) as caught:
            track(out, "--mlflow", address)
        assert caught.value.code == code and caught.value.hint
