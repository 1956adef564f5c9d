"""Writes the model card, README.md, for the Hub: measurements, loading lines, the source's metadata."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData, metadata_load

from quantcore.checkpoint.folder import find_gguf
from quantcore.hub.listing import MAX_FETCHED_CARD_BYTES
from quantcore.hub.names import is_model_id
from quantcore.report.evaluation_result import CacheQuality
from quantcore.report.quality import metric_title
from quantcore.report.values import GoalResult, Mix, Report, SourceModel
from quantcore.sandbox.opening import open_file, path_for_libraries

KEPT_FIELDS = tuple("license license_name license_link language pipeline_tag library_name datasets tags".split())
"""Fields of the source's front matter that stay true for the quantized model. Its scores (model-index) do not."""


def model_card(report: Report, source: Path) -> str:
    """Return Markdown with front matter; ``source`` is the float model's folder."""
    metadata = source_metadata(source)
    front = {key: metadata[key] for key in KEPT_FIELDS if key in metadata}
    front |= {"base_model": base_model(report, metadata)}
    is_quantized_base = is_model_id(report.model.id or "") and report.model.adapter is None
    front |= {"base_model_relation": "quantized"} if is_quantized_base else {}
    front["tags"] = list(dict.fromkeys([*_strings(metadata.get("tags")), "quantized", *report.summary.exports]))
    sections = [
        f"# {escape(report.model.name)}, quantized",
        _intro(report),
        _measured(report),
        _warnings(report),
        _loading(report),
        _checks(report),
        "`report.html` shows every layer and check; `report.json` contains the same data for programs. "
        "`reproduce.sh` recreates the same weights. `MANIFEST.json` lists all files with their SHA-256.",
        _license(metadata, report.model),
    ]
    text = ModelCardData(**{key: value for key, value in front.items() if value}).to_yaml() + "\n"
    return f"---\n{text}---\n\n" + "\n\n".join(filter(None, sections)) + "\n"


def source_metadata(source: Path) -> dict[str, Any]:
    """Return the front matter of the source's card; an empty dict if there is none, or it cannot be read."""
    folder = source.parent if find_gguf(source) is not None and source.is_file() else source
    card = folder / "README.md"
    try:
        with open_file(card, max_bytes=MAX_FETCHED_CARD_BYTES) as file:
            metadata = metadata_load(path_for_libraries(file, card))
    except Exception:  # a stranger's YAML: the job continues without it, for any error
        return {}
    return metadata if isinstance(metadata, dict) else {}


def base_model(report: Report, metadata: dict[str, Any]) -> str | list[str] | None:
    """Return the ids on the Hub of the float model and of its adapter; else the base models in the model's card."""
    if report.model.id is not None and is_model_id(report.model.id):
        adapter = report.model.adapter
        return report.model.id if adapter is None or adapter.id is None else [report.model.id, adapter.id]
    return _strings(metadata.get("base_model")) or None


def escape(text: str) -> str:
    """Escape ``text`` for Markdown and HTML."""
    shown = "".join(character if character.isprintable() else " " for character in text)
    return re.sub(r"([\\`*_{}\[\]()#+!|<>&~])", r"\\\1", shown)


def code(text: str) -> str:
    """Return ``text`` as a code span. Pipes are replaced: they would end a table cell."""
    shown = "".join(character if character.isprintable() else " " for character in text).replace("|", "¦")
    ticks = "`" * (max((len(run) for run in re.findall("`+", shown)), default=0) + 1)
    return f"{ticks}{' ' if len(ticks) > 1 else ''}{shown}{' ' if len(ticks) > 1 else ''}{ticks}"


def _intro(report: Report) -> str:
    summary = report.summary
    kind = "at commit" if is_model_id(report.model.id or "") else "with the digest"
    commit = f" {kind} {code(report.model.sha)}" if report.model.sha else ""
    return (
        f"This is {code(report.model.name)}{commit} with {summary.num_layers_quantized} layers quantized"
        f" ({', '.join(map(code, report.schemes))}) by Bitfoundry {report.environment['quantcore']}."
        f" Linear layers left as they were: {summary.num_layers_kept}."
        f"{_adapter(report.model)}{_grids(report)}{_mix(report.mix)}{_goal(report.goal)}"
    )


def _adapter(model: SourceModel) -> str:
    if model.adapter is None:
        return ""
    adapter = model.adapter
    commit = f" at commit {code(adapter.sha)}" if adapter.sha else ""
    return (
        f" The adapter {code(adapter.name)}{commit} ({adapter.method} of rank {adapter.rank}, {code(adapter.digest)})"
        " was merged into it first; the original of all measurements is the merged model."
    )


def _grids(report: Report) -> str:
    if not report.model.grids:
        return ""
    return f" Its weights were already quantized: {escape(report.model.grids_in_words)}."


def _mix(mix: Mix | None) -> str:
    if mix is None:
        return ""
    layers = ", ".join(f"{num} {code(scheme)}" for scheme, num in mix.chosen.layers.items())
    return (
        f" The scheme of each layer was chosen by its rounding error, for {code(str(mix.asked))}: {layers};"
        f" {mix.chosen.bits:.2f} bits per weight."
    )


def _goal(goal: GoalResult | None) -> str:
    if goal is None:
        return ""
    asked = ", ".join(f"{name} {value}" for name, value in goal.asked.items())
    return f" It was chosen for a goal ({code(asked)}) from {len(goal.trials)} candidates: {escape(goal.why)}."


def _measured(report: Report) -> str:
    summary, quality = report.summary, report.quality
    rows = [
        ("", "original", "quantized"),
        ("---", "---:", "---:"),
        ("size", _megabytes(summary.size_before_bytes), _megabytes(summary.size_after_bytes)),
    ]
    if report.encoder is not None:
        return "## Measured\n\n" + _table([*rows, *((name, "", value) for name, value in report.encoder.rows)])
    if quality is None:
        return "## Measured\n\n" + _table(rows) + "\n\nNo evaluation was requested."
    for (name, before), (_, after) in zip(quality.before.rows, quality.after.rows, strict=True):
        rows.append((name, str(before), str(after)))
    for task, metrics in (report.harness or {}).items():
        for metric, result in metrics.items():
            rows.append((code(f"{task} {metric_title(metric)}"), f"{result.original or '–'}", str(result.quantized)))
    rows += [(code(task), "failed", "failed") for task in summary.failed_tasks]
    divergence, experts = quality.divergence, ""
    if report.experts is not None:
        experts = (
            f" {report.experts.share_covered:.1%} of the {report.experts.num_experts} experts saw at least 0.5 % of "
            f"the calibration tokens; the minimum is {report.experts.fewest_tokens}."
        )
    return (
        f"## Measured\n\n{_verdict(report)}" + _table(rows) + f"\n\nOn {quality.num_tokens} held-out tokens"
        f" ({quality.num_windows} windows of {quality.seq_len}); in brackets the 95 % interval. Compared with the"
        f" original's predictions: mean KL divergence {divergence.kl_mean} nats per token, 99th percentile"
        f" {divergence.kl_p99:.4g}; top-1 agreement {divergence.top1_agreement}.{experts}"
        + ("" if report.answers is None else f" On its own answers: {report.answers}.")
        + ("" if report.behaviour is None else f" In its own answers: {escape(str(report.behaviour))}.")
        + _kv_caches(report.kv_caches)
        + ("" if report.drafts is None else f" {report.drafts}")
    )


def _kv_caches(caches: Sequence[CacheQuality] | None) -> str:
    each = ", ".join(f"{code(cache.dtype)} {cache.level}" for cache in caches or ())
    return f" With a KV cache of fewer bits, beside itself with one of 16: {each}." if each else ""


def _verdict(report: Report) -> str:
    verdict = report.summary.verdict
    if verdict is None:
        return ""
    sentence = f"{escape(verdict.sentence)} " if verdict.sentence else ""
    return f"{sentence}Verdict: **{verdict.level}** ({escape(verdict.reason)}).\n\n"


def _warnings(report: Report) -> str:
    lines = [f"- {escape(' '.join(warning.split()))}" for warning in report.warnings]
    return "## Warnings\n\n" + "\n".join(lines) if lines else ""


def _loading(report: Report) -> str:
    parts = [
        "\n\n".join(
            (
                f"{code(name)}, in {code(export.path)}:",
                f"```python\n{export.load}\n```",
                *map(escape, export.refusals.values()),
            )
        )
        for name, export in report.summary.exports.items()
    ]
    return "## Loading\n\n" + "\n\n".join(parts)


def _checks(report: Report) -> str:
    missed = [gate for gate in report.summary.gates if gate.status in ("warn", "fail")]
    lines = [f"- {gate.gate} {code(gate.name)}: {gate.status}. {escape(gate.detail)}" for gate in missed]
    checks = [f"- {code(name)}: {escape(str(proof.consumer_check))}" for name, proof in report.proof.items()]
    outcome = "\n".join(lines) or "All checks passed."
    if report.summary.gate == "off":
        outcome = "The checks were off: the result was not compared with any limits."
    return f"## Checks\n\n{outcome}\n\n" + "\n".join(checks)


def _license(metadata: dict[str, Any], model: SourceModel) -> str:
    name = metadata.get("license")
    more = "" if model.adapter is None else " The terms of the adapter apply as well."
    if not isinstance(name, str):
        return (
            "## License\n\nThe model card of the source names no license. The terms of the original apply to "
            f"this model.{more}"
        )
    return f"## License\n\n{code(name)}, the same as the original.{more}"


def _table(rows: list[tuple[str, str, str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _strings(value: Any) -> list[str]:
    values = [value] if isinstance(value, str) else value if isinstance(value, list) else []
    return [text for text in values if isinstance(text, str)]


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
