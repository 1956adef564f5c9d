"""The types of what ``report.json`` says of each quantized layer."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from quantcore.report.quality import Number, Record


class OutlierChannel(Record):
    """An input channel whose size is ``ratio`` times the median of the layer's channels."""

    channel: int
    ratio: Number


class WeightSpread(Record):
    """The distribution of a weight before it is rounded: ``counts`` in equal bins from -``largest`` to ``largest``.

    At most 262,144 weights are counted, spread evenly over the layer's. The size of a channel is its norm.
    """

    largest: Number
    counts: tuple[int, ...]
    outliers: tuple[OutlierChannel, ...]


class InputRange(Record):
    """The largest magnitude of the layer's inputs on the calibration text: of all channels, and of the median one."""

    largest: Number
    median: Number
    outliers: tuple[OutlierChannel, ...]


class LayerError(Record):
    """The error of a quantized layer; see ``quantcore.events.LayerQuantized``.

    ``bytes`` are those of its weight with scales in the main export. Reports of earlier versions lack them, and so do
    exports that hold floats. Experts of a mixture have no ``weight_spread`` and no ``input_range``.
    """

    kind: Literal["layer_quantized"]
    name: str
    block: Annotated[int, Field(description="-1 outside of the decoder blocks")]
    relative_error: Number
    sqnr_db: Number
    scheme: str
    output_error: Number | None
    rounding_error: Number | None
    num_tokens: int | None
    num_weights: int | None = None
    bytes: int | None = None
    weight_spread: WeightSpread | None = None
    input_range: InputRange | None = None

    @property
    def bits(self) -> float | None:
        """Bits per weight in the main export, with scales and zero points; None if the size is unknown."""
        return 8 * self.bytes / self.num_weights if self.bytes and self.num_weights else None
