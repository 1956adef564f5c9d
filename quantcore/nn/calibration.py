"""Runs a model on a user's batches once, and learns the ranges that static specs need."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from quantcore.checkpoint.experts import EXPERT
from quantcore.config.layer_plan import LayerPlan
from quantcore.engine.calibration.experts import share_ranges
from quantcore.engine.calibration.ranges import Activations, Watched, collect_ranges, learned
from quantcore.engine.runtime.matmul import matmul_precision
from quantcore.errors import CalibrationError
from quantcore.nn.log import log
from quantcore.nn.progress import Progress


def calibrate(
    model: nn.Module,
    modules: dict[LayerPlan, nn.Module],
    batches: Iterable[Any] | None,
    progress: Progress,
    *,
    others_learn: bool = False,
) -> dict[LayerPlan, Activations]:
    """Return the ranges that layers with static specs learn from one pass of the float model over ``batches``.

    The model does not run if no layer needs it, unless ``others_learn`` in the same pass.

    Raises CalibrationError for no batches, batches that the model cannot take, and layers that no batch reached;
    NumericsError for activations that are not finite.
    """
    if not others_learn and not any(layer.config.needs_calibration for layer in modules):
        return {}
    num_batches = 0
    with evaluating(model), torch.no_grad(), collect_ranges(modules, model) as watched:
        for batch in progress.track(batches or (), "calibrate"):
            run(model, batch)
            num_batches += 1
    if num_batches == 0:
        raise CalibrationError(
            f"The dataloader is empty, but static activation specs need data ({len(watched)} layer(s)).",
            code="no_calibration_data",
            hint="Pass quantize_model a dataloader with a few batches, or use specs with is_dynamic=True.",
        )
    _check_all_seen(watched)
    shared, warnings = share_ranges(watched)
    for warning in warnings:
        log.warning(warning.message)
    return {
        layer: learned(layer, observers, modules[layer].get_parameter("weight").dtype)
        for layer, observers in shared.items()
    }


def run(model: nn.Module, batch: Any) -> Any:
    """Run ``model`` on one batch: a tensor, a mapping of named arguments (BatchEncoding), or a tuple of arguments."""
    args, kwargs = as_arguments(batch, next(model.parameters()).device)
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise CalibrationError(
            f"The model cannot be called with a batch of the dataloader: {error}.",
            code="batch_does_not_fit",
            hint="A dict is passed as keyword arguments, a tuple as positional ones. Pass inputs without labels.",
        ) from error
    with matmul_precision(next(model.parameters()).device):
        return model(*args, **kwargs)


def as_arguments(batch: Any, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a batch as (positional, named) arguments, with its tensors on ``device``."""

    def moved(value: Any) -> Any:
        return value.to(device) if isinstance(value, torch.Tensor) else value

    if isinstance(batch, Mapping):
        return (), {name: moved(value) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        return tuple(moved(value) for value in batch), {}
    return (moved(batch),), {}


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put ``model`` into evaluation mode inside the block; afterwards every module gets its own mode back."""
    training = [module for module in model.modules() if module.training]
    model.train(False)
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _check_all_seen(watched: dict[LayerPlan, Watched]) -> None:
    unseen = [
        layer.name
        for layer, observers in watched.items()
        if not EXPERT.match(layer.name)  # an expert that no token reached learns from the others
        and any(part is not None and part.num_values == 0 for part in (observers.inputs, observers.outputs))
    ]
    if unseen:
        raise CalibrationError(
            f"{len(unseen)} layer(s) with static specs saw no data: {', '.join(unseen[:5])}"
            + (" ..." if len(unseen) > 5 else "."),
            code="layers_without_data",
            hint="Exclude them if the model never calls them, use batches that reach them, or set is_dynamic=True.",
        )
