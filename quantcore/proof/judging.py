"""From what a job left behind to what its gates say."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantcore.blockwise.smoother import MAX_UPDATE_CHANGE
from quantcore.checkpoint.artifact import differing_side_files
from quantcore.checkpoint.headers import ModelHeaders
from quantcore.checkpoint.source import TORCH_DTYPES
from quantcore.config.task import Task
from quantcore.errors import GateError
from quantcore.events import Emit, GatesJudged, LayerQuantized, Warned
from quantcore.export import EXPORTERS, Container
from quantcore.plan.resolve import Plan, export_dir
from quantcore.proof.expectation import Expectation
from quantcore.proof.gates import Evidence, GateResult, failed, judge
from quantcore.proof.verify import Proof


@dataclass
class Outcome:
    """What the quantizing pass leaves behind besides the written tensors.

    ``provenance``: see there. ``overlap``: the share of the held-out text that calibration saw, None where nothing was
    learned from text. ``num_shards``: in how many slices blocks lay on the processes, 1 where each held them whole.
    """

    expected: Expectation
    layers: list[LayerQuantized]
    warnings: list[Warned]
    edges: list[dict[str, Any]]
    provenance: dict[str, Any]
    overlap: float | None
    num_shards: int = 1


def judge_result(
    task: Task, headers: ModelHeaders, plan: Plan, folder: Path, outcome: Outcome, proofs: dict[str, Proof]
) -> list[GateResult]:
    """What the gates say of the files in ``folder``; nothing if they are off."""
    if task.gate == "off":
        return []
    exports = {name: export_dir(folder, plan, name) for name in plan.exports}
    tensors_alone = {name: path for name, path in exports.items() if not isinstance(EXPORTERS.get(name), Container)}
    return judge(
        Evidence(
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


def tell_gates(task: Task, results: list[GateResult], emit: Emit) -> None:
    """Say what the gates found. Raises GateError if one failed and the task takes that for a failure."""
    if task.gate == "off":
        return
    emit(GatesJudged(task.gate, [row.to_dict() for row in results]))
    missed = [
        f"{row.gate} {row.name}: {row.value} where {row.limit} is allowed ({row.detail})" for row in failed(results)
    ]
    if missed and task.gate == "fail":
        raise GateError(
            f"The result misses {len(missed)} limit(s): {'; '.join(missed)}.",
            code="gate_failed",
            hint="The artifact was kept apart as rejected. Take a finer scheme, an algorithm or more calibration text;"
            " or gate: warn.",
        )
    for row in missed:
        emit(Warned("gate_failed", row))


def weights_bytes(folder: Path) -> int:
    """Bytes of the tensors in the safetensors files of ``folder``: all that lies behind the files' headers."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            total += path.stat().st_size - 8 - int.from_bytes(file.read(8), "little")
    return total
