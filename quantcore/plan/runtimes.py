"""Lists the schemes that a runtime has kernels for on a device, and computes how much fits there. No torch.

Sources: vLLM, "Quantization: supported hardware" and "FP8 W8A8" (docs.vllm.ai, 0.32); for the formats that
Transformers, llama.cpp and ONNX Runtime load, docs/reference/formats.md and compatibility.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quantcore.checkpoint.model_config import ModelConfig
from quantcore.config.goal import Goal, Runtime
from quantcore.config.target_devices import device_of
from quantcore.errors import ConfigError

USABLE_SHARE = 0.9
"""Share of a device's memory for weights and KV cache; vLLM's default. Activations need the rest."""


@dataclass(frozen=True)
class Scheme:
    """A preset that a runtime computes where a device computes ``needs`` (empty: everywhere).

    ``if_smaller_than`` names the preset that is better for models for which this one is not smaller.
    """

    preset: str
    needs: str = ""
    if_smaller_than: str = ""


@dataclass(frozen=True)
class RuntimeSupport:
    """The schemes of a runtime, all in one format, and the KV cache schemes that it can store, by what they need."""

    export: str
    schemes: tuple[Scheme, ...]
    kv_cache: Mapping[str, str]


SUPPORTED_SCHEMES: dict[Runtime, RuntimeSupport] = {
    "vllm": RuntimeSupport(
        "compressed_tensors",
        (
            Scheme("w4a16", "w4"), Scheme("int8_weight_only", "w8"), Scheme("int8_dynamic", "int8"),
            Scheme("fp8_dynamic", "fp8"), Scheme("nvfp4", "nvfp4"), Scheme("mxfp4", "mxfp4"),
        ),
        {"fp8": "fp8"},
    ),
    "transformers": RuntimeSupport(
        "compressed_tensors",  # not w4a16: Transformers 5.23 unpacks asymmetric int4 wrongly
        (Scheme("w4a16_sym"), Scheme("int8_weight_only"), Scheme("int8_dynamic", "int8"), Scheme("fp8_dynamic", "fp8")),
        {},
    ),
    "llama_cpp": RuntimeSupport(
        "gguf",
        (
            Scheme("gguf_q4_k"), Scheme("gguf_q5_k"), Scheme("gguf_q6_k"), Scheme("gguf_q8_0"),
            # K-quants take a larger type for the head, and for rows that 256 does not divide
            Scheme("gguf_q4_0", if_smaller_than="gguf_q4_k"), Scheme("gguf_q4_1", if_smaller_than="gguf_q4_k"),
        ),
        {},
    ),
    "onnx": RuntimeSupport("onnx", (Scheme("w4a16"), Scheme("int8_weight_only")), {}),
}  # fmt: skip


def schemes_for(goal: Goal) -> tuple[Scheme, ...]:
    """Return the schemes to choose from. Raises ConfigError ``nothing_runs_there`` if there are none."""
    device = device_of(goal.device)
    schemes = tuple(
        each for each in SUPPORTED_SCHEMES[goal.runtime].schemes if not each.needs or each.needs in device.computes
    )
    if not schemes:
        raise ConfigError(
            f"{goal.runtime} does not support any quantized format on {device.title}.",
            code="nothing_runs_there",
            hint="Choose another runtime or device, or a scheme by hand (--quant_scheme).",
            field="/goal/device",
        )
    return schemes


def weight_limit_bytes(goal: Goal, cache_bytes: int) -> int | None:
    """Return the largest size of all weights: ``max_size``, or what a KV cache leaves of the device; None: any size."""
    memory = device_of(goal.device).memory_bytes
    limits = [] if memory is None else [round(memory * USABLE_SHARE) - cache_bytes]
    limits += [] if goal.max_bytes is None else [goal.max_bytes]
    return min(limits, default=None)


def kv_cache_scheme(goal: Goal) -> str | None:
    """Return the scheme in which the runtime can store the KV cache on this device, or None."""
    computes = device_of(goal.device).computes
    return next((name for name, needs in SUPPORTED_SCHEMES[goal.runtime].kv_cache.items() if needs in computes), None)


def kv_cache_bytes(model_config: Mapping[str, Any], num_tokens: int, bytes_per_number: int = 2) -> int:
    """Return an upper bound on the KV cache of one sequence: as if every layer kept keys and values of all tokens.

    A config whose sizes are not found counts nothing: a state of constant size stands in for the cache there.
    """
    sizes = ModelConfig(model_config)
    layers = sizes.num_layers or 0
    if rank := sizes.text.get("kv_lora_rank"):  # multi-head latent attention keeps one compressed vector
        return int(layers * num_tokens * (rank + sizes.text.get("qk_rope_head_dim", 0)) * bytes_per_number)
    width = (sizes.num_key_value_heads or 0) * (sizes.head_dim or 0)
    return 2 * layers * num_tokens * width * bytes_per_number
