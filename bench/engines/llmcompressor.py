"""llm-compressor, in its own environment: ``python -m bench.engines.llmcompressor JOB``.

The clock runs around ``oneshot``. Perplexity is that of the model in memory, which quantizes as it runs.
"""

from __future__ import annotations

from typing import Any

import torch
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
from llmcompressor.modifiers.transform.spinquant import SpinQuantModifier
from llmcompressor.pipelines.cache import IntermediatesCache
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from bench.engines.runner import Clock, finish, quality, start

INT8_CHANNEL = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
INT8_TENSOR = {"num_bits": 8, "type": "int", "strategy": "tensor", "symmetric": True, "observer": "static_minmax"}
KV_CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
GROUPS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64}
SCHEMES: dict[str, Any] = {  # the name of a preset, or the arguments of one scheme
    "uint4": {"weights": GROUPS | {"symmetric": False}},
    "int4": {"weights": GROUPS | {"symmetric": True}},
    "uint3": {"weights": GROUPS | {"num_bits": 3, "symmetric": False}},
    "uint2": {"weights": GROUPS | {"num_bits": 2, "symmetric": False}},
    "int8": {"weights": INT8_CHANNEL, "input_activations": INT8_TENSOR},
    "int8_dynamic": "INT8",
    "fp8": "FP8",
    "fp8_kv": "FP8",
    "mxfp4": "MXFP4",
}

NOTES = {"int8": "static inputs by arguments; its own preset for int8 is int8_dynamic"}


def quantization(scheme: str) -> dict[str, Any]:
    """Return the arguments that set a modifier's scheme."""
    arguments = SCHEMES[scheme]
    if isinstance(arguments, str):
        cache = {"kv_cache_scheme": KV_CACHE} if scheme == "fp8_kv" else {}
        return {"scheme": arguments, "targets": ["Linear"], "ignore": ["lm_head"], **cache}
    return {"config_groups": {"all": {"targets": ["Linear"], **arguments}}, "ignore": ["lm_head"]}


def recipe(scheme: str, algorithms: list[str], settings: dict[str, Any]) -> list[Any]:
    """Return the modifiers in order, and note their settings other than defaults in ``settings``."""
    steps: list[Any] = []
    if "smoothquant" in algorithms:
        steps.append(SmoothQuantModifier(smoothing_strength=0.8))
        settings["smoothing_strength"] = 0.8  # of the project's own examples for int8
    if "awq" in algorithms:
        per_tensor = scheme == "fp8"  # its search by weights needs one scale per channel or group
        steps.append(AWQModifier(duo_scaling=False) if per_tensor else AWQModifier())
        settings["duo_scaling"] = not per_tensor
    if "rotation" in algorithms:
        # Its plain Hadamard matrices are powers of two in size; the hidden size here is 576.
        steps.append(SpinQuantModifier(rotations=["R1", "R2"], transform_type="random-hadamard"))
        settings["rotations"] = "R1, R2, random-hadamard"
    arguments = quantization(scheme)
    if "range_search" in algorithms:
        arguments["weight_observer"] = settings["weight_observer"] = "imatrix_mse"
    solver = GPTQModifier if "gptq" in algorithms else QuantizationModifier
    return [*steps, solver(**arguments)]


def main() -> None:
    job = start()
    # Without an accelerator AWQ fails in 0.14.0.1 where it pins memory for one.
    IntermediatesCache.pin_memory = lambda *_, **__: None
    calibration_NT, _ = job.token_windows()
    with Clock() as load:
        model = AutoModelForCausalLM.from_pretrained(job.model_dir, dtype=torch.bfloat16).eval()
    rows = [{"input_ids": ids_T, "attention_mask": torch.ones_like(ids_T)} for ids_T in calibration_NT]
    settings: dict[str, Any] = {"scheme": SCHEMES[job.scheme], "shuffle_calibration_samples": False}
    steps = recipe(job.scheme, job.algorithms, settings)
    with Clock() as quantize:
        oneshot(
            model=model, dataset=DataLoader(rows, batch_size=1, shuffle=False), recipe=steps,
            num_calibration_samples=len(rows), max_seq_length=calibration_NT.shape[1],
            shuffle_calibration_samples=False,
        )  # fmt: skip
    with Clock() as evaluate:
        found = quality(model, job)
    finish(
        job, load=load, quantize=quantize, evaluate=evaluate, quality=found,
        packages=["llmcompressor", "compressed-tensors"], settings=settings, note=NOTES.get(job.scheme, ""),
    )  # fmt: skip


if __name__ == "__main__":
    main()
