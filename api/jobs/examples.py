"""The examples of the OpenAPI document: requests and a response."""

from __future__ import annotations

from typing import Any

from quantcore.config.job_spec import JobOptions

PLAN_REQUEST: dict[str, Any] = {
    "model": {"path": "/models/SmolLM2-135M-Instruct"},
    "config": {"preset": "w4a16"},
    "export": ["compressed_tensors"],
}

PUBLISH: dict[str, Any] = {"repo_id": "org/SmolLM2-135M-Instruct-w4a16", "private": True, "hub_token": "team"}

PLAN_ON_REQUEST: dict[str, Any] = {
    **PLAN_REQUEST,
    "hardware": {"devices": "8x80GB", "nodes": 2, "host_memory": "1TB", "disk": "4TB"},
}

JOB_REQUEST: dict[str, Any] = {
    **PLAN_REQUEST,
    "name": "nightly",
    "labels": {"team": "search"},
    "priority": 7,
    "limits": {"max_runtime_s": 7200, "max_pending_s": 3600},
    "evaluation": {"source": "wikitext", "split": "test", "num_windows": 64},
    "publish": PUBLISH,
}

OPTIONS = JobOptions(export=("compressed_tensors",))

JOB: dict[str, Any] = {
    "id": "job_01a200dc5edf7cfaa251b183f95c582d",
    "name": "nightly",
    "labels": {"team": "search"},
    "priority": 7,
    "pinned": False,
    "limits": {"max_runtime_s": 7200, "max_pending_s": 3600},
    "state": "running",
    "state_times": {"queued": "2026-11-22T08:00:00Z", "running": "2026-11-22T08:00:02Z"},
    "waiting_reason": None,
    "queue_position": None,
    "allocation": None,
    "phase": "quantize",
    "progress": {"phase": "quantize", "done": 12, "total": 30, "unit": "block", "eta_s": 40.5},
    "eta_s": 68.0,
    "phases": [
        {
            "name": "quantize",
            "state": "running",
            "started_at": "2026-11-22T08:00:05Z",
            "ended_at": None,
            "done": 12,
            "total": 30,
            "unit": "block",
        }
    ],
    "model": {"path": "/models/SmolLM2-135M-Instruct"},
    "preset": "w4a16",
    "config": {"global_quant_config": {"weight": {"dtype": "uint4", "qscheme": "per_group", "group_size": 128}}},
    "mix": None,
    **OPTIONS.model_dump(mode="json"),
    **{
        name: getattr(OPTIONS, name).model_dump(mode="json", exclude_none=True)
        for name in ("calibration", "evaluation")
    },
    "needs_memory_bytes": 1200000000,
    "avoid_host": None,
    "progress_kept_until": None,
    "cloned_from": None,
    "sweep_id": None,
    "sweep_values": None,
    "submitted_by": {"key_id": "0123456789ab", "name": "nightly pipeline"},
    "attempt": 1,
    "created_at": "2026-11-22T08:00:00Z",
    "started_at": "2026-11-22T08:00:02Z",
    "finished_at": None,
    "error": None,
    "summary": None,
    "artifact": None,
    "publish": PUBLISH,
    "publication": None,
    "cancel_requested": False,
}
