"""Whether the dtypes of a KV cache that a job measures fit its model, and the memory of measuring them. No torch."""

from __future__ import annotations

from collections.abc import Iterable

from quantcore.checkpoint.headers import ModelHeaders
from quantcore.checkpoint.model_config import ModelConfig, first
from quantcore.config.cache_dtypes import CACHE_DTYPES, FIELD, LATENT, cache_dtypes, not_measured
from quantcore.config.job_spec import Evaluation
from quantcore.config.layer_plan import LayerPlan
from quantcore.errors import ConfigError

COPIES = 12
"""Copies of the keys or the values of a window, in float32, while the costliest dtype (iq4_nl) rounds them."""


def check_cache_dtypes(evaluation: Evaluation, headers: ModelHeaders, layers: Iterable[LayerPlan] = ()) -> None:
    """Raise ConfigError for dtypes of the KV cache that cannot be measured with a job's result.

    ``layers`` are those that it quantizes. Their code is ``cache_dtypes_not_measured`` for a model of which none can
    be, ``cache_dtype_does_not_fit`` for dtypes that its heads do not fit.
    """
    if not evaluation.kv_cache_dtypes:
        return
    config = ModelConfig(headers.config)
    declared = [str(name) for name in headers.config.get("architectures") or ()]
    is_masked = any(name.endswith("ForMaskedLM") for name in declared)
    has_encoder = any(part.get("is_encoder_decoder") for part in (headers.config, config.text))
    if is_masked or has_encoder or not config.predicts_tokens:
        raise not_measured(f"only causal language models keep one, and it is {', '.join(declared)}")
    if config.text.get("kv_lora_rank"):
        raise not_measured(LATENT)
    cached = next((layer.name for layer in layers if layer.is_cached), None)
    if cached is not None:
        raise not_measured(f"this job quantizes the KV cache itself (first {cached})")
    sizes = _sizes_of_heads(config)
    odd = [each for each in cache_dtypes(evaluation.kv_cache_dtypes) if not all(map(each.fits, sizes))]
    if odd:
        fitting = [name for name, each in CACHE_DTYPES.items() if all(map(each.fits, sizes))]
        raise ConfigError(
            f"The heads of this model have {' and '.join(map(str, sizes))} channels, which {odd[0].program} cannot "
            f"keep in a KV cache of {', '.join(each.name for each in odd)}.",
            code="cache_dtype_does_not_fit",
            hint=f"These fit: {', '.join(fitting)}.",
            field=FIELD,
            allowed=fitting,
        )


def bytes_of_caches(evaluation: Evaluation, headers: ModelHeaders, held_out: int) -> int:
    """Return what measuring the dtypes takes: ``held_out``, the states of all windows, for each; and rounding."""
    if not evaluation.kv_cache_dtypes:
        return 0
    config = ModelConfig(headers.config)
    width = (config.num_key_value_heads or 0) * max(_sizes_of_heads(config), default=0)
    num_dtypes = len(cache_dtypes(evaluation.kv_cache_dtypes))
    return num_dtypes * held_out + COPIES * 4 * width * evaluation.held_out_len


def _sizes_of_heads(config: ModelConfig) -> list[int]:
    """Return the channels of a head of keys, in blocks of each kind; none if config.json does not say."""
    return [size for size in (config.head_dim, first(config.text, ("global_head_dim",))) if size is not None]
