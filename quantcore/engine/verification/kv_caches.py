"""Compares the predictions of a job's written result with KV caches of fewer bits to those with one of 16 bits."""

from __future__ import annotations

from typing import Any

from quantcore.config.cache_dtypes import cache_dtypes
from quantcore.config.task import Task
from quantcore.engine.evaluation.cache_dtypes import measure_cache_dtypes
from quantcore.engine.evaluation.model import EvaluatedModel
from quantcore.engine.evaluation.text import EvaluationText
from quantcore.engine.verification.whole_model import failure_as_warning
from quantcore.events import Emit


def measure_kv_caches(task: Task, model: EvaluatedModel, text: EvaluationText, emit: Emit) -> dict[str, Any]:
    """Return ``kv_caches`` of a Proof for the dtypes that the task asks for. Warn if that fails."""
    found: dict[str, Any] = {}
    if dtypes := cache_dtypes(task.evaluation.kv_cache_dtypes):
        with failure_as_warning("kv_caches_failed", "Measuring dtypes of the KV cache", emit):
            found["kv_caches"] = measure_cache_dtypes(model, text, dtypes, emit)
    return found
