"""Runs in mlx-lm's environment: load checkpoints, compute logits, and dequantize their weights with MLX.

usage: check_mlx.py WINDOWS.json MODEL_DIR ... -> one line ``RESULT {MODEL_DIR: {"perplexity", "text", "modes"}}``, or
           the error in place of these. WINDOWS.json is a list of token id lists; ``text`` is what follows a prompt, and
           ``modes`` counts the quantized modules by class, mode, bits and group size
       check_mlx.py --logits WINDOWS.json MODEL_DIR OUT.safetensors -> the logits of the first window, float32
       check_mlx.py --dequantize MODEL_DIR OUT.safetensors -> every weight as mx.dequantize computes it from scales and
           biases in float32
       check_mlx.py --quantize IN.safetensors OUT.safetensors BITS GROUP_SIZE MODE -> ``NAME.weight``, ``NAME.scales``
           and ``NAME.biases`` of every tensor, as mx.quantize makes them
       check_mlx.py --convert MODEL_DIR OUT_DIR BITS GROUP_SIZE MODE -> the model, quantized by mlx-lm itself
"""

import json
import math
import os
import sys
import traceback
from collections import Counter
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import mlx.core as mx
import mlx.nn as nn
from mlx_lm import convert, generate, load
from mlx_lm.utils import load_model


def main() -> None:
    commands = {"--logits": save_logits, "--dequantize": dequantize, "--quantize": quantize, "--convert": convert_model}
    if sys.argv[1] in commands:
        result = commands[sys.argv[1]](*sys.argv[2:])
    else:
        windows = json.loads(Path(sys.argv[1]).read_text())
        result = {folder: measured_or_error(Path(folder), windows) for folder in sys.argv[2:]}
    print("RESULT " + json.dumps(result))


def measured_or_error(folder, windows):
    try:
        return measured(folder, windows)
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"


def measured(folder, windows):
    model, _ = load_model(folder)
    model.set_dtype(mx.float32)  # in 16 bits MLX rounds each weight twice, and takes minutes on a CPU
    losses = []
    for window in windows:
        logits = model(mx.array([window[:-1]])).astype(mx.float32)
        losses.append(nn.losses.cross_entropy(logits, mx.array([window[1:]])))
    perplexity = math.exp(mx.concatenate(losses, axis=1).mean().item())
    modes = Counter(
        f"{type(module).__name__} {module.mode} {module.bits} {module.group_size}"
        for _, module in model.named_modules()
        if hasattr(module, "bits")
    )
    return {"perplexity": perplexity, "modes": modes, "text": said(folder)}


def said(folder):
    if not (folder / "tokenizer.json").exists():
        return None
    model, tokenizer = load(str(folder))
    return generate(model, tokenizer, "The capital of France is", max_tokens=8)


def save_logits(windows, folder, out):
    model, _ = load_model(Path(folder))
    window = json.loads(Path(windows).read_text())[0]
    mx.save_safetensors(out, {"logits": model(mx.array([window])).astype(mx.float32)})
    return len(window)


def dequantize(folder, out):
    config = json.loads((Path(folder) / "config.json").read_text())["quantization"]
    usual = {key: config[key] for key in ("group_size", "bits", "mode")}
    stored, values = {}, {}
    for file in Path(folder).glob("model*.safetensors"):
        stored.update(mx.load(str(file)))
    for name in [name.removesuffix(".scales") for name in stored if name.endswith(".scales")]:
        own = config.get(name, usual)
        scales, biases = stored[f"{name}.scales"], stored.get(f"{name}.biases")
        if biases is not None:
            scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
        values[f"{name}.weight"] = mx.dequantize(stored[f"{name}.weight"], scales, biases, **own, dtype=mx.float32)
    mx.save_safetensors(out, values)
    return len(values)


def quantize(path, out, bits, group_size, mode):
    parts = {}
    for name, weight in mx.load(path).items():
        own = mx.quantize(weight, int(group_size), int(bits), mode=mode)
        parts |= {f"{name}.{part}": each for part, each in zip(("weight", "scales", "biases"), own, strict=False)}
    mx.save_safetensors(out, parts)
    return len(parts)


def convert_model(folder, out, bits, group_size, mode):
    convert(folder, out, quantize=True, q_bits=int(bits), q_group_size=int(group_size), q_mode=mode)
    return json.loads((Path(out) / "config.json").read_text())["quantization"]


if __name__ == "__main__":
    main()
