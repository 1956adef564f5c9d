"""The float model itself, in bfloat16: the baseline of the others."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM

from bench.engines.runner import Clock, finish, quality, start


def main() -> None:
    job = start()
    with Clock() as load:
        model = AutoModelForCausalLM.from_pretrained(job.model_dir, dtype=torch.bfloat16).eval()
    with Clock() as nothing:
        pass
    with Clock() as evaluate:
        found = quality(model, job)
    finish(job, load=load, quantize=nothing, evaluate=evaluate, quality=found, packages=[], settings={})


if __name__ == "__main__":
    main()
