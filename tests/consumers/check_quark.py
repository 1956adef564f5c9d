"""Runs in the peers' environment, with AMD Quark: read a checkpoint with Quark's import and measure token windows.

usage: check_quark.py MODEL_DIR WINDOWS.json [ATTENTION] -> one line ``RESULT {json}``: perplexity, and the
layers that Quark found quantized.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("QUARK_DISABLE_COMPILE", "1")

import torch


def mend_attention() -> None:
    """Let Quark 0.13 load its own fp8 attention.

    Its importer requires CUDA on any device, and renames ``prob_output_scale`` to a name that it then does not find:
    it cannot load its own files. All else is Quark's own code.
    """
    from quark.torch.export import api, utils

    utils.get_real_quantizer = partial(utils.get_real_quantizer, device=torch.device("cpu"))
    rename = api._fix_loaded_weights_key_mismatch

    def rename_others(weights, **options):
        kept = {name: weights.pop(name) for name in list(weights) if name.endswith("prob_output_scale")}
        return rename(weights, **options) | kept

    api._fix_loaded_weights_key_mismatch = rename_others


def main() -> None:
    from quark.torch import import_model_from_safetensors

    mend_attention()
    model_dir, windows = sys.argv[1], json.loads(Path(sys.argv[2]).read_text())
    attention = sys.argv[3] if len(sys.argv) > 3 else "sdpa"
    model = import_model_from_safetensors(None, model_dir, device="cpu", attn_implementation=attention).eval()
    losses, sums = [], {}
    with torch.no_grad():
        for window in windows:
            ids = torch.tensor([window])
            logits = model(ids).logits[0, :-1].float()
            losses.append(torch.nn.functional.cross_entropy(logits, ids[0, 1:]))
    for name, module in model.named_modules():
        if hasattr(module, "weight_scale") or hasattr(module, "weight_quantizer"):
            sums[name] = type(module).__name__
    perplexity = torch.stack(losses).mean().exp().item()
    print("RESULT " + json.dumps({"perplexity": perplexity, "layers": sums}))


if __name__ == "__main__":
    main()
