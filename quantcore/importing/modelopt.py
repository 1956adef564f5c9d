"""Presents checkpoints of NVIDIA ModelOpt as AMD Quark's, which hold the same tensors under almost the same names.

NVFP4 and FP8 of one scale a tensor are read; weights of other algorithms are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from quantcore.checkpoint.headers import read_json
from quantcore.checkpoint.layout import TensorHeader
from quantcore.config import presets
from quantcore.errors import ModelError

METHOD = "modelopt"
OWN_FILE = "hf_quant_config.json"
"""Where ModelOpt before 0.35 describes the quantization, instead of in config.json."""

PRESETS = {"NVFP4": "nvfp4", "FP8": "fp8"}
"""ModelOpt's algorithm -> our preset for the same numbers."""

CACHE_SCALES = ("k_proj.k_scale", "v_proj.v_scale")


def description_of(folder: Path, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return ModelOpt's ``quantization_config``, from config.json or from its own file; None for other checkpoints."""
    own = config.get("quantization_config")
    if isinstance(own, dict) and own.get("quant_method") == METHOD:
        return own
    if own or not (folder / OWN_FILE).exists():
        return None
    described = read_json(folder / OWN_FILE, "invalid_quantization_config").get("quantization")
    return described if isinstance(described, dict) else {}


def as_quark(
    description: Mapping[str, Any], tensors: Mapping[str, TensorHeader]
) -> tuple[dict[str, Any], dict[str, TensorHeader]]:
    """Return the ``quantization_config`` and the tensors of the same checkpoint in AMD Quark's format.

    Raises ModelError ``already_quantized`` for an algorithm that cannot be read.
    """
    algorithm = str(description.get("quant_algo"))
    if algorithm not in PRESETS:
        raise ModelError(
            f"The model is already quantized by ModelOpt, with the algorithm '{algorithm}'.",
            code="already_quantized",
            hint=f"Provide the float model it was made from. Of ModelOpt's algorithms, {' and '.join(PRESETS)} can "
            "be read.",
        )
    cache = "fp8" if any(name.endswith(CACHE_SCALES) for name in tensors) else None
    config = presets.resolve(PRESETS[algorithm], exclude=(), kv_cache=cache)
    if not any(name.endswith(".input_scale") for name in tensors):
        config = replace(config, global_quant_config=replace(config.global_quant_config, input_tensors=None))
    is_nvfp4 = algorithm == "NVFP4"
    renamed = {_quark_name(name, is_nvfp4=is_nvfp4): header for name, header in tensors.items()}
    return {"quant_method": "quark", **config.to_dict()}, renamed


def _quark_name(name: str, *, is_nvfp4: bool) -> str:
    """Return AMD Quark's name of a tensor: a static input scale of NVFP4 is the second one, above those of blocks."""
    if name.endswith(CACHE_SCALES):
        return f"{name.rpartition('.')[0]}.output_scale"
    return f"{name}_2" if is_nvfp4 and name.endswith(".input_scale") else name
