"""Runs in llama.cpp's own environment: load a GGUF file, generate, and measure the perplexity of given token windows.

usage: check_llamacpp.py MODEL.gguf WINDOWS.json [TEXT] -> one line ``RESULT {json}``

WINDOWS.json is a list of token id lists. The result holds the ids of TEXT, too.
"""

import json
import math
import sys
from pathlib import Path

import numpy as np
from llama_cpp import Llama


def main() -> None:
    windows = json.loads(Path(sys.argv[2]).read_text())
    text = sys.argv[3] if len(sys.argv) > 3 else ""
    longest = max(map(len, windows))
    llm = Llama(sys.argv[1], n_ctx=longest + 32, n_threads=1, logits_all=True, verbose=False, seed=0)
    generated = llm("The capital of France is", max_tokens=8, temperature=0.0)["choices"][0]["text"]
    loss, count = 0.0, 0
    for window in windows:
        llm.reset()
        llm.eval(window)
        logits_TV = np.array(llm.scores[: len(window) - 1], dtype=np.float64)
        logits_TV -= logits_TV.max(-1, keepdims=True)
        logprobs_TV = logits_TV - np.log(np.exp(logits_TV).sum(-1, keepdims=True))
        loss -= logprobs_TV[np.arange(len(window) - 1), window[1:]].sum()
        count += len(window) - 1
    ids = llm.tokenize(text.encode(), add_bos=True, special=True)
    print("RESULT " + json.dumps({"texts": [generated], "perplexity": math.exp(loss / count), "ids": ids}))


if __name__ == "__main__":
    main()
