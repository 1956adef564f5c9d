"""Runs in vLLM's environment: decode the NVFP4 weights of a ModelOpt checkpoint with vLLM's own function.

usage: check_nvfp4.py MODEL_DIR OUT.safetensors -> one line ``RESULT number of weights``; they are float32 in the file.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import dequantize_to_dtype

stored = load_file(Path(sys.argv[1]) / "model.safetensors")
modules = [name.removesuffix(".weight_scale_2") for name in stored if name.endswith(".weight_scale_2")]
weights = {
    f"{module}.weight": dequantize_to_dtype(
        stored[f"{module}.weight"],
        stored[f"{module}.weight_scale"],
        stored[f"{module}.weight_scale_2"],
        torch.float32,
        swizzle=False,
    ).contiguous()
    for module in modules
}
save_file(weights, sys.argv[2])
print("RESULT " + json.dumps(len(weights)))
