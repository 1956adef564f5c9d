"""The service's answers as frozen values. Fields that this client does not know are kept, not rejected."""

from typing import Any

from pydantic import BaseModel, ConfigDict

FINAL_STATES = frozenset({"succeeded", "failed", "cancelled"})


class Answer(BaseModel):
    """An answer of the service: frozen, and open to fields that this client does not know."""

    model_config = ConfigDict(frozen=True, extra="allow")


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
    """The error of a failed job: its reason, a remedy, and whether a retry can help."""

    code: str
    message: str
    hint: str = ""
    retryable: bool = False


class ArtifactRef(Answer):
    """The artifact's path on the service, and the hash of its manifest."""

    manifest_sha256: str
    bytes: int
    path: str | None = None


class Phase(Answer):
    """A phase of the present attempt: `running`, `done` or `stopped`."""

    name: str
    state: str
    started_at: str
    ended_at: str | None = None
    done: int | float | None = None
    total: int | float | None = None
    unit: str | None = None


class Publication(Answer):
    """The newest publication of a job's artifact: `pending`, `publishing`, `published` or `failed`.

    `revision` is the commit on the Hub, or the SHA-256 of the MANIFEST.json at a URL."""

    id: str
    state: str
    target: dict[str, Any]
    hub_token: str | None = None
    progress: Progress | None = None
    revision: str | None = None
    url: str | None = None
    error: JobError | None = None
    attempt: int = 0

    @property
    def is_final(self) -> bool:
        return self.state in ("published", "failed")


class ChatAnswer(Answer):
    """An answer of one model in a chat. `time_s` includes reading the prompt."""

    text: str
    num_tokens: int
    time_s: float


class ChatEvent(Answer):
    """A change of a chat: of its turn `number`, or of the chat itself."""

    seq: int
    state: str
    number: int | None = None


class ChatTurn(Answer):
    """A prompt with both answers: `waiting`, `answering` (then the answers are those so far), `answered` or `failed`.

    `first_difference` is the index of the first token that differs, None while all are equal; its text begins at
    `first_different_char` of the quantized model's answer.
    """

    seq: int
    number: int
    prompt: str
    state: str
    original: ChatAnswer | None = None
    quantized: ChatAnswer | None = None
    first_difference: int | None = None
    first_different_char: int | None = None
    error: dict[str, Any] | None = None


class Mapped(Answer):
    """An answer whose fields can also be read by name, as JSON data: it used to be a plain dictionary."""

    def __getitem__(self, name: str) -> Any:
        return self.model_dump(mode="json")[name]


class WorstLayer(Answer):
    """The layer whose output changed most; the one whose weight did, if `output_error` is None."""

    name: str
    relative_error: float
    sqnr_db: float | None = None
    output_error: float | None = None

    @property
    def error(self) -> str:
        """The error by which it is the worst."""
        if self.output_error is None:
            return f"weight error {self.relative_error:.4f}"
        return f"output error {self.output_error:.4f}"


class MixSummary(Answer):
    """The chosen mix: the number of layers of each scheme, bits per weight, the estimated and the measured KL."""

    layers: dict[str, int]
    bits: float
    loss: float
    kl_mean: float


class GoalSummary(Answer):
    """Whether the goal was met, and why this result was chosen."""

    is_met: bool
    why: str


class ExportSummary(Answer):
    """A checkpoint of the artifact: its folder, its size in bytes, and the Python lines that load it.

    `programs`: the lines of each program that was seen to load such files. `refusals`: why a program is known not to
    load them, by program.
    """

    path: str
    bytes: int
    load: str
    programs: dict[str, str] = {}
    refusals: dict[str, str] = {}


class Verdict(Answer):
    """How far the result's predictions are from the original's.

    `level` is faithful, good, unclear (too little text), degraded or broken, and `reason` the measurement that keeps it
    from a better one. `advice`: what a job could change to get closer to the original, for a degraded or broken result;
    or how to measure an unclear one.
    """

    level: str
    reason: str
    advice: str | None = None


class JobSummary(Mapped):
    """The figures of a job that has succeeded. Sizes are in bytes; perplexities are None if they were not measured."""

    size_before_bytes: int
    size_after_bytes: int
    perplexity_before: float | None = None
    perplexity_after: float | None = None
    perplexity_ratio: float | None = None
    kl_mean: float | None = None
    kl_stderr: float | None = None
    verdict: Verdict | None = None
    worst_layer: WorstLayer
    num_layers_quantized: int = 0
    num_layers_kept: int = 0
    mix: MixSummary | None = None
    goal: GoalSummary | None = None
    quantize_s: float = 0.0
    total_s: float
    seconds_by_phase: dict[str, float] = {}
    peak_memory_bytes: int
    planned_peak_memory_bytes: int | None = None
    failed_tasks: dict[str, str] = {}
    gate: str = ""
    gates: list[dict[str, Any]] = []
    exports: dict[str, ExportSummary] = {}


class Job(Answer):
    """A job in the state of the moment when the service answered.

    `eta_s`: about the seconds left of the whole job, None without similar earlier jobs of its project.
    """

    id: str
    state: str
    name: str | None = None
    labels: dict[str, str] = {}
    priority: int = 5
    pinned: bool = False
    limits: dict[str, int | None] = {}
    state_times: dict[str, str] = {}
    waiting_reason: str | None = None
    queue_position: int | None = None
    phase: str | None = None
    progress: Progress | None = None
    eta_s: float | None = None
    phases: list[Phase] = []
    model: dict[str, Any]
    config: dict[str, Any]
    preset: str | None = None
    mix: dict[str, Any] | None = None
    goal: dict[str, Any] | None = None
    calibration: dict[str, Any] = {}
    export: list[str] = []
    evaluation: dict[str, Any] = {}
    gate: str = "warn"
    max_shard_size: str = "5GB"
    file2file: bool = False
    shard_blocks: bool | None = None
    nodes: int = 1
    avoid_host: str | None = None
    progress_kept_until: str | None = None
    cloned_from: str | None = None
    sweep_id: str | None = None
    sweep_values: dict[str, Any] | None = None
    attempt: int = 0
    created_at: str
    started_at: str | None = None
    finished_at: str | None = None
    error: JobError | None = None
    summary: JobSummary | None = None
    artifact: ArtifactRef | None = None
    publish: dict[str, Any] | None = None
    publication: Publication | None = None
    cancel_requested: bool = False

    @property
    def is_final(self) -> bool:
        return self.state in FINAL_STATES


class Event(Answer):
    """An entry of a job's history; `seq` counts within the job."""

    seq: int
    at: str
    kind: str
    data: dict[str, Any] = {}


class ArtifactFile(Answer):
    """A file of an artifact."""

    path: str
    bytes: int
    sha256: str


class LogLine(Answer):
    """A line that an engine printed; `seq` counts within the job, over all its attempts."""

    seq: int
    at: str
    attempt: int
    level: str
    text: str


class Summary(Answer):
    """The number of jobs, in total and in each state."""

    total: int
    by_state: dict[str, int]


class Dataset(Answer):
    """An uploaded data file; `column` holds its text. Jobs take its id as `calibration.source`."""

    id: str
    name: str
    format: str
    bytes: int
    sha256: str
    columns: list[str]
    column: str
    statistics: dict[str, Any]
    created_at: str


class PreviewRow(Answer):
    """A row of a dataset: its place in the file, and its values, with long ones shortened."""

    place: str
    values: dict[str, Any]


class Estimate(Answer):
    """The estimate for a preset: size in bytes by format, or in `refused` the error that rules the preset out."""

    preset: str
    size_bytes: dict[str, int]
    peak_memory_bytes: int | None = None
    refused: dict[str, str] | None = None


class Inspection(Answer):
    """The properties of a model, read from its headers.

    `grids`: levels on which its weights lie already, since they were quantized before; from a few rows of them.
    """

    model: dict[str, Any]
    model_type: str
    architectures: list[str]
    num_blocks: int
    num_parameters: int
    dtypes: dict[str, int]
    linear_layers: list[dict[str, Any]]
    tied_embeddings: bool
    experts: dict[str, int] | None = None
    license: str | None = None
    size_bytes: int
    quantization: dict[str, str | None] | None = None
    grids: list[dict[str, Any]] = []
    estimates: list[Estimate]
    warnings: list[str]


class KeptTensor(Answer):
    """A weight that stays in high precision, and the reason."""

    name: str
    reason: str


class Plan(Mapped):
    """The plan of a job, made from the model's headers. Sizes are in bytes.

    `capacity`: with hardware, whether the job fits and how long it takes. `time_s`: what the last such jobs took.
    """

    model_type: str
    num_blocks: int
    num_layers: int
    layers: list[dict[str, Any]]
    kept: list[KeptTensor]
    exports: list[str]
    config: dict[str, Any]
    preset: str | None = None
    mix: dict[str, Any] | None = None
    goal: dict[str, Any] | None = None
    calibration: dict[str, Any]
    evaluation: dict[str, Any] = {}
    needs_calibration: bool
    experts: dict[str, int] | None = None
    executor: str
    size_before_bytes: int
    size_after_bytes: int
    peak_memory_bytes: int
    memory_by_phase: dict[str, dict[str, int]] = {}
    warnings: list[str] = []
    time_s: float | None = None
    possible_chains: list[list[str]] | None = None
    capacity: dict[str, Any] | None = None


class Recipe(Answer):
    """The recipe of a result: a `preset`, a `mix` of schemes, or a `goal`; with none of them a whole config.

    `algorithms` is None with a goal, for which the job chose them.
    """

    preset: str | None = None
    mix: dict[str, Any] | None = None
    goal: dict[str, Any] | None = None
    algorithms: list[str] | None = None


class Sweep(Answer):
    """Jobs that were submitted together, in the order of the matrix."""

    id: str
    name: str | None = None
    created_at: str
    matrix: dict[str, list[Any]]
    total: int
    by_state: dict[str, int]
    jobs: list[Job]
