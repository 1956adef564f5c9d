"""What travels with an artifact beside its weights: what was done, how good it is, how to do it again.

``report.json`` holds all of it (its schema is docs/report.schema.json); ``report.html`` and the model card
``README.md`` show it to people, ``reproduce.sh`` makes the same weights once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quantcore.checkpoint.artifact import write_json
from quantcore.evaluation.card import model_card
from quantcore.evaluation.gates import GateResult
from quantcore.evaluation.html import page
from quantcore.evaluation.judging import Outcome
from quantcore.evaluation.proof import Proof
from quantcore.evaluation.reproduce import script
from quantcore.export.loading import load_lines
from quantcore.plan import Plan
from quantcore.runtime.devices import peak_memory_bytes
from quantcore.task import Task

SCHEMA_VERSION = 2


def build_report(
    task: Task,
    plan: Plan,
    outcome: Outcome,
    proofs: dict[str, Proof],
    gates: list[GateResult],
    *,
    mixed: dict[str, Any] | None = None,
    quantize_s: float,
    total_s: float,
    peaks_bytes: Sequence[int],
) -> dict[str, Any]:
    """The whole report as JSON data; ``summary`` is what a table shows. Times in seconds, sizes in bytes.

    ``mixed``: what the config was chosen from, if it was (see ``mixing.command.choose``). ``peaks_bytes``: the most
    memory that each process of the job held until all weights were written.
    """
    main = proofs[plan.main_export]
    return {
        "schema_version": SCHEMA_VERSION,
        "summary": {
            "size_before_bytes": plan.size_before_bytes,
            "size_after_bytes": plan.size_after_bytes,
            **_quality_in_short(main),
            **_layers_in_short(plan, outcome),
            **(_mix_in_short(mixed["mix"]) if mixed else {}),
            "quantize_s": round(quantize_s, 2),
            "total_s": round(total_s, 2),
            "executor": plan.executor,
            "peak_memory_bytes": peak_memory_bytes(),
            "planned_peak_memory_bytes": plan.peak_memory_bytes,
            **_memory_by_rank(plan, outcome.num_shards, peaks_bytes),
            "gate": task.gate,
            "gates": [row.to_dict() for row in gates],
            "exports": {name: _export(plan, name, proofs[name]) for name in plan.exports},
        },
        "model": _model(task) | {"model_type": plan.model_type},
        "config": task.config.to_dict(),
        "mix": mixed and _mix(mixed),
        "calibration": task.calibration.model_dump(mode="json", exclude_none=True),
        "evaluation": task.evaluation.model_dump(mode="json"),
        "proof": {name: proof.to_dict() for name, proof in proofs.items()},
        "quality": main.quality,
        "samples": main.samples,
        "harness": main.harness,
        "layers": [layer.to_dict() for layer in outcome.layers],
        "edges": outcome.edges,
        "kept": [asdict(entry) for entry in plan.kept],
        "warnings": [*plan.warnings, *(warning.message for warning in outcome.warnings)],
        "provenance": {name: value for name, value in outcome.provenance.items() if name != "environment"},
        "environment": outcome.provenance["environment"],
    }


def write_report(task: Task, folder: Path, report: dict[str, Any]) -> None:
    """The report in its four forms."""
    write_json(folder / "report.json", report)
    (folder / "report.html").write_text(page(report), "utf-8")
    (folder / "README.md").write_text(model_card(report, task.model_folder), "utf-8")
    reproduce = folder / "reproduce.sh"
    reproduce.write_text(script(task, folder), "utf-8")
    reproduce.chmod(0o755)


def _quality_in_short(main: Proof) -> dict[str, Any]:
    if main.quality is None:
        return {"perplexity_before": None, "perplexity_after": None, "perplexity_ratio": None, "kl_mean": None}
    return {
        "perplexity_before": main.quality["before"]["token_perplexity"]["value"],
        "perplexity_after": main.perplexity,
        "perplexity_ratio": main.quality["ratio"]["value"],
        "kl_mean": main.quality["divergence"]["kl_mean"]["value"],
    }


def _layers_in_short(plan: Plan, outcome: Outcome) -> dict[str, Any]:
    worst = max(outcome.layers, key=lambda layer: layer.relative_error)
    return {
        "worst_layer": {"name": worst.name, "relative_error": worst.relative_error, "sqnr_db": worst.sqnr_db},
        "num_layers_quantized": len(plan.layers),
        "num_layers_kept": len(plan.kept),
    }


def _mix(mixed: dict[str, Any]) -> dict[str, Any]:
    return {"asked": mixed["asked"], "chosen": mixed["mix"], "uniform": mixed["uniform"], "frontier": mixed["frontier"]}


def _mix_in_short(chosen: dict[str, Any]) -> dict[str, Any]:
    """``kl_mean`` is of the mix with weights rounded plainly; that of the result may be less."""
    kl_mean = chosen["measured"]["divergence"]["kl_mean"]["value"]
    return {"mix": {"layers": chosen["layers"], "bits": chosen["bits"], "loss": chosen["loss"], "kl_mean": kl_mean}}


def _memory_by_rank(plan: Plan, num_shards: int, peaks_bytes: Sequence[int]) -> dict[str, Any]:
    """Of several processes, what each held beside what was planned for it."""
    if len(peaks_bytes) == 1:
        return {}
    planned = sum(plan.memory_of_rank(len(peaks_bytes), num_shards).values())
    rows = [
        {"rank": rank, "peak_memory_bytes": peak, "planned_peak_memory_bytes": planned}
        for rank, peak in enumerate(peaks_bytes)
    ]
    return {"ranks": rows}


def _model(task: Task) -> dict[str, str]:
    """Where the float model is from: enough to get the same bytes again."""
    if task.model_id:
        return {"id": task.model_id, "sha": task.revision}
    return {"path": str(task.model_folder)}


def _export(plan: Plan, name: str, proof: Proof) -> dict[str, Any]:
    path = "." if len(plan.exports) == 1 else name
    return {
        "path": path,
        "bytes": sum(layout.num_bytes for layout in plan.layouts[name].values()),
        "load": load_lines(name, plan.layers, path, proof.consumer_check),
    }
