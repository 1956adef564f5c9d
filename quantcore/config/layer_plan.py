"""The plan of one layer, the type that planning, solving and exporting share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quantcore.config.gguf_types import GGUF_TYPES
from quantcore.config.grouping import weight_grouping
from quantcore.config.quantization import (
    CACHED_LAYERS,
    Config,
    QSchemeType,
    QuantizationConfig,
    QuantizationSpec,
    ScaleType,
)
from quantcore.config.spec import SUPER_BLOCK
from quantcore.errors import ConfigError

USUAL_SHAPE = (4096, 4096)
TOWERS, DRAFTS = "tower_quant_config", "draft_quant_config"
GROUP_SIZES = (16, 32, 64, 96, 128, 192, 256, 512)


@dataclass(frozen=True)
class LayerPlan:
    """A layer whose weight will be quantized. ``block`` is its decoder block, None outside them (lm_head,
    embeddings, towers, draft heads).

    ``shape`` is that of the weight as [out, in, *kernel], in whatever layout a module of class ``kind`` stores it.
    ``chosen_by`` names the entry of the Config that its config comes from. ``in_cache``: it computes keys or values of
    a KV cache, and ``output_tensors`` of its config are those that enter the cache, behind norms and RoPE.
    """

    name: str
    block: int | None
    shape: tuple[int, ...]
    config: QuantizationConfig
    kind: str = "Linear"
    chosen_by: str = "global_quant_config"
    in_cache: bool = False

    @property
    def is_cached(self) -> bool:
        """True if the keys or values that it computes are quantized where they enter the cache."""
        return self.in_cache and self.config.output_tensors is not None

    @property
    def is_in_tower(self) -> bool:
        """True for a layer of an encoder of images or sound, which no text runs."""
        return self.chosen_by == TOWERS

    @property
    def is_in_draft(self) -> bool:
        """True for a layer of a head for multi-token prediction, which only speculative decoding runs."""
        return self.chosen_by == DRAFTS

    @property
    def is_embedding(self) -> bool:
        """True for an embedding, which may be the output projection as well."""
        return self.kind == "Embedding"

    @property
    def is_rounded_alone(self) -> bool:
        """True for a layer that no calibration runs: in a tower or a draft head, or an embedding."""
        return self.is_in_tower or self.is_in_draft or self.is_embedding

    @property
    def out_features(self) -> int:
        return self.shape[0]

    @property
    def in_features(self) -> int:
        return self.shape[1]

    @property
    def weight(self) -> QuantizationSpec:
        assert self.config.weight is not None
        return self.config.weight

    @property
    def input_tensors(self) -> QuantizationSpec | None:
        return self.config.input_tensors

    @property
    def num_scales(self) -> tuple[int, int]:
        """Shape [rows, groups] of the weight's scales."""
        return weight_grouping(self.weight).num_scales(self.shape)

    @property
    def group_size(self) -> int:
        """The number of inputs that share one scale within a row."""
        size = self.weight.group_size
        return self.in_features if size is None or size == -1 else size

    @property
    def groups(self) -> list[tuple[int, int]]:
        """The pairs (axis length, group size) of weight and input, where they have groups of a fixed size."""
        axes = ((self.weight, weight_grouping(self.weight).axis), (self.input_tensors, 1))
        return [
            (self.shape[axis or 0], spec.group_size)
            for spec, axis in axes
            if spec is not None and spec.group_size is not None and spec.group_size > 0
        ]

    @property
    def scheme(self) -> str:
        """A short name for people: ``uint4 per_group 64``, ``int8 per_channel + int8 per_token dynamic``."""
        text = _describe(self.weight, group_size=self.group_size)
        if self.config.input_tensors is not None:
            text += f" + {_describe_activation(self.config.input_tensors)}"
        if self.config.output_tensors is not None:
            text += f" -> {_describe_activation(self.config.output_tensors)}"
        return text

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "block": self.block,
            "shape": list(self.shape),
            "scheme": self.scheme,
            "chosen_by": self.chosen_by,
        }


def check_groups(layers: Sequence[LayerPlan]) -> None:
    """Raise ConfigError unless every group size divides its axis; the error says which do not and what would fit."""
    rows = [(layer, length, size) for layer in layers for length, size in layer.groups]
    bad = [(layer, length, size) for layer, length, size in rows if length % size]
    if not bad:
        return
    fitting = [size for size in GROUP_SIZES if not any(length % size for _, length, _ in rows)]
    widths = "; ".join(
        f"{width} inputs: {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
        for width in sorted({length for _, length, _ in bad})
        if (names := [layer.name for layer, length, _ in bad if length == width])
    )
    raise ConfigError(
        f"group_size {bad[0][2]} does not divide the rows of {len(bad)} layer(s): {widths}.",
        code="group_size_not_dividing",
        hint=f"Sizes that fit all grouped layers: {', '.join(map(str, fitting)) or 'none'}, or -1 for the whole row.",
        field="/global_quant_config/weight/group_size",
        allowed=(*fitting, -1),
    )


def check_super_blocks(layers: Sequence[LayerPlan]) -> None:
    """Raise ConfigError for scales that share a float16 number per 256 inputs where rows are not a multiple of 256."""
    bad = [layer for layer in layers if layer.weight.scale_type.is_whole and layer.in_features % SUPER_BLOCK]
    if bad:
        raise ConfigError(
            f"Scales of type {bad[0].weight.scale_type.value} are nested under one super-block scale per "
            f"{SUPER_BLOCK} inputs, but {len(bad)} layer(s) do not have a multiple of that, first {bad[0].name} "
            f"({bad[0].in_features} inputs).",
            code="group_size_not_dividing",
            hint="Set another scheme for them, such as gguf_q5_0 or gguf_q8_0, in layer_quant_config.",
            field="/global_quant_config/weight/scale_type",
        )


def _describe(spec: QuantizationSpec, *, group_size: int | None) -> str:
    text = f"{spec.dtype.value} {spec.qscheme.value}"
    if spec.qscheme is QSchemeType.per_group:
        text += f" {spec.group_size if group_size is None else group_size}"
    if spec.block_size is not None:
        text += f" {spec.block_size[0]}x{spec.block_size[1]}"
    kind = spec.scale_type
    if kind is ScaleType.pof2 or kind.in_one_byte or kind.in_two_levels:
        text += f" {kind.value}"
    return text if spec.over is None else f"{text} over {_describe(spec.over, group_size=None)}"


def _describe_activation(spec: QuantizationSpec) -> str:
    if not spec.format.scaled:
        return spec.dtype.value
    text = _describe(spec, group_size=None)
    if spec.is_dynamic:
        text = text.replace("per_channel", "per_token")
    return f"{text} {'dynamic' if spec.is_dynamic else 'static'}"


def usual_layers(config: Config) -> list[LayerPlan]:
    """Return a layer of common shape for all settings in ``config`` that have a weight, and for an embedding."""
    cached = {name: config.choose(name, "Linear")[0] for name in CACHED_LAYERS if config.kv_cache_quant_config}
    beside = {name: getattr(config, name) for name in (TOWERS, DRAFTS)}
    own = {"layer": config.global_quant_config, **config.layer_quant_config, **cached, **beside}
    layers = [
        LayerPlan(name, 0, USUAL_SHAPE, settings)
        for name, settings in own.items()
        if settings is not None and settings.weight is not None
    ]
    if config.gguf is not None and layers:
        of_mix = QuantizationConfig(weight=GGUF_TYPES["Q8_0"])  # every mix has types that GGUF alone holds
        embedding = layers[0].config if config.gguf.mix is None else of_mix
        layers.append(LayerPlan("embedding", None, USUAL_SHAPE, embedding, "Embedding"))
    return layers
