"""Runs in vLLM's environment: ask its own functions how a ``quantization_config`` says that layers are stored.

usage: check_schemes.py CONFIG.json NAMES.json -> one line ``RESULT [8, null, ...]``: the bits of a weight for each
name, null for a layer in high precision.
"""

import json
import sys
from pathlib import Path

from torch import nn
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.quantization.quark.quark import QuarkConfig
from vllm.model_executor.layers.quantization.quark.utils import should_ignore_layer

config, names = (json.loads(Path(path).read_text()) for path in sys.argv[1:3])
if config["quant_method"] == "quark":
    quark, bits = QuarkConfig.from_config(config), {"uint4": 4, "int8": 8}
    chosen = [
        None if should_ignore_layer(name, config["exclude"]) else quark._find_matched_config(name, nn.Linear)["weight"]
        for name in names
    ]
    found = [None if weight is None else bits[weight["dtype"]] for weight in chosen]
else:
    compressed_tensors = CompressedTensorsConfig.from_config(config)
    schemes = [compressed_tensors.get_scheme_dict(nn.Linear(1, 1), name) for name in names]
    found = [None if scheme is None else scheme["weights"].num_bits for scheme in schemes]
print("RESULT " + json.dumps(found))
