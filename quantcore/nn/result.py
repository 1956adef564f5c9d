"""The result of a quantization in memory: the error and the time of each layer, the edges along which scales moved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

from quantcore.report.data_frame import data_frame
from quantcore.report.error_chart import error_chart

_STYLE = "svg text{fill:gray;font-size:12px}svg line{stroke:silver}svg circle{fill:#0b5fb0}"
NUM_SHOWN = 5


@dataclass(frozen=True)
class LayerResult:
    """A layer's scheme, and the errors of its weight and its output.

    ``relative_error`` is ||W - Q|| / ||W||, ``sqnr_db`` the same in dB. ``output_error`` is ||(W - Q) X|| / ||W X|| on
    the calibration data, ``rounding_error`` the same for plain rounding; both are None if no algorithm saw the input.
    ``seconds`` is the time since the layer before: layers that are solved together count at the first of them.
    """

    name: str
    scheme: str
    shape: tuple[int, ...]
    relative_error: float
    sqnr_db: float
    output_error: float | None
    rounding_error: float | None
    num_tokens: int | None
    seconds: float


@dataclass(frozen=True)
class EdgeResult:
    """Scales that moved from ``producer`` into ``consumers`` of a decoder block, or the reason why none can.

    ``change`` is the relative change of the block's update by all its edges together; it comes from rounding only.
    """

    block: int
    producer: str | None
    consumers: tuple[str, ...]
    change: float | None
    reason: str = ""


@dataclass(frozen=True, repr=False)
class QuantizationResult:
    """The result of ``ModelQuantizer.quantize_model``.

    ``kept``: layers that were not quantized, and why. ``seconds``: the time of each phase, and ``total``.
    """

    layers: tuple[LayerResult, ...]
    edges: tuple[EdgeResult, ...]
    kept: Mapping[str, str]
    warnings: tuple[str, ...]
    seconds: Mapping[str, float]

    def to_pandas(self) -> Any:
        """Return the layers as a pandas DataFrame, one row a layer. Raises ConfigError if pandas is not installed."""
        return data_frame(asdict(layer) for layer in self.layers)

    def plot(self, path: str | Path | None = None) -> Chart:
        """Draw the relative error of each layer as a chart, which notebooks show; ``path`` also writes an SVG file."""
        chart = Chart(error_chart([(layer.name, layer.relative_error) for layer in self.layers]))
        if path is not None:
            Path(path).write_text(chart.svg, "utf-8")
        return chart

    def __repr__(self) -> str:
        worst = sorted(self.layers, key=lambda layer: layer.relative_error, reverse=True)
        lines = [
            f"QuantizationResult: {len(self.layers)} layers in {self.seconds['total']:.1f} s,"
            f" {len(self.kept)} kept, {len(self.warnings)} warning(s)",
            *(f"  {row.name}  {row.scheme}  error {row.relative_error:.4f}" for row in worst[:NUM_SHOWN]),
        ]
        more = len(worst) - NUM_SHOWN
        return "\n".join(lines + ([f"  ... and {more} with less error"] if more > 0 else []))

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows."""
        return f"<pre>{escape(repr(self))}</pre>{self.plot()._repr_html_()}"


class Chart:
    """A chart as SVG, which a notebook shows as a picture."""

    def __init__(self, svg: str) -> None:
        head, _, rest = svg.partition(">")
        namespace = head.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ')
        self.svg = f"{namespace}><style>{_STYLE}</style>{rest}"

    def __repr__(self) -> str:
        return "Chart: a notebook shows it, and plot(path) writes it to a file."

    def _repr_html_(self) -> str:
        return self.svg
