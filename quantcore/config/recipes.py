"""The algorithms that are recommended for a scheme, by effort: a preset's recipe. No torch.

``fast`` rounds to nearest: it needs no data and takes seconds. ``balanced`` is the default of every preset, and
``best`` enables every algorithm that improves quality, at any cost. The chains were chosen from measurements on several
families of models (docs/benchmarks.md, ``make bench-recipes``). AMD Quark's names of schemes
(``w_uint4_per_group_asym``) mean only the scheme, as in AMD Quark.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple, get_args

from quantcore.config.algorithms import config_of
from quantcore.config.preset_table import PRESETS
from quantcore.config.quantization import Config, QuantizationConfig, learns_from_data
from quantcore.errors import ConfigError
from quantcore.formats import IntFormat

Effort = Literal["fast", "balanced", "best"]
EFFORTS: tuple[Effort, ...] = get_args(Effort)
DEFAULT_EFFORT: Effort = "balanced"

TUNED_BITS = 3
"""Most bits of a weight at which ``distill`` gains: see docs/benchmarks.md."""

_RUNTIMES = {"gguf": "llama_cpp", "onnx": "onnx"}
"""Formats that one program reads -> its name in a goal."""

_CHAINS: dict[str, dict[Effort, str]] = {
    "static integers": {"fast": "", "balanced": "smoothquant,gptq", "best": "smoothquant,gptaq"},
    "low-bit weights": {"fast": "", "balanced": "gptq", "best": "yaqa"},
    "low-bit float inputs": {"fast": "", "balanced": "autosmoothquant,gptq", "best": "autosmoothquant,gptaq"},
    "few bits": {"fast": "", "balanced": "gptq", "best": "gptaq"},
    "eight bits": {"fast": "", "balanced": "", "best": "gptaq"},
}
"""Kind of scheme -> the chain of each effort. The first kind that a layer of a config has applies to all of them."""


def recipe(configs: Iterable[Config], effort: Effort) -> tuple[Any, ...]:
    """Return the algorithms that are recommended for the schemes of one or more configs, with default options."""
    kind = _kind(configs)
    chain = "" if kind is None else _CHAINS[kind][effort]
    return tuple(config_of(name) for name in chain.split(",") if name)


def with_recipe(
    config: Config, effort: Effort | None, *, preset: str | None, file2file: bool = False, mixed: Iterable[Config] = ()
) -> Config:
    """Return ``config`` with the recipe of ``effort``; by default balanced for a ``preset`` without algorithms.

    ``preset``: the name that the scheme was asked for by, None for a config. ``mixed``: the schemes that a mix chooses
    from, beside which ``config`` has none. From file to file no model runs, so the default is fast there. Raises
    ConfigError ``conflicting_effort`` for an effort beside algorithms, and for one that has to run the model beside
    ``file2file``.
    """
    if effort is None:
        is_preset = (preset or "").lower() in map(str.lower, PRESETS)
        effort = DEFAULT_EFFORT if is_preset and not file2file and not config.algo_config else None
        return config if effort is None else replace(config, algo_config=recipe([config], effort))
    chain = recipe(list(mixed) or [config], effort)
    if config.algo_config:
        raise conflicting_effort(f"The effort '{effort}' chooses the algorithms, but the config sets algo_config.")
    if file2file and chain:
        names = ", ".join(algorithm.name for algorithm in chain)
        raise conflicting_effort(f"The effort '{effort}' runs the model for {names}, which file2file does not do.")
    return replace(config, algo_config=chain)


class Advice(NamedTuple):
    """What may bring a result closer to its original: in words, and as fields of a job's request."""

    text: str
    changes: dict[str, Any]


def advice_on(config: Config, export: str) -> tuple[Advice, ...]:
    """Return what would bring the result of a scheme closer to the original: a better chain, and a goal.

    ``export``: the format of the result, which says for what runtime the goal is. No effort has ``distill``, since it
    is refused in some jobs (several processes, other kinds of models), but at 2 and 3 bits it gains on top of the best
    one.
    """
    used = set(_names(config.algo_config))
    chains = {effort: _names(recipe([config], effort)) for effort in EFFORTS}
    goal = Advice(
        "A goal gives more bits to the layers that need them.",
        {"goal": {"runtime": _RUNTIMES.get(export, "vllm"), "device": "24GB"}},
    )
    if used.issuperset(chains["best"]):
        if "distill" in used or not _has_few_bits(config):
            return (goal,)
        chain = [{"name": algorithm.name} for algorithm in config.algo_config] + [{"name": "distill"}]
        names = ", ".join([*_names(config.algo_config), "distill"])
        text = f"Tune the scales for the predictions as well (algorithms {names})."
        return Advice(text, {"config": {"algo_config": chain}}), goal
    if used.issuperset(chains[DEFAULT_EFFORT]):
        text = f"Use effort best ({', '.join(chains['best'])}): slower, usually better."
        return Advice(text, {"effort": "best"}), goal
    text = f"Use effort {DEFAULT_EFFORT} ({', '.join(chains[DEFAULT_EFFORT])})."
    return Advice(text, {"effort": DEFAULT_EFFORT}), goal


def algorithms_text(config: Mapping[str, Any]) -> str:
    """Return the algorithms of a config, as JSON data, in words: ``smoothquant, gptaq``."""
    names = [algorithm["name"] for algorithm in config.get("algo_config", ())]
    return ", ".join("smoothquant" if name == "smooth" else name for name in names) or "none (rounds to nearest)"


def _names(algorithms: Iterable[Any]) -> list[str]:
    return ["smoothquant" if algorithm.name == "smooth" else algorithm.name for algorithm in algorithms]


def conflicting_effort(message: str) -> ConfigError:
    """Return the error for an effort combined with something that excludes it."""
    return ConfigError(message, code="conflicting_effort", hint="Remove one of them.", field="/effort")


def _kind(configs: Iterable[Config]) -> str | None:
    """Return the kind of the scheme that loses most: see ``_CHAINS``. None for configs that only cast.

    Static ranges of integer activations lose most, because they clip outliers or round everything else coarsely. Those
    of floats lose less, and gain from the same solver as few bits. Float inputs of less than 8 bits gain most from
    scales that even out their channels, found for each group of layers. Where activations are rounded as well, the
    gradients of yaqa gained nothing.
    """
    layers = [
        layer
        for config in configs
        for layer in _layers(config)
        if layer.weight is not None and layer.weight.format.scaled
    ]
    inputs = [layer.input_tensors for layer in layers if layer.input_tensors is not None]
    static = [spec for spec in inputs if learns_from_data(spec)]
    if any(isinstance(spec.format, IntFormat) for spec in static):
        return "static integers"
    weights = [layer.weight for layer in layers if layer.weight is not None]
    if not inputs and any(spec.format.bits < 8 for spec in weights):
        return "low-bit weights"
    low_bit_inputs = [spec for spec in inputs if spec.format.bits < 8]
    if any(not isinstance(spec.format, IntFormat) for spec in low_bit_inputs):
        return "low-bit float inputs"
    if static or low_bit_inputs or any(spec.format.bits < 8 for spec in weights):
        return "few bits"
    return "eight bits" if layers else None


def _has_few_bits(config: Config) -> bool:
    """Return whether weights alone are rounded, and some to integers of at most 3 bits."""
    weights = [layer.weight for layer in _layers(config) if layer.weight is not None]
    return _kind([config]) == "low-bit weights" and any(
        isinstance(spec.format, IntFormat) and spec.format.bits <= TUNED_BITS for spec in weights
    )


def _layers(config: Config) -> Iterator[QuantizationConfig]:
    yield config.global_quant_config
    yield from config.layer_quant_config.values()
    yield from config.layer_type_quant_config.values()
