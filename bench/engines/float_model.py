"""The float model itself, in bfloat16: the baseline of every perplexity."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM

from bench.engines.runner import Clock, finish, perplexity, start


def main() -> None:
    job = start()
    _, held_out_NT = job.token_windows()
    with Clock() as load:
        model = AutoModelForCausalLM.from_pretrained(job.model_dir, dtype=torch.bfloat16).eval()
    with Clock() as nothing:
        pass
    with Clock() as evaluate:
        value = perplexity(model, held_out_NT)
    finish(job, load=load, quantize=nothing, evaluate=evaluate, perplexity=value, packages=[], settings={})


if __name__ == "__main__":
    main()
