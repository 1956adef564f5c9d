"""The types of ``report.json``: frozen, without torch. Times are in seconds, sizes in bytes.

``docs/report.schema.json`` and the API's types are generated from them.
"""

from __future__ import annotations

from operator import not_
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from quantcore.checkpoint.folder import model_name
from quantcore.config.job_spec import Gate
from quantcore.report.behaviour import Behaviour
from quantcore.report.evaluation_result import CacheQuality
from quantcore.report.gate_result import GateResult
from quantcore.report.layer import LayerError
from quantcore.report.quality import (
    AnswerQuality,
    ConsumerCheck,
    DraftQuality,
    EncoderQuality,
    Measure,
    Number,
    Quality,
    Record,
    Sample,
    Step,
    TaskResults,
    Verdict,
)

SCHEMA_VERSION: Literal[2] = 2


class WorstLayer(Record):
    """The layer whose output changed most; the one whose weight did if outputs were not measured.

    The two differ: a weight may have a large error where its inputs are small, or were compensated for.
    """

    name: str
    relative_error: Number
    sqnr_db: Number
    output_error: Annotated[Number | None, Field(description="None if the layer was found by its weight.")] = None

    @property
    def title(self) -> str:
        """What the layer is the worst by, as a row of a table."""
        return "largest weight error" if self.output_error is None else "worst layer"

    def __str__(self) -> str:
        """Return the layer with its errors."""
        if self.output_error is None:
            return f"{self.name} (relative error {self.relative_error:.4f}, {self.sqnr_db:.1f} dB)"
        errors = f"{self.output_error:.4f} of its output, {self.relative_error:.4f} of its weight"
        return f"{self.name} (relative error {errors})"


class MemoryUse(Record):
    """Peak memory, measured and planned."""

    peak_memory_bytes: int
    planned_peak_memory_bytes: int

    def __str__(self) -> str:
        return f"{self.peak_memory_bytes / 1e6:.0f} MB, planned {self.planned_peak_memory_bytes / 1e6:.0f} MB"


class PhaseMemory(Record):
    """Peak memory that all processes of the job held together in each phase.

    ``quantize`` counts the process of each rank; ``verify`` the process that verifies and the one that waits for it.
    """

    quantize: MemoryUse
    verify: MemoryUse

    @property
    def rows(self) -> list[tuple[str, MemoryUse]]:
        """The name and value of each phase."""
        return [("quantize", self.quantize), ("verify", self.verify)]


class RankMemory(MemoryUse):
    """Peak memory of one process while it quantized."""

    rank: int


class ExportSummary(Record):
    """A checkpoint of the artifact: its folder, its size, and the Python lines that load it.

    ``programs``: the lines of each program that was seen to load such files. ``refusals``: why a program is known
    not to load them, by program. Reports of earlier versions lack both.
    """

    path: str
    bytes: int
    load: str
    programs: dict[str, str] = Field(default_factory=dict)
    refusals: dict[str, str] = Field(default_factory=dict)


class MixSummary(Record):
    """The chosen mix in short: the number of layers of each scheme, bits per weight, and the KL divergence.

    ``loss`` is the estimated one; ``kl_mean`` is measured without GPTQ or any other algorithm.
    """

    layers: dict[str, int]
    bits: Number
    loss: Number
    kl_mean: Number


class GoalSummary(Record):
    """Whether a goal was met, and why this result was chosen."""

    is_met: bool
    why: str


class Summary(Record):
    """The figures of a job that has succeeded. Sizes are in bytes; a measurement that was not made is null."""

    size_before_bytes: Annotated[int, Field(description="Of the model's tensors, as its files store them.")]
    size_after_bytes: int
    float_bytes: Annotated[
        int | None,
        Field(exclude_if=not_, description="Size of the model's tensors as floats, if its files are quantized."),
    ] = None
    perplexity_before: Number | None
    perplexity_after: Number | None
    perplexity_ratio: Number | None
    perplexity_ratio_stderr: Annotated[Number | None, Field(description="Standard error of perplexity_ratio.")] = None
    kl_mean: Number | None
    kl_stderr: Annotated[Number | None, Field(description="Standard error of kl_mean.")] = None
    verdict: Verdict | None = None
    worst_layer: WorstLayer
    num_layers_quantized: int
    num_layers_kept: int
    mix: MixSummary | None = None
    goal: GoalSummary | None = None
    quantize_s: Number
    total_s: Number
    seconds_by_phase: Annotated[
        dict[str, Number],
        Field(default_factory=dict, description="Of the final run; earlier, resumed runs are not counted."),
    ]
    executor: str = "streamed"
    peak_memory_bytes: Annotated[int, Field(description="The maximum of memory_by_phase.")]
    planned_peak_memory_bytes: int
    memory_by_phase: PhaseMemory | None = None
    ranks: Annotated[
        tuple[RankMemory, ...] | None, Field(description="For a job on several processes: peak memory of each.")
    ] = None
    failed_tasks: Annotated[
        dict[str, str],
        Field(
            default_factory=dict, description="Tasks of lm-evaluation-harness without a result, each with the reason."
        ),
    ]
    gate: Gate
    gates: tuple[GateResult, ...]
    exports: Annotated[dict[str, ExportSummary], Field(min_length=1)]

    @property
    def memory(self) -> MemoryUse:
        """The peak memory of the whole job."""
        return MemoryUse(
            peak_memory_bytes=self.peak_memory_bytes, planned_peak_memory_bytes=self.planned_peak_memory_bytes
        )


class WeightGrid(Record):
    """Levels on which weights of the model lay before: what shares a scale, and the share of the weights on them."""

    name: str
    bits: int
    scope: str
    group_size: int | None
    title: str
    share: float


class MergedAdapter(Record):
    """A PEFT adapter that was merged into the model first: ``id`` and ``sha`` on the Hub, or the ``path`` of a folder.

    ``digest``: of its settings and weights. ``base_model``: the model that it says it was trained on.
    """

    id: str | None = None
    sha: str | None = None
    path: str | None = None
    digest: str
    method: str
    rank: int
    num_tensors: Annotated[int, Field(description="Tensors of the model that it changes.")]
    base_model: str | None = None

    @property
    def name(self) -> str:
        """The id on the Hub, or the name of the folder."""
        return self.id or model_name(Path(str(self.path)))

    def __str__(self) -> str:
        return f"{self.name} ({self.method} of rank {self.rank}, {self.num_tensors} tensors, {self.digest})"


class SourceModel(Record):
    """Origin of the model: ``id`` and ``sha`` on the Hub, or the ``path`` of a folder.

    ``grids`` are there if its weights were quantized before: then it is not the float model that it was made from.
    With an ``adapter`` the original of all measurements is the model into which that was merged.
    """

    id: str | None = None
    sha: str | None = None
    path: str | None = None
    model_type: str
    grids: tuple[WeightGrid, ...] | None = None
    adapter: MergedAdapter | None = None

    @property
    def grids_in_words(self) -> str:
        return "; ".join(f"{grid.title} ({100 * grid.share:.0f} %)" for grid in self.grids or ())

    @property
    def name(self) -> str:
        """The id on the Hub, or the name of the folder."""
        return self.id or model_name(Path(str(self.path)))


class MixScheme(Record):
    """A choice of schemes with its size, bits, estimated loss, and number of layers by scheme.

    The size is that of all weight files; bits are per weight in the mixed layers; the loss is in nats per token.
    """

    size_bytes: int
    bits: Number
    loss: Number
    layers: dict[str, int]


class ChosenMix(MixScheme):
    """The chosen mix with its measured quality.

    It is ``measured`` without GPTQ or any other algorithm, on held-out text of the calibration's source.
    """

    measured: Quality


class MixBudget(Record):
    """The requested mix: the schemes to choose from, and one budget."""

    schemes: Annotated[tuple[str, ...], Field(min_length=2)]
    max_size: str | int | None = None
    max_bits: Number | None = None
    max_divergence: Number | None = None

    def __str__(self) -> str:
        """Return the budget as text: ``max_bits 4.5``."""
        return " ".join(f"{name} {value}" for name, value in self.to_dict().items() if name != "schemes")


class Mix(Record):
    """The choice of a scheme for each layer: see docs/how-to/mixed-precision.md."""

    asked: MixBudget
    chosen: ChosenMix
    uniform: dict[str, MixScheme]
    frontier: Annotated[tuple[MixScheme, ...], Field(min_length=1)]


class GoalPoint(Record):
    """A size that a mix of the schemes can have, and the recovery to expect there."""

    size_bytes: int
    recovery: Number


class GoalTrial(GoalPoint):
    """A candidate that was quantized and measured.

    ``recovery`` is exp(-KL) at the unfavourable end of the 95 % interval of ``kl``. ``layers``: number of layers by
    scheme.
    """

    kl: Measure
    layers: dict[str, int]
    algorithms: str
    verdict: Verdict | None
    seconds: Number
    is_chosen: bool


class GoalResult(Record):
    """The outcome of a goal: the request, the candidates that were tried, and why this result was chosen."""

    asked: dict[str, Any]
    max_bytes: Annotated[
        int | None, Field(description="Limit for all weights: by size, or the memory left by the KV cache.")
    ]
    kv_cache: Annotated[str | None, Field(description="Scheme of the KV cache; null: 16 bits.")]
    cache_bytes: Annotated[int, Field(description="Upper bound on the KV cache of the context in that scheme.")]
    is_met: bool
    why: str
    advice: tuple[str, ...]
    trials: Annotated[tuple[GoalTrial, ...], Field(min_length=1)]
    frontier: tuple[GoalPoint, ...]


class ExportProof(Record):
    """The result of reading one export back."""

    num_tensors_equal: int
    max_logit_difference: Number | None
    perplexity: Number | None
    consumer_check: ConsumerCheck = ConsumerCheck()


class ExpertCoverage(Record):
    """The number of tokens of the calibration text that the experts of all mixtures saw."""

    num_experts: int
    fewest_tokens: int
    share_covered: Annotated[Number, Field(description="Share of the experts that saw 0.5 % of the tokens or more.")]


class KeptTensor(Record):
    """A layer that stays in its original precision, and the reason."""

    name: str
    reason: str


class Distillation(Record):
    """Mean KL divergence in nats per token on held-back calibration windows, before ``distill`` and after it.

    ``is_kept``: the result has the tuned scales, because they gained; otherwise those of the solver.
    """

    kl_before: Number
    kl_after: Number | None
    is_kept: bool

    def __str__(self) -> str:
        after = "not finite" if self.kl_after is None else f"{self.kl_after:.4g}"
        kept = "the tuned scales are kept" if self.is_kept else "no gain, so the scales of the solver are kept"
        return f"KL {self.kl_before:.4g} -> {after} on held-back calibration windows; {kept}"


class Provenance(Record):
    """Identity of the model and digests of the texts and the config."""

    model: str
    calibration_sha256: str
    held_out_sha256: str
    config_sha256: str
    seed: str


class Report(Record):
    """report.json of an artifact. Fields may be added under the same schema_version."""

    schema_version: Literal[2]
    summary: Summary
    model: SourceModel
    config: dict[str, Any]
    mix: Mix | None = None
    goal: GoalResult | None = None
    calibration: dict[str, Any]
    evaluation: dict[str, Any]
    proof: dict[str, ExportProof]
    quality: Quality | None
    encoder: EncoderQuality | None = None
    drafts: DraftQuality | None = None
    kv_caches: tuple[CacheQuality, ...] | None = None
    clipping: dict[str, Number] = Field(
        default_factory=dict,
        description="Share of the values on held-out text that static activation ranges clip, by type of tensor: "
        "`q_proj input` covers all blocks.",
    )
    answers: AnswerQuality | None = None
    behaviour: Behaviour | None = None
    samples: tuple[Sample, ...] | None
    harness: TaskResults | None
    layers: Annotated[tuple[LayerError, ...], Field(min_length=1)]
    more_bits: Annotated[
        Step | None, Field(description="The layers with the largest errors of their outputs in 8 bits.")
    ] = None
    experts: ExpertCoverage | None = None
    distillation: Distillation | None = None
    edges: tuple[dict[str, Any], ...]
    kept: tuple[KeptTensor, ...]
    warnings: tuple[str, ...]
    provenance: Provenance
    environment: dict[str, str]

    @property
    def ranked_layers(self) -> list[LayerError]:
        """The layers from the largest error of their output to the smallest, those without one by weight error."""
        return sorted(self.layers, key=lambda each: (-(each.output_error or 0.0), -each.relative_error))

    @property
    def schemes(self) -> list[str]:
        """The schemes of the quantized layers, sorted."""
        return sorted({layer.scheme for layer in self.layers})
