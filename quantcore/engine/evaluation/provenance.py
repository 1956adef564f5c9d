"""Records the origin of a result, so that model and text can be recognized and the weights reproduced."""

from __future__ import annotations

import hashlib
import json
import platform
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import quantcore
from quantcore.checkpoint.artifact import sha256
from quantcore.checkpoint.folder import find_gguf, gguf_parts
from quantcore.config.task import Task
from quantcore.engine.runtime.devices import default_device
from quantcore.tensors.hashing import tensor_sha256

MAX_HASHED_BYTES = 20 << 30
"""Size above which models in folders are identified by names, sizes and times of files: hashing would take minutes."""
VERSIONS = ("torch", "transformers", "safetensors")


def environment() -> dict[str, str]:
    """Return what computed the result: programs, device, instructions of the processor, number of threads.

    Any other may sum in another order, and so round otherwise.
    """
    return {
        **_programs(),
        "device": str(default_device()),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
    }


@cache
def _programs() -> dict[str, str]:
    return {
        "quantcore": quantcore.__version__,
        "python": platform.python_version(),
        **{name: version(name) for name in VERSIONS},
    }


def provenance(task: Task, calibration_NT: torch.Tensor, held_out_NT: torch.Tensor) -> dict[str, Any]:
    """Return the origin of a result: identity of the model, digests of the tokens and the config, seed, environment."""
    config = json.dumps(task.config.to_dict(), sort_keys=True)
    return {
        "model": model_identity(task),
        "calibration_sha256": tensor_sha256(calibration_NT),
        "held_out_sha256": tensor_sha256(held_out_NT),
        "config_sha256": hashlib.sha256(config.encode()).hexdigest(),
        "seed": str(task.calibration.seed),
        "environment": environment(),
    }


def model_identity(task: Task) -> str:
    """Return an identity of the model's bytes: ``hub:ID@COMMIT``, or ``identity_of`` the folder.

    That of a merged model ends in ``+adapter:`` and the digest of the adapter.
    """
    base = f"hub:{task.model_id}@{task.revision}" if task.model_id else identity_of(task.model_folder)
    return base if task.adapter is None else f"{base}+adapter:{task.adapter.digest}"


def identity_of(folder: Path) -> str:
    """Return ``sha256:...`` of config and weights; ``stat:...`` for very large ones."""
    files = model_files(folder)
    if sum(path.stat().st_size for path in files) > MAX_HASHED_BYTES:
        parts = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
        return f"stat:{hashlib.sha256(json.dumps(parts).encode()).hexdigest()}"
    hashed = [(path.name, sha256(path)) for path in files]
    return f"sha256:{hashlib.sha256(json.dumps(hashed).encode()).hexdigest()}"


def model_files(folder: Path) -> list[Path]:
    """Return the GGUF file or all its parts, or config.json and the weights."""
    gguf_file = find_gguf(folder)
    if gguf_file is not None:
        return gguf_parts(gguf_file)
    return [folder / "config.json", *sorted(folder.glob("*.safetensors"))]
