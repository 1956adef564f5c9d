"""``bitfoundry speed``: speed and memory of a program that serves a model, beside the original."""

from __future__ import annotations

import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quantcore.checkpoint.folder import find_gguf
from quantcore.engine.evaluation.inputs import find_model
from quantcore.engine.runtime.devices import limit_threads
from quantcore.errors import ConfigError
from quantcore.events import Emit, PhaseStarted, Progress
from quantcore.serving.run_in_env import STOPWATCH, kv_cache_dtype, run_in_env


@dataclass(frozen=True)
class Load:
    """Workload of the program: ``batch_size`` prompts of ``prompt_len`` tokens, each continued by ``num_new``.

    It is repeated ``repeats`` times. Raises ConfigError ``invalid_load``.
    """

    prompt_len: int = 256
    num_new: int = 64
    batch_size: int = 1
    repeats: int = 3

    def __post_init__(self) -> None:
        least = {"prompt_len": 1, "num_new": 2, "batch_size": 1, "repeats": 1}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least {bound}.", code="invalid_load")


def speed(
    model: str, against: str | None, load: Load, emit: Emit, *, runtime: str | None = None, python: str = sys.executable
) -> dict[str, Any]:
    """Time ``model``, and ``against`` if there is an original (see ``summarize``); return their ``ratio``, too.

    Models are folders, GGUF files, alone or in a folder, or ids on the Hub. The default ``runtime`` is llama.cpp for
    GGUF files, else Transformers. ``python`` is the interpreter of the program's environment. Raises ConfigError,
    ModelError.
    """
    found = [find_model(name, emit) for name in (model, against) if name is not None]
    paths = [find_gguf(path) or path for path in found]
    chosen = runtime or ("llama_cpp" if paths[0].suffix == ".gguf" else "transformers")
    measured = []
    for number, path in enumerate(paths):
        emit(PhaseStarted("verify"))
        measured.append(summarize(_measured(path, chosen, python, load), load))
        emit(Progress("verify", number + 1, len(paths), "model", None))
    result: dict[str, Any] = {"runtime": chosen, "version": measured[0].pop("version"), "load": asdict(load)}
    result["num_threads"] = limit_threads()
    result["model"] = {"path": model, **measured[0]}
    if against is not None:
        measured[1].pop("version")
        result["against"] = {"path": against, **measured[1]}
        own, other = measured
        result["ratio"] = {
            name: value / other[name] for name, value in own.items() if value is not None and other[name]
        }
    return result


def summarize(seen: dict[str, Any], load: Load) -> dict[str, Any]:
    """Return tokens per second of the prompts and of generation after the first token: medians of the repetitions."""
    prompt_s = statistics.median(seen["first_s"])
    writing_s = statistics.median(whole - first for whole, first in zip(seen["all_s"], seen["first_s"], strict=True))
    return {
        "version": seen["version"],
        "load_s": seen["load_s"],
        "prompt_tokens_per_s": load.batch_size * load.prompt_len / prompt_s,
        "new_tokens_per_s": load.batch_size * (load.num_new - 1) / writing_s if writing_s > 0 else None,
        "peak_memory_bytes": seen["peak_memory_bytes"],
        "peak_device_bytes": seen["peak_device_bytes"],
    }


def _measured(path: Path, runtime: str, python: str, load: Load) -> dict[str, Any]:
    """Run ``stopwatch`` and return its measurements."""
    served = {"model": str(path), "runtime": runtime, "num_threads": limit_threads()}
    task = {**served, "kv_cache_dtype": kv_cache_dtype(path), **asdict(load)}
    return run_in_env(STOPWATCH, task, python=python, program=runtime)
