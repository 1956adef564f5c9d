"""``bitfoundry mix``: builds a config that gives each layer a suitable scheme, for a size or a quality."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from quantcore.config.job_spec import KEEP, JobSpec, MixConfig, ResolvedMix
from quantcore.config.quantization import CalibrationConfig, Config, parse_config
from quantcore.config.task import Task
from quantcore.engine.blockwise.savepoint import SavePoint
from quantcore.engine.data.tokenizer import load_tokenizer
from quantcore.engine.data.windows import token_windows
from quantcore.engine.evaluation.inputs import find_model
from quantcore.engine.evaluation.model import open_model
from quantcore.engine.evaluation.text import EvaluationText, document_tokenizer, of_held_out
from quantcore.engine.mixed_precision.sensitivity import Losses, Sensitivity
from quantcore.engine.mixed_precision.trial import Trial
from quantcore.engine.verification.architecture import prove_tiny_model
from quantcore.errors import ConfigError
from quantcore.events import Emit, PhaseStarted
from quantcore.export import EXPORTERS, layouts_of
from quantcore.importing.model import Model, read_model
from quantcore.plan import planner as plan
from quantcore.plan.mix_choice import Mix, Option, Unit, mixes, of_size
from quantcore.plan.mix_schemes import Plans, plan_each
from quantcore.plan.mix_search import Point, find_smallest
from quantcore.plan.planner import Plan
from quantcore.report.quality import Quality

NUM_HELD_OUT = 12  # windows on which a mix is measured
MAX_ROUNDS = 4  # measurements in the search for the mix with the largest allowed loss


def mix(name: str, asked: ResolvedMix, calibration: CalibrationConfig, emit: Emit, *, export: str) -> dict[str, Any]:
    """Choose a mix for a folder, a GGUF file or a model on the Hub. Raises ConfigError, ModelError."""
    emit(PhaseStarted("resolve"))
    model = read_model(find_model(name, emit))
    emit(PhaseStarted("plan"))
    prove_tiny_model(model, emit)
    return {"model": name} | choose(model, asked, calibration, (export,), emit)


def with_mix(task: Task, model: Model, savepoint: SavePoint, emit: Emit) -> tuple[Task, dict[str, Any] | None]:
    """Return the task with the chosen config in place of its mix, and the result of ``choose``; None without a mix.

    A task that resumes after a stop keeps its earlier choice. The first rank measures for all.
    """
    request = task.mix
    if request is None:
        return task, None
    work_dir = task.output_dir.parent

    def find() -> dict[str, Any]:
        work_dir.mkdir(parents=True, exist_ok=True)
        return choose(model, request, task.calibration, task.export, emit, work_dir)

    result = savepoint.once("mix", find)
    config = replace(parse_config(result["config"]), algo_config=task.config.algo_config)
    return task.model_copy(update={"config": config, "mix": None}), result


def choose(
    model: Model,
    request: ResolvedMix,
    calibration: CalibrationConfig,
    exports: Sequence[str],
    emit: Emit,
    work_dir: Path | None = None,
) -> dict[str, Any]:
    """Choose a scheme for each unit of layers within the budget; returns it as ``config``, and the alternatives.

    The losses are measured on the calibration windows, the divergence of the chosen mix on ``NUM_HELD_OUT`` others of
    that length. Both use plain rounding; algorithms run only in the job. Sizes are those of the main format of the
    ``exports``. Hidden states are stored in ``work_dir`` (None: the folder for temporary files). Raises ConfigError.
    """
    headers = model.headers

    def plan_of(config: Config) -> Plan:
        return plan.make_plan(JobSpec(config=config, calibration=calibration, export=tuple(exports)), headers)

    plans = plan_each(request, plan_of)
    configs = {name: config for name, (config, _) in plans.items()}
    windows_NT, text = read_texts(model.folder, calibration)
    emit(PhaseStarted("sensitivity"))
    with tempfile.TemporaryDirectory(prefix="bitfoundry-mix-", dir=work_dir) as scratch:
        sensitivity = Sensitivity(open_model(model), windows_NT, plans, Path(scratch), emit)
        units = units_of(model, plans, sensitivity.losses(calibration.seed), may_keep=KEEP in request.schemes)
        bytes_outside = bytes_outside_of(plans, units)
        trial = Trial(model, sensitivity, text, emit)

        def quality(chosen: Mix) -> Quality:
            config = config_of(chosen, units, configs)
            return trial.quality(config, plan_of(config))

        emit(PhaseStarted("trial"))
        chosen, measured = _within(request, units, bytes_outside, quality)
    return {
        "asked": request.asked,
        "config": config_of(chosen, units, configs).to_dict(),
        "mix": describe(chosen, units, bytes_outside) | {"measured": measured.to_dict()},
        "uniform": {
            name: describe(Mix(tuple(_option(unit, name) for unit in units)), units, bytes_outside)
            for name in request.schemes
        },
        "frontier": [describe(candidate, units, bytes_outside) for candidate in mixes(units)],
        "units": [
            {
                "block": unit.block,
                "layers": list(unit.layers),
                "scheme": option.scheme,
                "options": {other.scheme: {"bytes": other.num_bytes, "loss": other.loss} for other in unit.options},
            }
            for unit, option in zip(units, chosen.chosen, strict=True)
        ],
    }


def read_texts(path: Path, calibration: CalibrationConfig) -> tuple[torch.Tensor, EvaluationText]:
    tokenizer = load_tokenizer(path)
    windows = token_windows(
        calibration,
        document_tokenizer(path, tokenizer, calibration.chat_template_kwargs),
        num_held_out=NUM_HELD_OUT,
        held_out_len=calibration.seq_len,
    )
    return windows.calibration_NT, of_held_out(windows, tokenizer)


def units_of(model: Model, plans: Plans, losses: Losses, *, may_keep: bool) -> list[Unit]:
    """Return the units with their options, each with its size in the file."""
    tensors = model.headers.tensors
    planned = {name: {layer.name: layer for layer in plan.layers} for name, (_, plan) in plans.items()}
    first = next(iter(planned.values()))
    exporter = EXPORTERS.get(next(iter(plans.values()))[1].main_export)

    def size(scheme: str, layer: str) -> int:
        header = tensors[f"{layer}.weight"]
        return sum(layout.num_bytes for layout in layouts_of(exporter, planned[scheme][layer], header.dtype).values())

    units = []
    for names, lost in losses.items():
        options = [Option(scheme, sum(size(scheme, name) for name in names), lost[scheme]) for scheme in plans]
        if may_keep:
            options.append(Option(KEEP, sum(tensors[f"{name}.weight"].num_bytes for name in names), 0.0))
        weights = sum(first[name].out_features * first[name].in_features for name in names)
        units.append(Unit(first[names[0]].block or 0, names, weights, tuple(options)))
    return units


def bytes_outside_of(plans: Plans, units: Sequence[Unit]) -> int:
    """Return the bytes that belong to no unit: embeddings, norms, the head."""
    scheme, (_, first) = next(iter(plans.items()))
    return first.size_after_bytes - sum(_option(unit, scheme).num_bytes for unit in units)


def _option(unit: Unit, scheme: str) -> Option:
    return next(option for option in unit.options if option.scheme == scheme)


def config_of(mix: Mix, units: Sequence[Unit], configs: Mapping[str, Config]) -> Config:
    """Return the config of a mix: the most common scheme as the global one, the others by layer name."""
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
    budget: MixConfig, units: Sequence[Unit], bytes_outside: int, quality: Callable[[Mix], Quality]
) -> tuple[Mix, Quality]:
    """Choose the mix within the budget, and measure it. Raises ConfigError ``budget_too_small``."""
    if budget.max_divergence is None:
        chosen = of_size(units, bytes_of(budget, units, bytes_outside))
        return chosen, quality(chosen)
    allowed = budget.max_divergence
    frontier, qualities = mixes(units), dict[int, Quality]()

    def measure(index: int) -> float:
        qualities[index] = quality(frontier[index])
        return _divergence(qualities[index])

    measured = find_smallest([Point(mix.num_bytes, mix.loss) for mix in frontier], allowed, measure, MAX_ROUNDS)
    fitting = [index for index, lost in measured.items() if lost <= allowed]
    if not fitting:
        raise ConfigError(
            f"The best mix found of these schemes is {min(measured.values()):.2g} nats per token away from the "
            f"original, but {allowed:g} was requested.",
            code="budget_too_small",
            hint="Allow more, or add a scheme with more bits or 'keep'.",
        )
    return frontier[min(fitting)], qualities[min(fitting)]


def bytes_of(budget: MixConfig, units: Sequence[Unit], bytes_outside: int) -> int:
    """Return the number of bytes that the budget allows for all units together."""
    if budget.max_bits is not None:
        return int(budget.max_bits / 8 * sum(unit.num_weights for unit in units))
    assert budget.max_bytes is not None
    return budget.max_bytes - bytes_outside


def _divergence(quality: Quality) -> float:
    value = quality.divergence.kl_mean.value
    assert value is not None
    return value


def describe(mix: Mix, units: Sequence[Unit], bytes_outside: int) -> dict[str, Any]:
    """Return a mix as JSON.

    ``bits`` is the mean of a weight of the mixed layers, ``loss`` the estimate in nats a token.
    """
    layers = Counter[str]()
    for unit, option in zip(units, mix.chosen, strict=True):
        layers[option.scheme] += len(unit.layers)
    return {
        "size_bytes": mix.num_bytes + bytes_outside,
        "bits": 8 * mix.num_bytes / sum(unit.num_weights for unit in units),
        "loss": mix.loss,
        "layers": dict(layers),
    }
