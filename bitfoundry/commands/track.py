"""``track``: logs a result, or a failed job, to MLflow."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bitfoundry.commands import terminal
from bitfoundry.commands.options import AsJson, Home, Key, ResultName, Url
from bitfoundry.errors import BitfoundryError

if TYPE_CHECKING:
    from bitfoundry.client.answers import Job
    from bitfoundry.client.mlflow import Logged
    from quantcore.report.values import Report

EXPERIMENT = "bitfoundry"
METRICS = (
    "perplexity_before", "perplexity_after", "perplexity_ratio", "kl_mean", "size_before_bytes", "size_after_bytes",
    "num_layers_quantized", "num_layers_kept", "quantize_s", "total_s", "peak_memory_bytes",
)  # fmt: skip


def track(
    run: ResultName,
    mlflow: Annotated[
        str | None, typer.Option(envvar="MLFLOW_TRACKING_URI", help="Address of the MLflow server.")
    ] = None,
    experiment: Annotated[str, typer.Option(help="Experiment, which is made if it is not there.")] = EXPERIMENT,
    register: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Also add a version of this registered model.")
    ] = None,
    report: Annotated[bool, typer.Option(help="Upload the report and the table of layers.")] = True,
    url: Url = None,
    api_key: Key = None,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Log a result to MLflow: parameters, metrics by layer, the report; of a failed job its error."""
    if mlflow is None:
        raise BitfoundryError(
            "No MLflow server is named.",
            code="mlflow_uri",
            hint="Use --mlflow http://HOST:PORT or MLFLOW_TRACKING_URI.",
        )
    logged, place = _read(run, url, api_key, home, with_files=report)
    if register is not None and logged.is_failed:
        raise BitfoundryError(f"{run} has failed, so it has no files to register.", code="not_ready")
    from bitfoundry.client.mlflow import MLflow

    with MLflow(mlflow) as server:
        experiment_id, run_id = server.log(logged, experiment)
        version = None if register is None else server.register(register, place, run_id)
    address = f"{server.uri}/#/experiments/{experiment_id}/runs/{run_id}"
    if as_json:
        terminal.print_json({"experiment_id": experiment_id, "run_id": run_id, "url": address, "version": version})
        return
    terminal.out.print(f"Logged as {logged.name}: {address}", soft_wrap=True)
    if version is not None:
        terminal.out.print(f"Registered as version {version} of {register}.")


def _read(
    name: str, url: str | None, api_key: str | None, home: Path | None, *, with_files: bool
) -> tuple[Logged, str]:
    """Return what is logged of a folder, a local run or a job, and the place of its files."""
    from bitfoundry.commands.results import read_result

    found = read_result(name, url, api_key, home)
    job = found.job
    if job is None:
        assert found.report is not None and found.folder is not None
        logged = _of_report(found.report, found.id, found.name, {}, with_files=with_files)
        return logged, str(found.folder.absolute())
    if found.report is None:
        return _of_failure(job), ""
    tags = {"bitfoundry.job": job.id, **{f"bitfoundry.label.{key}": value for key, value in job.labels.items()}}
    place = job.id if job.artifact is None else job.artifact.path
    return _of_report(found.report, job.id, found.name, tags, with_files=with_files), place


def _of_report(report: Report, identity: str, name: str, tags: dict[str, str], *, with_files: bool) -> Logged:
    from bitfoundry.client.mlflow import Logged

    summary, verdict = report.summary, report.summary.verdict
    metrics = {key: float(value) for key in METRICS if (value := getattr(summary, key)) is not None}
    if report.quality is not None:
        metrics |= {
            "kl_p99": report.quality.divergence.kl_p99,
            "top1_agreement": report.quality.divergence.top1_agreement.value or 0.0,
        }
    if report.answers is not None:
        metrics["answers_kl_mean"] = report.answers.divergence.kl_mean.value or 0.0
    files = {}
    if with_files:
        files = {"report.json": json.dumps(report.to_dict()).encode(), "layers.csv": _table_of(report)}
    about = {"bitfoundry.model": report.model.path or str(report.model.id)}
    if verdict is not None:
        about |= {"bitfoundry.verdict": verdict.level, "bitfoundry.verdict_reason": verdict.reason}
    return Logged(
        identity=identity,
        name=name,
        params=_flat({"config": report.config, "calibration": report.calibration, "evaluation": report.evaluation}),
        metrics=metrics,
        series={"layer_relative_error": [layer.relative_error for layer in report.layers]},
        tags=tags | about,
        files=files,
    )


def _of_failure(job: Job) -> Logged:
    from bitfoundry.client.mlflow import Logged

    error = job.error
    tags = {"bitfoundry.job": job.id, "bitfoundry.state": job.state}
    if error is not None:
        tags |= {"bitfoundry.error": error.code, "bitfoundry.error_message": f"{error.message} {error.hint}".strip()}
    params = _flat({"config": job.config, "calibration": job.calibration})
    return Logged(job.id, job.name or job.id, params, {}, tags=tags, is_failed=True)


def _flat(value: Any, prefix: str = "") -> dict[str, str]:
    """Return nested settings as one table: {"config.global_quant_config.weight.dtype": "uint4"}; nulls are left out."""
    if isinstance(value, dict):
        return {
            key: text
            for name, member in value.items()
            for key, text in _flat(member, f"{prefix}.{name}" if prefix else str(name)).items()
        }
    if isinstance(value, list) and any(isinstance(member, dict) for member in value):
        return _flat({str(number): member for number, member in enumerate(value)}, prefix)
    if value is None or value in ([], ""):
        return {}
    return {prefix: ",".join(map(str, value)) if isinstance(value, list) else str(value)}


def _table_of(report: Report) -> bytes:
    """Return the layers as CSV, in the order of the steps of ``layer_relative_error``."""
    columns = ("name", "block", "scheme", "relative_error", "output_error", "num_weights", "bytes")
    text = io.StringIO()
    rows = csv.writer(text)
    rows.writerow(columns)
    rows.writerows([getattr(layer, column) for column in columns] for layer in report.layers)
    return text.getvalue().encode()
