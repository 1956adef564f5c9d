"""Finds the decoder blocks of a checkpoint: the numbered list that config.json describes as the language model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quantcore.checkpoint.layout import TensorHeader
from quantcore.errors import ModelError

DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "num_blocks", "decoder_layers")
KINDS = ("layer_types", "layers_block_type")
WIDTHS = ("hidden_size", "n_embd", "d_model")
SMALL_SHARE = 0.01  # of the bytes of the decoder blocks; a smaller list is not worth a warning
_NUMBERED = re.compile(r"((?:.*?\.)?)(\d+)\.")
_TEXT = re.compile(r"(^|\.)(language_model|text_model|text_decoder|llm|lm|thinker)\.")
_TEXT_KEY = re.compile(r"text|llm|language|thinker|decoder|generator")
_NOT_TEXT = re.compile(
    r"vision|visual|image|img_|video|audio|speech|acoustic|semantic|sound|perception|protein|codec|vq|vpm|apm|talker|code2wav"
    r"|token2wav|code_predictor|depth_decoder|diffusion|qformer|perceiver|resampler|projector|connector|aligner|adapt|deepstack"
    r"|(^|[._])(vit|clip|siglip|sam|mtp)([._]|$)"
)
"""Pattern of the names of a model's parts beside the language model, in module paths and config keys."""


@dataclass(frozen=True)
class BlockList:
    """A numbered list of modules: ``model.layers.`` with ``indices`` 0 to 29; ``sides`` are its tensors' lengths.

    In quantized models the width may only show in norms, because codes are packed.
    """

    prefix: str
    indices: frozenset[int]
    sides: frozenset[int]
    num_bytes: int

    @property
    def count(self) -> int:
        return len(self.indices)

    def __str__(self) -> str:
        return f"'{self.prefix}*' ({self.count} blocks, {self.num_bytes / 1e9:.2g} GB)"


def find_blocks(tensors: Mapping[str, TensorHeader], model_config: Mapping[str, Any]) -> tuple[str, int]:
    """Return (prefix, count) of the decoder blocks: ``model.layers.``, 30.

    They are the numbered list with the depth and the width of the language model in config.json, declared at its top
    level or in a config inside it. Blocks for multi-token prediction, which some checkpoints hold after the others, do
    not count, because they do not run. Raises ModelError if no list fits, or several do.
    """
    every = block_lists(tensors)
    lists, every = _large(_of_text(every)), _large(every)
    if not lists:
        what = f"these are none: {_names(every)}" if every else "no tensor name has a block number (model.layers.0...)"
        raise ModelError(
            f"No decoder blocks of a language model were found: {what}.",
            code="unsupported_architecture",
            hint="Bitfoundry quantizes decoder-only language models.",
        )
    configs = list(_text_configs(model_config))
    if len(every) > 1 and any(config.get("is_encoder_decoder") for config in configs):
        raise _ambiguous("an encoder beside its decoder", every)
    fitting = [(blocks, depth) for blocks in lists if (depth := _depth(blocks, configs)) is not None]
    if len(fitting) > 1 or (not fitting and len(lists) > 1):
        raise _ambiguous("several lists of blocks that may be its language model", lists)
    if not fitting:
        promised = " or ".join(dict.fromkeys(str(depth) for config in configs for depth in _depths(config)))
        raise ModelError(
            f"config.json promises {promised or 'other'} decoder blocks, the weights hold {lists[0].count} under"
            f" '{lists[0].prefix}*'.",
            code="config_implausible",
            hint="The checkpoint and its config.json do not belong together, or a shard is missing.",
        )
    [(blocks, depth)] = fitting
    return blocks.prefix, depth


def block_lists(tensors: Mapping[str, TensorHeader]) -> list[BlockList]:
    """Return every numbered list of modules that holds matrices, the largest first."""
    parts: dict[str, list[tuple[int, TensorHeader]]] = {}
    for name, tensor in tensors.items():
        if match := _NUMBERED.match(name):
            parts.setdefault(match[1], []).append((int(match[2]), tensor))
    lists = [
        BlockList(
            prefix,
            frozenset(index for index, _ in part),
            frozenset(side for _, tensor in part for side in tensor.shape),
            sum(tensor.num_bytes for _, tensor in part),
        )
        for prefix, part in parts.items()
        if any(len(tensor.shape) > 1 for _, tensor in part)
    ]
    return sorted(lists, key=lambda blocks: (-blocks.num_bytes, blocks.prefix))


def warn_of_other_parts(tensors: Mapping[str, TensorHeader], prefix: str) -> tuple[str, ...]:
    """Return a warning that names the other numbered lists of a checkpoint, which are not quantized; empty if none."""
    lists = block_lists(tensors)
    chosen = next(blocks for blocks in lists if blocks.prefix == prefix)
    rest = [other for other in lists if other is not chosen and other.num_bytes >= SMALL_SHARE * chosen.num_bytes]
    warning = f"Only the language model, '{prefix}*', is quantized. Other parts stay as they are: {_names(rest)}."
    return (warning,) if rest else ()


def is_of_tower(name: str) -> bool:
    """Return True for a tensor of a part beside the language model, by its name."""
    return _NOT_TEXT.search(name) is not None


def tower_configs(model_config: Mapping[str, Any]) -> list[str]:
    """Return the keys of config.json that describe parts beside the language model, such as ``vision_config``."""
    return [key for key, part in model_config.items() if isinstance(part, Mapping) and part and _NOT_TEXT.search(key)]


def _large(lists: Sequence[BlockList]) -> list[BlockList]:
    return [blocks for blocks in lists if blocks.num_bytes >= SMALL_SHARE * lists[0].num_bytes]


def _of_text(lists: Sequence[BlockList]) -> list[BlockList]:
    """Return the lists that may be a language model by name; if some names say so, only those."""
    lists = [blocks for blocks in lists if not _NOT_TEXT.search(blocks.prefix)]
    return [blocks for blocks in lists if _TEXT.search(blocks.prefix)] or lists


def _text_configs(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield ``config`` and the configs inside it that may be a language model's, by the same rule as lists."""
    yield config
    inner = {key: part for key, part in config.items() if isinstance(part, Mapping) and not _NOT_TEXT.search(key)}
    for part in [inner[key] for key in inner if _TEXT_KEY.match(key)] or inner.values():
        yield from _text_configs(part)


def _depths(config: Mapping[str, Any]) -> list[int]:
    """Return the numbers of blocks that ``config`` declares, some of them as a list with an entry per block."""
    depths = [depth for name in DEPTHS if isinstance(depth := config.get(name), int)]
    return depths + [len(kinds) for name in KINDS if isinstance(kinds := config.get(name), list)]


def _depth(blocks: BlockList, configs: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the number of blocks that run, if one of ``configs`` declares such a list; else None."""
    if blocks.indices != set(range(blocks.count)):
        return None
    for config in configs:
        width = next((config[name] for name in WIDTHS if isinstance(config.get(name), int)), None)
        if width is not None and width not in blocks.sides:
            continue
        for depth in _depths(config):
            if blocks.count in (depth, depth + (config.get("num_nextn_predict_layers") or 0)):
                return depth
    return None if any(map(_depths, configs)) else blocks.count  # older configs leave out defaults


def _names(lists: Sequence[BlockList]) -> str:
    return ", ".join(map(str, lists[:4])) + (f" and {len(lists) - 4} more" if len(lists) > 4 else "")


def _ambiguous(what: str, lists: Sequence[BlockList]) -> ModelError:
    return ModelError(
        f"This model has {what}: {_names(lists)}.",
        code="unsupported_architecture",
        hint="Bitfoundry quantizes decoder-only language models whose blocks lie in one list.",
    )


def natural_order(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts block 2 before block 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
