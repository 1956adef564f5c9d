"""The configs of a job: the quantization, its algorithms, presets, calibration, and the job as a whole.

``from quantcore.config import Config, parse_config`` is stable public API. No torch.
"""

from __future__ import annotations

from quantcore.config import presets
from quantcore.config.quantization import (
    CalibrationConfig,
    Config,
    QuantizationConfig,
    QuantizationMode,
    json_schema,
    parse_config,
)

__all__ = [
    "CalibrationConfig",
    "Config",
    "QuantizationConfig",
    "QuantizationMode",
    "json_schema",
    "parse_config",
    "presets",
]
