"""From what callers of the client give to the bodies of its requests."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def body_of_plan(
    model: str | Path | Mapping[str, Any],
    config: str | Mapping[str, Any] | None,
    mix: Mapping[str, Any] | None,
    export: Sequence[str] | None,
    calibration: Mapping[str, Any] | None,
    file2file: bool | None,
    shard_blocks: bool | None,
) -> dict[str, Any]:
    """The request body that jobs and plans share."""
    chosen = {"preset": config} if isinstance(config, str) else config
    formats = None if export is None else list(export)
    return {"model": model_of(model)} | given(
        config=chosen, mix=mix, export=formats, calibration=calibration, file2file=file2file, shard_blocks=shard_blocks
    )


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
