"""Runs in an environment with Transformers: load a checkpoint, generate, and measure the perplexity of token windows.

usage: check_transformers.py MODEL_DIR WINDOWS.json [gptqmodel] -> one line ``RESULT {json}``
       check_transformers.py --each WINDOWS.json MODEL_DIR ... [gptqmodel] -> one, {MODEL_DIR: perplexity, or an error}

WINDOWS.json is a list of token id lists. With ``gptqmodel`` that package loads the checkpoint, on its plain torch
kernels, and in float32 on a processor without AVX-512, where its products of bfloat16 take many times as long.
``layers`` are the classes of the modules that hold the weights of linear layers, with how many there are.
"""

import json
import math
import os
import sys
import traceback
from collections import Counter
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DEVICE", "cpu")

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    windows = json.loads(Path(sys.argv[2]).read_text())
    *others, last = sys.argv[3:] or [""]
    has_gptqmodel, others = last == "gptqmodel", others if last == "gptqmodel" else [*others, last]
    if sys.argv[1] == "--each":
        result = {model_dir: perplexity_or_error(model_dir, windows, has_gptqmodel) for model_dir in others}
    else:
        result = measure(sys.argv[1], windows, has_gptqmodel)
    print("RESULT " + json.dumps(result))


def perplexity_or_error(model_dir, windows, has_gptqmodel):
    try:
        return measure(model_dir, windows, has_gptqmodel)["perplexity"]
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"


def measure(model_dir, windows, has_gptqmodel):
    if has_gptqmodel:
        from gptqmodel import BACKEND, GPTQModel

        model = GPTQModel.load(model_dir, device="cpu", backend=BACKEND.TORCH, dtype=torch.bfloat16).model
        if torch.backends.cpu.get_cpu_capability() != "AVX512":
            model.float()
    else:
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16, device_map="cpu")
    model.eval()
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.inference_mode():
        text = tokenizer.decode(model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :])
        losses = []
        for window in windows:
            window = torch.tensor(window).unsqueeze(0)
            logits = model(window).logits[0, :-1].float()
            losses.append(cross_entropy(logits, window[0, 1:], reduction="none"))
    blocks = Counter(type(module).__name__ for name, module in model.named_modules() if name.endswith("_proj"))
    perplexity = math.exp(torch.cat(losses).mean().item())
    return {"texts": [text], "prompt_ids": ids[0].tolist(), "perplexity": perplexity, "layers": blocks}


if __name__ == "__main__":
    main()
