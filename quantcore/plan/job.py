"""The defaults of a job that depend on its scheme and its model. No torch."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from quantcore.checkpoint.headers import ModelHeaders
from quantcore.config.job_spec import Evaluation, JobSpec
from quantcore.config.quantization import CalibrationConfig
from quantcore.export import default_format
from quantcore.plan.planner import make_plan

Spec = TypeVar("Spec", bound=JobSpec)
Text = TypeVar("Text", CalibrationConfig, Evaluation)


def with_model_defaults(spec: Spec, model_config: Mapping[str, Any]) -> Spec:
    """Return ``spec`` with the defaults that depend on its scheme and its model: the format, the length of windows."""
    parts = {
        part: text_with_model_defaults(getattr(spec, part), model_config) for part in ("calibration", "evaluation")
    }
    return spec.model_copy(update=parts | {"export": spec.export or default_exports(spec)})


def default_exports(spec: JobSpec) -> tuple[str, ...]:
    """Return the format that most programs load for the scheme, or for all schemes of a mix; none for a goal."""
    if spec.goal is not None:
        return ()
    return (default_format(*(spec.mix.configs.values() if spec.mix else (spec.config,))),)


def text_with_model_defaults(text: Text, model_config: Mapping[str, Any]) -> Text:
    """Return a calibration or an evaluation whose default ``seq_len`` fits the model's context."""
    longest = model_config.get("max_position_embeddings")
    if "seq_len" in text.model_fields_set or not isinstance(longest, int) or not 32 <= longest < text.seq_len:
        return text
    return text.model_copy(update={"seq_len": longest})


def without_layers(spec: Spec, headers: ModelHeaders, names: Collection[str]) -> tuple[Spec, list[str]]:
    """Return ``spec`` with those of the layers called ``names`` excluded that would be quantized, and their patterns.

    A job with a mix is returned unchanged.
    """
    if not names or spec.mix is not None:
        return spec, []
    planned = [layer.name for layer in make_plan(spec, headers).layers if layer.name in names]
    patterns = list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name, count=1) for name in planned))
    config = replace(spec.config, exclude=(*spec.config.exclude, *planned))
    return spec.model_copy(update={"config": config}), patterns
