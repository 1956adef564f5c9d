"""Request bodies, made from the arguments of the client's methods."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict


class JobOptions(TypedDict, total=False):
    """Options of a job besides its model and its scheme. For an absent option or None the service uses its default.

    `goal` {runtime, device, max_size, min_recovery, context}: what the result is for, instead of a scheme. `effort`:
    the algorithms that are recommended for the scheme, "fast", "balanced" or "best". `calibration` {source or sources,
    num_samples, seq_len, seed, ...}: the calibration text. `export`: one format or several; by default the one that
    most programs load for the scheme. `evaluation` {num_windows, source, tasks, ...}: how the result is measured.
    `gate`: the effect of a missed limit, "off", "warn" or "fail". `max_shard_size`: size limit of a file of weights,
    "500MB". `file2file`: weights go from file to file and no model is run. `shard_blocks`: whether each block is
    sharded over a worker's processes. `nodes`: the number of workers, with a shared disk, that do the job together.
    """

    goal: Mapping[str, Any] | None
    effort: str | None
    calibration: Mapping[str, Any] | None
    export: str | Sequence[str] | None
    evaluation: Mapping[str, Any] | None
    gate: str | None
    max_shard_size: str | None
    file2file: bool | None
    shard_blocks: bool | None
    nodes: int | None


def job_body(
    model: str | Path | Mapping[str, Any],
    config: str | Mapping[str, Any] | None,
    mix: Mapping[str, Any] | None,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the request body that jobs and plans share."""
    chosen = {"preset": config} if isinstance(config, str) else config
    body = {"model": model_of(model)} | given(config=chosen, mix=mix, **options)
    formats = body.get("export", [])
    return body | ({"export": [formats] if isinstance(formats, str) else list(formats)} if formats else {})


def given(**fields: Any) -> dict[str, Any]:
    """Return the fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


def model_of(model: str | Path | Mapping[str, Any]) -> Mapping[str, Any]:
    """Return {"path": ...} for a path (absolute, ~, ./, or an existing folder), else {"id": ...} for the Hub."""
    if isinstance(model, Mapping):
        return model
    path = Path(model).expanduser()
    if isinstance(model, Path) or path.is_absolute() or model.startswith(".") or path.is_dir():
        return {"path": str(path.absolute())}
    return {"id": model}
