"""Where the decoder blocks of a checkpoint are: the numbered list that config.json describes as the language model."""

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
    r"|token2wav|code_predictor|depth_decoder|diffusion|qformer|perceiver|resampler|projector|connector|adapt|deepstack"
    r"|(^|[._])(vit|clip|siglip|sam|mtp)([._]|$)"
)
"""Names of a model's parts beside the language model, in module paths and config keys."""


@dataclass(frozen=True)
class BlockList:
    """A numbered list of modules: ``model.layers.`` with ``indices`` 0 to 29; ``sides`` are those of its tensors.

    Of quantized models only norms may show the width: codes are packed.
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
    """(prefix, count) of the decoder blocks: ``model.layers.``, 30.

    They are the numbered list that has the depth and the width of the language model in config.json, which are declared
    at its top or in a config inside it. Blocks for multi-token prediction, which some checkpoints hold after the
    others, do not count: they do not run. Raises ModelError if no list fits, or several do.
    """
    every = _large(block_lists(tensors))
    lists = _of_text(every)
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
    fitting = [(found, depth) for found in lists if (depth := _depth(found, configs)) is not None]
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
    [(found, depth)] = fitting
    return found.prefix, depth


def block_lists(tensors: Mapping[str, TensorHeader]) -> list[BlockList]:
    """Every numbered list of modules that holds matrices, the largest first."""
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
    return sorted(lists, key=lambda one: (-one.num_bytes, one.prefix))


def said_of_the_rest(tensors: Mapping[str, TensorHeader], prefix: str) -> tuple[str, ...]:
    """A warning that names the other numbered lists of a checkpoint, which are not quantized; none if there is none."""
    lists = block_lists(tensors)
    chosen = next(one for one in lists if one.prefix == prefix)
    rest = [one for one in lists if one is not chosen and one.num_bytes >= SMALL_SHARE * chosen.num_bytes]
    said = f"Only the language model, '{prefix}*', is quantized. Other parts stay as they are: {_names(rest)}."
    return (said,) if rest else ()


def _large(lists: Sequence[BlockList]) -> list[BlockList]:
    return [one for one in lists if one.num_bytes >= SMALL_SHARE * lists[0].num_bytes]


def _of_text(lists: Sequence[BlockList]) -> list[BlockList]:
    """Return the lists that may be a language model by their names; if some are called one, only those."""
    lists = [one for one in lists if not _NOT_TEXT.search(one.prefix)]
    return [one for one in lists if _TEXT.search(one.prefix)] or lists


def _text_configs(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """``config`` and those inside it that may be a language model's, by the same rule as for lists."""
    yield config
    inner = {key: one for key, one in config.items() if isinstance(one, Mapping) and not _NOT_TEXT.search(key)}
    for one in [inner[key] for key in inner if _TEXT_KEY.match(key)] or inner.values():
        yield from _text_configs(one)


def _depths(config: Mapping[str, Any]) -> list[int]:
    """Yield the number of blocks as ``config`` declares it; some configs do so by a list with an entry for each."""
    depths = [depth for name in DEPTHS if isinstance(depth := config.get(name), int)]
    return depths + [len(kinds) for name in KINDS if isinstance(kinds := config.get(name), list)]


def _depth(found: BlockList, configs: Sequence[Mapping[str, Any]]) -> int | None:
    """The number of blocks that run, if one of ``configs`` declares such a list; None if not."""
    if found.indices != set(range(found.count)):
        return None
    for config in configs:
        width = next((config[name] for name in WIDTHS if isinstance(config.get(name), int)), None)
        if width is not None and width not in found.sides:
            continue
        for depth in _depths(config):
            if found.count in (depth, depth + (config.get("num_nextn_predict_layers") or 0)):
                return depth
    return None if any(map(_depths, configs)) else found.count  # older files leave out what is a class's default


def _names(lists: Sequence[BlockList]) -> str:
    return ", ".join(map(str, lists[:4])) + (f" and {len(lists) - 4} more" if len(lists) > 4 else "")


def _ambiguous(what: str, lists: Sequence[BlockList]) -> ModelError:
    return ModelError(
        f"This model has {what}: {_names(lists)}.",
        code="unsupported_architecture",
        hint="Bitfoundry quantizes decoder-only language models whose blocks lie in one list.",
    )


def natural_order(name: str) -> list[tuple[int, str]]:
    """Sort key that puts block 2 before block 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
