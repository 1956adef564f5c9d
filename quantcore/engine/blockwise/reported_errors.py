"""Measures the error that rounding causes in a layer's weight, and in its output on the calibration text."""

from __future__ import annotations

from math import log10
from typing import Any

import torch

from quantcore.checkpoint.experts import EXPERT
from quantcore.engine.blockwise.results import Solved
from quantcore.engine.solvers.rtn import round_to_nearest
from quantcore.events import LayerQuantized

NUM_BINS = 21
NUM_SAMPLED = 2**18
"""Number of weights, spread evenly over the layer's, that its histogram counts at most."""
NUM_CHANNELS = 5
OUTLIER = 3.0
"""Size of an outlier channel, at least, relative to the median of the layer's channels."""


def measured(solved: Solved) -> LayerQuantized:
    """Return the errors of the layer's weight and of its output on the calibration text, with what both look like.

    The weight is the one that was rounded, after scales have moved. The experts of a mixture, of which there may be
    thousands, have their errors alone.
    """
    layer, weight = solved.layer, solved.weight_OI.float()
    lost = weight - solved.restored_OI
    gram = None if solved.stats is None else solved.stats.gram_II
    ratios = [_ratio(lost.norm(), weight.norm())]
    if gram is not None:
        rounded = weight - round_to_nearest(weight, layer.weight).dequantize()
        power = [((part @ gram.float()) * part).sum().clamp(min=0).sqrt() for part in (lost, rounded, weight)]
        ratios += [*(_ratio(part, power[2]) for part in power[:2]), gram.any().float()]
    parts = [torch.stack(ratios), *([] if EXPERT.match(layer.name) else _looks(solved, weight))]
    values = torch.cat([part.float() for part in parts]).tolist()  # an accelerator is waited for once
    (error, *of_output), looks = values[: len(ratios)], values[len(ratios) :]
    output_error = rounding_error = None
    if of_output and of_output[2]:
        output_error, rounding_error = (round(value, 6) for value in of_output[:2])
    return LayerQuantized(
        name=layer.name,
        block=-1 if layer.block is None else layer.block,
        relative_error=round(error, 6),
        sqnr_db=round(min(-20 * log10(error), 999.0), 2) if error > 0 else 999.0,
        scheme=layer.scheme,
        output_error=output_error,
        rounding_error=rounding_error,
        num_tokens=None if solved.stats is None else solved.stats.num_own,
        **_described(looks),
    )


def _looks(solved: Solved, weight_OI: torch.Tensor) -> list[torch.Tensor]:
    """Return a histogram and the largest channels of the weight, then those of its inputs if they were observed."""
    flat = weight_OI.flatten()
    largest = flat.abs().max()
    sample = flat[:: -(-flat.numel() // NUM_SAMPLED)] / largest.clamp(min=torch.finfo(torch.float32).tiny)
    bins = ((sample + 1) * (NUM_BINS / 2)).long().clamp(0, NUM_BINS - 1)
    counts = torch.zeros(NUM_BINS, device=flat.device).scatter_add_(0, bins, torch.ones_like(sample))
    looks = [largest[None], counts, *_channels(weight_OI.flatten(1).norm(dim=0))]
    if solved.stats is not None and solved.stats.largest_I.numel():
        looks += _channels(solved.stats.largest_I.float())
    return looks


def _channels(sizes_I: torch.Tensor) -> list[torch.Tensor]:
    """Return the median and the NUM_CHANNELS largest of the sizes, padded with zeros, and their channels."""
    top = sizes_I.topk(min(NUM_CHANNELS, len(sizes_I)))
    missing = NUM_CHANNELS - len(top.values)
    pad = [torch.nn.functional.pad(part.float(), (0, missing)) for part in top]
    return [sizes_I.median()[None], *pad]


def _described(looks: list[float]) -> dict[str, Any]:
    """Return the fields of the event from the numbers of ``_looks``."""
    if not looks:
        return {}
    largest, counts, channels = looks[0], looks[1 : NUM_BINS + 1], looks[NUM_BINS + 1 :]
    size = 1 + 2 * NUM_CHANNELS
    spread = {"largest": _short(largest), "counts": [int(count) for count in counts]}
    fields = {"weight_spread": spread | {"outliers": _outliers(channels[:size])}}
    if of_inputs := channels[size:]:
        sizes = {"largest": _short(of_inputs[1]), "median": _short(of_inputs[0])}
        fields["input_range"] = sizes | {"outliers": _outliers(of_inputs)}
    return fields


def _outliers(numbers: list[float]) -> list[dict[str, Any]]:
    median, sizes, channels = numbers[0], numbers[1 : NUM_CHANNELS + 1], numbers[NUM_CHANNELS + 1 :]
    return [
        {"channel": int(channel), "ratio": round(size / median, 2)}
        for size, channel in zip(sizes, channels, strict=True)
        if median > 0 and size > OUTLIER * median
    ]


def _short(value: float) -> float:
    return float(f"{value:.5g}")


def _ratio(part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    return torch.where(whole > 0, part / whole, 0.0)
