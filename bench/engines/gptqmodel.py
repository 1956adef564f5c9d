"""GPTQModel, in its own environment: ``python -m bench.engines.gptqmodel JOB``.

The clock runs around ``quantize``, which also packs. Perplexity is that of its checkpoint, saved, loaded again and
dequantized by GPTQModel, because it moves quantized layers from memory to disk.
"""

from __future__ import annotations

import os

os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # with fewer, 7.7.0 cannot load a model

import torch
from gptqmodel import BACKEND, GPTQModel
from gptqmodel.nn_modules.qlinear.torch import TorchLinear
from gptqmodel.quantization.config import AWQConfig, GPTQConfig, RTNConfig
from torch import nn

from bench.engines.runner import Clock, finish, quality, start, weight_settings

CONFIGS = {"rtn": RTNConfig, "gptq": GPTQConfig, "awq": AWQConfig, "rotation+gptq": GPTQConfig, "gptaq": GPTQConfig}


def dequantize(model: nn.Module) -> None:
    """Replace layers that dequantize as they run by plain ones: they would first compile themselves, 210 times."""
    for name, module in list(model.named_modules()):
        if isinstance(module, TorchLinear):
            plain = nn.Linear(
                module.in_features, module.out_features, bias=module.bias is not None, dtype=torch.bfloat16
            )
            with torch.no_grad():
                plain.weight.copy_(TorchLinear.dequantize_weight(module).T)
                if module.bias is not None:
                    plain.bias.copy_(module.bias)
            model.set_submodule(name, plain)


def main() -> None:
    job = start()
    calibration_NT, _ = job.token_windows()
    settings = weight_settings(job.scheme)
    if "rotation" in job.algorithms:
        settings["rotation"] = "hadamard"
    if "gptaq" in job.algorithms:
        settings["gptaq"] = {}
    with Clock() as load:
        model = GPTQModel.load(str(job.model_dir), CONFIGS[job.algorithm](**settings), device="cpu")
    rows = [{"input_ids": ids_T.tolist(), "attention_mask": [1] * len(ids_T)} for ids_T in calibration_NT]
    with Clock() as quantize:
        model.quantize(None if job.algorithm == "rtn" else rows, batch_size=1)
    model.save(str(job.scratch))
    del model
    backend = BACKEND.AWQ_TORCH if job.algorithm == "awq" else BACKEND.GPTQ_TORCH
    restored = GPTQModel.load(str(job.scratch), backend=backend, device="cpu", dtype=torch.bfloat16)
    with Clock() as evaluate:
        dequantize(restored.model)
        found = quality(restored.model, job)
    finish(
        job, load=load, quantize=quantize, evaluate=evaluate, quality=found, packages=["gptqmodel"],
        settings=settings,
    )  # fmt: skip


if __name__ == "__main__":
    main()
