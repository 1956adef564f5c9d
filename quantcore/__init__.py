"""quantcore: the quantization engine of Bitfoundry. Knows torch; knows nothing of HTTP, SQL or Celery.

All that a user of the library needs is here: ``from quantcore import Config, ModelQuantizer``. Names are loaded when
they are first asked for, so that ``import quantcore`` loads no torch.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_WHERE = {
    "quantcore.config": "Config QuantizationConfig QuantizationMode json_schema parse_config",
    "quantcore.quark_config": "read_config",
    "quantcore.spec": "Dtype QSchemeType QuantizationSpec RoundType ScaleMode ScaleType ZeroPointType",
    "quantcore.specs": """
        Int2PerTensorSpec Int2PerChannelSpec Int2PerGroupSpec Int3PerTensorSpec Int3PerChannelSpec Int3PerGroupSpec
        Int4PerTensorSpec Int4PerChannelSpec Int4PerGroupSpec Int8PerTensorSpec Int8PerChannelSpec Int8PerGroupSpec
        Uint2PerTensorSpec Uint2PerChannelSpec Uint2PerGroupSpec Uint4PerTensorSpec Uint4PerChannelSpec
        Uint4PerGroupSpec Uint8PerTensorSpec Uint8PerChannelSpec Uint8PerGroupSpec
        FP8E4M3PerTensorSpec FP8E4M3PerChannelSpec FP8E4M3PerGroupSpec
        FP8E5M2PerTensorSpec FP8E5M2PerChannelSpec FP8E5M2PerGroupSpec
        FP6E2M3PerGroupSpec FP6E3M2PerGroupSpec FP4PerGroupSpec Float16Spec Bfloat16Spec
        OCP_MXFP8E4M3Spec OCP_MXFP8E5M2Spec OCP_MXFP6E2M3Spec OCP_MXFP6E3M2Spec OCP_MXFP4Spec OCP_MXINT8Spec
        ProgressiveSpec ScaleQuantSpec
    """,
    "quantcore.algorithms": """
        AWQConfig AutoRoundConfig AutoSmoothQuantConfig GPTAQConfig GPTQConfig QronosConfig RTNConfig RotationConfig
        SmoothQuantConfig load_quant_algo_config_from_file
    """,
    "quantcore.observers.names": """
        PlaceholderObserver PerBlockMXObserver
        PerTensorMinMaxObserver PerTensorPercentileObserver PerTensorMSEObserver PerTensorHistogramObserver
        PerChannelMinMaxObserver PerChannelPercentileObserver PerChannelMSEObserver PerChannelHistogramObserver
        PerGroupMinMaxObserver PerGroupPercentileObserver PerGroupMSEObserver PerGroupHistogramObserver
        PerBlockMinMaxObserver PerBlockPercentileObserver PerBlockMSEObserver PerBlockHistogramObserver
    """,
    "quantcore.nn.quantizer": "ModelQuantizer",
    "quantcore.nn.exporter": "ExporterConfig JsonExporterConfig ModelExporter OnnxExporterConfig",
    "quantcore.nn.loading": "Loaded load",
    "quantcore.nn.processors": "AwqProcessor GptqProcessor SmoothQuantProcessor",
    "quantcore.errors": "CalibrationError ConfigError ModelError NumericsError ProofError QuantError",
}
_MODULE_OF = {name: module for module, names in _WHERE.items() for name in names.split()}
__all__ = ["__version__", *_MODULE_OF]  # all of them are strings


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'quantcore' has no attribute '{name}'")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
