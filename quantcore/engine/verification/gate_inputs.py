"""Applies the quality gates to the result of a job."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantcore.checkpoint.headers import ModelHeaders
from quantcore.checkpoint.side_files import differing_side_files
from quantcore.config.task import Task
from quantcore.engine.blockwise.distillation import Distilled
from quantcore.engine.blockwise.smoother import MAX_UPDATE_CHANGE
from quantcore.engine.verification.expectation import ExpectedDigests
from quantcore.engine.verification.gates import GateInputs, failed, judge
from quantcore.engine.verification.verify import Proof
from quantcore.errors import GateError
from quantcore.events import Emit, GatesJudged, LayerQuantized, Warned
from quantcore.export import EXPORTERS, Container
from quantcore.plan.planner import Plan, export_dir
from quantcore.report.gate_result import GateResult
from quantcore.report.values import Report
from quantcore.tensors.source import TORCH_DTYPES

_REMEDY = "--quant_algo gptq, a scheme with more bits or more calibration text"


@dataclass
class Outcome:
    """The result of the quantizing pass besides the written tensors.

    ``provenance`` comes from ``engine.evaluation.provenance``. ``overlap`` is the share of the held-out text that
    calibration saw, None if nothing was learned from text. ``num_shards`` is the number of processes that shared each
    block, 1 if each held it whole. ``distilled``: the result of scale-only distillation, if the job has that.
    """

    expected: ExpectedDigests
    layers: list[LayerQuantized]
    warnings: list[Warned]
    edges: list[dict[str, Any]]
    provenance: dict[str, Any]
    overlap: float | None
    num_shards: int = 1
    distilled: Distilled | None = None


def judge_result(
    task: Task, headers: ModelHeaders, plan: Plan, folder: Path, outcome: Outcome, proofs: dict[str, Proof]
) -> list[GateResult]:
    """Return the gates' results for the files in ``folder``; an empty list if the gates are off."""
    if task.gate == "off":
        return []
    exports = {name: export_dir(folder, plan, name) for name in plan.exports}
    tensors_alone = {name: path for name, path in exports.items() if not isinstance(EXPORTERS.get(name), Container)}
    return judge(
        GateInputs(
            plan=plan,
            layers=outcome.layers,
            warnings=outcome.warnings,
            edges=outcome.edges,
            proofs=proofs,
            compares=task.config.compares,
            fold_tolerance=MAX_UPDATE_CHANGE[TORCH_DTYPES[headers.main_dtype]],
            differing_files=[
                f"{name}/{file}"
                for name, path in exports.items()
                if (path / "config.json").exists()
                for file in differing_side_files(task.model_folder, path)
            ],
            overlap=outcome.overlap,
            sizes={
                name: (weights_bytes(path), sum(layout.num_bytes for layout in plan.layouts[name].values()))
                for name, path in tensors_alone.items()
            },
            missing_provenance=[name for name, value in outcome.provenance.items() if not value],
        )
    )


def tell_gates(task: Task, report: Report, emit: Emit) -> None:
    """Report the outcome of the gates. Raises GateError if one failed and the task treats that as a failure."""
    if task.gate == "off":
        return
    gates, verdict = report.summary.gates, report.summary.verdict
    rows = [row.to_dict() for row in gates]
    missed = [gate.sentence for gate in failed(gates)]
    if not missed or task.gate != "fail":
        emit(GatesJudged(task.gate, rows))
        for sentence in missed:
            emit(Warned("gate_failed", sentence))
        return
    samples = None if report.samples is None else [sample.to_dict() for sample in report.samples]
    emit(GatesJudged(task.gate, rows, None if verdict is None else verdict.to_dict(), samples))
    remedy = "a larger size, a lower recovery or more time" if task.goal else _REMEDY
    raise GateError(
        " ".join(missed),
        code="gate_failed",
        hint=f"The artifact is kept in a folder whose name ends in '.rejected'. Try {remedy} or --gate warn.",
    )


def weights_bytes(folder: Path) -> int:
    """Return the bytes of the tensors in the safetensors files of ``folder``, without the files' headers."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            total += path.stat().st_size - 8 - int.from_bytes(file.read(8), "little")
    return total
