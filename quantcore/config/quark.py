"""Converts configs that AMD Quark wrote (``quantization_config`` of config.json, 0.6 to 0.13) to ours.

Quark writes every field, most of them null, a two-stage tensor as a list, and the byte type of scales in a field of its
own (``scale_format``). Our own defaults apply to fields that its files do not have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantcore.config.quantization import Config, parse_config
from quantcore.errors import ConfigError

SCALE_FORMATS = {"e8m0": "e8m0", "e4m3": "e4m3"}
SPEC_FIELDS = (
    "dtype", "observer_cls", "is_dynamic", "qscheme", "ch_axis", "group_size", "block_size", "symmetric",
    "round_method", "scale_type", "scale_calculation_mode", "zero_point_type", "mx_element_dtype",
)  # fmt: skip
ROUND_METHODS = {2: "round", 3: "floor", 8: "half_even"}
ALGORITHM_NAMES = {"smoothquant": "smooth", "quarot": "rotation"}


def read_config(data: object) -> Config:
    """Return the Config of JSON data: ours, Quark's, or a whole config.json that holds Quark's. Raises ConfigError."""
    inner = data.get("quantization_config", data) if isinstance(data, Mapping) else data
    if isinstance(inner, Mapping) and inner.get("quant_method") == "quark":
        return read_quark_config(inner)
    return parse_config(data)


def read_quark_config(data: Mapping[str, Any]) -> Config:
    """Convert the ``quantization_config`` of AMD Quark's checkpoints. Raises ConfigError for unsupported parts."""
    tables = {
        table: {_layer_name(name): _layer(layer) for name, layer in (data.get(table) or {}).items()}
        for table in ("layer_type_quant_config", "layer_quant_config", "kv_cache_quant_config")
    }
    algorithms = data.get("algo_config") or ()
    return parse_config(
        {
            **tables,
            "global_quant_config": _layer(data.get("global_quant_config") or {}),
            "softmax_quant_spec": _spec(data.get("softmax_quant_spec")),
            "exclude": data.get("exclude") or (),
            "algo_config": [
                _algorithm(entry) for entry in ([algorithms] if isinstance(algorithms, Mapping) else algorithms)
            ],
            "quant_mode": data.get("quant_mode") or "eager_mode",
        }
    )


def _layer_name(name: str) -> str:
    return name.removeprefix("<class '").removesuffix("'>")


def _layer(data: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _spec(data.get(name)) for name in ("input_tensors", "output_tensors", "weight", "bias")}


def _spec(data: Any) -> dict[str, Any] | None:
    """Convert the spec of one tensor; a list is a tensor in two stages."""
    if isinstance(data, list):
        return _two_stages(data) if len(data) > 1 else _spec(data[0])
    if data is None:
        return None
    spec = {name: data[name] for name in SPEC_FIELDS if data.get(name) is not None}
    if data.get("scale_format") in SCALE_FORMATS:
        spec["scale_type"] = SCALE_FORMATS[data["scale_format"]]
    if spec.get("scale_type") != "e8m0":
        spec.pop("scale_calculation_mode", None)
    if spec.get("qscheme") == "per_tensor" or "qscheme" not in spec:
        spec.pop("ch_axis", None)
    if spec.get("round_method") in ROUND_METHODS:
        spec["round_method"] = ROUND_METHODS[spec["round_method"]]
    return spec


def _two_stages(stages: list[Any]) -> dict[str, Any]:
    """Convert two stages: fp8 then int4 is int4 over fp8; fp4 then fp8 for its scales is NVFP4."""
    first, second = stages[0], stages[-1]
    if len(stages) != 2 or first.get("is_scale_quant"):
        raise ConfigError(
            f"A tensor has {len(stages)} stages that only AMD Quark supports.",
            code="unsupported_quark_config",
            hint="Two stages can be fp8 under integers, or fp4 with fp8 scales.",
        )
    if second.get("is_scale_quant"):
        return {**(_spec(first) or {}), "scale_type": "e4m3"}
    return {**(_spec(second) or {}), "over": _spec(first)}


def _algorithm(data: Mapping[str, Any]) -> dict[str, Any]:
    options = {key: value for key, value in data.items() if value is not None}
    return {**options, "name": ALGORITHM_NAMES.get(str(options.get("name")), options.get("name"))}
