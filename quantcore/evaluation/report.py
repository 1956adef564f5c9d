"""report.json: what was done, how good it is, and what was seen when the files were read back."""

from __future__ import annotations

import platform
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import quantcore
from quantcore.evaluation.proof import Proof
from quantcore.events import LayerQuantized, Warned
from quantcore.export import EXPORTERS
from quantcore.plan import Plan
from quantcore.runtime.devices import default_device, peak_memory_bytes
from quantcore.task import Task


def build_report(
    task: Task,
    plan: Plan,
    layers: list[LayerQuantized],
    warnings: list[Warned],
    edges: list[dict[str, Any]],
    proofs: dict[str, Proof],
    *,
    quantize_s: float,
    total_s: float,
) -> dict[str, Any]:
    """The whole report as JSON data; ``summary`` is what a table shows. Times in seconds, sizes in bytes."""
    worst = max(layers, key=lambda layer: layer.relative_error)
    quality = proofs[plan.main_export].quality
    before = quality["before"]["token_perplexity"]["value"] if quality else None
    after = proofs[plan.main_export].perplexity
    return {
        "schema_version": 1,
        "summary": {
            "size_before_bytes": plan.size_before_bytes,
            "size_after_bytes": plan.size_after_bytes,
            "perplexity_before": before,
            "perplexity_after": after,
            "perplexity_ratio": after / before if after and before else None,
            "worst_layer": {"name": worst.name, "relative_error": worst.relative_error, "sqnr_db": worst.sqnr_db},
            "num_layers_quantized": len(plan.layers),
            "num_layers_kept": len(plan.kept),
            "quantize_s": round(quantize_s, 2),
            "total_s": round(total_s, 2),
            "peak_memory_bytes": peak_memory_bytes(),
            "planned_peak_memory_bytes": plan.peak_memory_bytes,
            "exports": {name: _export(plan, name) for name in plan.exports},
        },
        "model": _model(task) | {"model_type": plan.model_type},
        "config": task.config.to_dict(),
        "calibration": task.calibration.model_dump(mode="json", exclude_none=True),
        "evaluation": task.evaluation.model_dump(mode="json"),
        "proof": {name: proof.to_dict() for name, proof in proofs.items()},
        "quality": quality,
        "samples": proofs[plan.main_export].samples,
        "layers": [layer.to_dict() for layer in layers],
        "edges": edges,
        "kept": [asdict(entry) for entry in plan.kept],
        "warnings": [*plan.warnings, *(warning.message for warning in warnings)],
        "environment": {
            "quantcore": quantcore.__version__,
            "python": platform.python_version(),
            "torch": version("torch"),
            "transformers": version("transformers"),
            "device": str(default_device()),
        },
    }


def _model(task: Task) -> dict[str, str]:
    """Where the float model is from: enough to get the same bytes again."""
    if task.model_id:
        return {"id": task.model_id, "sha": task.revision}
    return {"path": str(task.model_folder)}


def _export(plan: Plan, name: str) -> dict[str, Any]:
    path = "." if len(plan.exports) == 1 else name
    return {
        "path": path,
        "bytes": sum(layout.num_bytes for layout in plan.layouts[name].values()),
        "load": EXPORTERS.get(name).load_hint(path),
    }
