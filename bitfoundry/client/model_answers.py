"""Answers of the service as frozen values, made by `make openapi` (api/client_answers.py)."""

from typing import Any

from pydantic import Field

from bitfoundry.client.answer import Answer
from bitfoundry.client.answers import Job
from bitfoundry.client.project_answers import MemberRef


class Interval(Answer):
    """A number and its 95 % interval."""

    value: float
    low: float
    high: float


class PairedChange(Answer):
    """Whether a new result is worse than an old one, measured on the same tokens.

    `kl_change` is the relative change of the mean KL divergence from the original, new / old - 1, and decides
    `verdict`: its interval lies above `tolerance` (worse), below `-tolerance` (better), or neither.
    `smallest_kl_change` is the relative rise of KL that this text shows 19 times in 20 to be above the tolerance.
    `perplexity_ratio` is new / old, and `top1_difference` that of the shares of tokens, new - old.
    """

    verdict: str
    """`better`, `worse` or `no difference found`."""
    tolerance: float
    kl_change: Interval
    smallest_kl_change: float
    perplexity_ratio: Interval
    top1_difference: Interval


class ResultChange(Answer):
    """The change from one result to another; without a test on the same tokens, why there is none."""

    change: PairedChange | None = None
    not_tested: str | None = None


class Recipe(Answer):
    """The recipe of a result: a `preset`, a `mix` of schemes, or a `goal`; with none of them a whole config.

    `algorithms` is None with a goal: then the job chose them, and its report names them.
    """

    preset: str | None = None
    mix: dict[str, Any] | None = None
    goal: dict[str, Any] | None = None
    algorithms: list[str] | None = None


class BriefResult(Answer):
    """A result in short. What was not measured is None. `verdict` is the level of its `Verdict`.

    `kl_mean` is the mean KL divergence from the original in nats per token, and `kl_stderr` its standard error,
    which results of earlier versions lack.
    """

    job_id: str
    finished_at: str
    recipe: Recipe
    size_before_bytes: int | None = None
    size_after_bytes: int | None = None
    verdict: str | None = None
    kl_mean: float | None = None
    kl_stderr: float | None = None


class BriefPublication(Answer):
    """The newest publication of a result in short; `url` is None until it has succeeded."""

    state: str
    """`pending`, `publishing`, `published` or `failed`."""
    url: str | None = None


class Result(BriefResult):
    """A result of a model.

    `sha` is the commit of a model on the Hub that was quantized. `cloned_from` is the id of a job, which may be
    deleted since. `derived_models` are the names of models in this result's artifact that other jobs quantized.
    """

    name: str | None = None
    sha: str | None = None
    export: list[str] = Field(default=[])
    perplexity_ratio: float | None = None
    cloned_from: str | None = None
    publication: BriefPublication | None = None
    derived_models: list[str] = Field(default=[])


class ParentResult(Answer):
    """The job whose artifact a model lies in, and the name of the model that this job quantized."""

    job_id: str
    model: str


class UsedModel(Answer):
    """A model that jobs of the project used. `name` is its id on the Hub, or its path on the server.

    `num_results` counts the jobs that have succeeded. `active_at` is when one of the jobs was last submitted,
    started or ended. `best` is a result with the best verdict: of those at most 5 % larger than the smallest, the one
    with the smallest KL divergence. `derived_from` is set for a path in the artifact of a job of the project that is
    not deleted.
    """

    name: str
    num_jobs: int
    num_results: int
    active_at: str
    newest: BriefResult | None = None
    best: BriefResult | None = None
    derived_from: ParentResult | None = None


class ModelResults(Answer):
    """The results of a model, newest first, and the result that the model itself came from, if any."""

    model: str
    derived_from: ParentResult | None = None
    data: list[Result] = Field(default=[])


class BriefSweep(Answer):
    """A sweep in short. `axes` are the JSON pointers of its matrix with their values.

    `model` is that of its first job. `best` is a result with the best verdict: of those at most 5 % larger than the
    smallest, the one with the smallest KL divergence. Jobs that were deleted do not count.
    """

    id: str
    name: str | None = None
    created_at: str
    model: str | None = None
    axes: dict[str, list[Any]] = Field(default={})
    total: int
    by_state: dict[str, int] = Field(default={})
    best: BriefResult | None = None


class Sweep(Answer):
    """A sweep and its current jobs, in the order of its matrix."""

    id: str
    name: str | None = None
    created_at: str
    matrix: dict[str, list[Any]] = Field(default={})
    total: int
    by_state: dict[str, int] = Field(default={})
    jobs: list[Job] = Field(default=[])


class ModelFolder(Answer):
    """The folder of a model that a job can read, and the size of its weight files. `is_result`: a job made it."""

    path: str
    size_bytes: int
    is_result: bool


class ModelFolders(Answer):
    """The models that were found. `is_complete` is false if not all folders were searched."""

    data: list[ModelFolder] = Field(default=[])
    is_complete: bool


class Actor(Answer):
    """The key of an action, and the member who has the key; None for the key of a program."""

    key_id: str
    name: str
    member: MemberRef | None = None


class ModelAlias(Answer):
    """An alias and its version. Only an approved request moves a `protected` one."""

    alias: str
    version: int
    protected: bool
    moved_at: str


class RegisteredModel(Answer):
    """A model of the registry. `num_pending` counts the requests that nobody has decided.

    `latest_verdict` is the level of the `Verdict` on the newest version, None for one without a verdict.
    """

    name: str
    num_versions: int
    latest_version: int | None = None
    latest_verdict: str | None = None
    aliases: list[ModelAlias] = Field(default=[])
    num_pending: int
    created_at: str


class ModelVersion(BriefResult):
    """A version of a model: the result of the job `job_id`, whose name is `name`.

    `source` is the model that the job quantized, `export` its formats, `sha256` that of the MANIFEST.json, which
    has the SHA-256 of every file.
    """

    model: str
    version: int
    aliases: list[str] = Field(default=[])
    name: str | None = None
    source: str
    export: list[str] = Field(default=[])
    bytes: int
    sha256: str
    added_by: Actor | None = None
    created_at: str


class AliasRequest(Answer):
    """A request to move a protected alias `from_version` `to_version`.

    `from_version` is None for a new alias, `to_version` for one that shall be removed. `verdict` is the level of
    the `Verdict` on `to_version`; None without one.
    """

    id: str
    model: str
    alias: str
    from_version: int | None = None
    to_version: int | None = None
    verdict: str | None = None
    reason: str
    state: str
    """`pending`, `approved`, `refused` or `withdrawn`."""
    asked_by: Actor | None = None
    created_at: str
    decided_by: Actor | None = None
    decided_at: str | None = None
    comment: str | None = None
