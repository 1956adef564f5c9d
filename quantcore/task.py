"""One quantization as a file: what ``python -m quantcore run TASK.json`` reads and the worker writes. No torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StrictInt, ValidationError, field_validator, model_validator

from quantcore.config import DEFAULT_SHARD_SIZE, CalibrationConfig, Config, parse_size
from quantcore.errors import ConfigError


class EvaluationConfig(BaseModel):
    """Held-out text for the perplexity before and after: ``num_windows`` windows (0: none) of ``seq_len`` tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_windows: Annotated[StrictInt, Field(ge=0, le=4096)] = 12
    seq_len: Annotated[StrictInt, Field(ge=32, le=131072)] = 512


class Task(BaseModel):
    """A float model in, an artifact folder out.

    The model is the folder ``model_dir``, or ``model_id`` on the Hub at the commit ``revision``: never a branch, so
    that a second run reads the same bytes. With both, ``model_dir`` holds what was downloaded. With a ``resume_dir``,
    on the disk of ``output_dir``, a task that was stopped goes on where it was; what it needs for that is kept there
    until it is done. Files of weights are no larger than ``max_shard_size`` (see ``parse_size``), unless a tensor is.
    ``shard_blocks``: whether several processes hold each block in slices (FSDP2) instead of whole; None: where the
    devices have too little memory otherwise.
    ``token_on_stdin``: the token for the Hub is the first line of standard input, so that it is in no file and in
    nobody's environment.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model_dir: Path | None = None
    model_id: str = ""
    revision: Annotated[str, Field(pattern="^([0-9a-f]{40})?$")] = ""
    token_on_stdin: bool = False
    output_dir: Path
    resume_dir: Path | None = None
    config: Config
    calibration: CalibrationConfig = CalibrationConfig()
    export: tuple[str, ...] = ("quark",)
    evaluation: EvaluationConfig = EvaluationConfig()
    max_shard_size: str = DEFAULT_SHARD_SIZE
    shard_blocks: bool | None = None

    @field_validator("max_shard_size")
    @classmethod
    def _is_a_size(cls, text: str) -> str:
        parse_size(text)
        return text

    @model_validator(mode="after")
    def _name_one_model(self) -> Task:
        if self.model_dir is None and not self.model_id:
            raise ValueError("give model_dir, or model_id and revision")
        if bool(self.model_id) != bool(self.revision):
            raise ValueError("model_id and revision (a commit of 40 hex digits) go together")
        return self

    @property
    def model_folder(self) -> Path:
        """``model_dir`` of a task whose model is on this machine (see ``checkpoint.hub.fetch``)."""
        if self.model_dir is None:
            raise RuntimeError("the model of this task was not downloaded yet")
        return self.model_dir


def read_task(path: Path) -> Task:
    """The task in a JSON file. Raises ConfigError ``invalid_task``."""
    try:
        return Task.model_validate(json.loads(path.read_text("utf-8")))
    except (OSError, ValueError, ValidationError) as error:
        raise ConfigError(f"{path} is not a valid task: {error}.", code="invalid_task") from error
