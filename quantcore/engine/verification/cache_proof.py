"""Proves, before a job's first block, that taps read the keys and values that Transformers caches.

A small twin of the model (see ``engine.model.tiny_model``) runs twice: with Transformers' own cache, and without one
but with the taps of ``engine.model.cache_taps``, as our engine runs it. What a tap sees must be in that cache.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
from transformers import Cache, EncoderDecoderCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from quantcore.config.kv_cache import NO_CACHE_HINT
from quantcore.config.layer_plan import LayerPlan
from quantcore.config.presets import KV_CACHE_SPECS
from quantcore.config.quantization import QuantizationConfig
from quantcore.engine.model.cache_taps import Through, cached_names, tap_caches
from quantcore.engine.model.kinds import inputs_of, language_model, model_class, num_tokens
from quantcore.engine.model.skeleton import clean_config
from quantcore.engine.model.tiny_model import build_tiny_model, tiny_config
from quantcore.engine.runtime.matmul import matmul_precision
from quantcore.engine.verification.consumer import quiet
from quantcore.errors import ModelError, QuantError, reason_of
from quantcore.events import Emit, Warned
from quantcore.importing.model import Model

WINDOW_LEN = 24
MAX_TRIES = 3
"""By rounding, a router may choose another expert. That is rare, so a twin with other weights decides."""
MAX_DIFFERENCE = 1e-3
"""Upper bound on ||difference|| / ||values||, in float32. Measured: below 1e-6 in 150 classes."""
CACHED = QuantizationConfig(output_tensors=KV_CACHE_SPECS["fp8"])


def prove_caches(model: Model, emit: Emit) -> None:
    """Raise ModelError ``kv_cache_not_found`` if taps read other keys or values than Transformers caches.

    A warning says that nothing was proven if Transformers cannot run a twin.
    """
    config = model.headers.config
    other, reason = _not_in_cache(json.dumps(tiny_config(config), sort_keys=True))
    if reason is not None:
        emit(
            Warned(
                "kv_cache_not_proven", f"Keys and values were not compared with the cache of Transformers: {reason}."
            )
        )
    if other is not None:
        raise ModelError(
            f"What {other} writes to a KV cache differs from what Transformers caches for '{config['model_type']}'.",
            code="kv_cache_not_found",
            hint=f"Please report this as a bug. {NO_CACHE_HINT}",
        )


@cache  # a process, such as a test's, may run many jobs on models of the same config
def _not_in_cache(config: str) -> tuple[str | None, str | None]:
    """Return a layer whose keys or values are not in Transformers' cache, if any, and why none can be looked for."""
    other: str | None = None
    for seed in range(MAX_TRIES):
        try:
            seen, stored = _run_twin(json.loads(config), seed)
        except (QuantError, torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:  # the code of any model, on untested inputs
            return None, f"Transformers could not run a small twin of it ({reason_of(error)})"
        other = next((name for name, x_BTI in seen.items() if not any(_is_end(part, x_BTI) for part in stored)), None)
        if other is None:
            break
    return other, None


def _run_twin(config: dict[str, Any], seed: int) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """Return the keys and values [1, T, I] that taps see, by layer, and all that Transformers has in its cache."""
    built, kind = model_class(clean_config(config), config)
    twin = build_tiny_model(config, seed, built).train(False)
    reader = language_model(twin, kind)
    ids_NT = torch.randint(num_tokens(twin), (1, WINDOW_LEN), generator=torch.Generator().manual_seed(0))
    inputs = inputs_of(reader, kind, ids_NT)
    with quiet(), torch.no_grad(), matmul_precision(twin.device):
        filled = reader(**inputs | {"use_cache": True}).past_key_values
        with _seen(twin) as seen:
            reader(**inputs | {"use_cache": False})
    is_double = isinstance(filled, EncoderDecoderCache)
    caches: list[Cache] = [filled.self_attention_cache, filled.cross_attention_cache] if is_double else [filled]
    layers = [layer for one in caches for layer in one.layers if isinstance(layer, CacheLayerMixin)]
    parts = [part for layer in layers for part in (layer.keys, layer.values)]
    return seen, [part.transpose(1, 2).flatten(2) for part in parts if part is not None and part.ndim == 4]


@contextmanager
def _seen(model: PreTrainedModel) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the keys and values that taps see while this lasts, by the names of their layers."""
    seen: dict[str, torch.Tensor] = {}

    def note(layer: LayerPlan) -> Through:
        def see(x_BTI: torch.Tensor) -> torch.Tensor:
            seen.setdefault(layer.name, x_BTI)  # attention without v_proj shows keys, and then values
            return x_BTI

        return see

    modules = {name: model.get_submodule(name) for name in cached_names(model)}
    cached = {
        LayerPlan(name, None, tuple(module.get_parameter("weight").shape), CACHED, in_cache=True): module
        for name, module in modules.items()
    }
    with ExitStack() as stack:
        for handle in tap_caches(cached, model, note):
            stack.callback(handle.remove)
        yield seen


def _is_end(part_BTI: torch.Tensor, x_BTI: torch.Tensor) -> bool:
    """Return whether ``part_BTI`` is the end of ``x_BTI``, of which a sliding window has only that."""
    if part_BTI.shape[-1] != x_BTI.shape[-1] or part_BTI.shape[1] > x_BTI.shape[1]:
        return False
    end_BTI = x_BTI[:, -part_BTI.shape[1] :]
    return bool((end_BTI - part_BTI).norm() <= MAX_DIFFERENCE * part_BTI.norm())
