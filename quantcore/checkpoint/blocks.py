"""Finds the blocks of a checkpoint: the numbered lists of modules that config.json describes as the language model.

A decoder has one list, as has an encoder; a sequence-to-sequence model has the list of its encoder and that of its
decoder. A few models have lists that take turns (attention and feed-forward layers in XLM).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quantcore.checkpoint.layout import TensorHeader
from quantcore.checkpoint.model_config import DEPTH, HIDDEN, first
from quantcore.errors import ModelError

DEPTHS = (
    *DEPTH, "num_blocks", "decoder_layers", "num_decoder_layers",
    "encoder_layers", "num_encoder_layers", "num_layers_per_stack", "num_hidden_groups",
)  # fmt: skip
KINDS = ("layer_types", "layers_block_type")
ONE_LIST = "Bitfoundry quantizes models with one list of blocks, or with one list of an encoder and one of its decoder."
SMALL_SHARE = 0.01  # of the bytes of the decoder blocks; a smaller list is not worth a warning
_NUMBERED = re.compile(r"((?:.*?\.)?)(\d+)\.(?=.*\.)")  # with modules inside: layers alone are no blocks
_TEXT = re.compile(r"(^|\.)(language_model|text_model|text_encoder|text_decoder|llm|lm|thinker)\.")
_SIDE = re.compile(r"(?:^|[._])(encoder|decoder)(?:[._]|$)")
_TEXT_KEY = re.compile(r"text|llm|language|thinker|decoder|generator")
_NOT_TEXT = re.compile(
    r"vision|visual|image|img_|video|audio|speech(?=[._]|$)|acoustic|semantic|sound|perception|protein|codec|vq|vpm|apm|talker|code2wav"
    r"|token2wav|code_predictor|depth_decoder|diffusion|qformer|perceiver|resampler|projector|connector|aligner|adapt|deepstack"
    r"|(^|[._])(vit|clip|siglip|sam|mtp)([._]|$)"
)
"""Pattern of the names of a model's parts beside the language model, in module paths and config keys."""


@dataclass(frozen=True)
class Blocks:
    """The blocks of a model, numbered in the order in which they run: an encoder's come before its decoder's.

    Blocks of lists that ``take_turns`` run in another order, which the names do not tell.

    ``lists`` has the prefix and the length of each list of blocks, such as ``("model.layers.", 30)``.
    """

    lists: tuple[tuple[str, int], ...]
    take_turns: bool = False

    def __len__(self) -> int:
        return sum(length for _, length in self.lists)

    @property
    def prefixes(self) -> tuple[str, ...]:
        """The prefixes of the names of all tensors in blocks."""
        return tuple(prefix for prefix, _ in self.lists)

    @property
    def starts(self) -> list[int]:
        """The number of the first block of each list."""
        return [sum(length for _, length in self.lists[:place]) for place in range(len(self.lists))]

    def prefix_of(self, index: int) -> str:
        """Return the prefix of the tensors in block ``index``: ``model.layers.7.``."""
        for (prefix, length), start in zip(self.lists, self.starts, strict=True):
            if index < start + length:
                return f"{prefix}{index - start}."
        raise IndexError(index)

    def number_of(self, name: str) -> int | None:
        """Return the number of the block that the tensor or module called ``name`` is in; None outside the blocks.

        Blocks that a checkpoint holds after those that run, for multi-token prediction, have numbers after all others.
        """
        for (prefix, length), start in zip(self.lists, self.starts, strict=True):
            if name.startswith(prefix):
                place = int(name[len(prefix) :].split(".", 1)[0])
                return start + place if place < length else len(self) + place - length
        return None


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


def find_blocks(tensors: Mapping[str, TensorHeader], model_config: Mapping[str, Any]) -> Blocks:
    """Return the blocks of the model's text: those under ``model.layers.``, for example.

    They are the numbered list with the depth and the width of the language model in config.json, declared at its top
    level or in a config inside it; in a sequence-to-sequence model, two such lists; lists that take turns are taken
    together. Blocks for multi-token prediction, which some checkpoints hold after the others, do not count, because
    they do not run. Raises ModelError if no list fits, or several do.
    """
    every = block_lists(tensors)
    lists, every = _large(_of_text(every)), _large(every)
    if not lists:
        what = f"these are none: {_names(every)}" if every else "no tensor name has a block number (model.layers.0...)"
        raise ModelError(
            f"No blocks of a language model were found: {what}.",
            code="unsupported_architecture",
            hint=ONE_LIST,
        )
    configs = list(_text_configs(model_config))
    fitting = [(blocks, depth) for blocks in lists if (depth := _depth(blocks, configs)) is not None]
    if any(config.get("is_encoder_decoder") for config in configs) and len(every) > 1:
        return _encoder_and_decoder(fitting, every, tensors, has_towers=bool(tower_configs(model_config)))
    if _take_turns([blocks for blocks, _ in fitting]):
        return Blocks(tuple((blocks.prefix, depth) for blocks, depth in fitting), take_turns=True)
    if len(fitting) > 1 or (not fitting and len(lists) > 1):
        raise _ambiguous("several lists of blocks that could be its language model", lists)
    if not fitting:
        promised = " or ".join(dict.fromkeys(str(depth) for config in configs for depth in _depths(config)))
        raise ModelError(
            f"config.json declares {promised or 'other'} blocks, but the weights contain {lists[0].count} under "
            f"'{lists[0].prefix}*'.",
            code="config_implausible",
            hint="The checkpoint and its config.json do not belong together, or a shard is missing.",
        )
    [(blocks, depth)] = fitting
    return Blocks(((blocks.prefix, depth),))


def _take_turns(lists: Sequence[BlockList]) -> bool:
    """Return True for lists of the same length whose prefixes differ in one part: ``H_module`` and ``L_module``."""
    paths = [blocks.prefix.split(".") for blocks in lists]
    are_alike = len({(blocks.count, len(path)) for blocks, path in zip(lists, paths, strict=True)}) == 1
    has_sides = any(_SIDE.search(blocks.prefix) for blocks in lists)
    return are_alike and not has_sides and sum(len(set(parts)) > 1 for parts in zip(*paths, strict=True)) == 1


def _encoder_and_decoder(
    fitting: Sequence[tuple[BlockList, int]],
    every: Sequence[BlockList],
    tensors: Mapping[str, TensorHeader],
    *,
    has_towers: bool,
) -> Blocks:
    """Return the blocks of an encoder and of its decoder; of the decoder alone if the encoder reads sound or images."""
    sides = {blocks.prefix: match[1] for blocks, _ in fitting if (match := _SIDE.search(blocks.prefix))}
    encoders, decoders = (
        [(blocks.prefix, depth) for blocks, depth in fitting if sides.get(blocks.prefix) == side]
        for side in ("encoder", "decoder")
    )
    if len(decoders) != 1 or len(encoders) > 1 or len(fitting) != len(encoders) + len(decoders):
        raise _ambiguous("an encoder and a decoder, but not one list of blocks for each", every)
    if not has_towers and not any(_reads_signals(prefix, tensors) for prefix, _ in encoders):
        return Blocks((*encoders, *decoders))
    return Blocks(tuple(decoders))


def _reads_signals(prefix: str, tensors: Mapping[str, TensorHeader]) -> bool:
    """Return True if there are convolutions around the blocks of the encoder: it reads sound or images, not tokens."""
    match = _SIDE.search(prefix)
    assert match is not None
    around = (name for name in tensors if name.startswith(prefix[: match.end()]) and not name.startswith(prefix))
    return any(len(tensors[name].shape) > 2 for name in around)


def block_lists(tensors: Mapping[str, TensorHeader]) -> list[BlockList]:
    """Return every numbered list of modules that hold layers with matrices, the largest first."""
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


def warn_of_other_parts(
    tensors: Mapping[str, TensorHeader], blocks: Blocks, quantized: Iterable[str] = ()
) -> tuple[str, ...]:
    """Return a warning that names the other numbered lists of a checkpoint, which are not quantized; empty if none.

    ``quantized`` are names of layers in lists that are quantized all the same.
    """
    lists, quantized = block_lists(tensors), tuple(quantized)
    smallest = SMALL_SHARE * sum(one.num_bytes for one in lists if one.prefix in blocks.prefixes)
    others = [one for one in lists if one.prefix not in blocks.prefixes and one.num_bytes >= smallest]
    rest = [one for one in others if not any(name.startswith(one.prefix) for name in quantized)]
    chosen = " and ".join(f"'{prefix}*'" for prefix in blocks.prefixes)
    warning = f"Only the language model, {chosen}, is quantized. Other parts stay unchanged: {_names(rest)}."
    return (warning,) if rest else ()


def is_of_tower(name: str) -> bool:
    """Return True for a tensor outside the language model, by its name."""
    return _NOT_TEXT.search(name) is not None


def tower_configs(model_config: Mapping[str, Any]) -> list[str]:
    """Return the keys of config.json that describe parts outside the language model, such as ``vision_config``."""
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
    has_encoder = config.get("is_encoder_decoder")
    chosen = [key for key in inner if _TEXT_KEY.match(key) or (has_encoder and _SIDE.search(key))]
    for part in [inner[key] for key in chosen] or inner.values():
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
        width = first(config, HIDDEN)
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
        hint=ONE_LIST,
    )


def natural_order(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts block 2 before block 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
