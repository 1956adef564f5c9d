"""Runs tasks of lm-evaluation-harness on vLLM, in vLLM's environment (see ``inside_env``)."""

from __future__ import annotations

import os
from importlib import import_module, metadata
from typing import Any

ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """Return the harness's ``results``, and the ``versions`` of both programs."""
    os.environ["OMP_NUM_THREADS"] = str(task["num_threads"])
    import vllm
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    _load_harness(vllm.__version__)

    results: Any = simple_evaluate(
        model="vllm",
        model_args={
            "pretrained": task["model"],
            "dtype": "auto",
            "enforce_eager": True,
            "kv_cache_dtype": task["kv_cache_dtype"],
        },
        tasks=task["tasks"],
        limit=task["limit"],
        num_fewshot=task["num_fewshot"],
        batch_size="auto",
        task_manager=TaskManager(verbosity="ERROR", include_path=task["include_path"]),
        bootstrap_iters=1000,
        log_samples=False,
    )
    versions = {"vllm": vllm.__version__, "lm_eval": metadata.version("lm_eval")}
    return {"results": results["results"], "versions": versions}


def _load_harness(version: str) -> None:
    """Import the harness with the version of the package vllm patched: builds for CPUs have another package name."""
    from vllm.platforms import current_platform

    _ = current_platform.device_type  # vLLM itself looks up its version, too, and must get the true one
    packaged = metadata.version
    metadata.version = lambda name: version if name == "vllm" else packaged(name)  # type: ignore[assignment]
    import_module("lm_eval.models.vllm_causallms")
    metadata.version = packaged
