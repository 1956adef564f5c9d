"""Runs in llama.cpp's own environment: what a KV cache of fewer bits does to the predictions for given token windows.

usage: check_llamacpp_caches.py MODEL.gguf WINDOWS.json DTYPE... -> one line ``RESULT {json}``

The result has the mean KL divergence, in nats, of the predictions with each dtype from those with a cache of 16 bits.
"""

import json
import sys
from pathlib import Path

import llama_cpp
import numpy as np


def main() -> None:
    windows = json.loads(Path(sys.argv[2]).read_text())
    usual = predictions(windows, "f16")
    divergences = {}
    for name in sys.argv[3:]:
        pairs = zip(usual, predictions(windows, name), strict=True)
        losses = [(np.exp(before) * (before - after)).sum(-1) for before, after in pairs]
        divergences[name] = float(np.concatenate(losses).mean())
    print("RESULT " + json.dumps(divergences))


def predictions(windows: list[list[int]], cache: str) -> list[np.ndarray]:
    """Return the logarithms of the probabilities [T - 1, V] of each window."""
    kind = getattr(llama_cpp, f"GGML_TYPE_{cache.upper()}")
    longest = max(map(len, windows))
    llm = llama_cpp.Llama(
        sys.argv[1],
        n_ctx=longest + 32,
        n_threads=1,
        logits_all=True,
        verbose=False,
        seed=0,
        type_k=kind,
        type_v=kind,
        flash_attn=True,
    )
    found = []
    for window in windows:
        llm.reset()
        llm.eval(window)
        logits_TV = np.array(llm.scores[: len(window) - 1], dtype=np.float64)
        logits_TV -= logits_TV.max(-1, keepdims=True)
        found.append(logits_TV - np.log(np.exp(logits_TV).sum(-1, keepdims=True)))
    return found


if __name__ == "__main__":
    main()
