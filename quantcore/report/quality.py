"""Results of an evaluation as frozen values, without torch; their JSON has exactly the fields that were set."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, WithJsonSchema, model_serializer

from quantcore.config.verdict_levels import Level

Number = Annotated[int | float, WithJsonSchema({"type": "number"})]
"""A number that stays an integer in JSON if it is one."""
DEVIATIONS = 1.96
"""Standard errors on each side of a 95 % interval."""


class Record(BaseModel):
    """Base of the values in a report.

    A report may lack a field with a default, if an older version did not write it or it does not apply. JSON has only
    the fields that were set, so that a report stays the same when it is read and written again.
    """

    model_config = ConfigDict(
        frozen=True, ser_json_inf_nan="constants", json_schema_extra={"additionalProperties": False}
    )

    @model_serializer(mode="wrap")
    def _fields_set(self, handler: SerializerFunctionWrapHandler):  # type: ignore[no-untyped-def]
        """Return the fields that are set. A return annotation would replace the fields in the JSON schema."""
        return {name: value for name, value in handler(self).items() if name in self.model_fields_set}

    def to_dict(self) -> dict[str, Any]:
        """Return the value as JSON data."""
        return self.model_dump(mode="json")

    def replace(self, **changes: Any) -> Self:
        """Return a copy with other values in some fields."""
        return self.model_copy(update=changes)


LARGEST_EXPONENT = 700.0  # exp of more overflows float64
LARGE = 1e6
"""Perplexities of this size and more, those of broken models, are written with an exponent."""


class Measure(Record):
    """A number and its standard error; null if it is not finite, or unknown."""

    value: Number | None
    stderr: Number | None

    @property
    def half_interval(self) -> float:
        """Half of the 95 % interval; 0 if the standard error is unknown."""
        return DEVIATIONS * (self.stderr or 0.0)

    @property
    def ends(self) -> tuple[str, str] | None:
        """The ends of the 95 % interval, rounded outwards to the first digit of its half; None if it is unknown."""
        if self.value is None or not self.half_interval:
            return None
        scale = 10.0**self._decimals
        low, high = self._interval(self.value)
        if self.value >= LARGE:
            return f"{low:.3g}", f"{high:.3g}"
        rounded = math.floor(low * scale + 1e-9) / scale, math.ceil(high * scale - 1e-9) / scale
        return f"{rounded[0]:.{self._decimals}f}", f"{rounded[1]:.{self._decimals}f}"

    def _interval(self, value: float) -> tuple[float, float]:
        low = value - self.half_interval
        return max(0.0, low) if value >= 0 else low, value + self.half_interval

    @property
    def _decimals(self) -> int:
        return max(0, -math.floor(math.log10(self.half_interval)))

    @property
    def in_words(self) -> str:
        """Where the value is, such as ``between 0.10 and 0.21``: its 95 % interval, or the value alone."""
        if self.value is None:
            return "not a number"
        return f"{self.value:.3g}" if self.ends is None else f"between {self.ends[0]} and {self.ends[1]}"

    def __str__(self) -> str:
        """Return text such as ``12.34 (12.2 to 12.5)``: the value, and its 95 % interval in brackets."""
        if self.value is None:
            return "–"
        if self.ends is None:
            return f"{self.value:.5g}"
        value = f"{self.value:.5g}" if self.value >= LARGE else f"{self.value:.{self._decimals + 1}f}"
        return f"{value} ({self.ends[0]} to {self.ends[1]})"


class Perplexity(Measure):
    """A perplexity and its standard error. It is never below 1, and what its error comes from is its logarithm."""

    def _interval(self, value: float) -> tuple[float, float]:
        factor = math.exp(min(self.half_interval / value, LARGEST_EXPONENT))
        return max(1.0, value / factor), value * factor


class Perplexities(Record):
    """Perplexity of one model on the held-out text, per token, word and byte."""

    token_perplexity: Perplexity
    word_perplexity: Perplexity
    byte_perplexity: Perplexity
    bits_per_byte: Number

    @property
    def rows(self) -> list[tuple[str, Measure]]:
        """The name and value of each perplexity, as a table shows them."""
        names = ("token_perplexity", "word_perplexity", "byte_perplexity")
        return [(name.replace("_", " "), getattr(self, name)) for name in names]


class Divergence(Record):
    """Distance of the predictions from the original's.

    KL divergence is in nats per token, top-1 agreement a share of the tokens, and ``logit_error`` the relative error of
    the logits (||difference|| / ||logits||).
    """

    kl_mean: Measure
    kl_p99: Number
    top1_agreement: Measure
    logit_error: Number | None = None


class PositionQuality(Record):
    """Distance of the predictions at positions ``first`` to ``last`` of a window from the original's.

    Position 1 predicts the second token of a window from the first one.
    """

    first: int
    last: int
    num_tokens: int
    kl_mean: Measure
    top1_agreement: Measure

    def __str__(self) -> str:
        """Return the positions, such as ``17 to 64``."""
        return f"{self.first} to {self.last}"


class WindowSums(Record):
    """Sums over the scored tokens of each window, from which two results are compared: see ``report.paired``.

    ``losses`` are those of the quantized model, ``kl`` its divergence from the original, both in nats;
    ``top1_agreements`` counts the tokens at which both have the same first choice. ``texts`` numbers the text of each
    window, where several give a fixed number of windows each; empty for one text.
    """

    num_tokens: tuple[int, ...]
    losses: tuple[Number, ...]
    kl: tuple[Number, ...]
    top1_agreements: tuple[Number, ...]
    texts: tuple[int, ...] = ()


class AbsoluteQuality(Record):
    """Perplexities of one model on its own."""

    num_windows: int
    seq_len: int
    num_tokens: int
    after: Perplexities


class Quality(AbsoluteQuality):
    """Perplexities of the quantized model (``after``) and of the original (``before``), and the distance between both.

    ``ratio`` is that of the token perplexities; its error comes from the pairs of losses. ``by_position`` has the
    distance by the position in a window, in a few ranges: see ``divergence.POSITIONS``. ``by_window`` is null for more
    than 1024 windows.
    """

    before: Perplexities
    ratio: Measure
    divergence: Divergence
    by_position: tuple[PositionQuality, ...] = ()
    by_window: WindowSums | None = None


class KindQuality(Record):
    """Distance of the predictions from the original's on its own answers to prompts of one ``kind``."""

    kind: str
    num_answers: int
    num_tokens: int
    kl_mean: Measure
    top1_agreement: Measure


class AnswerQuality(Quality):
    """Distance of a chat model from its original on the original's own answers, token by token.

    ``num_windows`` is the number of answers and ``seq_len`` the length of the longest one; positions are those in an
    answer. ``num_ended`` of the answers came to their end. ``left_out``: kinds of prompts that could not be asked, in
    part or at all, with the reason. ``prompts_sha256``: that of the file with the prompts, unless they are packaged.
    """

    num_ended: int
    by_kind: tuple[KindQuality, ...]
    left_out: dict[str, str] = Field(default_factory=dict)
    prompts_sha256: str | None = None

    def __str__(self) -> str:
        """Return the distance in a sentence, with what was left out."""
        left_out = f"; without some prompts: {', '.join(self.left_out)}" if self.left_out else ""
        return (
            f"mean KL divergence {self.divergence.kl_mean}, top-1 agreement {self.divergence.top1_agreement}, on "
            f"{self.num_windows} answers of the original{left_out}"
        )


class Interval(Record):
    """A number and its 95 % interval."""

    value: Number
    low: Number
    high: Number


Change = Literal["better", "worse", "no difference found"]


class PairedChange(Record):
    """Whether a new result is worse than an old one, measured on the same tokens.

    ``kl_change`` is the relative change of the mean KL divergence from the original, new / old - 1, and decides
    ``verdict``: its interval lies above ``tolerance`` (worse), below ``-tolerance`` (better), or neither.
    ``smallest_kl_change`` is the relative rise of KL that this text shows 19 times in 20 to be above the tolerance.
    ``perplexity_ratio`` is new / old, and ``top1_difference`` that of the shares of tokens, new - old.
    """

    verdict: Change
    tolerance: Number
    kl_change: Interval
    smallest_kl_change: Number
    perplexity_ratio: Interval
    top1_difference: Interval


class PairedQuality(PairedChange):
    """A paired comparison with what it was made of: one result on each side, or several.

    Several results of one recipe are compared by their means: ``num_results`` has the numbers of both sides, and
    ``seed_deviation`` is the relative standard deviation of KL among the results of one side (None: one result each).
    """

    new: str
    old: str
    against: str
    num_results: tuple[int, int]
    seed_deviation: Number | None
    new_quality: Quality
    old_quality: Quality
    environment: dict[str, str]


class DraftQuality(Record):
    """Share of the tokens drafted by the first layer for multi-token prediction that the model would choose as well.

    ``before``: draft layer and model of the original; ``after``: both of the result. ``num_layers`` of the draft heads
    are quantized.
    """

    before: Measure | None
    after: Measure
    num_layers: int

    def __str__(self) -> str:
        """Return the shares in a sentence."""
        compared = "" if self.before is None else f", the original {self.before}"
        return f"The model accepts {self.after} of the drafted tokens{compared}."


class EncoderQuality(Record):
    """Distance of an encoder's outputs from the original's: embeddings of texts, or scores of them.

    ``cosine`` is the mean cosine similarity of the two embeddings of a text (the mean of its tokens' states), null for
    scores. ``rank_agreement`` is the share of pairs of texts that both models put in the same order: by their score, or
    by the similarity of their embeddings to that of another text. ``output_error`` is the relative error of all outputs
    (||difference|| / ||outputs||).
    """

    num_windows: int
    seq_len: int
    cosine: Measure | None
    rank_agreement: Measure
    output_error: Number

    @property
    def rows(self) -> list[tuple[str, str]]:
        """The name and value of each measure, as a table shows them."""
        rows = [
            ("rank agreement, share of pairs", str(self.rank_agreement)),
            ("relative error of the outputs", f"{self.output_error:.4g}"),
        ]
        return rows if self.cosine is None else [("cosine of the embeddings", str(self.cosine)), *rows]


class Sample(Record):
    """Continuations of one prompt by both models; a degenerate one is empty, or repeats a single token."""

    prompt: str
    original: str
    quantized: str
    original_is_degenerate: bool
    quantized_is_degenerate: bool


class TaskResult(Record):
    """A metric of a task of lm-evaluation-harness for both models."""

    original: Measure | None
    quantized: Measure


TaskResults = dict[str, dict[str, TaskResult]]
"""Results of both models by task and metric (``acc,none``)."""


def metric_title(metric: str) -> str:
    """Return a metric of lm-evaluation-harness for people: ``acc`` for ``acc,none``, ``f1 (strict)`` for others."""
    name, _, filter_name = metric.partition(",")
    return name if filter_name in ("", "none") else f"{name} ({filter_name})"


class ConsumerCheck(Record):
    """Outcome of reading the files with another program, or the reason why that was not checked.

    ``consumer`` is its name with versions, ``logit_difference`` the norm of the logits' differences over theirs.
    """

    consumer: str | None = None
    logit_difference: Number | None = None
    of_twin: Annotated[
        bool,
        Field(
            description="The model does not fit into memory; a small twin, exported in the same way, was checked "
            "instead."
        ),
    ] = False
    not_checked: str | None = None
    is_refused: Annotated[
        bool, Field(description="The program cannot load and run such files; see not_checked for the reason.")
    ] = False

    def __str__(self) -> str:
        """Return the outcome in a sentence."""
        if self.consumer is None:
            return f"not read by another program: {self.not_checked or 'this was not tried.'}"
        what = "the files of a small twin, exported in the same way" if self.of_twin else "the files"
        return f"{self.consumer} reads {what}; its logits differ by {self.logit_difference:.1e} of their norm."


class Step(Record):
    """Something to try next: in words, as fields of a job's request, and as flags of ``quantize`` and ``clone``."""

    text: str
    changes: dict[str, Any]
    flags: str


class Verdict(Record):
    """The level of a result, and ``reason``: the measurement that keeps it from a better one.

    ``sentence`` says for everybody whether the result may be shipped, and how many of its next words are the
    original's. ``advice``: what a job could change to get closer to the original, for a result that is degraded or
    broken; or how to measure one that is unclear. ``steps``: the same, each part by itself. Reports of earlier
    versions have neither ``sentence`` nor ``steps``.
    """

    level: Level
    reason: str
    sentence: str | None = None
    advice: str | None = None
    steps: tuple[Step, ...] = ()

    def __str__(self) -> str:
        """Return the verdict in a sentence."""
        return f"{self.level}: {self.reason}"
