"""Quality gates: the limits that a result must keep, and the measurements they are compared with.

The ids are those of docs/concepts/proof-and-gates.md; docs/benchmarks.md has the measurements that the limits come
from. Files that differ from the computed results, weights that are not finite, and folding that changes the model fail
a job with any ``gate``: those errors are raised where they occur, and are listed here among the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from quantcore.checkpoint.experts import EXPERT
from quantcore.engine.calibration.experts import hardly_seen
from quantcore.engine.verification.expectation import LOGIT_TOLERANCE
from quantcore.engine.verification.verify import Proof
from quantcore.events import LayerQuantized, Warned
from quantcore.plan.planner import Plan
from quantcore.plan.scheme_limits import SchemeLimits, limits_of
from quantcore.report.gate_result import GateResult, Status
from quantcore.report.quality import Measure

ROUNDING_SHARE = 1.05  # of plain rounding's error: an algorithm may be worse by no more than noise
FALLBACK_SHARE = 0.05  # of the layers
CLIPPED_WARN, CLIPPED_FAIL = 0.001, 0.01
DEGENERATE_SHARE = 0.25  # of the prompts that the original continues well
OVERLAP_SHARE = 0.01
SIZE_SHARE = 0.01
FALLBACKS = ("layer_saw_few_tokens", "layer_never_called", "expert_saw_few_tokens", "solver", "edge_rejected")
"""Codes of the warnings about layers that were not quantized as requested."""


@dataclass(frozen=True)
class GateInputs:
    """Measurements of a finished job that the gates judge.

    ``fold_tolerance`` is the change that moving scales may cause in this dtype. ``differing_files`` are tokenizer files
    that differ from the source's. ``overlap`` is the share of the held-out text that was also used for calibration.
    ``sizes`` are the bytes of the files of each export, actual and planned. ``missing_provenance``: unknown fields.
    """

    plan: Plan
    layers: Sequence[LayerQuantized]
    warnings: Sequence[Warned]
    edges: Sequence[dict[str, Any]]
    proofs: dict[str, Proof]
    compares: bool
    fold_tolerance: float
    differing_files: Sequence[str]
    overlap: float | None
    sizes: dict[str, tuple[int, int]]
    missing_provenance: Sequence[str]

    @property
    def main(self) -> Proof:
        return self.proofs[self.plan.main_export]


def judge(evidence: GateInputs) -> list[GateResult]:
    """Apply every gate, in the order of their ids."""
    return [row for gate in GATES for row in gate(evidence)]


def failed(results: Sequence[GateResult]) -> list[GateResult]:
    return [row for row in results if row.status == "fail"]


def finite_numbers(seen: GateInputs) -> Iterator[GateResult]:
    odd = [f"{name}: {problem}" for name, proof in seen.proofs.items() for problem in proof.invalid_numbers]
    yield _row("G1", "finite_numbers", len(odd), 0, "; ".join(odd[:8]) or "weights, scales and zero points are valid")


def calibration_coverage(seen: GateInputs) -> Iterator[GateResult]:
    if not seen.plan.needs_calibration:
        yield _skipped("G2", "calibration_coverage", "the result does not depend on calibration text")
        return
    poor = [warning.message for warning in seen.warnings if warning.code == "layer_saw_few_tokens"]
    yield _row("G2", "calibration_coverage", len(poor), 0, " | ".join(poor) or "every layer saw enough tokens")
    never = [warning.message for warning in seen.warnings if warning.code == "layer_never_called"]
    if never:
        yield _row("G2", "layers_never_called", len(never), 0, " | ".join(never), worst="warn")
    if any(EXPERT.match(layer.name) for layer in seen.layers):
        hardly = hardly_seen(seen.layers)
        mixtures = [warning.message for warning in seen.warnings if warning.code == "expert_saw_few_tokens"]
        detail = " | ".join([*mixtures, *hardly[:8]]) or "every expert saw enough tokens"
        yield _row("G2", "expert_coverage", len(mixtures) + len(hardly), 0, detail, worst="warn")


def layer_error(seen: GateInputs) -> Iterator[GateResult]:
    limits = limits_of(seen.plan)
    layer = min(seen.layers, key=lambda layer: layer.sqnr_db)
    detail = f"lowest: {layer.name} ({layer.scheme})"
    yield _row("G3", "layer_sqnr_db", layer.sqnr_db, limits.sqnr_db, detail, at_least=True)
    ratios = {
        layer.name: layer.output_error / layer.rounding_error
        for layer in seen.layers
        if layer.output_error is not None and layer.rounding_error
    }
    if not ratios:
        yield _skipped("G3", "not_worse_than_rounding", "codes are rounded to nearest")
        return
    name, ratio = max(ratios.items(), key=lambda item: item[1])
    # Some algorithms fit the float model's output, not the layer's own: then a larger error alone is no fault.
    worst: Status = "warn" if seen.compares else "fail"
    yield _row("G3", "not_worse_than_rounding", ratio, ROUNDING_SHARE, f"worst: {name}", worst=worst)


def fallbacks(seen: GateInputs) -> Iterator[GateResult]:
    messages = [warning.message for warning in seen.warnings if warning.code in FALLBACKS]
    share = len(messages) / max(1, len(seen.layers))
    detail = " | ".join(messages) or "every layer was quantized as requested"
    yield _row("G4", "fallbacks", share, FALLBACK_SHARE, detail)


def clipping(seen: GateInputs) -> Iterator[GateResult]:
    if seen.main.clipping is None:
        yield _skipped("G5", "clipping", "no static activation ranges")
        return
    name, share = seen.main.clipping
    worst: Status = "fail" if share > CLIPPED_FAIL else "warn"
    yield _row("G5", "clipping", share, CLIPPED_WARN, f"most: {name}; it fails above {CLIPPED_FAIL}", worst=worst)


def folding(seen: GateInputs) -> Iterator[GateResult]:
    if not seen.edges:
        yield _skipped("G6", "folding", "no scales were moved")
        return
    largest = max(edge["largest_change_by_folding"] for edge in seen.edges)
    yield _row("G6", "folding", largest, seen.fold_tolerance, "of a block's update, on a test input")


def round_trip(seen: GateInputs) -> Iterator[GateResult]:
    num = sum(proof.num_tensors_equal for proof in seen.proofs.values())
    detail = f"{num} tensors read back are equal bit for bit, none is missing or extra"
    if seen.main.max_logit_difference is None:  # from file to file
        yield _row("G7", "round_trip", 0, 0, f"{detail}; no model was run")
        return
    yield _row("G7", "round_trip", seen.main.max_logit_difference, LOGIT_TOLERANCE, detail)


def quality(seen: GateInputs) -> Iterator[GateResult]:
    measured = seen.main.quality
    if seen.main.encoder is not None:
        yield _skipped("G8", "quality", "there are no limits for embeddings and scores; see the measures in the report")
        return
    if measured is None:
        yield _skipped("G8", "quality", "no evaluation was requested")
        return
    limits, divergence = limits_of(seen.plan), measured.divergence
    yield _measured("perplexity_ratio", measured.ratio, limits.perplexity_ratio, limits)
    yield _measured("kl_mean", divergence.kl_mean, limits.kl_mean, limits)
    yield _measured("top1_agreement", divergence.top1_agreement, limits.top1_agreement, limits, at_least=True)


def generation(seen: GateInputs) -> Iterator[GateResult]:
    if not seen.main.samples:
        yield _skipped("G9", "generation", "no texts were generated: not requested, or the model is too large")
        return
    bad = [text for text in seen.main.samples if text.quantized_is_degenerate and not text.original_is_degenerate]
    num = len(seen.main.samples)
    detail = f"{len(bad)} of {num} texts are empty or repeat one token, unlike the original's"
    yield _row("G9", "generation", len(bad) / num, DEGENERATE_SHARE, detail)


def side_files(seen: GateInputs) -> Iterator[GateResult]:
    detail = ", ".join(seen.differing_files) or "tokenizer, template and generation config equal the source's"
    yield _row("G10", "side_files", len(seen.differing_files), 0, detail)


def overlap(seen: GateInputs) -> Iterator[GateResult]:
    if seen.overlap is None:
        yield _skipped("G11", "overlap", "not measured, or no calibration text was used")
        return
    detail = "share of the held-out text that was also used for calibration"
    yield _row("G11", "overlap", seen.overlap, OVERLAP_SHARE, detail, worst="warn")


def provenance(seen: GateInputs) -> Iterator[GateResult]:
    detail = ", ".join(seen.missing_provenance) or "model, text, config, seed, versions and device are recorded"
    yield _row("G12", "provenance", len(seen.missing_provenance), 0, detail)


def size(seen: GateInputs) -> Iterator[GateResult]:
    if not seen.sizes:
        yield _skipped("G14", "size", "files of this format contain more than tensors")
        return
    shares = {name: abs(written / planned - 1) for name, (written, planned) in seen.sizes.items()}
    name, share = max(shares.items(), key=lambda item: item[1])
    yield _row("G14", "size", share, SIZE_SHARE, f"{name}: {seen.sizes[name][0]} bytes, {seen.sizes[name][1]} planned")


GATES: tuple[Callable[[GateInputs], Iterator[GateResult]], ...] = (
    finite_numbers,
    calibration_coverage,
    layer_error,
    fallbacks,
    clipping,
    folding,
    round_trip,
    quality,
    generation,
    side_files,
    overlap,
    provenance,
    size,
)


def _row(
    gate: str, name: str, value: float, limit: float, detail: str, *, at_least: bool = False, worst: Status = "fail"
) -> GateResult:
    """Return the row of a value compared with a limit; ``worst`` is the status of a value beyond it, and of NaN."""
    keeps = value >= limit if at_least else value <= limit
    return _result(gate, name, "pass" if keeps else worst, value, limit, detail)


def _measured(name: str, measure: Measure, limit: float, limits: SchemeLimits, *, at_least: bool = False) -> GateResult:
    """Return the row of a measure with a standard error.

    Its status is "fail" if it is beyond the limit by more than two standard errors, "warn" if by less.
    """
    value, stderr = measure.value, measure.stderr or 0.0
    if value is None:
        return _result("G8", name, "fail", None, limit, f"not a number; limit for {limits.scheme}")
    beyond = (limit - value) if at_least else (value - limit)
    status: Status = "pass" if beyond <= 0 else "warn" if beyond <= 2 * stderr else "fail"
    return _result("G8", name, status, value, limit, f"{measure.in_words}; limit for {limits.scheme}")


def _skipped(gate: str, name: str, why: str) -> GateResult:
    return _result(gate, name, "skipped", None, None, why)


def _result(gate: str, name: str, status: Status, value: float | None, limit: float | None, detail: str) -> GateResult:
    return GateResult(gate=gate, name=name, status=status, value=value, limit=limit, detail=detail)
