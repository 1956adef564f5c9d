"""Builds the report of a job and writes it beside the weights.

``report.json`` holds all of it (its schema is docs/report.schema.json). ``report.html`` and the model card
``README.md`` show it to people. ``reproduce.sh`` makes the same weights again.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quantcore.checkpoint.adapter import Adapter
from quantcore.checkpoint.artifact import write_json
from quantcore.checkpoint.experts import EXPERT
from quantcore.checkpoint.folder import find_gguf
from quantcore.checkpoint.side_files import MODULES
from quantcore.config.recipes import advice_on
from quantcore.config.task import AdapterSource, Task
from quantcore.config.texts import CalibrationConfig
from quantcore.config.verdict_levels import POOR
from quantcore.engine.calibration.experts import hardly_seen
from quantcore.engine.model.kinds import loading_class
from quantcore.engine.pipeline.context import RunContext, RunLog
from quantcore.engine.pipeline.layer_step import LayerSizes, more_bits
from quantcore.engine.pipeline.reproduce import script
from quantcore.engine.verification.fresh_process import Proved
from quantcore.engine.verification.gate_inputs import Outcome
from quantcore.engine.verification.verify import Proof
from quantcore.export.gguf.tensor_names import has_own_layout
from quantcore.export.loading import LoadedModel, known_refusals, load_lines, program_lines
from quantcore.plan.planner import Plan, export_dir
from quantcore.report.card import model_card
from quantcore.report.gate_result import GateResult
from quantcore.report.html import page
from quantcore.report.layer import LayerError
from quantcore.report.quality import Quality, Verdict
from quantcore.report.values import (
    SCHEMA_VERSION,
    ChosenMix,
    Distillation,
    ExpertCoverage,
    ExportProof,
    ExportSummary,
    KeptTensor,
    MemoryUse,
    MergedAdapter,
    Mix,
    MixBudget,
    MixScheme,
    MixSummary,
    PhaseMemory,
    Provenance,
    RankMemory,
    Report,
    SourceModel,
    Summary,
    WeightGrid,
    WorstLayer,
)
from quantcore.report.verdict import judge_quality, steps_of, with_behaviour, with_failed_gates


def build_report(
    context: RunContext, outcome: Outcome, proved: Proved, gates: Sequence[GateResult], log: RunLog
) -> Report:
    """Build the report of a job whose files have been verified.

    An earlier run that this one resumed left its warnings in ``outcome``.
    """
    task, plan, proofs = context.task, context.plan, proved.proofs
    main = proofs[plan.main_export]
    mix = None if log.mixed is None else _mix(log.mixed)
    warned = (warning.message for warning in (*outcome.warnings, *log.warnings))
    has_modules = (context.folder / MODULES).is_file()
    loaded = LoadedModel(plan.model_type, loading_class(context.model.headers.config), has_modules)
    return Report(
        schema_version=SCHEMA_VERSION,
        summary=Summary(
            size_before_bytes=plan.size_before_bytes,
            size_after_bytes=plan.size_after_bytes,
            float_bytes=plan.float_bytes if plan.float_bytes != plan.size_before_bytes else None,
            **_quality_in_short(main.quality),
            verdict=None if main.quality is None else _verdict(main, main.quality, task, plan, gates),
            worst_layer=_worst_layer(outcome),
            num_layers_quantized=len(plan.layers),
            num_layers_kept=sum(entry.is_layer for entry in plan.kept),
            **_mix_in_short(mix),
            quantize_s=round(log.quantize_s, 2),
            total_s=round(log.total_s, 2),
            seconds_by_phase=log.emit.seconds,
            executor=plan.executor,
            **_memory(plan, outcome.num_shards, log.peaks_bytes, proved.peak_memory_bytes),
            failed_tasks=main.failed_tasks,
            gate=task.gate,
            gates=tuple(gates),
            exports={name: _export(plan, context.folder, name, proofs[name], loaded) for name in plan.exports},
        ),
        model=_source(context),
        config=task.config.to_dict(),
        mix=mix,
        calibration=_calibration(task.calibration),
        evaluation=task.evaluation.model_dump(mode="json"),
        proof={name: _proof(proof) for name, proof in proofs.items()},
        quality=main.quality,
        **_of_some_kinds(main),
        samples=main.samples,
        harness=main.harness,
        **_layers(context, outcome),
        **_expert_coverage(outcome),
        distillation=_distillation(outcome),
        edges=tuple(outcome.edges),
        kept=tuple(KeptTensor(name=entry.name, reason=entry.reason) for entry in plan.kept),
        warnings=tuple(dict.fromkeys([*plan.warnings, *warned])),
        provenance=Provenance(**{name: text for name, text in outcome.provenance.items() if name != "environment"}),
        environment=outcome.provenance["environment"],
    )


def _calibration(calibration: CalibrationConfig) -> dict[str, Any]:
    """Return the calibration text as it was asked for; of several sources also the number of windows of each."""
    asked = calibration.model_dump(mode="json", exclude_none=True)
    for source, count in zip(asked.get("sources", ()), calibration.counts, strict=False):
        source["num_samples"] = count
    return asked


def write_report(task: Task, folder: Path, report: Report) -> None:
    """Write the report in its four forms."""
    write_json(folder / "report.json", report.to_dict())
    (folder / "report.html").write_text(page(report), "utf-8")
    (folder / "README.md").write_text(model_card(report, task.model_folder), "utf-8")
    reproduce = folder / "reproduce.sh"
    reproduce.write_text(script(task, folder), "utf-8")
    with reproduce.open("rb") as file:
        if hasattr(os, "fchmod"):  # Windows has no such right
            os.fchmod(file.fileno(), 0o755)  # in a sandbox chmod, which takes a path, does nothing


def _verdict(proof: Proof, quality: Quality, task: Task, plan: Plan, gates: Sequence[GateResult]) -> Verdict:
    """Return the verdict on a result, with advice if it is a poor one."""
    verdict = with_failed_gates(judge_quality(quality, proof.harness, proof.answers), quality, gates)
    verdict = with_behaviour(verdict, quality, proof.behaviour)
    if verdict.level not in POOR:
        return verdict
    advice = advice_on(task.config, plan.main_export)
    if task.adapter is not None:  # a goal is searched for without one
        advice = tuple(each for each in advice if "goal" not in each.changes)
    return Verdict(
        level=verdict.level,
        reason=verdict.reason,
        sentence=verdict.sentence,
        advice=" ".join(text for text, _ in advice),
        steps=steps_of(advice),
    )


def _quality_in_short(quality: Quality | None) -> dict[str, Any]:
    return {
        "perplexity_before": quality and quality.before.token_perplexity.value,
        "perplexity_after": quality and quality.after.token_perplexity.value,
        "perplexity_ratio": quality and quality.ratio.value,
        "perplexity_ratio_stderr": quality and quality.ratio.stderr,
        "kl_mean": quality and quality.divergence.kl_mean.value,
        "kl_stderr": quality and quality.divergence.kl_mean.stderr,
    }


def _of_some_kinds(main: Proof) -> dict[str, Any]:
    """Return the results that only some kinds of models or of schemes have."""
    found = {
        "encoder": main.encoder,
        "drafts": main.drafts,
        "kv_caches": main.kv_caches,
        "answers": main.answers,
        "behaviour": main.behaviour,
        "clipping": main.clipped_by_kind or None,
    }
    return {name: value for name, value in found.items() if value is not None}


def _layers(context: RunContext, outcome: Outcome) -> dict[str, Any]:
    """Return the errors and sizes of the layers, and the step that gives more bits to the worst of them."""
    plan, tensors = context.plan, context.model.headers.tensors
    errors = LayerSizes(plan, tensors).added_to(LayerError(**layer.to_dict()) for layer in outcome.layers)
    step = more_bits(context.task.config, plan, tensors, errors)
    return {"layers": errors} | ({} if step is None else {"more_bits": step})


def _expert_coverage(outcome: Outcome) -> dict[str, Any]:
    matches = {layer.name: match for layer in outcome.layers if (match := EXPERT.match(layer.name))}
    experts = {name: match.group("moe", "index") for name, match in matches.items()}
    seen = [layer for layer in outcome.layers if layer.name in experts and layer.num_tokens is not None]
    if not seen:
        return {}
    counts = {experts[layer.name]: layer.num_tokens or 0 for layer in seen}
    covered = counts.keys() - {experts[name] for name in hardly_seen(outcome.layers)}
    return {
        "experts": ExpertCoverage(
            num_experts=len(counts), fewest_tokens=min(counts.values()), share_covered=len(covered) / len(counts)
        )
    }


def _worst_layer(outcome: Outcome) -> WorstLayer:
    """Return the layer with the largest error of its output; of its weight if no output was measured."""
    seen = [(layer.output_error, layer) for layer in outcome.layers if layer.output_error is not None]
    by_error = seen or [(layer.relative_error, layer) for layer in outcome.layers]
    worst = max(by_error, key=lambda pair: pair[0])[1]
    return WorstLayer(
        name=worst.name, relative_error=worst.relative_error, sqnr_db=worst.sqnr_db, output_error=worst.output_error
    )


def _proof(proof: Proof) -> ExportProof:
    return ExportProof(
        num_tensors_equal=proof.num_tensors_equal,
        max_logit_difference=proof.max_logit_difference,
        perplexity=proof.perplexity,
        consumer_check=proof.consumer_check,
    )


def _distillation(outcome: Outcome) -> Distillation | None:
    result = outcome.distilled
    if result is None:
        return None
    after = result.kl_after if math.isfinite(result.kl_after) else None
    return Distillation(kl_before=result.kl_before, kl_after=after, is_kept=result.is_kept)


def _mix(mixed: dict[str, Any]) -> Mix:
    return Mix(
        asked=MixBudget(**mixed["asked"]),
        chosen=ChosenMix(**mixed["mix"]),
        uniform={name: MixScheme(**scheme) for name, scheme in mixed["uniform"].items()},
        frontier=tuple(MixScheme(**scheme) for scheme in mixed["frontier"]),
    )


def _mix_in_short(mix: Mix | None) -> dict[str, Any]:
    """Return the mix for the summary. ``kl_mean`` is measured without an algorithm; that of the result may be lower."""
    if mix is None:
        return {}
    chosen, kl_mean = mix.chosen, mix.chosen.measured.divergence.kl_mean.value
    assert kl_mean is not None
    return {"mix": MixSummary(layers=chosen.layers, bits=chosen.bits, loss=chosen.loss, kl_mean=kl_mean)}


def _memory(plan: Plan, num_shards: int, ranks: Sequence[int], verify: int) -> dict[str, Any]:
    """Return the peak memory of all processes together, in each phase and overall, measured and planned.

    ``ranks``: the peak bytes of each rank's process while it quantized. ``verify``: those of the process that verifies
    together with the one that waits for it. For several processes the result also has the memory of each.
    """
    planned = sum(plan.memory_of_rank(len(ranks), num_shards).values())
    phases = PhaseMemory(
        quantize=_use(sum(ranks), planned * len(ranks)),
        verify=_use(verify, sum(plan.memory_by_phase["verify"].values())),
    )
    uses = [use for _, use in phases.rows]
    rows = tuple(
        RankMemory(rank=rank, peak_memory_bytes=peak, planned_peak_memory_bytes=planned)
        for rank, peak in enumerate(ranks)
    )
    return {
        "peak_memory_bytes": max(use.peak_memory_bytes for use in uses),
        "planned_peak_memory_bytes": max(use.planned_peak_memory_bytes for use in uses),
        "memory_by_phase": phases,
        **({"ranks": rows} if len(rows) > 1 else {}),
    }


def _use(peak: int, planned: int) -> MemoryUse:
    return MemoryUse(peak_memory_bytes=peak, planned_peak_memory_bytes=planned)


def _source(context: RunContext) -> SourceModel:
    """Return the origin of the model: enough to get the same bytes again."""
    task, grids = context.task, context.model.headers.grids
    where = {"id": task.model_id, "sha": task.revision} if task.model_id else {"path": str(task.model_folder)}
    found: dict[str, Any] = {"grids": tuple(WeightGrid(**share.to_dict()) for share in grids)} if grids else {}
    found |= {} if task.adapter is None else {"adapter": _adapter(task.adapter, context.model.adapter)}
    return SourceModel.model_validate({**where, **found, "model_type": context.plan.model_type})


def _adapter(source: AdapterSource, adapter: Adapter | None) -> MergedAdapter:
    assert adapter is not None
    config = adapter.config
    return MergedAdapter(
        **({"id": source.id, "sha": source.revision} if source.id else {"path": str(source.folder)}),
        digest=source.digest,
        method=config.method,
        rank=config.r,
        num_tensors=len(adapter.changes),
        base_model=config.base_model_name_or_path,
    )


def _export(plan: Plan, folder: Path, name: str, proof: Proof, model: LoadedModel) -> ExportSummary:
    path, check = "." if len(plan.exports) == 1 else name, proof.consumer_check
    gguf_file = find_gguf(export_dir(folder, plan, name))
    model_path = path if gguf_file is None else f"{path}/{gguf_file.name}"
    refusals = known_refusals(name, plan.layers, plan.kept_layers, check.not_checked if check.is_refused else None)
    programs = program_lines(
        name, plan.layers, model_path, model, is_read_by_transformers=check.consumer is not None, refusals=refusals
    )
    return ExportSummary(
        path=path,
        bytes=sum(layout.num_bytes for layout in plan.layouts[name].values()),
        load=load_lines(
            programs, model_path, is_ours=name != "gguf" or has_own_layout({"model_type": model.model_type})
        ),
        programs=programs,
        refusals=refusals,
    )
