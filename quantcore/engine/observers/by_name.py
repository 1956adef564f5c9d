"""The observers under the names that configs use: ``PerTensorMinMaxObserver``, ``PerChannelMSEObserver`` ...

``PerTensorMSEObserver(spec)`` is like ``observer_for(spec)``, but rejects a spec of another scheme.
"""

from __future__ import annotations

from quantcore.config.spec import QSchemeType
from quantcore.engine.observers.histogram import HistogramObserver
from quantcore.engine.observers.min_max import MinMaxObserver
from quantcore.engine.observers.mse import MSEObserver
from quantcore.engine.observers.percentile import PercentileObserver
from quantcore.engine.observers.placeholder import PlaceholderObserver as PlaceholderObserver


class PerBlockMXObserver(MinMaxObserver):
    """Learns the exact range of each OCP MX block of 32 values, under any scheme's name."""


class PerTensorMinMaxObserver(MinMaxObserver):
    """Learns the exact range of the tensor."""

    qscheme = QSchemeType.per_tensor


class PerTensorPercentileObserver(PercentileObserver):
    """Learns the range of a percentile of the tensor."""

    qscheme = QSchemeType.per_tensor


class PerTensorMSEObserver(MSEObserver):
    """Learns the range of least mean squared error of the tensor."""

    qscheme = QSchemeType.per_tensor


class PerTensorHistogramObserver(HistogramObserver):
    """Learns a range from a histogram of the tensor."""

    qscheme = QSchemeType.per_tensor


class PerChannelMinMaxObserver(MinMaxObserver):
    """Learns the exact range of each channel."""

    qscheme = QSchemeType.per_channel


class PerChannelPercentileObserver(PercentileObserver):
    """Learns the range of a percentile of each channel."""

    qscheme = QSchemeType.per_channel


class PerChannelMSEObserver(MSEObserver):
    """Learns the range of least mean squared error of each channel."""

    qscheme = QSchemeType.per_channel


class PerChannelHistogramObserver(HistogramObserver):
    """Learns a range from a histogram of each channel."""

    qscheme = QSchemeType.per_channel


class PerGroupMinMaxObserver(MinMaxObserver):
    """Learns the exact range of each group."""

    qscheme = QSchemeType.per_group


class PerGroupPercentileObserver(PercentileObserver):
    """Learns the range of a percentile of each group."""

    qscheme = QSchemeType.per_group


class PerGroupMSEObserver(MSEObserver):
    """Learns the range of least mean squared error of each group."""

    qscheme = QSchemeType.per_group


class PerGroupHistogramObserver(HistogramObserver):
    """Learns a range from a histogram of each group."""

    qscheme = QSchemeType.per_group


class PerBlockMinMaxObserver(MinMaxObserver):
    """Learns the exact range of each block."""

    qscheme = QSchemeType.per_block


class PerBlockPercentileObserver(PercentileObserver):
    """Learns the range of a percentile of each block."""

    qscheme = QSchemeType.per_block


class PerBlockMSEObserver(MSEObserver):
    """Learns the range of least mean squared error of each block."""

    qscheme = QSchemeType.per_block


class PerBlockHistogramObserver(HistogramObserver):
    """Learns a range from a histogram of each block."""

    qscheme = QSchemeType.per_block
