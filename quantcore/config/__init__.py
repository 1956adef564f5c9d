"""What a job is asked to do: the config of a quantization and of its algorithms, presets, calibration, the job itself.

``from quantcore.config import Config, parse_config`` is a promise to users. No torch.
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
