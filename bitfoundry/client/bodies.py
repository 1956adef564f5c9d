"""From what callers of the client give to the bodies of its requests."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict


class JobOptions(TypedDict, total=False):
    """What decides a job's result beside its model and its scheme; the service's default where an option is left out.

    `calibration` {source, num_samples, seq_len, seed, ...}: the text that is learned from. `export`: one format or
    several. `evaluation` {num_windows, source, tasks, ...}: how the result is measured. `gate`: what a missed limit
    means, "off", "warn" or "fail". `max_shard_size`: largest file of weights, "500MB". `file2file`: weights go from
    file to file and no model is run. `shard_blocks`: whether each block is sharded over a worker's processes. `nodes`:
    how many workers, with one disk in common, do the job together. None is the same as left out.
    """

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
    """The body that requests for jobs and for plans share."""
    chosen = {"preset": config} if isinstance(config, str) else config
    body = {"model": model_of(model)} | given(config=chosen, mix=mix, **options)
    formats = body.get("export", [])
    return body | ({"export": [formats] if isinstance(formats, str) else list(formats)} if formats else {})


def given(**fields: Any) -> dict[str, Any]:
    """Those that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


def model_of(model: str | Path | Mapping[str, Any]) -> Mapping[str, Any]:
    """A path when it looks like one (absolute, ~, ./, or there on this machine), else a Hub id."""
    if isinstance(model, Mapping):
        return model
    path = Path(model).expanduser()
    if isinstance(model, Path) or path.is_absolute() or model.startswith(".") or path.is_dir():
        return {"path": str(path.absolute())}
    return {"id": model}
