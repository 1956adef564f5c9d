"""One quantization as a file: what ``python -m quantcore run TASK.json`` reads and the worker writes. No torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StrictInt, ValidationError

from quantcore.config import CalibrationConfig, Config
from quantcore.errors import ConfigError


class EvaluationConfig(BaseModel):
    """Held-out text for the perplexity before and after: ``num_windows`` windows (0: none) of ``seq_len`` tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_windows: Annotated[StrictInt, Field(ge=0, le=4096)] = 8
    seq_len: Annotated[StrictInt, Field(ge=32, le=131072)] = 512


class Task(BaseModel):
    """A float model folder in, an artifact folder out."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model_dir: Path
    output_dir: Path
    config: Config
    calibration: CalibrationConfig = CalibrationConfig()
    export: tuple[str, ...] = ("quark",)
    evaluation: EvaluationConfig = EvaluationConfig()


def read_task(path: Path) -> Task:
    """The task in a JSON file. Raises ConfigError ``invalid_task``."""
    try:
        return Task.model_validate(json.loads(path.read_text("utf-8")))
    except (OSError, ValueError, ValidationError) as error:
        raise ConfigError(f"{path} is not a valid task: {error}.", code="invalid_task") from error
