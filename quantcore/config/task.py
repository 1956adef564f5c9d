"""One quantization as a file: what ``python -m quantcore run TASK.json`` reads and the worker writes. No torch."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, StrictInt, ValidationError, field_validator, model_validator

from quantcore.config.quantization import (
    DEFAULT_SHARD_SIZE,
    CalibrationConfig,
    Config,
    QuantizationConfig,
    TextSource,
    parse_size,
)
from quantcore.config.values import Settings, config_error
from quantcore.errors import ConfigError

Gate = Literal["off", "warn", "fail"]
GATES: tuple[Gate, ...] = get_args(Gate)
TaskName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:-]{0,99}$")]


class Evaluation(TextSource):
    """How the result is measured, beside the original.

    ``num_windows`` windows of ``seq_len`` tokens (0: nothing is measured) of held-out text: the part that the
    calibration leaves of its source, or ``source``, which is named like that, with ``config``, ``split``, ``revision``
    and ``column``. Windows of such a text start every ``stride`` tokens (default: ``seq_len``); a smaller one gives
    every token more context. ``num_prompts`` short texts are continued by both models. ``tasks`` of
    lm-evaluation-harness run with ``limit`` documents and ``num_fewshot`` examples each (None: the task's own),
    ``batch_size`` at a time.
    """

    num_windows: Annotated[StrictInt, Field(ge=0, le=1 << 20)] = 12
    seq_len: Annotated[StrictInt, Field(ge=32, le=131072)] = 512
    stride: Annotated[StrictInt, Field(ge=1)] | None = None
    num_prompts: Annotated[StrictInt, Field(ge=0, le=64)] = 4
    tasks: Annotated[tuple[TaskName, ...], Field(max_length=64)] = ()
    limit: Annotated[StrictInt, Field(ge=1)] | None = None
    num_fewshot: Annotated[StrictInt, Field(ge=0, le=64)] | None = None
    batch_size: Annotated[StrictInt, Field(ge=1, le=4096)] = 8

    @model_validator(mode="after")
    def _make_sense(self) -> Self:
        if self.stride is not None and (self.source is None or self.stride > self.seq_len):
            raise ValueError("stride goes with a source, and is at most seq_len")
        return self

    @property
    def text(self) -> CalibrationConfig | None:
        """Its own text, named as a calibration's is; None for what the calibration leaves."""
        place = {name: getattr(self, name) for name in TextSource.model_fields}
        return None if self.source is None else CalibrationConfig(**place)


class EvaluationConfig(Evaluation):
    """The same on one machine: ``include_path`` is a folder with YAML files of more tasks."""

    include_path: Path | None = None


KEEP = "keep"
MIN_SCHEMES, MAX_SCHEMES = 2, 8
NO_SCHEME = QuantizationConfig()
"""The global scheme of a config beside a mix, which says the algorithms alone."""
Number = Annotated[float, Field(strict=True)]


class MixConfig(Settings):
    """The scheme of each layer is chosen when the job runs, from what its rounding costs: the best mix for one budget.

    ``schemes``: presets to choose from; ``keep`` leaves a layer in high precision. The budget is one of ``max_size``
    (of all files of weights: as "90MB", or bytes), ``max_bits`` (a weight in the layers that are mixed, with scales)
    and ``max_divergence`` (mean KL from the original in nats a token: the smallest mix that is measured to keep it).
    """

    schemes: tuple[str, ...] = Field(
        examples=[["w4a16", "int8_weight_only"]],
        json_schema_extra={"minItems": MIN_SCHEMES, "maxItems": MAX_SCHEMES, "uniqueItems": True},
    )
    max_size: str | StrictInt | None = Field(default=None, examples=["90MB"])
    max_bits: Number | None = Field(default=None, json_schema_extra={"exclusiveMinimum": 0})
    max_divergence: Number | None = Field(default=None, json_schema_extra={"exclusiveMinimum": 0})

    @property
    def max_bytes(self) -> int | None:
        return parse_size(self.max_size, "max_size") if isinstance(self.max_size, str) else self.max_size

    @model_validator(mode="after")
    def _make_sense(self) -> Self:
        if len(set(self.schemes)) != len(self.schemes) or not MIN_SCHEMES <= len(self.schemes) <= MAX_SCHEMES:
            raise ConfigError(
                f"A mix is made of {MIN_SCHEMES} to {MAX_SCHEMES} schemes, each given once; given were: "
                f"{', '.join(self.schemes)[:200] or 'none'}.",
                code="invalid_schemes",
                hint="For example w4a16 and int8_weight_only, with 'keep' for layers that stay as they are.",
                field="/mix/schemes",
            )
        try:
            given = [one for one in (self.max_bytes, self.max_bits, self.max_divergence) if one is not None]
        except ConfigError as error:
            error.field = "/mix/max_size"
            raise
        if len(given) != 1 or not 0 < given[0] < math.inf:
            raise ConfigError(
                "A mix is made for one budget above 0.",
                code="invalid_budget",
                hint="Give one of max_size (90MB), max_bits (4.5), max_divergence (0.02).",
                field="/mix",
            )
        return self


class ResolvedMix(MixConfig):
    """The same with the ``configs`` that the schemes' names stand for, none for ``keep``."""

    configs: dict[str, Config]

    @property
    def asked(self) -> dict[str, Any]:
        """What a MixConfig says, as JSON data."""
        return self.model_dump(mode="json", exclude={"configs"}, exclude_none=True)

    @model_validator(mode="after")
    def _all_are_known(self) -> Self:
        if self.configs.keys() != {*self.schemes} - {KEEP}:
            raise ValueError(f"configs has the config of every scheme but {KEEP}")
        return self


class Task(Settings):
    """A float model in, an artifact folder out.

    The model is the folder ``model_dir``, or ``model_id`` on the Hub at the commit ``revision``: never a branch, so
    that a second run reads the same bytes. With both, ``model_dir`` holds what was downloaded. With a ``resume_dir``,
    on the disk of ``output_dir``, a task that was stopped goes on where it was; what it needs for that is kept there
    until it is done. Files of weights are no larger than ``max_shard_size`` (see ``parse_size``), unless a tensor is.
    ``file2file``: weights go from file to file one at a time, and no model is run; nor can it be measured then.
    ``shard_blocks``: whether several processes hold each block in slices (FSDP2) instead of whole; None: where the
    devices have too little memory otherwise.
    ``token_on_stdin``: the token for the Hub is the first line of standard input, so that it is in no file and in
    nobody's environment. ``gate``: what a result that misses a limit means (see ``evaluation.gates``).
    ``mix``: the scheme of each layer is chosen first; then ``config`` says the algorithms alone (``check_mix``).
    """

    model_dir: Path | None = None
    model_id: str = ""
    revision: Annotated[str, Field(pattern="^([0-9a-f]{40})?$")] = ""
    token_on_stdin: bool = False
    output_dir: Path
    resume_dir: Path | None = None
    config: Config
    mix: ResolvedMix | None = None
    calibration: CalibrationConfig = CalibrationConfig()
    export: tuple[str, ...] = ("quark",)
    evaluation: EvaluationConfig = EvaluationConfig()
    gate: Gate = "warn"
    max_shard_size: str = DEFAULT_SHARD_SIZE
    file2file: bool = False
    shard_blocks: bool | None = None

    @field_validator("max_shard_size")
    @classmethod
    def _is_a_size(cls, text: str) -> str:
        parse_size(text)
        return text

    @model_validator(mode="after")
    def _make_sense(self) -> Task:
        if self.model_dir is None and not self.model_id:
            raise ValueError("give model_dir, or model_id and revision")
        if bool(self.model_id) != bool(self.revision):
            raise ValueError("model_id and revision (a commit of 40 hex digits) go together")
        check_tasks(self.evaluation, file2file=self.file2file)
        if self.mix is not None:
            check_mix(self.config, file2file=self.file2file)
        return self

    @property
    def model_folder(self) -> Path:
        """``model_dir`` of a task whose model is on this machine (see ``checkpoint.hub.fetch``)."""
        if self.model_dir is None:
            raise RuntimeError("the model of this task was not downloaded yet")
        return self.model_dir


def check_tasks(evaluation: Evaluation, *, file2file: bool) -> None:
    """Raises ConfigError ``unsupported_config`` for tasks of a model that is not run, or not measured."""
    if evaluation.tasks and evaluation.num_windows == 0:
        raise ConfigError(
            "Tasks are run beside the perplexity, and with num_windows 0 (--skip_evaluation) nothing is measured.",
            code="unsupported_config",
            hint="Leave one of them out: give num_windows of 1 or more, or no tasks.",
            field="/evaluation/tasks",
        )
    if file2file and evaluation.tasks:
        raise ConfigError(
            "file2file runs no model, which evaluation.tasks need.",
            code="unsupported_config",
            hint="Leave one of them out.",
            field="/evaluation/tasks",
        )


def check_mix(config: Config, *, file2file: bool) -> None:
    """Raises ConfigError ``unsupported_config`` for what cannot go with a mix: a config that says more than algorithms,
    for it is the mix that chooses; or a model that is not run."""
    if file2file:
        raise ConfigError(
            "file2file runs no model, and a mix is chosen from what running it shows.",
            code="unsupported_config",
            hint="Leave one of them out.",
            field="/file2file",
        )
    nothing = Config(global_quant_config=NO_SCHEME, algo_config=config.algo_config)
    said = [one.name for one in fields(Config) if getattr(config, one.name) != getattr(nothing, one.name)]
    if said:
        raise ConfigError(
            f"A mix chooses the scheme of every layer, and the config says {said[0]}.",
            code="unsupported_config",
            hint="Beside a mix a config holds algo_config and nothing else; or leave the mix out.",
            field=f"/{said[0]}",
        )


def read_task(path: Path) -> Task:
    """The task in a JSON file. Raises ConfigError ``invalid_task``."""
    try:
        return Task.model_validate(json.loads(path.read_text("utf-8")))
    except ValidationError as error:
        raise config_error(error, f"The task in {path}", code="invalid_task") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not a valid task: {error}.", code="invalid_task") from error
