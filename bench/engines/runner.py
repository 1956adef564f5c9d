"""Shared parts of every engine's process: its job, the clock, the quality, the row of results.

This runs in the environments of the peers, so it uses only torch, safetensors, the standard library, and our way of
multiplying bfloat16 on processors without instructions for it. There it evaluates every engine in a sixth of the time.
"""

from __future__ import annotations

import json
import math
import os
import re
import resource
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from quantcore.engine.runtime.matmul import matmul_precision

RSS_UNIT = 1 if sys.platform == "darwin" else 1024


@dataclass(frozen=True)
class Job:
    """The job of an engine's process: one cell. ``result`` is the file for the row, ``scratch`` an empty folder.

    ``float_logits`` is the folder for the float model's logits, which the first process of a run writes.
    """

    model_dir: Path
    windows: Path
    float_logits: Path
    scheme: str
    algorithm: str
    scratch: Path
    result: Path

    def write(self, file: Path) -> None:
        file.write_text(json.dumps(asdict(self), default=str), "utf-8")

    @classmethod
    def read(cls, file: Path) -> Job:
        data = json.loads(file.read_text("utf-8"))
        return cls(**{key: Path(value) if key in PATHS else value for key, value in data.items()})

    @property
    def algorithms(self) -> list[str]:
        """The steps of the algorithm: ``smoothquant+gptq`` has two, ``rtn`` none."""
        return [] if self.algorithm == "rtn" else self.algorithm.split("+")

    def token_windows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (calibration [N, T], held out [M, T]), int64 token ids."""
        tensors = load_file(self.windows)
        return tensors["calibration"], tensors["held_out"]

    def more_windows(self) -> torch.Tensor:
        """Return further calibration windows [N, T], of which no engine gets any but to tune what it has rounded."""
        return load_file(self.windows)["more"]


BITS = {"uint4": 4, "int4": 4, "uint3": 3, "uint2": 2}


def weight_settings(scheme: str) -> dict[str, Any]:
    """Return the options of a scheme of weights alone, as GPTQModel and AutoRound both name them."""
    return {"bits": BITS[scheme], "group_size": 64, "sym": scheme == "int4"}


PATHS = ("model_dir", "windows", "float_logits", "scratch", "result")


class Clock:
    """Wall and CPU seconds of a ``with`` block, of all threads of this process, and its peak memory at the end."""

    def __enter__(self) -> Clock:
        self._before_bytes = peak_bytes()
        self._wall, self._cpu = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.seen = {
            "wall_s": round(time.perf_counter() - self._wall, 2),
            "cpu_s": round(time.process_time() - self._cpu, 2),
            "peak_before_bytes": self._before_bytes,
            "peak_bytes": peak_bytes(),
        }


def peak_bytes() -> int:
    """Return the peak resident memory of this program so far.

    Linux's getrusage includes the peak of the program that started this one; the kernel's own line does not.
    """
    status = Path("/proc/self/status")
    if status.exists() and (line := re.search(r"VmHWM:\s*(\d+) kB", status.read_text())):
        return int(line.group(1)) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT


def quality(model: torch.nn.Module, job: Job) -> dict[str, float]:
    """Compare a model with the float one on the held-out windows, in float32, for every token after a window's first.

    ``perplexity`` is exp of the mean negative log-likelihood, ``kl`` the mean of KL(float || model) in nats, ``top1``
    the share of tokens for which both predict the same.
    """
    _, windows_NT = job.token_windows()
    sums = torch.zeros(3, dtype=torch.float64)
    with torch.inference_mode(), matmul_precision(torch.device("cpu")):
        for ids_T, float_TV in zip(windows_NT, float_logits(job), strict=True):
            logits_TV = model(input_ids=ids_T[None], use_cache=False).logits[0, :-1].float()
            loss = functional.cross_entropy(logits_TV, ids_T[1:], reduction="sum")
            given = functional.log_softmax(float_TV.float(), dim=-1)
            kl = functional.kl_div(logits_TV.log_softmax(-1), given, reduction="sum", log_target=True)
            same = (logits_TV.argmax(-1) == float_TV.argmax(-1)).sum()
            sums += torch.stack([loss, kl, same]).double()
    loss, kl, same = (sums / (windows_NT.shape[0] * (windows_NT.shape[1] - 1))).tolist()
    return {"perplexity": round(math.exp(loss), 4), "kl": round(kl, 5), "top1": round(same, 4)}


def float_logits(job: Job) -> Iterator[torch.Tensor]:
    """Yield the logits [T - 1, V] of the float model for each held-out window, as it computes them in bfloat16."""
    if not job.float_logits.exists():
        _write_float_logits(job)
    for window in range(len(job.token_windows()[1])):
        yield load_file(job.float_logits / f"{window}.safetensors")["logits"]


def _write_float_logits(job: Job) -> None:
    """Write the logits of every window. ``quality`` calls it where it has set how products are computed."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(job.model_dir, dtype=torch.bfloat16).eval()
    scratch = job.float_logits.with_suffix(f".{os.getpid()}")
    scratch.mkdir()
    for window, ids_T in enumerate(job.token_windows()[1]):
        logits_TV = model(input_ids=ids_T[None], use_cache=False).logits[0, :-1].contiguous()
        save_file({"logits": logits_TV}, scratch / f"{window}.safetensors")
    scratch.rename(job.float_logits)


def start() -> Job:
    """Return the job named on the command line, after setting one thread and no network."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return Job.read(Path(sys.argv[1]))


def finish(
    job: Job, *, load: Clock | None = None, quantize: Clock, evaluate: Clock, quality: dict[str, float],
    packages: Iterable[str], settings: dict[str, Any], note: str = "", **more: Any,
) -> None:  # fmt: skip
    """Write the row. ``load`` is None if loading is part of the quantize step.

    ``settings`` are the engine's options other than defaults, under its own names; ``note`` is a hint for readers of
    the table.
    """
    row = {
        **quality,
        "quantize": quantize.seen,
        "load": None if load is None else load.seen,
        "evaluate": evaluate.seen,
        "settings": settings,
        "note": note,
        "versions": {name: version(name) for name in ("torch", "transformers", *packages)},
        **more,
    }
    job.result.write_text(json.dumps(row), "utf-8")
