"""The file of one job, which the worker writes and ``python -m quantcore run TASK.json`` reads. No torch."""

from __future__ import annotations

import json
from operator import not_
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, StrictInt, ValidationError, model_validator

from quantcore.config.job_spec import MAX_ANSWERS, Evaluation, JobSpec
from quantcore.config.values import Settings, config_error
from quantcore.errors import ConfigError

MAX_OWN_PROMPTS = 1000
"""Most prompts of a file."""


class EvaluationConfig(Evaluation):
    """An Evaluation on one machine.

    ``include_path`` is a folder with YAML files of more tasks. ``prompts`` is a file with prompts of one's own:
    all of them take the place of the packaged ones for own answers, the first ``num_behaviour_prompts`` for behaviour.
    """

    include_path: Path | None = None
    prompts: Path | None = Field(default=None, exclude_if=not_)
    num_behaviour_prompts: Annotated[StrictInt, Field(ge=0, le=MAX_OWN_PROMPTS, exclude_if=not_)] = 0

    @model_validator(mode="after")
    def _has_so_many_prompts(self) -> Self:
        if self.prompts is None and self.num_behaviour_prompts > MAX_ANSWERS:
            raise ValueError(f"there are {MAX_ANSWERS} packaged prompts; more come from a file (--prompts)")
        return self


class AdapterSource(Settings):
    """A PEFT adapter that is merged into the model: a folder, or an ``id`` on the Hub at the commit ``revision``.

    With both, ``folder`` holds the download. ``digest``: of the adapter's files; a job whose files have another is
    refused. The job itself fills it in if it is empty.
    """

    folder: Path | None = None
    id: str = ""
    revision: Annotated[str, Field(pattern="^([0-9a-f]{40})?$")] = ""
    digest: str = ""

    @model_validator(mode="after")
    def _names_an_adapter(self) -> Self:
        if self.folder is None and not self.id:
            raise ValueError("give folder, or id and revision")
        if bool(self.id) != bool(self.revision):
            raise ValueError("id and revision (a commit of 40 hex digits) go together")
        return self


class Task(JobSpec):
    """A JobSpec and the folders of one machine: a float model in, an artifact folder out.

    The model is the folder ``model_dir``, or ``model_id`` on the Hub at the commit ``revision``: never a branch, so
    that a second run reads the same bytes. With both, ``model_dir`` holds the download. A ``resume_dir``, on the disk
    of ``output_dir``, keeps savepoints until the task is done, so that a stopped task continues after the last one.
    ``token_on_stdin``: the token for the Hub is the first line of standard input, so that it is in no file and no
    environment. An ``adapter`` is merged into the model before anything is computed: the original, too, is the merged
    model.
    """

    model_dir: Path | None = None
    model_id: str = ""
    revision: Annotated[str, Field(pattern="^([0-9a-f]{40})?$")] = ""
    token_on_stdin: bool = False
    adapter: AdapterSource | None = None
    output_dir: Path
    resume_dir: Path | None = None
    evaluation: EvaluationConfig = EvaluationConfig()

    @model_validator(mode="after")
    def _names_a_model(self) -> Task:
        if self.model_dir is None and not self.model_id:
            raise ValueError("give model_dir, or model_id and revision")
        if bool(self.model_id) != bool(self.revision):
            raise ValueError("model_id and revision (a commit of 40 hex digits) go together")
        if self.adapter is not None and self.goal is not None:
            raise ValueError("a goal is searched for without an adapter: merge it first, or name a scheme")
        return self

    @property
    def adapter_folder(self) -> Path | None:
        """The folder of the adapter on this machine, if there is one."""
        return None if self.adapter is None else self.adapter.folder

    @property
    def model_folder(self) -> Path:
        """The ``model_dir`` of a task whose model is on this machine (see ``quantcore.hub.download.fetch``)."""
        if self.model_dir is None:
            raise RuntimeError("the model of this task has not been downloaded yet")
        return self.model_dir


def read_task(path: Path) -> Task:
    """Read the task in a JSON file. Raises ConfigError ``invalid_task``."""
    try:
        return Task.model_validate(json.loads(path.read_text("utf-8")))
    except ValidationError as error:
        raise config_error(error, f"The task in {path}", code="invalid_task") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not a valid task: {error}.", code="invalid_task") from error
