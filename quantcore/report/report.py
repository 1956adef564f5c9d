"""What travels with an artifact beside its weights: what was done, how good it is, how to do it again.

``report.json`` holds all of it (its schema is docs/report.schema.json); ``report.html`` and the model card
``README.md`` show it to people, ``reproduce.sh`` makes the same weights once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantcore.checkpoint.artifact import write_json
from quantcore.config.task import Task
from quantcore.events import Warned
from quantcore.export.loading import load_lines
from quantcore.plan.resolve import Plan
from quantcore.proof.gates import GateResult
from quantcore.proof.judging import Outcome
from quantcore.proof.verify import Proof
from quantcore.report.card import model_card
from quantcore.report.html import page
from quantcore.report.reproduce import script

SCHEMA_VERSION = 2


@dataclass(frozen=True)
class Peaks:
    """The most memory that was held: by the process of each rank while it quantized; by the process that verifies and
    the one that waits for it together."""

    of_ranks: Sequence[int]
    verify: int


def build_report(
    task: Task,
    plan: Plan,
    outcome: Outcome,
    proofs: dict[str, Proof],
    gates: list[GateResult],
    said: Sequence[Warned],
    *,
    mixed: dict[str, Any] | None = None,
    quantize_s: float,
    total_s: float,
    peaks_bytes: Peaks,
) -> dict[str, Any]:
    """The whole report as JSON data; ``summary`` is what a table shows. Times in seconds, sizes in bytes.

    ``said``: every warning of this run; an earlier run that it goes on from left its own in ``outcome``. ``mixed``:
    what the config was chosen from, if it was (see ``mixing.command.choose``).
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
            **_memory(plan, outcome.num_shards, peaks_bytes),
            "failed_tasks": main.failed_tasks,
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
        "kept": [{"name": entry.name, "reason": entry.reason} for entry in plan.kept],
        "warnings": list(dict.fromkeys([*plan.warnings, *(one.message for one in (*outcome.warnings, *said))])),
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
        "num_layers_kept": sum(entry.is_layer for entry in plan.kept),
    }


def _mix(mixed: dict[str, Any]) -> dict[str, Any]:
    return {"asked": mixed["asked"], "chosen": mixed["mix"], "uniform": mixed["uniform"], "frontier": mixed["frontier"]}


def _mix_in_short(chosen: dict[str, Any]) -> dict[str, Any]:
    """``kl_mean`` is of the mix with weights rounded plainly; that of the result may be less."""
    kl_mean = chosen["measured"]["divergence"]["kl_mean"]["value"]
    return {"mix": {"layers": chosen["layers"], "bits": chosen["bits"], "loss": chosen["loss"], "kl_mean": kl_mean}}


def _memory(plan: Plan, num_shards: int, peaks_bytes: Peaks) -> dict[str, Any]:
    """The most memory that all processes held together, in each phase and in all, beside what was planned; of several
    processes also that of each."""
    ranks = peaks_bytes.of_ranks
    planned = sum(plan.memory_of_rank(len(ranks), num_shards).values())
    phases = {
        "quantize": _beside(sum(ranks), planned * len(ranks)),
        "verify": _beside(peaks_bytes.verify, sum(plan.memory_by_phase["verify"].values())),
    }
    rows = [{"rank": rank, **_beside(peak, planned)} for rank, peak in enumerate(ranks)]
    most = {name: max(one[name] for one in phases.values()) for name in _beside(0, 0)}
    return most | {"memory_by_phase": phases} | ({"ranks": rows} if len(rows) > 1 else {})


def _beside(peak: int, planned: int) -> dict[str, int]:
    return {"peak_memory_bytes": peak, "planned_peak_memory_bytes": planned}


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
