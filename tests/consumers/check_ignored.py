"""Runs in vLLM's environment: ask its own functions which layers a ``quantization_config`` leaves in high precision.

usage: check_ignored.py CONFIG.json NAMES.json -> one line ``RESULT [true, false, ...]``, one value for each name.
"""

import json
import sys
from pathlib import Path

from vllm.model_executor.layers.quantization.compressed_tensors import utils as compressed_tensors
from vllm.model_executor.layers.quantization.quark import utils as quark

config, names = (json.loads(Path(path).read_text()) for path in sys.argv[1:3])
if config["quant_method"] == "quark":
    ignored = [quark.should_ignore_layer(name, config["exclude"]) for name in names]
else:
    ignored = [compressed_tensors.should_ignore_layer(name, config["ignore"]) for name in names]
print("RESULT " + json.dumps(ignored))
