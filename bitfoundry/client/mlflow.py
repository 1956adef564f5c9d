"""Logs a result to an MLflow tracking server, by its REST API (``/api/2.0/mlflow``). Tried with MLflow 3.17.

The address and the credentials are MLflow's own: MLFLOW_TRACKING_URI, MLFLOW_TRACKING_TOKEN, or
MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import httpx2

from bitfoundry.client.transport import is_local
from bitfoundry.errors import BitfoundryError

API = "/api/2.0/mlflow"
ARTIFACTS = "/api/2.0/mlflow-artifacts/artifacts"
IDENTITY = "bitfoundry.id"
"""The tag by which a run is found again: a result has one run in an experiment."""
FILES = "bitfoundry.files"
"""The tag of a registered version: the folder of its files, or the job that has them."""
MAX_PARAM, MAX_TAG = 6000, 8000
MAX_PARAMS, MAX_METRICS = 100, 1000
"""Limits of MLflow: characters of a value, and entries of one request."""
TIMEOUT_S = 60


@dataclass(frozen=True)
class Logged:
    """What a run shall hold. ``series`` are metrics with a value for each step. ``files``: path -> content."""

    identity: str
    name: str
    params: Mapping[str, str]
    metrics: Mapping[str, float]
    series: Mapping[str, Sequence[float]] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    is_failed: bool = False


class MLflow:
    """A tracking server, in a ``with`` block. All methods raise BitfoundryError ``mlflow_failed``."""

    def __init__(self, uri: str) -> None:
        """``uri``: its address. Raises BitfoundryError ``mlflow_uri`` for one that no server can have."""
        self.uri = uri.rstrip("/")
        if not self.uri.startswith(("http://", "https://")):
            raise BitfoundryError(
                f"'{uri}' is not the address of an MLflow server.",
                code="mlflow_uri",
                hint="Use http://HOST:PORT, as --mlflow or in MLFLOW_TRACKING_URI.",
            )
        token = os.environ.get("MLFLOW_TRACKING_TOKEN")
        user = os.environ.get("MLFLOW_TRACKING_USERNAME")
        self._http = httpx2.Client(
            base_url=self.uri,
            headers={"Authorization": f"Bearer {token}"} if token else {},
            auth=(user, os.environ.get("MLFLOW_TRACKING_PASSWORD", "")) if user and not token else None,
            timeout=TIMEOUT_S,
            trust_env=not is_local(self.uri),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def log(self, logged: Logged, experiment: str) -> tuple[str, str]:
        """Write a run, unless it is there. Returns its experiment's id and its own."""
        experiment_id = self._experiment(experiment)
        run_id, has_ended = self._find(experiment_id, logged.identity)
        if run_id is not None and has_ended:
            return experiment_id, run_id
        if run_id is None:
            tags = [{"key": IDENTITY, "value": logged.identity}]
            asked = {"experiment_id": experiment_id, "run_name": logged.name, "tags": tags}
            run_id = self._send("POST", "runs/create", asked)["run"]["info"]["run_id"]
        params = [{"key": name, "value": value[:MAX_PARAM]} for name, value in logged.params.items()]
        metrics: list[dict[str, Any]] = [
            *({"key": name, "value": value, "step": 0} for name, value in logged.metrics.items()),
            *(
                {"key": name, "value": value, "step": step}
                for name, values in logged.series.items()
                for step, value in enumerate(values)
            ),
        ]
        now_ms = int(time.time() * 1000)
        metrics = [{**metric, "timestamp": now_ms} for metric in metrics if math.isfinite(metric["value"])]
        tags = [{"key": name, "value": value[:MAX_TAG]} for name, value in logged.tags.items()]
        for some in _pieces(params, MAX_PARAMS):
            self._send("POST", "runs/log-batch", {"run_id": run_id, "params": some})
        for some in _pieces(metrics, MAX_METRICS):
            self._send("POST", "runs/log-batch", {"run_id": run_id, "metrics": some})
        self._send("POST", "runs/log-batch", {"run_id": run_id, "tags": tags})
        for path, content in logged.files.items():
            self._upload(run_id, path, content)
        status = "FAILED" if logged.is_failed else "FINISHED"
        self._send("POST", "runs/update", {"run_id": run_id, "status": status})
        return experiment_id, run_id

    def register(self, model: str, place: str, run_id: str) -> str:
        """Add a version of a registered model, which is made if it is not there. Returns the version's number.

        A run has one version of a model: it is returned if it is there. MLflow takes no folder of ours as the source of
        a version: that is the run, and the tag FILES says where the files are.
        """
        if self._send("GET", "registered-models/get", {"name": model}, missing_ok=True) is None:
            self._send("POST", "registered-models/create", {"name": model})
        # MLflow compares strings in quotes, which a name may not hold.
        found = self._send("GET", "model-versions/search", {"filter": f"name='{model}' and run_id='{run_id}'"})
        if versions := (found or {}).get("model_versions"):
            return str(versions[0]["version"])
        source = self._send("GET", "runs/get", {"run_id": run_id})["run"]["info"]["artifact_uri"]
        tags = [{"key": FILES, "value": place}]
        asked = {"name": model, "source": source, "run_id": run_id, "tags": tags}
        return str(self._send("POST", "model-versions/create", asked)["model_version"]["version"])

    def _experiment(self, name: str) -> str:
        found = self._send("GET", "experiments/get-by-name", {"experiment_name": name}, missing_ok=True)
        if found is not None:
            return str(found["experiment"]["experiment_id"])
        return str(self._send("POST", "experiments/create", {"name": name})["experiment_id"])

    def _find(self, experiment_id: str, identity: str) -> tuple[str | None, bool]:
        """Return the id of the run of a result, and whether all of it was written."""
        asked = {
            "experiment_ids": [experiment_id], "filter": f"tags.`{IDENTITY}` = '{identity}'", "max_results": 1,
        }  # fmt: skip
        runs = (self._send("POST", "runs/search", asked) or {}).get("runs") or []
        return (str(runs[0]["info"]["run_id"]), runs[0]["info"]["status"] != "RUNNING") if runs else (None, False)

    def _upload(self, run_id: str, path: str, content: bytes) -> None:
        """Upload a file through the server. Raises BitfoundryError ``mlflow_artifacts`` if it does not serve any."""
        run = self._send("GET", "runs/get", {"run_id": run_id})["run"]
        place = str(run["info"]["artifact_uri"])
        if not place.startswith("mlflow-artifacts:"):
            raise BitfoundryError(
                f"The MLflow server keeps artifacts in {place}, and does not take them itself.",
                code="mlflow_artifacts",
                hint="Start it with --serve-artifacts (the default), or log without files: --no-report.",
            )
        folder = place.removeprefix("mlflow-artifacts:").lstrip("/").partition("?")[0]
        self._checked(self._call("PUT", f"{ARTIFACTS}/{quote(f'{folder}/{path}')}", content=content))

    def _send(self, method: str, path: str, asked: Mapping[str, Any], *, missing_ok: bool = False) -> Any:
        """Send a request and return the answer; None for what is not there, if that is ``missing_ok``."""
        body: dict[str, Any] = {"params": asked} if method == "GET" else {"json": asked}
        answer = self._call(method, f"{API}/{path}", **body)
        if missing_ok and answer.status_code == 404:
            return None
        return self._checked(answer)

    def _call(self, method: str, path: str, **how: Any) -> httpx2.Response:
        try:
            return self._http.request(method, path, **how)
        except httpx2.HTTPError as error:
            raise BitfoundryError(
                f"The MLflow server at {self.uri} does not answer: {error}",
                code="mlflow_failed",
                hint="Check the address (--mlflow, MLFLOW_TRACKING_URI), and that it is running.",
            ) from error

    def _checked(self, answer: httpx2.Response) -> Any:
        if answer.is_success:
            return answer.json() if answer.content else {}
        try:
            said = str(answer.json().get("message"))
        except ValueError:
            said = answer.text[:300]
        hint = "Set MLFLOW_TRACKING_TOKEN, or _USERNAME and _PASSWORD." if answer.status_code in (401, 403) else ""
        raise BitfoundryError(f"MLflow refused ({answer.status_code}): {said}", code="mlflow_failed", hint=hint)


def _pieces(rows: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]
