"""AMD Quark, in its own environment: ``python -m bench.engines.quark JOB``.

The clock runs around ``quantize_model``. Perplexity is that of the frozen model in memory. ``save`` has the time of
writing the files, which ours includes.
"""

from __future__ import annotations

import os

os.environ.setdefault("QUARK_DISABLE_COMPILE", "1")  # compiling for one run costs more than it gives

import torch
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors
from quark.torch.quantization.config.config import Int8PerChannelSpec, Int8PerTensorSpec, QLayerConfig
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from bench.engines.runner import Clock, finish, quality, start

SCHEMES = {
    "uint4": "uint4_wo_64", "int4": "int4_wo_64", "int8": "int8_channel", "fp8": "fp8", "fp8_kv": "fp8",
    "mxfp4": "mxfp4",
}  # fmt: skip


def register_int8() -> None:
    """Register an int8 scheme with one scale per output channel; Quark's own has one scale for a whole weight."""
    weight = Int8PerChannelSpec(ch_axis=0, symmetric=True).to_quantization_spec()
    inputs = Int8PerTensorSpec(
        observer_method="min_max", symmetric=True, scale_type="float", round_method="half_even", is_dynamic=False
    ).to_quantization_spec()
    LLMTemplate.register_scheme("int8_channel", QLayerConfig(weight=weight, input_tensors=inputs))


def main() -> None:
    job = start()
    calibration_NT, _ = job.token_windows()
    register_int8()
    # Quark's MXFP4 rounds activations on a CPU in float32 only; everything else runs in the model's bfloat16.
    dtype = torch.float32 if job.scheme == "mxfp4" else torch.bfloat16
    with Clock() as load:
        model = AutoModelForCausalLM.from_pretrained(job.model_dir, dtype=dtype).eval()
    template = LLMTemplate.get(model.config.model_type)
    kv_cache = "fp8" if job.scheme == "fp8_kv" else None
    config = template.get_config(scheme=SCHEMES[job.scheme], algorithm=job.algorithms or None, kv_cache_scheme=kv_cache)
    quantizer = ModelQuantizer(config)
    batches = DataLoader(calibration_NT, batch_size=1, shuffle=False)
    with Clock() as quantize:
        model = quantizer.quantize_model(model, batches)
    with Clock() as freeze:
        model = quantizer.freeze(model)
    with Clock() as evaluate:
        found = quality(model, job)
    with Clock() as save:
        export_safetensors(model, str(job.scratch / "model"))
    settings = {"scheme": SCHEMES[job.scheme], "algorithm": job.algorithms, "dtype": str(dtype), "kv_cache": kv_cache}
    finish(
        job, load=load, quantize=quantize, evaluate=evaluate, quality=found, packages=["amd-quark"],
        settings=settings, freeze=freeze.seen, save=save.seen,
        note="in float32, the only one in which it rounds MXFP4 inputs on a CPU" if job.scheme == "mxfp4" else "",
    )  # fmt: skip


if __name__ == "__main__":
    main()
