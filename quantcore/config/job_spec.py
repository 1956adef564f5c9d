"""The specification of a job, shared by the API request, the stored row, the lease and the engine's task.

``JobOptions`` holds the fields that a request and a planned job share. A new option is one field there and the code
that uses it: the API's schema, the stored job, the lease, the task and the command's flag follow from the field.
A request names its scheme (a preset, or schemes to mix); a ``JobSpec`` holds the whole configs. No torch.
"""

from __future__ import annotations

import math
from dataclasses import fields
from operator import not_
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, StrictBool, StrictInt, field_validator, model_validator

from quantcore.config.algorithms import RTNConfig
from quantcore.config.cache_dtypes import CACHE_DTYPES, FIELD, PROGRAMS, cache_dtypes
from quantcore.config.goal import Goal
from quantcore.config.quantization import (
    DEFAULT_SHARD_SIZE,
    CalibrationConfig,
    Config,
    QuantizationConfig,
    TextSource,
    parse_size,
)
from quantcore.config.texts import ChatArguments, TextPart, part_of
from quantcore.config.values import Settings
from quantcore.errors import ConfigError

Gate = Literal["off", "warn", "fail"]
GATES: tuple[Gate, ...] = get_args(Gate)
TaskName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:-]{0,99}$")]
ExportName = Annotated[str, Field(min_length=1, max_length=100)]
DEFAULT_EXPORTS: tuple[str, ...] = ()
"""For the format that most programs load directly for the scheme (see ``quantcore.plan.job.fitted``)."""


UNMEASURED_LEN = 128
"""Largest number of tokens of the windows that prove the files of a job without measurements."""


MAX_ANSWERS = 38
"""The number of packaged prompts (``data/builtin/prompts.jsonl``)."""


BEHAVIOUR_LEN = 256
"""Most tokens of an answer by which behaviour is judged, unless a job says otherwise."""


def _is_usual_len(value: int) -> bool:
    return value == BEHAVIOUR_LEN


class Evaluation(TextSource):
    """How the result is measured against the original.

    ``num_windows`` windows of ``seq_len`` tokens (0: nothing is measured) come from held-out text: the part of its
    source that calibration does not use, or a ``source`` of its own, named as for calibration with ``config``,
    ``split``, ``revision``, ``column`` and ``chat_template_kwargs``. Windows of such a source start every ``stride``
    tokens (default: ``seq_len``); a smaller stride gives every token more context. Both models answer ``num_prompts``
    questions in their chat template; without one they continue as many texts. A chat model is also measured on the
    original's answers to ``num_answers`` packaged prompts. Both models really answer ``num_behaviour_prompts`` of these
    in up to ``behaviour_len`` tokens, by which loops, broken JSON and answers without an end are found. The result is
    compared with itself with a KV cache of each of ``kv_cache_dtypes``, as llama.cpp or vLLM keep it. ``tasks`` of
    lm-evaluation-harness run with ``limit`` documents and ``num_fewshot`` examples each (None: the task's own),
    ``batch_size`` at a time.
    """

    chat_template_kwargs: ChatArguments = Field(default_factory=dict, exclude_if=not_)
    num_windows: Annotated[StrictInt, Field(ge=0, le=1 << 20)] = 12
    seq_len: Annotated[StrictInt, Field(ge=32, le=131072)] = 512
    stride: Annotated[StrictInt, Field(ge=1)] | None = None
    num_prompts: Annotated[StrictInt, Field(ge=0, le=64)] = 4
    num_answers: Annotated[StrictInt, Field(ge=0, le=MAX_ANSWERS)] = 24
    num_behaviour_prompts: Annotated[StrictInt, Field(ge=0, le=MAX_ANSWERS, exclude_if=not_)] = 0
    behaviour_len: Annotated[StrictInt, Field(ge=16, le=32768, exclude_if=_is_usual_len)] = BEHAVIOUR_LEN
    kv_cache_dtypes: Annotated[
        tuple[Annotated[str, Field(json_schema_extra={"enum": [*CACHE_DTYPES, *PROGRAMS]})], ...],
        Field(max_length=len(CACHE_DTYPES), exclude_if=not_),
    ] = ()
    tasks: Annotated[tuple[TaskName, ...], Field(max_length=64)] = ()
    limit: Annotated[StrictInt, Field(ge=1)] | None = None
    num_fewshot: Annotated[StrictInt, Field(ge=0, le=64)] | None = None
    batch_size: Annotated[StrictInt, Field(ge=1, le=4096)] = 8

    @field_validator("kv_cache_dtypes")
    @classmethod
    def _are_known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        cache_dtypes(names)
        return names

    @model_validator(mode="after")
    def _make_sense(self) -> Self:
        if self.stride is not None and (self.source is None or self.stride > self.seq_len):
            raise ValueError("stride needs a source and is at most seq_len")
        if self.chat_template_kwargs and self.source is None:
            raise ValueError(
                "chat_template_kwargs need a source: held-out text is rendered with the settings of calibration"
            )
        return self

    @property
    def text(self) -> TextPart | None:
        """The evaluation's own text, named as for calibration; None for the text that calibration leaves."""
        return None if self.source is None else part_of(self)

    @property
    def held_out_len(self) -> int:
        """The number of tokens of a window of held-out text. The proof alone, without measurements, needs fewer."""
        return self.seq_len if self.num_windows else min(self.seq_len, UNMEASURED_LEN)


KEEP = "keep"
MIN_SCHEMES, MAX_SCHEMES = 2, 8
NO_SCHEME = QuantizationConfig()
"""The global scheme of a config beside a mix; such a config holds only algorithms."""
Number = Annotated[float, Field(strict=True)]


class MixConfig(Settings):
    """A mix of schemes for one budget; the job chooses the scheme of each layer by the measured cost of its rounding.

    ``schemes``: presets to choose from; ``keep`` leaves a layer in high precision. The budget is one of ``max_size``
    (of all weight files: as "90MB", or bytes), ``max_bits`` (per weight in the mixed layers, with scales) and
    ``max_divergence`` (mean KL from the original in nats per token: the smallest mix that measurably keeps it).
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
                f"A mix consists of {MIN_SCHEMES} to {MAX_SCHEMES} different schemes; given: "
                f"{', '.join(self.schemes)[:200] or 'none'}.",
                code="invalid_schemes",
                hint="For example w4a16 and int8_weight_only; 'keep' leaves layers unquantized.",
                field="/mix/schemes",
            )
        try:
            budgets = [value for value in (self.max_bytes, self.max_bits, self.max_divergence) if value is not None]
        except ConfigError as error:
            error.field = "/mix/max_size"
            raise
        if len(budgets) != 1 or not 0 < budgets[0] < math.inf:
            raise ConfigError(
                "A mix needs exactly one budget, above 0.",
                code="invalid_budget",
                hint="Set one of max_size (90MB), max_bits (4.5), max_divergence (0.02).",
                field="/mix",
            )
        return self


class ResolvedMix(MixConfig):
    """A MixConfig with the ``configs`` of the named schemes; ``keep`` has none."""

    configs: dict[str, Config]

    @property
    def asked(self) -> dict[str, Any]:
        """The fields of the MixConfig as JSON data."""
        return self.model_dump(mode="json", exclude={"configs"}, exclude_none=True)

    @model_validator(mode="after")
    def _all_are_known(self) -> Self:
        if self.configs.keys() != {*self.schemes} - {KEEP}:
            raise ValueError(f"configs must have the config of every scheme except {KEEP}")
        return self


class JobOptions(Settings):
    """The options that a request and a JobSpec share: they decide the result beside the model and the scheme."""

    calibration: CalibrationConfig = CalibrationConfig()
    export: Annotated[
        tuple[ExportName, ...],
        Field(
            max_length=16,
            json_schema_extra={
                "description": "Checkpoint formats. By default, the one that most programs load directly for the "
                "scheme."
            },
        ),
    ] = DEFAULT_EXPORTS
    evaluation: Evaluation = Evaluation()
    gate: Annotated[Gate, Field(description="What happens when a quality limit is missed: off, warn or fail.")] = "warn"
    max_shard_size: Annotated[
        str,
        Field(
            examples=["5GB"],
            description="Maximum size of a weight file, such as 500MB or 5GB; a larger tensor gets its own file. "
            "GGUF is a single file up to 48 GB, unless another size than the default is given.",
        ),
    ] = DEFAULT_SHARD_SIZE
    file2file: Annotated[
        StrictBool,
        Field(
            description="Quantize weight by weight, from file to file, without running or measuring the model: for "
            "schemes that need no data, and for unknown architectures."
        ),
    ] = False
    shard_blocks: Annotated[
        StrictBool | None,
        Field(
            description="Shard each decoder block across the processes of a worker (FSDP2). By default, blocks are "
            "sharded only if a device has too little memory for a whole one."
        ),
    ] = None
    goal: Goal | None = None
    nodes: Annotated[
        StrictInt,
        Field(ge=1, le=64, description="Number of workers that run the job together. They must share a disk."),
    ] = 1

    @field_validator("max_shard_size")
    @classmethod
    def _is_a_size(cls, text: str) -> str:
        parse_size(text)
        return text

    @model_validator(mode="after")
    def _tasks_can_run(self) -> Self:
        check_tasks(self.evaluation, file2file=self.file2file)
        return self


class JobSpec(JobOptions):
    """The full specification of a job except its model: config, mix and ``JobOptions``, with all defaults set.

    With a ``mix`` the scheme of each layer is chosen when the job runs; then ``config`` holds the algorithms alone.
    With a ``goal`` everything about the scheme is chosen then, and ``config`` holds nothing.
    """

    config: Config
    mix: ResolvedMix | None = None

    @model_validator(mode="after")
    def _mix_alone_chooses(self) -> Self:
        if self.mix is not None:
            check_mix(self.config, file2file=self.file2file)
        if self.goal is not None:
            check_goal(self)
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return JSON data without nulls, which a row stores and ``JobSpec.model_validate`` reads."""
        return self.model_dump(mode="json", exclude_none=True)


def check_tasks(evaluation: Evaluation, *, file2file: bool) -> None:
    """Raise ConfigError ``unsupported_config`` for what is measured with a model that is not run, or not measured."""
    for name, what in (("num_behaviour_prompts", "Behaviour is"), ("kv_cache_dtypes", "Dtypes of the KV cache are")):
        if getattr(evaluation, name) and (evaluation.num_windows == 0 or file2file):
            raise ConfigError(
                f"{what} measured together with the perplexity, but "
                f"{'file2file' if file2file else 'num_windows 0 (--skip_evaluation)'} turns all measurements off.",
                code="unsupported_config",
                hint="Remove one of them.",
                field=f"/evaluation/{name}",
            )
    if evaluation.tasks and evaluation.num_windows == 0:
        raise ConfigError(
            "Tasks run together with the perplexity, but num_windows 0 (--skip_evaluation) turns all measurements off.",
            code="unsupported_config",
            hint="Set num_windows to 1 or more, or remove the tasks.",
            field="/evaluation/tasks",
        )
    if file2file and evaluation.tasks:
        raise ConfigError(
            "evaluation.tasks need to run the model, which file2file does not do.",
            code="unsupported_config",
            hint="Remove one of them.",
            field="/evaluation/tasks",
        )


def check_goal(spec: JobSpec) -> None:
    """Raise ConfigError ``conflicting_goal`` for a job that sets a field which its goal chooses.

    A config may hold an importance matrix alone, and that for the one runtime whose schemes all leave activations as
    they are.
    """
    if spec.evaluation.kv_cache_dtypes:
        raise ConfigError(
            "A goal measures many candidates, and chooses how the KV cache is kept.",
            code="conflicting_goal",
            hint="Leave kv_cache_dtypes out, and measure the result: bitfoundry evaluate OUT --kv_cache_dtypes NAMES.",
            field=FIELD,
        )
    imatrix = spec.config.imatrix
    if imatrix is not None and spec.goal is not None and spec.goal.runtime != "llama_cpp":
        raise ConfigError(
            f"An importance matrix takes the place of calibration in goals for llama_cpp, not for {spec.goal.runtime},"
            " some of whose schemes need the ranges of activations.",
            code="conflicting_goal",
            hint="Leave the imatrix out, or choose the runtime llama_cpp.",
            field="/algo_config",
        )
    chain = () if imatrix is None else (RTNConfig(imatrix=imatrix),)
    own = {
        "config": spec.config != Config(global_quant_config=NO_SCHEME, algo_config=chain),
        "mix": spec.mix is not None,
        "file2file": spec.file2file,
        "evaluation": spec.evaluation.num_windows == 0,
    }
    if conflict := next((name for name, is_own in own.items() if is_own), None):
        raise conflicting_goal(conflict)


def conflicting_goal(name: str) -> ConfigError:
    """Return the error for a field that cannot be set together with a goal, because the goal chooses it."""
    return ConfigError(
        f"A goal chooses scheme, algorithms and format by measuring, so '{name}' cannot be set together with it.",
        code="conflicting_goal",
        hint=f"Remove {name} or the goal.",
        field=f"/{name}",
    )


def check_mix(config: Config, *, file2file: bool) -> None:
    """Raise ConfigError ``unsupported_config`` for a config or an option that a mix excludes.

    Beside a mix, which chooses the schemes, a config may hold only algorithms; and the model must be run.
    """
    if file2file:
        raise ConfigError(
            "A mix is chosen by running the model, which file2file does not do.",
            code="unsupported_config",
            hint="Remove one of them.",
            field="/file2file",
        )
    if config.imatrix is not None:
        raise ConfigError(
            "A mix is chosen by running the model on text, and an importance matrix takes the place of that text.",
            code="unsupported_config",
            hint="Remove one of them.",
            field="/algo_config",
        )
    nothing = Config(global_quant_config=NO_SCHEME, algo_config=config.algo_config)
    names = [field.name for field in fields(Config) if getattr(config, field.name) != getattr(nothing, field.name)]
    if names:
        raise ConfigError(
            f"Mixed precision assigns a scheme to each layer, so the config cannot set {names[0]}.",
            code="unsupported_config",
            hint="With a mix, a config may contain only algo_config. Remove the rest, or the mix.",
            field=f"/{names[0]}",
        )
