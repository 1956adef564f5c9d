"""The result of ``bitfoundry evaluate``. No torch."""

from __future__ import annotations

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
