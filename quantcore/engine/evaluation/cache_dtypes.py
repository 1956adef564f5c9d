"""Measures what a KV cache of fewer bits costs: a model is compared with itself and a cache of 16 bits.

One pass over the blocks takes a stream of hidden states for each dtype along, so that weights are read once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from quantcore.checkpoint.model_config import ModelConfig
from quantcore.config.cache_dtypes import LATENT, CacheDtype, not_measured
from quantcore.engine.evaluation.cache_rounding import stored
from quantcore.engine.evaluation.divergence import measure_each, summarize_both
from quantcore.engine.evaluation.inputs import block_progress
from quantcore.engine.evaluation.model import EvaluatedModel
from quantcore.engine.evaluation.text import EvaluationText
from quantcore.engine.model.cache_taps import tap_all_caches
from quantcore.engine.model.kinds import Kind
from quantcore.events import Emit
from quantcore.report.evaluation_result import CacheQuality
from quantcore.report.quality import Quality
from quantcore.report.verdict import judge_quality


@dataclass
class _Seen:
    """The heads and channels of the keys and values of each block that wrote any: two pairs (H, D) a block.

    The blocks ``spared`` keep 16 bits.
    """

    dtype: CacheDtype
    spared: frozenset[int]
    shapes: dict[int, dict[str, tuple[int, int]]] = field(default_factory=dict)

    @contextmanager
    def kept_by(self, block: nn.Module, index: int) -> Iterator[None]:
        """Round what attention in ``block``, number ``index``, caches, while this lasts."""

        def through(what: str):  # type: ignore[no-untyped-def]  # a function of keys or values
            def passed(x_BHTD: torch.Tensor) -> torch.Tensor:
                self.shapes.setdefault(index, {})[what] = x_BHTD.shape[1], x_BHTD.shape[3]
                if index in self.spared:
                    return x_BHTD
                return stored(x_BHTD, self.dtype, are_keys=what == "keys")

            return passed

        with ExitStack() as stack:
            for handle in tap_all_caches(block, through("keys"), through("values")):
                stack.callback(handle.remove)
            yield

    def summary(self, quality: Quality, num_blocks: int) -> CacheQuality:
        """Return what was measured, for a model of ``num_blocks``."""
        return CacheQuality(
            dtype=self.dtype.name,
            program=self.dtype.program,
            option=self.dtype.option,
            bytes_per_token=self.bytes_per_token,
            bytes_per_token_of_16_bits=self.bytes_per_token_of_16_bits,
            num_blocks=len(self.shapes),
            num_blocks_spared=len(self.spared & self.shapes.keys()),
            num_blocks_without=num_blocks - len(self.shapes),
            quality=quality,
            level=judge_quality(quality).level,
        )

    @property
    def bytes_per_token(self) -> int:
        bits = 0.0
        for index, block in self.shapes.items():
            for what, (heads, size) in block.items():
                of_head = self.dtype.bits_of_head(size, are_keys=what == "keys")
                bits += heads * (16 * size if index in self.spared else of_head)
        return round(bits / 8)

    @property
    def bytes_per_token_of_16_bits(self) -> int:
        return sum(2 * heads * size for block in self.shapes.values() for heads, size in block.values())


def measure_cache_dtypes(
    model: EvaluatedModel, text: EvaluationText, dtypes: Sequence[CacheDtype], emit: Emit
) -> tuple[CacheQuality, ...]:
    """Measure each of ``dtypes`` on ``text``. Raises ConfigError ``cache_dtypes_not_measured`` where that says nothing.

    The order of the results is that of ``dtypes``.
    """
    _check(model)
    told = block_progress(emit, model)
    all_seen = [_Seen(dtype, _spared(dtype, model)) for dtype in dtypes]
    streams = [model.embed(text)]
    streams += [streams[0].copy() for _ in dtypes]
    for index in range(model.streamed.num_blocks):
        model.streamed.enter(index, *streams)
        with model.quantized_block(index) as block:
            model.streamed.run_block(block, index, streams[0])
            for seen, stream in zip(all_seen, streams[1:], strict=True):
                with seen.kept_by(block, index):
                    model.streamed.run_block(block, index, stream)
        told(index + 1)
    model.has_run = True
    if not all_seen[0].shapes:
        raise not_measured("none of its blocks writes keys or values to a cache of Transformers")
    original, *others = (list(stream.states) for stream in streams)
    with model.vocabulary(original[0]) as vocabulary:
        measured = measure_each([(vocabulary, states) for states in others], (vocabulary, original), text)
    return tuple(
        seen.summary(summarize_both(each, text), model.streamed.num_blocks)
        for seen, each in zip(all_seen, measured, strict=True)
    )


def _spared(dtype: CacheDtype, model: EvaluatedModel) -> frozenset[int]:
    """Return the blocks that ``dtype`` spares: none of a hybrid model, which has attention in few."""
    count = model.streamed.num_blocks
    num = 0 if _is_hybrid(model) else min(dtype.num_spared, count // 2)
    return frozenset({*range(num), *range(count - num, count)})


def _is_hybrid(model: EvaluatedModel) -> bool:
    checkpoint = model.streamed.checkpoint
    kinds = ModelConfig(checkpoint.config).text.get("layer_types") or ()
    has_recurrence = any(name.endswith(".A_log") for name in checkpoint.names)
    return has_recurrence or any("attention" not in kind for kind in kinds)


def _check(model: EvaluatedModel) -> None:
    """Raise ConfigError for a model whose cache is not what its attention hands to Transformers' cache."""
    if model.streamed.kind is not Kind.causal:
        raise not_measured(f"it is of kind '{model.streamed.kind}', and only causal language models keep a cache")
    if ModelConfig(model.streamed.checkpoint.config).text.get("kv_lora_rank"):
        raise not_measured(LATENT)
    cached = next((layer.name for layer in model.layers if layer.is_cached), None)
    if cached is not None:
        raise not_measured(f"its files quantize the KV cache themselves (first {cached})")
