"""The result of ``bitfoundry evaluate``. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field

from quantcore.config.verdict_levels import Level
from quantcore.report.behaviour import Behaviour
from quantcore.report.quality import (
    AbsoluteQuality,
    AnswerQuality,
    DraftQuality,
    Measure,
    Quality,
    Record,
    Sample,
    TaskResults,
    Verdict,
)


class CacheQuality(Record):
    """Distance of a model with a KV cache of ``dtype`` from the same model with one of 16 bits.

    ``option`` chooses the dtype in ``program``. ``bytes_per_token`` are those of keys and values in all
    ``num_blocks`` that cache any, of which ``num_blocks_spared`` keep 16 bits. ``num_blocks_without`` cache none of
    their own.
    """

    dtype: str
    program: str
    option: str
    bytes_per_token: int
    bytes_per_token_of_16_bits: int
    num_blocks: int
    num_blocks_spared: int
    num_blocks_without: int
    quality: Quality
    level: Level

    @property
    def row(self) -> tuple[str, ...]:
        """The cells of a table below ``heads_of_caches``."""
        size, change = self.bytes_per_token / self.bytes_per_token_of_16_bits, (self.quality.ratio.value or 0) - 1
        of_last = self.quality.by_position[-1].kl_mean.value
        last = "–" if of_last is None else f"{of_last:.3g}"
        kl_mean = str(self.quality.divergence.kl_mean)
        return self.dtype, f"{100 * size:.0f} %", f"{100 * change:+.2f} %", kl_mean, last, self.level


def heads_of_caches(caches: Sequence[CacheQuality]) -> tuple[str, ...]:
    """Return what the columns of a table of dtypes hold; all were measured on the same text."""
    positions = caches[0].quality.by_position[-1]
    return "KV cache", "size", "perplexity", "kl mean", f"positions {positions}", "verdict"


def notes_on_caches(caches: Sequence[CacheQuality]) -> list[str]:
    """Return what a reader of such a table must know: what the sizes are a share of, and how to choose each dtype."""
    first = caches[0]
    without = f" ({first.num_blocks_without} others keep none of their own)" if first.num_blocks_without else ""
    kept = f"keys and values of {first.num_blocks} blocks{without} take {first.bytes_per_token_of_16_bits} bytes"
    notes = [f"Beside the same model with a KV cache of 16 bits: {kept} per token there."]
    if num := max(each.num_blocks_spared for each in caches):
        notes.append(f"TurboQuant keeps 16 bits in {num} blocks, as vLLM does.")
    options = (f"{each.program}: {each.option.replace(each.dtype, 'NAME')}" for each in caches)
    return [*notes, *dict.fromkeys(options)]


class EvaluationResult(Record):
    """Result of ``bitfoundry evaluate``: measurements of an existing model, alone or beside its original.

    ``harness`` has one number per metric for a model alone, and a pair for two models. ``reference`` describes the
    file that took the original's place.
    """

    model: str
    against: str | None
    environment: dict[str, str]
    served_by: dict[str, str] = Field(default_factory=dict)
    quality: Quality | AbsoluteQuality | None = None
    verdict: Verdict | None = None
    reference: dict[str, Any] | None = None
    drafts: DraftQuality | None = None
    kv_caches: tuple[CacheQuality, ...] | None = None
    answers: AnswerQuality | None = None
    behaviour: Behaviour | None = None
    samples: tuple[Sample, ...] | None = None
    harness: TaskResults | dict[str, dict[str, Measure]] = Field(default_factory=dict)
    failed_tasks: dict[str, str] = Field(default_factory=dict)
