"""Answers of the service about models: the results of each, and those on the server."""

from pydantic import Field

from bitfoundry.client.answers import Answer, Recipe


class BriefResult(Answer):
    """A result in short. Sizes are in bytes; what was not measured is None.

    `kl_mean` is in nats per token, with the standard error `kl_stderr`.
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
    url: str | None = None


class Result(BriefResult):
    """A result of a model. `derived_models` are models in its artifact that other jobs quantized.

    `sha` is the commit of a model on the Hub. The job `cloned_from` may be deleted since.
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
    """A model that jobs used: its Hub id or its path on the server, its jobs, and its results in short.

    `best` is the smallest of the results with the best verdict. `active_at` is when one of its jobs was last submitted,
    started or ended.
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
    data: list[Result]


class ModelFolder(Answer):
    """A model on the server that a job can name by its path; `size_bytes` is that of its weight files."""

    path: str
    size_bytes: int


class ModelFolders(Answer):
    """The models on the server, by path; `is_complete` is False if not all folders were searched."""

    data: list[ModelFolder]
    is_complete: bool
