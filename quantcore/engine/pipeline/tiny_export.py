"""Quantizes and exports a small twin of a model in the way of the model itself.

If a model does not fit into memory, another program reads the files of its twin (see ``engine.model.tiny_model``): same
class, same names, same kinds of layers, written by the same code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from quantcore.config import presets
from quantcore.config.job_spec import JobSpec
from quantcore.config.quantization import Config, QuantizationConfig
from quantcore.config.task import Task
from quantcore.engine.blockwise.savepoint import SavePoint
from quantcore.engine.model.kinds import declared_class
from quantcore.engine.model.tiny_model import build_tiny_model, tiny_config
from quantcore.engine.pipeline.context import RunContext
from quantcore.engine.pipeline.file_to_file import round_files
from quantcore.engine.pipeline.writer import write_side_files
from quantcore.engine.runtime.ranks import ALONE
from quantcore.engine.verification.consumer import quiet
from quantcore.errors import ConfigError, ModelError, reason_of
from quantcore.events import silence
from quantcore.importing.model import Model, read_model
from quantcore.plan.planner import Plan, make_plan


class ExportedTinyModel(NamedTuple):
    """The float twin, and the ``plan`` of its export to ``folder``."""

    model: Model
    plan: Plan
    folder: Path


def export_twin(task: Task, export: str, original: Model, scratch: Path) -> ExportedTinyModel:
    """Write the twin of ``original`` in the format ``export`` below ``scratch``, its weights rounded to nearest.

    Its layers have the schemes of the task's weights; if these do not fit its small widths, int8 with a scale a row.
    Raises QuantError if no twin can be built, or the format cannot hold it.
    """
    config = original.headers.config
    try:
        with quiet():
            twin = build_tiny_model(tiny_config(config), kind=declared_class(config))
            twin.save_pretrained(scratch / "twin")
    except Exception as error:  # any model's code may fail on untested numbers
        raise ModelError(f"no small twin of it can be built ({reason_of(error)})", code="no_twin") from error
    model = read_model(scratch / "twin")
    try:
        return _export(task, _weights_alone(task.config), export, model, scratch / "same")
    except ConfigError:
        return _export(task, _in_int8(task.config), export, model, scratch / "int8")


def _export(task: Task, config: Config, export: str, model: Model, folder: Path) -> ExportedTinyModel:
    small = task.model_copy(
        update={
            "model_dir": model.folder,
            "model_id": "",
            "adapter": None,
            "config": config,
            "export": (export,),
            "file2file": True,
        }
    )
    plan = make_plan(JobSpec(config=config, export=small.export, file2file=True), model.headers)
    folder.mkdir()
    context = RunContext(small, model, plan, folder, silence, SavePoint(None, "", ALONE))
    round_files(context)
    write_side_files(context)
    return ExportedTinyModel(model, plan, folder)


def _weights_alone(config: Config) -> Config:
    """Return ``config`` with only the weight specs, which need no text."""
    return _with(config, lambda layer: QuantizationConfig(weight=layer.weight))


def _in_int8(config: Config) -> Config:
    """Return ``config`` with its quantized layers in int8 with a scale a row."""
    int8 = presets.resolve("int8_weight_only").global_quant_config
    return _with(config, lambda layer: layer if layer.weight is None else int8)


def _with(config: Config, change: Callable[[QuantizationConfig], QuantizationConfig]) -> Config:
    return replace(
        config,
        global_quant_config=change(config.global_quant_config),
        layer_quant_config={name: change(own) for name, own in config.layer_quant_config.items()},
        layer_type_quant_config={name: change(own) for name, own in config.layer_type_quant_config.items()},
        kv_cache_quant_config={},
        softmax_quant_spec=None,
        algo_config=(),
        strict=False,
    )
