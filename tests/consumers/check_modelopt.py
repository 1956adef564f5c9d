"""Runs in vLLM's environment: what vLLM makes of checkpoints in ModelOpt's format.

usage: check_modelopt.py NAMES.json MODEL_DIR ... -> one line ``RESULT {MODEL_DIR: [method, cache, [numbers, ...]]}``:
           the method that vLLM chooses, the number type of the KV cache, and for each name the number types of the
           weight and the inputs, null for a layer in high precision. config.json and hf_quant_config.json must agree
       check_modelopt.py --run MODEL_DIR WINDOWS.json -> the line of check_vllm.py. A CPU has no kernel for NVFP4, so
           vLLM's own emulation of it, which it offers on GPUs only, is registered first
"""

import json
import sys
from pathlib import Path

from check_vllm import measure  # sets the variables that vLLM reads
from vllm.model_executor.kernels.linear import register_linear_kernel
from vllm.model_executor.kernels.linear.nvfp4.emulation import EmulationNvFp4LinearKernel
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.platforms import PlatformEnum

METHODS = ("modelopt", "modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed")
FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


def main() -> None:
    if sys.argv[1] == "--run":
        register_linear_kernel(EmulationNvFp4LinearKernel, PlatformEnum.CPU, "nvfp4")
        result = measure(sys.argv[2], json.loads(Path(sys.argv[3]).read_text()))
    else:
        names = json.loads(Path(sys.argv[1]).read_text())
        result = {folder: read(Path(folder), names) for folder in sys.argv[2:]}
    print("RESULT " + json.dumps(result))


def read(folder, names):
    of_model = json.loads((folder / "config.json").read_text())["quantization_config"]
    own = json.loads((folder / "hf_quant_config.json").read_text())
    result, again = chosen(of_model, names), chosen({**own, "quant_method": "modelopt"}, names)
    assert result == again, (result, again)
    return result


def chosen(described, names):
    classes = {name: get_quantization_config(name) for name in METHODS}
    [method] = [name for name in METHODS if classes[name].override_quantization_method(described, None) is not None]
    config = classes[method].from_config(described)
    config.packed_modules_mapping = FUSED
    cache = getattr(config, "kv_cache_quant_method", None) or getattr(config, "kv_cache_quant_algo", None)
    return [method, cache, [numbers(config, name) for name in names]]


def numbers(config, name):
    found = config.get_quant_method(LinearBase.__new__(LinearBase), name)
    if isinstance(found, UnquantizedLinearMethod):
        return None
    return [None if key is None else str(key.dtype) for key in (found.spec.weight, found.spec.activation)]


if __name__ == "__main__":
    main()
