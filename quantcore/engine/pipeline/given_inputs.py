"""Reads what a job is told about the inputs of its layers, in place of calibration: an importance matrix."""

from __future__ import annotations

from pathlib import Path

from quantcore.config.task import Task
from quantcore.engine.calibration.imatrix import GivenInputs, inputs_of_layers, read_imatrix
from quantcore.engine.containers.gguf import places_of
from quantcore.importing.model import Model
from quantcore.plan.planner import Plan


def read_given_inputs(task: Task, model: Model, plan: Plan) -> GivenInputs | None:
    """Return the inputs of all planned layers from the importance matrix of the task's algorithms; None without one.

    Raises CalibrationError for a file that cannot be read or is of another model, ModelError and ConfigError for a
    model whose tensors have no known names in llama.cpp.
    """
    if task.config.imatrix is None:
        return None
    path, headers = Path(task.config.imatrix), model.headers
    entries = read_imatrix(path)
    places = places_of(headers.config, headers.tensors)
    return inputs_of_layers(path, entries, places, {layer.name: layer.in_features for layer in plan.layers})
