"""A twin of a model: its own class and config with small widths and random weights, so that it fits anywhere.

Depth, kinds of blocks and every switch of the config stay unchanged. Only the numbers of heads, their widths, the
vocabulary and the number of experts are small. Code that handles the twin handles the model in the same way.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from quantcore.checkpoint.model_config import EXPERTS, EXPERTS_PER_TOKEN, HEAD_DIMS, HEADS, HIDDEN, ModelConfig, first
from quantcore.engine.model.skeleton import clean_config
from quantcore.errors import ModelError

VOCAB_SIZE = 320
MAX_EXPERTS = 16
MAX_EXPERTS_PER_TOKEN = 4
MIN_HIDDEN = 32
MIN_HEADS, MAX_HEADS = 4, 16
HEAD_DIM = 16
MIN_WIDTH = 8
MAX_PARAMETERS = 100_000_000
"""Far more than the twin of any published config has: 0.4 GB."""

_TOKEN_IDS = ("token_id", "token_index")
# Words in the name of a field that holds a width, not a number of heads, groups or layers.
_WIDTHS = (
    "hidden_size", "intermediate", "ffn", "d_ff", "n_inner", "d_model", "n_embd", "width", "d_inner", "embed_dim",
    "emb_dim", "d_ssm", "attention_hidden", "embedding_dim",
)  # fmt: skip
_OUTPUT_WIDTHS = ("out_hidden_size", "text_hidden_size", "output_dim", "projection_dim", "hidden_out_dim", "d_out")
_RANKS = ("head_dim", "headdim", "_rank", "d_head", "head_size", "rotary_dim", "d_kv", "kv_channels")


@dataclass(frozen=True)
class _Scale:
    """Factors by which a config's number of heads and the width of a head shrink; other widths shrink by both."""

    heads: Fraction
    head_dim: Fraction

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> _Scale:
        heads, hidden = (first(config, names) for names in (HEADS, HIDDEN))
        if heads is None or hidden is None:
            return cls(Fraction(1), Fraction(1, max(1, (hidden or MIN_HIDDEN) // 64)))
        width = first(config, HEAD_DIMS) or max(1, hidden // heads)
        by = 1 if _has_list(config.get("rope_parameters") or config.get("rope_scaling")) else width // HEAD_DIM
        by = max((size for size in range(1, by + 1) if not (width % size or hidden % size)), default=1)
        small = {num: Fraction(hidden * num, heads * by) for num in range(min(MIN_HEADS, heads), heads + 1)}
        fits = (num for num, size in small.items() if heads % num == 0 and size % MIN_WIDTH == 0 and size >= MIN_HIDDEN)
        least = min(fits, default=heads)
        return cls(Fraction(least if least <= MAX_HEADS else MIN_HEADS, heads), Fraction(1, by))


def tiny_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``config`` (of config.json) with small widths; nested configs, such as ``text_config``, likewise.

    Each of them shrinks by its own factors. The width of a tower's output stays equal to that of the language model.
    """
    scale = _Scale.of(config)
    twin = {key: _small(key, value, scale) for key, value in config.items() if key != "quantization_config"}
    before, after = (ModelConfig(each).hidden_size for each in (config, twin))
    return _with_outputs(twin, config, before, after) if before and after else twin


def build_tiny_model(config: dict[str, Any], seed: int = 0, kind: type[Any] = AutoModelForCausalLM) -> PreTrainedModel:
    """Return a model of ``tiny_config``, float32 on the CPU, in evaluation mode; ``kind``: its class or an auto class.

    The global random state is not changed. Raises ModelError ``config_implausible`` for a config that leaves sizes to
    the class, which are those of a published model, and any error of Transformers for a config whose numbers do not fit
    together once they are small.
    """
    build = kind._from_config if issubclass(kind, PreTrainedModel) else kind.from_config
    _check_small(build, clean_config(config))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = build(clean_config(config), dtype=torch.float32)
        with torch.no_grad():
            computed = re.compile("|".join(model._keys_to_ignore_on_save or ["$^"]))  # by the model's code
            for name, parameter in model.named_parameters():
                if parameter.is_floating_point() and not computed.search(name):
                    noise = torch.randn_like(parameter)
                    is_vector = parameter.ndim < 2
                    parameter.copy_(parameter + 0.2 * noise if is_vector else noise * parameter.shape[-1] ** -0.5)
            stored = model.state_dict()
            for name, buffer in model.named_buffers():
                if name in stored and buffer.dtype == torch.long and buffer.ndim == 2 and not buffer.any():
                    buffer.random_(2)  # a table that a checkpoint fills, such as one from tokens to experts
    model.tie_weights()
    model.config.use_cache = False
    model.train(False).requires_grad_(False)
    return model


def _check_small(build: Callable[..., PreTrainedModel], config: PretrainedConfig) -> None:
    """Build the model without memory first, and count."""
    with torch.device("meta"), no_init_weights():
        num_parameters = sum(parameter.numel() for parameter in build(config, dtype=torch.float32).parameters())
    if num_parameters > MAX_PARAMETERS:
        raise ModelError(
            f"A small model of this config would have {num_parameters / 1e6:.0f} million parameters: config.json "
            "leaves sizes to the model class.",
            code="config_implausible",
            hint="Use the config.json that the model was published with.",
        )


def _with_outputs(twin: Mapping[str, Any], config: Mapping[str, Any], before: int, after: int) -> dict[str, Any]:
    """Return ``twin`` with ``after`` where ``config`` says that a tower gives the language model's width ``before``."""
    return {
        key: _with_outputs(value, config[key], before, after)
        if isinstance(value, Mapping)
        else (after if key in _OUTPUT_WIDTHS and config[key] == before else value)
        for key, value in twin.items()
    }


def _small(key: str, value: Any, scale: _Scale) -> Any:
    if isinstance(value, Mapping):
        if first(value, HIDDEN) is not None:  # a config of its own: a tower, the text model
            return tiny_config(value)
        return {name: _small(name, part, scale) for name, part in value.items()}
    if isinstance(value, list):
        return [_small(key, part, scale) for part in value]
    if type(value) is not int or value <= 0:
        return value
    return _RULES[kind](value, scale) if (kind := _kind(key)) else value


def _kind(key: str) -> str | None:
    """Return the kind of number that a config has under ``key``; None for one that a twin keeps."""
    if any(word in key for word in _TOKEN_IDS):
        return "token"
    if "vocab_size" in key:
        return "vocabulary"
    if key in EXPERTS:
        return "experts"
    if key in EXPERTS_PER_TOKEN:
        return "experts_per_token"
    if key.endswith(("heads", "n_head", "n_groups", "ngroups")):
        return "heads"
    if any(word in key for word in _RANKS):
        return "head_dim"
    return "width" if any(word in key for word in _WIDTHS) or key == "dim" else None


_RULES: dict[str, Callable[[int, _Scale], int]] = {
    "token": lambda value, scale: min(value, VOCAB_SIZE - 1),
    "vocabulary": lambda value, scale: min(value, VOCAB_SIZE),
    "experts": lambda value, scale: min(value, MAX_EXPERTS),
    "experts_per_token": lambda value, scale: min(value, MAX_EXPERTS_PER_TOKEN),
    "heads": lambda value, scale: max(1, int(value * scale.heads)),
    "head_dim": lambda value, scale: max(min(value, MIN_WIDTH), int(value * scale.head_dim)),
    "width": lambda value, scale: _width(value * scale.heads * scale.head_dim),
}


def _width(wanted: Fraction) -> int:
    """Return the next multiple of ``MIN_WIDTH``, at least two of them.

    A multiple is kept, so that heads times widths still fits.
    """
    return max(2 * MIN_WIDTH, math.ceil(wanted / MIN_WIDTH) * MIN_WIDTH)


def _has_list(value: Any) -> bool:
    """Return whether RoPE is given number by number (mrope, longrope), which fixes the width of a head."""
    if isinstance(value, Mapping):
        return any(_has_list(part) for part in value.values())
    return isinstance(value, list)
