"""Shows and changes what attention gives to its cache: the keys and values that a runtime stores, and scales.

These are not the outputs of ``k_proj`` and ``v_proj``: many classes normalize keys or values, and nearly all rotate
keys. Transformers' attention modules hand them to ``Cache.update``, whatever they did before, so there is no table of
architectures. A tap stands in that call. Attention without a cache gets an empty one of Transformers' own, which
returns what it is given. Layers that share the keys and values of an earlier one get them as its tap has changed them.

Legend: B batch, H heads of the keys or values, T tokens, D channels of a head, I = H x D.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import Cache, DynamicCache, EncoderDecoderCache, PreTrainedModel

from quantcore.config.kv_cache import NO_CACHE_HINT, computes_keys, holds_keys_or_values
from quantcore.config.layer_plan import LayerPlan
from quantcore.errors import ModelError

Through = Callable[[torch.Tensor], torch.Tensor]
"""Function of the keys or values [B, T, I] of a call. It returns what the cache is to hold, or the same tensor."""
ByHead = Callable[[torch.Tensor], torch.Tensor]
"""Function of the keys or values of a call by head, [B, H, T, D], as attention hands them to its cache."""

KEYS, VALUES = "k_proj", "v_proj"
_ARGUMENTS = ("past_key_values", "layer_past")
"""Names of the cache among the arguments of attention modules."""


def tap_caches(
    modules: Mapping[LayerPlan, nn.Module], within: nn.Module, through: Callable[[LayerPlan], Through | None]
) -> Iterator[RemovableHandle]:
    """Tap the caches that the layers among ``modules`` with quantized keys or values fill; yield handles of the taps.

    ``through`` returns the function for the keys or values of a layer, or None. The taps of one cache follow each other
    in the order in which they were made. ``within`` holds all modules. Raises ModelError ``kv_cache_not_found``, now or
    when the attention runs, if what enters the cache cannot be found out.
    """
    cached = {id(module): layer for layer, module in modules.items() if layer.is_cached}
    if not cached:
        return
    for attention in within.modules():
        layers = {part: cached[id(child)] for part, child in attention.named_children() if id(child) in cached}
        taps = {
            part: _of_layer(layer, function)
            for part, layer in layers.items()
            if (function := through(layer)) is not None
        }
        if taps:
            name = next(iter(layers.values())).name.rpartition(".")[0]
            # Attention without a layer for its values computes them from that of its keys: files have one scale,
            # which runtimes take for both.
            has_values = isinstance(getattr(attention, VALUES, None), nn.Module)
            tap = CacheTap(name, attention, taps.get(KEYS), taps.get(VALUES if has_values else KEYS))
            yield from tap.attach(attention)


def tap_all_caches(within: nn.Module, keys: ByHead, values: ByHead) -> Iterator[RemovableHandle]:
    """Tap the cache of every attention in ``within``; yield handles of the taps.

    Attention that reads what an earlier one has cached writes nothing, and its taps are not called.
    """
    for module in within.modules():
        if _argument_of(module) is not None and any(computes_keys(name) for name, _ in module.named_children()):
            yield from CacheTap(type(module).__name__, module, keys, values, must_write=False).attach(module)


def _argument_of(module: nn.Module) -> tuple[int, str] | None:
    """Return the position and the name of the cache among the arguments of ``module``, without self; None if none."""
    names = list(inspect.signature(type(module).forward).parameters)
    return next(((place - 1, name) for place, name in enumerate(names) if name in _ARGUMENTS), None)


def _of_layer(layer: LayerPlan, through: Through) -> ByHead:
    """Return ``through``, which takes the output of ``layer``, for keys or values by head."""

    def passed(x_BHTD: torch.Tensor) -> torch.Tensor:
        if x_BHTD.ndim != 4 or x_BHTD.shape[1] * x_BHTD.shape[3] != layer.out_features:
            shape, width = list(x_BHTD.shape), layer.out_features
            why = f"it writes a tensor {shape} to its cache, but its layer has {width} channels"
            raise _not_found(layer.name.rpartition(".")[0], why)
        x_BTI = x_BHTD.transpose(1, 2).flatten(2)
        passed_BTI = through(x_BTI)
        if passed_BTI is x_BTI:
            return x_BHTD
        return passed_BTI.reshape(*x_BTI.shape[:2], x_BHTD.shape[1], x_BHTD.shape[3]).transpose(1, 2)

    return passed


class CacheTap:
    """Passes what the ``attention`` called ``name`` writes to its cache through ``keys`` and ``values``.

    ``must_write``: attention that writes nothing is an error.
    """

    def __init__(
        self, name: str, attention: nn.Module, keys: ByHead | None, values: ByHead | None, *, must_write: bool = True
    ) -> None:
        self._name, self._keys, self._values, self._must_write = name, keys, values, must_write
        found = _argument_of(attention)
        if found is None:
            raise _not_found(name, f"{type(attention).__name__} takes no cache")
        self._place, self._argument = found

    def attach(self, attention: nn.Module) -> Iterator[RemovableHandle]:
        """Tap every call of ``attention`` until the handles are removed."""
        yield attention.register_forward_pre_hook(self._before, with_kwargs=True)
        yield attention.register_forward_hook(self._after, with_kwargs=True, always_call=True)

    def _before(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self._place >= len(args) and self._argument not in kwargs:
            raise _not_found(self._name, "the model calls it without passing a cache")
        cache = self._cache_of(args, kwargs)
        cache = _EmptyCache() if cache is None else cache
        for part in _parts(cache):
            vars(part).setdefault("update", _Update(part)).taps.append(self)
        if self._place < len(args):
            return (*args[: self._place], cache, *args[self._place + 1 :]), kwargs
        return args, {**kwargs, self._argument: cache}

    def _after(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        cache = self._cache_of(args, kwargs)
        updates = [vars(part).pop("update", None) for part in _parts(cache)]
        if output is None or not isinstance(cache, _EmptyCache) or None in updates:
            return  # it failed, its keys may be in the cache from before, or another tap has looked already
        if self._must_write and not any(update.is_called for update in updates):
            raise _not_found(self._name, "it wrote nothing to its cache")

    def _cache_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args[self._place] if self._place < len(args) else kwargs.get(self._argument)

    def pass_through(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the cache is to hold of new keys and values, [B, H, T, D] each."""
        return (
            keys if self._keys is None else self._keys(keys),
            values if self._values is None else self._values(values),
        )


def _not_found(name: str, why: str) -> ModelError:
    return ModelError(
        f"The input of the KV cache of {name} cannot be determined: {why}.",
        code="kv_cache_not_found",
        hint=f"The scales need what attention writes to a Transformers cache. {NO_CACHE_HINT}",
    )


class _EmptyCache(DynamicCache):
    """A cache for one call, of a decoder alone or beside an encoder: T5Gemma 2 asks for both parts by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attention_cache = self
        self.cross_attention_cache = DynamicCache()
        self.is_updated: dict[int, bool] = {}


class _Update:
    """Stands in for the method ``update`` of one cache while one attention runs."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self.taps: list[CacheTap] = []
        self.is_called = False

    def __call__(self, keys: torch.Tensor, values: torch.Tensor, *rest: Any, **named: Any) -> Any:
        self.is_called = True
        for tap in self.taps:
            keys, values = tap.pass_through(keys, values)
        return type(self._cache).update(self._cache, keys, values, *rest, **named)


def _parts(cache: Any) -> list[Cache]:
    """Return the caches of keys and values that a cache consists of."""
    if isinstance(cache, (EncoderDecoderCache, _EmptyCache)):
        return [cache.self_attention_cache, cache.cross_attention_cache]
    return [] if cache is None else [cache]


def cached_names(model: nn.Module) -> Iterator[str]:
    """Yield the names of layers whose outputs are cached keys and values; those of vision or audio towers are not."""
    tensors = {name for name, _ in model.named_parameters()}
    decoder: Any = model.get_decoder() if isinstance(model, PreTrainedModel) else None  # type: ignore[no-untyped-call]
    inside = set((decoder or model).modules())
    return (name for name, module in model.named_modules() if module in inside and holds_keys_or_values(name, tensors))
