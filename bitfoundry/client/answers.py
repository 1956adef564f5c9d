"""Answers of the service as frozen values, made by `make openapi` (api/client_answers.py)."""

from typing import Any

from pydantic import Field

from bitfoundry.client.answer import FINAL_STATES as FINAL_STATES
from bitfoundry.client.answer import Answer as Answer
from bitfoundry.client.answer import ChatEvent as ChatEvent
from bitfoundry.client.answer import JobBase, Mapped, PublicationBase, SummaryBase, WorstLayerBase


class Progress(Answer):
    """Progress of the present phase: `done` of `total` units; `eta_s` is the rest of the phase in seconds.

    `memory_bytes` is the memory of the engine's process at that moment.
    """

    phase: str
    done: int
    total: int
    unit: str
    eta_s: float | None = None
    memory_bytes: int | None = None


class JobError(Answer):
    """The error of a failed job: its reason, a remedy, and whether a retry can help.

    `detail` is for experts, such as the end of the log. `rank` is the process of several that failed, and `block`
    its decoder block; None where that is not known.
    """

    code: str
    message: str
    hint: str = ""
    retryable: bool = False
    detail: str = ""
    rank: int | None = None
    block: int | None = None


class ArtifactRef(Answer):
    """The result on the service's disk; its files are at `/v1/jobs/{id}/artifacts`."""

    manifest_sha256: str
    bytes: int
    path: str


class Phase(Answer):
    """A phase of the present attempt and its progress: `running`, `done`, or `stopped` with the attempt."""

    name: str
    state: str
    """`running`, `done` or `stopped`."""
    started_at: str
    ended_at: str | None = None
    done: int | float | None = None
    total: int | float | None = None
    unit: str | None = None


class Allocation(Answer):
    """Where a scheduler runs the present attempt, or why it waits, in the scheduler's words. `id` is its own number.

    `AWAY`: the scheduler does not answer.
    """

    launcher: str
    id: str
    state: str
    reason: str
    nodes: str


class Publication(PublicationBase):
    """The newest publication of a job's artifact.

    `pending` with an `error`: it is tried again. `revision` is the commit on the Hub, or the SHA-256 of the
    MANIFEST.json at a URL. A `failed` one can be retried: `POST .../publish` without a body.
    """

    id: str
    state: str
    """`pending`, `publishing`, `published` or `failed`."""
    target: dict[str, Any] = Field(default={})
    hub_token: str | None = None
    progress: Progress | None = None
    revision: str | None = None
    url: str | None = None
    error: JobError | None = None
    attempt: int
    created_at: str
    finished_at: str | None = None


class ChatAnswer(Answer):
    """The answer of one model: greedy tokens as text. `time_s` includes reading the prompt."""

    text: str
    num_tokens: int
    time_s: float


class ChatTurn(Answer):
    """A prompt and both answers, whole if `state` is answered, else so far.

    `first_difference` is the index of the first token that differs, None while all are equal; the text of that token
    begins at `first_different_char` of the quantized model's answer. `seq` is the number of the last change.
    """

    seq: int
    number: int
    prompt: str
    state: str
    """`waiting`, `answering`, `answered` or `failed`."""
    original: ChatAnswer | None = None
    quantized: ChatAnswer | None = None
    first_difference: int | None = None
    first_different_char: int | None = None
    error: dict[str, Any] | None = None


class WorstLayer(WorstLayerBase):
    """The layer whose output changed most; the one whose weight did if outputs were not measured.

    The two differ: a weight may have a large error where its inputs are small, or were compensated for.
    """

    name: str
    relative_error: float
    sqnr_db: float
    output_error: float | None = None
    """None if the layer was found by its weight."""


class MixSummary(Answer):
    """The chosen mix in short: the number of layers of each scheme, bits per weight, and the KL divergence.

    `loss` is the estimated one; `kl_mean` is measured without GPTQ or any other algorithm.
    """

    layers: dict[str, int] = Field(default={})
    bits: float
    loss: float
    kl_mean: float


class GoalSummary(Answer):
    """Whether a goal was met, and why this result was chosen."""

    is_met: bool
    why: str


class ExportSummary(Answer):
    """A checkpoint of the artifact: its folder, its size, and the Python lines that load it.

    `programs`: the lines of each program that was seen to load such files. `refusals`: why a program is known
    not to load them, by program. Reports of earlier versions lack both.
    """

    path: str
    bytes: int
    load: str
    programs: dict[str, str] = Field(default={})
    refusals: dict[str, str] = Field(default={})


class Step(Answer):
    """Something to try next: in words, as fields of a job's request, and as flags of `quantize` and `clone`."""

    text: str
    changes: dict[str, Any] = Field(default={})
    flags: str


class Verdict(Answer):
    """The level of a result, and `reason`: the measurement that keeps it from a better one.

    `sentence` says for everybody whether the result may be shipped, and how many of its next words are the
    original's. `advice`: what a job could change to get closer to the original, for a result that is degraded or
    broken; or how to measure one that is unclear. `steps`: the same, each part by itself. Reports of earlier
    versions have neither `sentence` nor `steps`.
    """

    level: str
    """`faithful`, `good`, `unclear`, `degraded` or `broken`."""
    reason: str
    sentence: str | None = None
    advice: str | None = None
    steps: list[Step] = Field(default=[])


class JobSummary(SummaryBase):
    """The figures of a job that has succeeded. Sizes are in bytes; a measurement that was not made is None."""

    size_before_bytes: int
    """Of the model's tensors, as its files store them."""
    size_after_bytes: int
    float_bytes: int | None = None
    """Size of the model's tensors as floats, if its files are quantized."""
    perplexity_before: float | None = None
    perplexity_after: float | None = None
    perplexity_ratio: float | None = None
    perplexity_ratio_stderr: float | None = None
    """Standard error of perplexity_ratio."""
    kl_mean: float | None = None
    kl_stderr: float | None = None
    """Standard error of kl_mean."""
    verdict: Verdict | None = None
    worst_layer: WorstLayer
    num_layers_quantized: int
    num_layers_kept: int
    mix: MixSummary | None = None
    goal: GoalSummary | None = None
    quantize_s: float
    total_s: float
    seconds_by_phase: dict[str, float] = Field(default={})
    """Of the final run; earlier, resumed runs are not counted."""
    executor: str = "streamed"
    peak_memory_bytes: int
    """The maximum of memory_by_phase."""
    planned_peak_memory_bytes: int
    memory_by_phase: dict[str, Any] | None = None
    ranks: list[dict[str, Any]] | None = None
    """For a job on several processes: peak memory of each."""
    failed_tasks: dict[str, str] = Field(default={})
    """Tasks of lm-evaluation-harness without a result, each with the reason."""
    gate: str
    """`off`, `warn` or `fail`."""
    gates: list[dict[str, Any]] = Field(default=[])
    exports: dict[str, ExportSummary] = Field(default={})


class Job(JobBase):
    """A job as clients see it: the request, with every default filled in, and the job's state.

    `submitted_by` is None for a job that was submitted on the machine itself. `state_times`: the last time at which
    it entered each state. `waiting_reason` and `queue_position` (1 is next) are there while it waits.
    `allocation` is None for an attempt on a worker's own machine. `eta_s`: about the seconds left of the whole job,
    by earlier jobs of its project that did the same kind of work; None without such a job. `progress.eta_s` is of the
    phase alone. `error` has a stable `code`, a `hint`, and says in `retryable` whether a retry can help; until
    `progress_kept_until` that continues after the last saved block. `publish` is the target from the start;
    `publication`, None if there was none, is the state of that or of a later `POST .../publish`.
    """

    id: str
    name: str | None = None
    labels: dict[str, str] = Field(default={})
    priority: int
    pinned: bool
    limits: dict[str, Any] = Field(default={})
    state: str
    """`queued`, `running`, `retry_wait`, `cancelling`, `pausing`, `paused`, `succeeded`, `failed` or `cancelled`."""
    state_times: dict[str, str] = Field(default={})
    waiting_reason: str | None = None
    queue_position: int | None = None
    allocation: Allocation | None = None
    phase: str | None = None
    progress: Progress | None = None
    eta_s: float | None = None
    phases: list[Phase] = Field(default=[])
    model: dict[str, Any] = Field(default={})
    preset: str | None = None
    config: dict[str, Any] = Field(default={})
    mix: dict[str, Any] | None = None
    needs_memory_bytes: int | None = None
    avoid_host: str | None = None
    progress_kept_until: str | None = None
    cloned_from: str | None = None
    sweep_id: str | None = None
    sweep_values: dict[str, Any] | None = None
    submitted_by: dict[str, Any] | None = None
    attempt: int
    created_at: str
    started_at: str | None = None
    finished_at: str | None = None
    error: JobError | None = None
    summary: JobSummary | None = None
    artifact: ArtifactRef | None = None
    publish: dict[str, Any] | None = None
    publication: Publication | None = None
    cancel_requested: bool
    calibration: dict[str, Any] = Field(default={})
    export: list[str] = Field(default=[])
    """Checkpoint formats. By default, the one that most programs load directly for the scheme."""
    evaluation: dict[str, Any] = Field(default={})
    gate: str = "warn"
    """What happens when a quality limit is missed: off, warn or fail."""
    max_shard_size: str = "5GB"
    """Maximum size of a weight file, such as 500MB or 5GB; a larger tensor gets its own file. GGUF is a single file
    up to 48 GB, unless another size than the default is given.
    """
    file2file: bool = False
    """Quantize weight by weight, from file to file, without running or measuring the model: for schemes that need no
    data, and for unknown architectures.
    """
    shard_blocks: bool | None = None
    """Shard each decoder block across the processes of a worker (FSDP2). By default, blocks are sharded only if a
    device has too little memory for a whole one.
    """
    goal: dict[str, Any] | None = None
    nodes: int = 1
    """Number of workers that run the job together. They must share a disk."""


class Event(Answer):
    """An event; `seq` counts 1, 2, 3 within the job."""

    seq: int
    at: str
    kind: str
    data: dict[str, Any] = Field(default={})


class ArtifactFile(Answer):
    """A file of an artifact."""

    path: str
    bytes: int
    sha256: str


class LogLine(Answer):
    """A line of the log; `seq` counts within the job, over all its attempts."""

    seq: int
    at: str
    attempt: int
    level: str
    text: str


class Summary(Answer):
    """The number of jobs, in all and in each state."""

    total: int
    by_state: dict[str, int] = Field(default={})


class Dataset(Answer):
    """An uploaded data file. A job takes it as `calibration.source`; `column` is its default there."""

    id: str
    name: str
    format: str
    bytes: int
    sha256: str
    columns: list[str] = Field(default=[])
    column: str
    statistics: dict[str, Any] = Field(default={})
    created_at: str


class PreviewRow(Answer):
    """A row: its place in the file, and its values, with long ones cut short."""

    place: str
    values: dict[str, Any] = Field(default={})


class Estimate(Answer):
    """The effect of a preset on the model: format -> size in bytes; `refused` says why the preset cannot be used."""

    preset: str
    size_bytes: dict[str, int] = Field(default={})
    peak_memory_bytes: int | None = None
    refused: dict[str, str] | None = None


class Inspection(Answer):
    """The properties of a model. `model` names it as a job would store it: a real path, or an id with its commit.

    `grids`: levels on which its weights lie already, since they were quantized before; from a few rows of them.
    """

    model: dict[str, Any] = Field(default={})
    model_type: str
    architectures: list[str] = Field(default=[])
    num_blocks: int
    num_parameters: int
    dtypes: dict[str, int] = Field(default={})
    linear_layers: list[dict[str, Any]] = Field(default=[])
    tied_embeddings: bool
    experts: dict[str, int] | None = None
    max_position_embeddings: int | None = None
    vocab_size: int | None = None
    license: str | None = None
    num_files: int
    size_bytes: int
    quantization: dict[str, str | None] | None = None
    grids: list[dict[str, Any]] = Field(default=[])
    estimates: list[Estimate] = Field(default=[])
    warnings: list[str] = Field(default=[])


class KeptTensor(Answer):
    """A layer that stays in its original precision, and the reason."""

    name: str
    reason: str


class Plan(Mapped):
    """The plan of a job, made from the model's headers. Sizes are in bytes.

    `experts`: how a mixture that is calibrated routes, with the calibration tokens that each expert gets on average.
    `mix`, `goal`, `publish` and `capacity` are there if the request asked for them; `capacity` says whether
    the job fits the hardware and how long it takes. `time_s`: the median seconds of the project's last jobs with the
    same model, algorithms, texts, formats and goal; None if there is none. Then `rough_time_s` is that of those with
    the same model and preset, if any. `possible_chains`: the algorithms that the first candidate of a goal can have.
    """

    model_type: str
    num_blocks: int
    num_layers: int
    layers: list[dict[str, Any]] = Field(default=[])
    kept: list[KeptTensor] = Field(default=[])
    exports: list[str] = Field(default=[])
    config: dict[str, Any] = Field(default={})
    preset: str | None = None
    mix: dict[str, Any] | None = None
    goal: dict[str, Any] | None = None
    calibration: dict[str, Any] = Field(default={})
    evaluation: dict[str, Any] = Field(default={})
    needs_calibration: bool
    experts: dict[str, int] | None = None
    executor: str
    size_before_bytes: int
    size_after_bytes: int
    peak_memory_bytes: int
    memory_bytes: dict[str, int] = Field(default={})
    memory_by_phase: dict[str, dict[str, int]] = Field(default={})
    warnings: list[str] = Field(default=[])
    time_s: float | None = None
    rough_time_s: float | None = None
    possible_chains: list[list[str]] | None = None
    publish: dict[str, Any] | None = None
    capacity: dict[str, Any] | None = None
