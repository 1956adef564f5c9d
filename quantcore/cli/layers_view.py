"""The layers of a result in the terminal: ranked by the error of their output, and one of them in detail."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from quantcore.errors import ConfigError, QuantError
from quantcore.events import silence
from quantcore.report.layer import LayerError
from quantcore.report.values import MergedAdapter, Report

if TYPE_CHECKING:
    import torch

NUM_BINS = 21
BAR = 40
MAX_CHANNELS = 5
OUTLIER = 3.0
"""Norm of an outlier channel, at least, relative to the median of the layer's channels."""


def show_layers(report: Report, limit: int) -> None:
    """Show the layers with the largest errors of their outputs."""
    ranked = report.ranked_layers
    table = Table("", box=None)
    table.add_column("layer", no_wrap=True)
    table.add_column("scheme", overflow="fold")
    for name in ("bits", "size", "output error", "weight error"):
        table.add_column(name, justify="right")
    for number, layer in enumerate(ranked[:limit], 1):
        table.add_row(str(number), layer.name, layer.scheme, *_size(layer), *_errors(layer))
    out = Console()
    out.print(table)
    if len(ranked) > limit:
        out.print(f"{len(ranked) - limit} more layers: --limit {len(ranked)} shows all.", style="dim")
    if all(layer.output_error is None for layer in ranked):
        out.print(
            "No error of an output was measured, because no algorithm ran: the order is that of the weight errors,"
            " which says little about their effect.",
            soft_wrap=True,
        )


def show_layer(report: Report, layer: LayerError, weight_OI: torch.Tensor | str) -> None:
    """Show one layer: its rank, size and errors, and the distribution of its weight.

    ``weight_OI`` is the original's weight, or the reason why it is not shown.
    """
    rank = report.ranked_layers.index(layer) + 1
    bits, size = _size(layer)
    output, error = _errors(layer)
    kind = f"{layer.name.rpartition('.')[2]} input"
    clipped = report.clipping.get(kind)
    facts = {
        "layer": layer.name,
        "rank": f"{rank} of {len(report.layers)}, from the largest error",
        "scheme": layer.scheme,
        "bits, size": f"{bits}, {size}",
        "output error": output,
        "weight error": f"{error} ({layer.sqnr_db:.1f} dB)",
        "calibration": "" if layer.num_tokens is None else f"{layer.num_tokens:,} tokens",
        "range of its input": "" if clipped is None else f"static; it clips {clipped:.3%} of {kind}s in all blocks",
    }
    if (inputs := layer.input_range) is not None:
        found = [(each.channel, float(each.ratio)) for each in inputs.outliers]
        facts["largest input"] = f"{inputs.largest:.4g}; {inputs.median:.4g} in the median channel"
        facts["outliers of it"] = _listed(found) if found else f"none above {OUTLIER:g} times the median"
    table = Table(show_header=False, box=None)
    for name, text in facts.items():
        if text:
            table.add_row(f"[bold]{name}[/]", text)
    out = Console()
    out.print(table)
    if isinstance(weight_OI, str):
        out.print(f"The weight is not shown: {weight_OI}", soft_wrap=True, highlight=False, markup=False)
        return
    for line in _distribution(weight_OI):
        out.print(line, highlight=False, markup=False, soft_wrap=True)


def find_layer(report: Report, name: str) -> LayerError:
    """Return the layer of this name, or the only one whose name ends so. Raises ConfigError ``unknown_layer``."""
    found = [layer for layer in report.layers if layer.name == name]
    found = found or [layer for layer in report.layers if f".{layer.name}".endswith(f".{name}")]
    if len(found) == 1:
        return found[0]
    names = [layer.name for layer in found] or [layer.name for layer in report.ranked_layers]
    raise ConfigError(
        f"'{name}' is the end of {len(found)} names of quantized layers." if found else f"There is no layer '{name}'.",
        code="unknown_layer",
        hint=f"Name one of: {', '.join(names[:5])}{' ...' if len(names) > 5 else ''}",
    )


def read_weight(model_dir: Path, name: str, adapter: MergedAdapter | None = None) -> torch.Tensor | str:
    """Return a layer's weight in float32, with the adapter merged, or the reason why it cannot be read."""
    from quantcore.cli.inputs import find_merged
    from quantcore.engine.containers.dequantize import open_source
    from quantcore.importing.model import read_model

    if not model_dir.exists():
        return f"there is no model in {model_dir} on this machine. Name it with --model_dir."
    try:
        folder = None if adapter is None else find_merged(adapter, silence)
        return open_source(read_model(model_dir, folder)).read(f"{name}.weight").float()
    except QuantError as error:
        return error.message


@dataclass(frozen=True)
class _Bin:
    low: float
    high: float
    count: int


def _bins(weight_OI: torch.Tensor) -> list[_Bin]:
    """Return the numbers of weights in equal parts of the range from -largest to largest."""
    import torch

    largest = float(weight_OI.abs().max()) or 1.0
    counts = torch.histc(weight_OI, NUM_BINS, min=-largest, max=largest).tolist()
    width = 2 * largest / NUM_BINS
    return [_Bin(-largest + k * width, -largest + (k + 1) * width, int(count)) for k, count in enumerate(counts)]


def _distribution(weight_OI: torch.Tensor) -> Iterator[str]:
    """Yield the lines of a histogram, whose bars grow with the logarithm of the counts, and the outlier channels."""
    bins = _bins(weight_OI)
    most = math.log1p(max(each.count for each in bins))
    yield "weights of the original (the bars grow with the logarithm of the number):"
    for each in bins:
        bar = "█" * round(BAR * math.log1p(each.count) / most)
        yield f"{each.low:>9.3f} to {each.high:>7.3f} {bar} {each.count:,}"
    norms_I = weight_OI.flatten(1).norm(dim=0)
    median = float(norms_I.median()) or 1.0
    order = norms_I.argsort(descending=True).tolist()
    outliers = [(k, float(norms_I[k]) / median) for k in order[:MAX_CHANNELS] if float(norms_I[k]) > OUTLIER * median]
    if not outliers:
        yield f"input channels: none has a norm above {OUTLIER:g} times the median."
        return
    yield "input channels with the largest norms, relative to the median: " + _listed(outliers)


def _listed(outliers: Sequence[tuple[int, float]]) -> str:
    return ", ".join(f"{channel} ({ratio:.1f}x)" for channel, ratio in outliers)


def _size(layer: LayerError) -> tuple[str, str]:
    if layer.bits is None or layer.bytes is None:
        return "–", "–"
    return f"{layer.bits:.2f}", f"{layer.bytes / 1e6:.2f} MB"


def _errors(layer: LayerError) -> tuple[str, str]:
    output = "–" if layer.output_error is None else f"{layer.output_error:.2%}"
    return output, f"{layer.relative_error:.2%}"
