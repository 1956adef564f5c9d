"""``bitfoundry mix``: a config that gives each layer the scheme that suits it, for a size or a quality."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from quantcore import presets
from quantcore.calibration.chat import chat_renderer
from quantcore.calibration.text import token_windows
from quantcore.calibration.tokenizer import load_tokenizer
from quantcore.config import CalibrationConfig, Config
from quantcore.errors import ConfigError
from quantcore.evaluation.command import find_model
from quantcore.evaluation.model import open_model
from quantcore.evaluation.text import EvaluationText, of_windows
from quantcore.events import Emit, PhaseStarted
from quantcore.export import EXPORTERS, layouts_of
from quantcore.mixing.choice import Budget, Mix, Option, Unit, mixes, of_loss, of_size
from quantcore.mixing.sensitivity import Losses, Sensitivity
from quantcore.mixing.trial import Trial
from quantcore.plan import Plan, resolve
from quantcore.reading import Model, read_model

KEEP = "keep"
MAX_ROUNDS = 4  # of measuring what a mix loses, on the way to one that loses as much as is allowed
NEAR = 0.9  # of the allowed divergence: a mix that uses so much of it is not looked further into


def mix(
    given: str, schemes: Sequence[str], budget: Budget, calibration: CalibrationConfig, emit: Emit, *,
    export: str = "quark", num_held_out: int = 12, known: Mapping[str, presets.Preset] = presets.PRESETS,
) -> dict[str, Any]:  # fmt: skip
    """``config``: a Config in which each unit of layers has the one of ``schemes`` (presets, or ``keep``) that the
    budget allows; and beside it what that was chosen from.

    The losses are measured on the calibration windows, the divergence of the chosen mix on ``num_held_out`` others of
    that length. Weights are rounded plainly for both; an algorithm in the job itself is for the job. Raises
    ConfigError, ModelError.
    """
    emit(PhaseStarted("resolve"))
    configs = {
        name: replace(presets.resolve(name, presets=known), algo_config=()) for name in _check(schemes) if name != KEEP
    }
    path = find_model(given, emit)
    model = read_model(path)
    headers = model.headers
    emit(PhaseStarted("plan"))

    def plan_of(config: Config) -> Plan:
        return resolve(config, headers.config, headers.tensors, calibration=calibration, exports=(export,))

    plans = {name: (config, plan_of(config)) for name, config in configs.items()}
    _check_mixed(plans, plan_of)
    windows_NT, text = _texts(path, calibration, num_held_out)
    emit(PhaseStarted("sensitivity"))
    with tempfile.TemporaryDirectory(prefix="bitfoundry-mix-") as scratch:
        sensitivity = Sensitivity(open_model(model), windows_NT, plans, Path(scratch), emit)
        units = _units(model, plans, sensitivity.losses(calibration.seed), export, may_keep=KEEP in schemes)
        elsewhere = _bytes_elsewhere(plans, units)
        trial = Trial(model, sensitivity, text, emit)

        def quality(chosen: Mix) -> dict[str, Any]:
            config = config_of(chosen, units, configs)
            return trial.quality(config, plan_of(config))

        emit(PhaseStarted("verify"))
        chosen, measured = _within(budget, units, elsewhere, quality)
    return {
        "model": given,
        "config": config_of(chosen, units, configs).to_dict(),
        "mix": _described(chosen, units, elsewhere) | {"measured": measured},
        "uniform": {
            name: _described(Mix(tuple(_option(unit, name) for unit in units)), units, elsewhere) for name in schemes
        },
        "frontier": [_described(one, units, elsewhere) for one in mixes(units)],
        "units": [
            {
                "block": unit.block,
                "layers": list(unit.layers),
                "scheme": option.scheme,
                "options": {one.scheme: {"bytes": one.num_bytes, "loss": one.loss} for one in unit.options},
            }
            for unit, option in zip(units, chosen.chosen, strict=True)
        ],
    }


def _check(schemes: Sequence[str]) -> Sequence[str]:
    if len(set(schemes)) != len(schemes) or len(schemes) < 2:
        raise ConfigError(
            f"A mix is made of two schemes or more, each given once; given were: {', '.join(schemes) or 'none'}.",
            code="invalid_schemes",
            hint="For example --schemes w4a16 int8_weight_only, with 'keep' for layers that stay as they are.",
        )
    return schemes


def _check_mixed(plans: Mapping[str, tuple[Config, Plan]], plan_of: Callable[[Config], Plan]) -> None:
    """Before anything is measured: the format must take a layer in one scheme among others in another one."""
    (usual, plan), *others = plans.values()
    for other, _ in others:
        plan_of(replace(usual, layer_quant_config={plan.layers[0].name: other.global_quant_config}))


def _texts(path: Path, calibration: CalibrationConfig, num_held_out: int) -> tuple[torch.Tensor, EvaluationText]:
    tokenizer = load_tokenizer(path)
    windows = token_windows(
        calibration,
        lambda text: tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"],
        num_held_out=num_held_out,
        held_out_len=calibration.seq_len,
        separator=tokenizer.eos_token_id,
        render=chat_renderer(tokenizer),
    )
    return windows.calibration_NT, of_windows(windows.held_out_NT, tokenizer)


def _units(
    model: Model, plans: Mapping[str, tuple[Config, Plan]], losses: Losses, export: str, *, may_keep: bool
) -> list[Unit]:
    """What can be chosen for each unit, and what it takes in the file."""
    tensors = model.headers.tensors
    planned = {name: {layer.name: layer for layer in plan.layers} for name, (_, plan) in plans.items()}
    first = next(iter(planned.values()))
    exporter = EXPORTERS.get(export)

    def size(scheme: str, layer: str) -> int:
        header = tensors[f"{layer}.weight"]
        return sum(one.num_bytes for one in layouts_of(exporter, planned[scheme][layer], header.dtype).values())

    units = []
    for names, lost in losses.items():
        options = [Option(scheme, sum(size(scheme, name) for name in names), lost[scheme]) for scheme in plans]
        if may_keep:
            options.append(Option(KEEP, sum(tensors[f"{name}.weight"].num_bytes for name in names), 0.0))
        weights = sum(first[name].out_features * first[name].in_features for name in names)
        units.append(Unit(first[names[0]].block or 0, names, weights, tuple(options)))
    return units


def _bytes_elsewhere(plans: Mapping[str, tuple[Config, Plan]], units: Sequence[Unit]) -> int:
    """What no unit takes of the files: embeddings, norms, the head."""
    scheme, (_, plan) = next(iter(plans.items()))
    return plan.size_after_bytes - sum(_option(unit, scheme).num_bytes for unit in units)


def _option(unit: Unit, scheme: str) -> Option:
    return next(option for option in unit.options if option.scheme == scheme)


def config_of(mix: Mix, units: Sequence[Unit], configs: Mapping[str, Config]) -> Config:
    """The config that says it: the scheme of most layers for all, the others by name."""
    chosen = {name: option.scheme for unit, option in zip(units, mix.chosen, strict=True) for name in unit.layers}
    counted = Counter(scheme for scheme in chosen.values() if scheme != KEEP)
    usual = counted.most_common(1)[0][0] if counted else next(iter(configs))
    others = {
        name: configs[scheme].global_quant_config for name, scheme in chosen.items() if scheme not in (usual, KEEP)
    }
    kept = tuple(name for name, scheme in chosen.items() if scheme == KEEP)
    base = configs[usual]
    return replace(base, layer_quant_config=others | base.layer_quant_config, exclude=(*base.exclude, *kept))


def _within(
    budget: Budget, units: Sequence[Unit], elsewhere: int, quality: Callable[[Mix], dict[str, Any]]
) -> tuple[Mix, dict[str, Any]]:
    """The mix, and what was measured of it. Raises ConfigError ``budget_too_small``."""
    if budget.max_divergence is None:
        chosen = of_size(units, budget.bytes_of(units, elsewhere))
        return chosen, quality(chosen)
    allowed = target = budget.max_divergence
    found: list[tuple[Mix, dict[str, Any]]] = []
    for _ in range(MAX_ROUNDS):
        chosen = of_loss(units, target)
        if any(chosen == before for before, _ in found):
            break
        found.append((chosen, quality(chosen)))
        lost = _divergence(found[-1][1])
        if NEAR * allowed <= lost <= allowed:
            break
        target *= allowed / max(lost, 1e-9)  # what was reckoned is wrong by about this factor
    fitting = [pair for pair in found if _divergence(pair[1]) <= allowed]
    if not fitting:
        least = min(_divergence(measured) for _, measured in found)
        raise ConfigError(
            f"The best mix of these schemes that was found is {least:.2g} nats a token away from the original; "
            f"{allowed:g} was asked for.",
            code="budget_too_small",
            hint="Allow more, or give a scheme with more bits, or 'keep'.",
        )
    return min(fitting, key=lambda pair: pair[0].num_bytes)


def _divergence(quality: dict[str, Any]) -> float:
    value: float = quality["divergence"]["kl_mean"]["value"]
    return value


def _described(mix: Mix, units: Sequence[Unit], elsewhere: int) -> dict[str, Any]:
    """``bits`` are those of a weight of the layers that are mixed; ``loss`` is what was reckoned, nats a token."""
    layers = Counter[str]()
    for unit, option in zip(units, mix.chosen, strict=True):
        layers[option.scheme] += len(unit.layers)
    return {
        "size_bytes": mix.num_bytes + elsewhere,
        "bits": 8 * mix.num_bytes / sum(unit.num_weights for unit in units),
        "loss": mix.loss,
        "layers": dict(layers),
    }
