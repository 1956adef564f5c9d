"""AutoRound, in its own environment: ``python -m bench.engines.autoround JOB``.

The clock runs around ``quantize``. Perplexity is that of the model in memory, whose weights are rounded by then.
"""

from __future__ import annotations

from typing import Any

import torch
from auto_round import AutoRound
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.engines.runner import Clock, finish, quality, start, weight_settings

TUNED_BATCH = 8  # its default, and that of ours
OPTIONS: dict[str, dict[str, Any]] = {
    "rtn": {"iters": 0, "disable_opt_rtn": True},
    "range_search": {"iters": 0, "enable_neuqi": True},
    "autoround": {"iters": 200},
}


def main() -> None:
    job = start()
    calibration_NT, _ = job.token_windows()
    settings = weight_settings(job.scheme) | OPTIONS[job.algorithm]
    if job.algorithm == "autoround" and settings["bits"] < 4:
        settings["enable_alg_ext"] = True  # SignRoundV2, which its documentation advises for few bits
    with Clock() as load:
        model = AutoModelForCausalLM.from_pretrained(job.model_dir, dtype=torch.bfloat16).eval()
        tokenizer = AutoTokenizer.from_pretrained(job.model_dir)
    rows = [{"input_ids": ids_T, "attention_mask": torch.ones_like(ids_T)} for ids_T in calibration_NT]
    tuner = AutoRound(
        model, tokenizer, dataset=DataLoader(rows, batch_size=TUNED_BATCH), nsamples=len(rows),
        seqlen=calibration_NT.shape[1], batch_size=TUNED_BATCH, device_map="cpu", **settings,
    )  # fmt: skip
    with Clock() as quantize:
        model, _ = tuner.quantize()
    with Clock() as evaluate:
        found = quality(model, job)
    finish(
        job, load=load, quantize=quantize, evaluate=evaluate, quality=found, packages=["auto-round"], settings=settings
    )


if __name__ == "__main__":
    main()
