"""Shared parts of every engine's process: its job, the clock, the perplexity, the row of results.

This runs in the environments of the peers, so it uses only torch, safetensors and the standard library.
"""

from __future__ import annotations

import json
import math
import os
import re
import resource
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.nn import functional

RSS_UNIT = 1 if sys.platform == "darwin" else 1024


@dataclass(frozen=True)
class Job:
    """The job of an engine's process: one cell. ``result`` is the file for the row, ``scratch`` an empty folder."""

    model_dir: Path
    windows: Path
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


PATHS = ("model_dir", "windows", "scratch", "result")


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


def perplexity(model: torch.nn.Module, windows_NT: torch.Tensor) -> float:
    """Return exp of the mean negative log-likelihood of every token after a window's first; the loss is in float32."""
    total = 0.0
    with torch.inference_mode():
        for ids_T in windows_NT:
            logits_TV = model(input_ids=ids_T[None], use_cache=False).logits[0, :-1].float()
            total += functional.cross_entropy(logits_TV, ids_T[1:], reduction="sum").item()
    return math.exp(total / (windows_NT.shape[0] * (windows_NT.shape[1] - 1)))


def start() -> Job:
    """Return the job named on the command line, after setting one thread and no network."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return Job.read(Path(sys.argv[1]))


def finish(
    job: Job, *, load: Clock | None = None, quantize: Clock, evaluate: Clock, perplexity: float,
    packages: Iterable[str], settings: dict[str, Any], note: str = "", **more: Any,
) -> None:  # fmt: skip
    """Write the row. ``load`` is None if loading is part of the quantize step.

    ``settings`` are the engine's options other than defaults, under its own names; ``note`` is a hint for readers of
    the table.
    """
    row = {
        "perplexity": round(perplexity, 4),
        "quantize": quantize.seen,
        "load": None if load is None else load.seen,
        "evaluate": evaluate.seen,
        "settings": settings,
        "note": note,
        "versions": {name: version(name) for name in ("torch", "transformers", *packages)},
        **more,
    }
    job.result.write_text(json.dumps(row), "utf-8")
