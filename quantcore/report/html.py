"""Renders ``report.html``: one file that loads nothing else. Charts are SVG, with a table of the same numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from quantcore.config.verdict_levels import LEVELS
from quantcore.report.answers import common_length
from quantcore.report.behaviour import Behaviour
from quantcore.report.error_chart import HEIGHT, LEFT, WIDTH, error_chart, grid, height
from quantcore.report.evaluation_result import CacheQuality, heads_of_caches, notes_on_caches
from quantcore.report.layer import LayerError
from quantcore.report.quality import (
    AnswerQuality,
    DraftQuality,
    EncoderQuality,
    PositionQuality,
    Quality,
    Sample,
    Step,
    TaskResults,
    metric_title,
)
from quantcore.report.values import ExportSummary, GoalResult, Mix, MixScheme, Report, Summary

_STYLE = """
:root{color-scheme:light dark;--ink:#1b1f26;--paper:#f7f8fa;--card:#fff;--raised:#eef0f4;--faint:#565e6c;--line:#d9dde4;
--mark:#3451c7;--pass:#116a35;--pass-ground:#e2f5e8;--warn:#855200;--warn-ground:#fdf1da;--fail:#b3211f;
--fail-ground:#fdeaea}
@media (prefers-color-scheme:dark){:root{--ink:#e8ebf0;--paper:#111418;--card:#191d23;--raised:#242a32;--faint:#a3acb9;
--line:#323a45;--mark:#94a9ff;--pass:#6ed594;--pass-ground:#17301f;--warn:#f0be62;--warn-ground:#35290f;--fail:#ff9a94;
--fail-ground:#3a1c1c}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:64rem;margin:0 auto;
padding:1rem}
section{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:.2rem 1rem;margin:.9rem 0;
overflow-x:auto}
.verdict{border-left-width:5px}.verdict h2{margin:.5rem 0 0}
.verdict.pass{background:var(--pass-ground);border-color:var(--pass);color:var(--ink)}
.verdict.warn{background:var(--warn-ground);border-color:var(--warn);color:var(--ink)}
.verdict.fail{background:var(--fail-ground);border-color:var(--fail);color:var(--ink)}
h1{font-size:1.35rem}h2{font-size:1.05rem}h1,h2{line-height:1.2}
table{border-collapse:collapse;width:100%;margin:.5rem 0 1rem;font-variant-numeric:tabular-nums}
th,td{border-bottom:1px solid var(--line);padding:.3rem .6rem;text-align:left;vertical-align:top}
td:last-child{overflow-wrap:anywhere;min-width:8rem}
td.n,th.n{text-align:right}caption{text-align:left;color:var(--faint)}pre{overflow:auto;background:var(--raised);
border:1px solid var(--line);border-radius:6px;padding:.8rem;white-space:pre-wrap;overflow-wrap:anywhere}
mark{background:var(--warn-ground);color:inherit;font-weight:600;text-decoration:underline}
.pass{color:var(--pass)}.warn{color:var(--warn)}.fail{color:var(--fail)}.skipped{color:var(--faint)}
svg{width:100%;height:auto;min-width:32rem}svg text{fill:var(--faint);font-size:12px}svg line{stroke:var(--line)}
svg circle{fill:var(--mark)}svg circle.chosen{fill:var(--fail)}details{margin:.5rem 0}
"""
"""Colours and cards of the dashboard's page of a run (``dashboard/src/styles``)."""

_TONES = dict(zip(LEVELS, ("pass", "pass", "warn", "warn", "fail"), strict=True))


def page(report: Report, byline: str = "") -> str:
    """Return the report as HTML; everything in it is escaped. ``byline`` stands below the title."""
    title = f"{escape(report.model.name)}, quantized"
    sections = [
        _verdict(report.summary, report.quality),
        _samples(report.samples),
        _overview(report),
        _loading(report.summary.exports),
        "" if report.goal is None else _goal(report.goal),
        _gates(report.summary),
        _quality(report.quality, report.drafts) if report.encoder is None else _encoder(report.encoder),
        _kv_caches(report.kv_caches),
        _answers(report.answers),
        _behaviour(report.behaviour),
        _clipping(report.clipping),
        _tasks(report.harness, report.summary.failed_tasks),
        _mix(report.mix),
        _layers(report.layers, report.more_bits),
        _listing("Warnings", report.warnings),
        _json("Config", report.config),
        _json("Calibration", report.calibration),
        _json("Evaluation", report.evaluation),
        _json("Provenance", report.provenance.to_dict() | {"model": report.model.to_dict()}),
        _json("Environment", report.environment),
    ]
    cards = [part if part.startswith("<section") else f"<section>{part}</section>" for part in sections if part]
    below = f'<p class="skipped">{escape(byline)}</p>' if byline else ""
    return document(title, f"<h1>{title}</h1>{below}\n" + "\n".join(cards))


def document(title: str, body: str) -> str:
    """Return a page in the report's style. ``title`` and ``body`` are HTML: their texts are escaped."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{title}</title><style>{_STYLE}</style></head><body><main>{body}</main></body></html>\n"
    )


def _verdict(summary: Summary, quality: Quality | None) -> str:
    """Render the verdict in words, then its level with the intervals that it was judged by, before anything else."""
    if summary.verdict is None:
        return ""
    verdict = summary.verdict
    level, reason = verdict.level, escape(verdict.reason[:1].upper() + verdict.reason[1:])
    title = f"<h2>{level}</h2>"
    if verdict.sentence is not None:
        title = f"<h2>{escape(verdict.sentence)}</h2><p>Verdict: <b>{level}</b>.</p>"
    figures = (
        f"<p>KL divergence {quality.divergence.kl_mean.in_words}, perplexity {quality.ratio.in_words} times the"
        " original's.</p>"
        if quality
        else ""
    )
    advice = "".join(map(_step, verdict.steps)) or (f"<p>{escape(verdict.advice)}</p>" if verdict.advice else "")
    return f'<section class="verdict {_TONES[level]}">{title}{figures}<p>{reason}.</p>{advice}</section>'


def _step(step: Step) -> str:
    return f"<p>{escape(step.text)} Run it again with:</p><pre>{escape(step.flags)}</pre>"


def _overview(report: Report) -> str:
    summary, worst = report.summary, report.summary.worst_layer
    before, after = summary.size_before_bytes, summary.size_after_bytes
    phases = summary.memory_by_phase.rows if summary.memory_by_phase else []
    rows = [
        ("Size", f"{before / 1e6:.1f} MB → {after / 1e6:.1f} MB ({100 * (after / before - 1):+.0f} %)"),
        *([("Weights of the input model", report.model.grids_in_words)] if report.model.grids else []),
        *([("Adapter merged first", str(report.model.adapter))] if report.model.adapter else []),
        *([("Scheme", ", ".join(report.schemes))] if report.schemes else []),
        ("Layers", f"{summary.num_layers_quantized} quantized, {summary.num_layers_kept} left as they were"),
        (worst.title.capitalize(), str(worst)),
        ("Time", f"{summary.total_s:.1f} s{_phases(summary.seconds_by_phase)}"),
        ("Peak memory", str(summary.memory)),
        *((f"Peak memory, {phase}", str(use)) for phase, use in phases),
        *((f"Peak memory, process {use.rank}", str(use)) for use in summary.ranks or ()),
        *([] if report.distillation is None else [("Distillation of scales", str(report.distillation))]),
        *((f"Files: {name}", f"{export.bytes / 1e6:.1f} MB") for name, export in summary.exports.items()),
        *((f"Other programs: {name}", str(proof.consumer_check)) for name, proof in report.proof.items()),
    ]
    return _table("", ("", ""), [(f"<b>{escape(name)}</b>", escape(text)) for name, text in rows])


def _phases(seconds: Mapping[str, float]) -> str:
    """Return the seconds of the phases that took any, as text in brackets."""
    shown = ", ".join(f"{phase} {took:.1f} s" for phase, took in seconds.items() if took >= 0.05)
    return f" ({shown})" if shown else ""


def _goal(goal: GoalResult) -> str:
    asked = ", ".join(f"{name} {value}" for name, value in goal.asked.items())
    rows = [
        (
            f"{trial.size_bytes / 1e6:.1f} MB",
            escape(", ".join(f"{n} {name}" for name, n in trial.layers.items())),
            escape(trial.algorithms),
            str(trial.kl),
            f"{trial.recovery:.2%}",
            "chosen" if trial.is_chosen else "",
        )
        for trial in goal.trials
    ]
    heads = ("size", "layers", "algorithms", "KL divergence", "recovery, at worst", "")
    advice = "".join(f"<li>{escape(line)}</li>" for line in goal.advice)
    return f"<h2>Goal</h2><p>{escape(goal.why)}.</p>" + _table(escape(asked), heads, rows) + f"<ul>{advice}</ul>"


def _gates(summary: Summary) -> str:
    """Render the checks: folded if none of them failed or warns."""
    if summary.gate == "off":
        return "<h2>Checks</h2><p>The checks were off: the result was not compared with any limits.</p>"
    rows = [
        (
            escape(gate.gate),
            escape(gate.name),
            f'<b class="{gate.status}">{gate.status}</b>',
            _number(gate.value),
            _number(gate.limit),
            escape(gate.detail),
        )
        for gate in summary.gates
    ]
    caption = f"A failed check {'rejects the result' if summary.gate == 'fail' else 'is a warning'}."
    table = _table(caption, ("check", "name", "result", "value", "limit", "detail"), rows)
    missed = sum(gate.status in ("warn", "fail") for gate in summary.gates)
    if missed:
        return f"<h2>Checks: {missed} of {len(rows)} beyond their limits</h2>{table}"
    return f"<h2>Checks</h2><details><summary>All checks passed</summary>{table}</details>"


def _encoder(encoder: EncoderQuality) -> str:
    caption = f"Compared with the original on {encoder.num_windows} held-out texts of {encoder.seq_len} tokens"
    return "<h2>Quality</h2>" + _table(caption, ("", ""), encoder.rows)


def _quality(quality: Quality | None, drafts: DraftQuality | None) -> str:
    if quality is None:
        return "<h2>Quality</h2><p>No evaluation was requested.</p>"
    rows = [
        (name, str(before), str(after))
        for (name, before), (_, after) in zip(quality.before.rows, quality.after.rows, strict=True)
    ]
    if drafts is not None:
        rows.append(("share of draft tokens accepted by the model", str(drafts.before or "–"), str(drafts.after)))
    divergence = quality.divergence
    distances = [
        ("ratio of token perplexities", str(quality.ratio)),
        ("mean KL divergence, nats per token", str(divergence.kl_mean)),
        ("99th percentile of the KL divergence", f"{divergence.kl_p99:.4g}"),
        ("top-1 agreement, share of tokens", str(divergence.top1_agreement)),
    ]
    if divergence.logit_error is not None:
        distances.append(("relative error of the logits", f"{divergence.logit_error:.4g}"))
    caption = f"{quality.num_tokens} tokens in {quality.num_windows} held-out windows; in brackets the 95 % interval"
    return (
        "<h2>Quality</h2>"
        + _table(caption, ("", "original", "quantized"), rows)
        + _table("Distance from the original", ("", ""), distances)
        + _positions(quality.by_position, "a window")
    )


def _positions(ranges: Sequence[PositionQuality], where: str) -> str:
    rows = [(str(each), str(each.num_tokens), str(each.kl_mean), str(each.top1_agreement)) for each in ranges]
    heads = ("positions", "tokens", "mean KL divergence", "top-1 agreement")
    return _table(f"Distance from the original, by position in {where}", heads, rows) if rows else ""


def _kv_caches(caches: Sequence[CacheQuality] | None) -> str:
    if not caches:
        return ""
    rows = [tuple(map(escape, each.row)) for each in caches]
    notes = "".join(f"<p>{escape(note)}</p>" for note in notes_on_caches(caches))
    return "<h2>KV caches</h2>" + _table("", heads_of_caches(caches), rows) + notes


def _answers(answers: AnswerQuality | None) -> str:
    if answers is None:
        return ""
    rows = [
        (escape(each.kind), str(each.num_tokens), str(each.kl_mean), str(each.top1_agreement))
        for each in answers.by_kind
    ]
    every = ("all", str(answers.num_tokens), str(answers.divergence.kl_mean), str(answers.divergence.top1_agreement))
    source = "packaged prompts" if answers.prompts_sha256 is None else f"prompts of the user ({answers.prompts_sha256})"
    caption = f"Predictions of both models on {answers.num_windows} answers that the original gave to {source}"
    table = _table(caption, ("prompts", "tokens", "mean KL divergence", "top-1 agreement"), [*rows, every])
    left_out = "".join(
        f"<p>Left out, in part or at all: {escape(kind)} ({escape(reason)})</p>"
        for kind, reason in answers.left_out.items()
    )
    return f"<h2>Own answers</h2>{table}{left_out}{_positions(answers.by_position, 'an answer')}"


def _behaviour(behaviour: Behaviour | None) -> str:
    if behaviour is None:
        return ""
    rows = [tuple(escape(text) for text in row) for row in behaviour.rows]
    caption = (
        f"Answers of both models to {behaviour.num_prompts} prompts, in at most {behaviour.max_tokens} tokens each:"
        f" {behaviour}"
    )
    return "<h2>Behaviour</h2>" + _table(caption, ("", "original", "quantized", ""), rows)


def _clipping(shares: Mapping[str, float]) -> str:
    """Render the clipped share of each kind of tensor, from the largest to the smallest."""
    rows = [(escape(kind), f"{share:.3%}") for kind, share in sorted(shares.items(), key=lambda item: -item[1])]
    caption = "Values on held-out text outside static activation ranges, by type of tensor, for all blocks"
    return "<h2>Clipping</h2>" + _table(caption, ("tensor", "clipped"), rows) if rows else ""


def _tasks(results: TaskResults | None, failed_tasks: Mapping[str, str]) -> str:
    failed = [
        f'<p><b class="fail">{escape(task)} failed</b>: {escape(reason)}</p>' for task, reason in failed_tasks.items()
    ]
    if not results:
        return "<h2>lm-evaluation-harness</h2>" * bool(failed) + "".join(failed)
    rows = [
        (escape(task), escape(metric_title(metric)), f"{result.original or '–'}", str(result.quantized))
        for task, metrics in results.items()
        for metric, result in metrics.items()
    ]
    table = _table("", ("task", "metric", "original", "quantized"), rows)
    return "<h2>lm-evaluation-harness</h2>" + table + "".join(failed)


def _mix(mix: Mix | None) -> str:
    """Render the chosen mix and its alternatives."""
    if mix is None:
        return ""
    rows = [
        (
            escape(name),
            escape(", ".join(f"{num} {layer}" for layer, num in scheme.layers.items())),
            f"{scheme.size_bytes / 1e6:.1f} MB",
            f"{scheme.bits:.2f}",
            _number(scheme.loss),
        )
        for name, scheme in (("the mix", mix.chosen), *mix.uniform.items())
    ]
    table = _table("", ("", "layers", "size", "bits per weight", "KL (estimated)"), rows)
    return (
        f"<h2>Mixed precision</h2><p>The scheme of each layer was chosen for {escape(str(mix.asked))}. The mix as"
        f" measured without GPTQ: mean KL {mix.chosen.measured.divergence.kl_mean} nats per token.</p>{table}"
        f"{_frontier(mix)}"
    )


def _frontier(mix: Mix) -> str:
    """Plot size against estimated divergence: one point for each Pareto-optimal mix."""
    frontier, chosen = mix.frontier, mix.chosen
    sizes = [scheme.size_bytes for scheme in (*frontier, chosen)]
    least, top = min(sizes), max(scheme.loss for scheme in (*frontier, chosen)) or 1.0
    scale = (WIDTH - LEFT - 12) / max(1, max(sizes) - least)

    def point(scheme: MixScheme, look: str) -> str:
        place = f'cx="{LEFT + (scheme.size_bytes - least) * scale:.1f}" cy="{height(scheme.loss / top):.1f}"'
        return f"<circle {place} {look}><title>{scheme.size_bytes / 1e6:.1f} MB, KL {scheme.loss:.3g}</title></circle>"

    points = "".join(point(scheme, 'r="3"') for scheme in frontier) + point(chosen, 'r="6" class="chosen"')
    label = f"Size against divergence of {len(frontier)} mixes; the large point is the chosen one."
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{grid(top)}{points}'
        f'<text x="{LEFT}" y="{HEIGHT - 6}">{least / 1e6:.1f} MB</text>'
        f'<text x="{WIDTH - 4}" y="{HEIGHT - 6}" text-anchor="end">{max(sizes) / 1e6:.1f} MB</text></svg>'
    )


def _layers(layers: Sequence[LayerError], more_bits: Step | None) -> str:
    rows = [
        (
            escape(layer.name),
            escape(layer.scheme),
            f"{layer.relative_error:.5f}",
            f"{layer.sqnr_db:.1f}",
            _number(layer.output_error),
        )
        for layer in layers
    ]
    table = _table("", ("layer", "scheme", "relative error", "SQNR, dB", "output error"), rows)
    outputs = [(layer.name, layer.output_error) for layer in layers if layer.output_error is not None]
    drawn = outputs or [(layer.name, layer.relative_error) for layer in layers]
    step = "" if more_bits is None else _step(more_bits)
    what = "layer's output" if outputs else "weight, ‖W − Q‖ / ‖W‖"
    return (
        f"<h2>Layers</h2><p>Relative error of each quantized {what}, from the first layer to the "
        f"last.</p>{error_chart(drawn)}<details><summary>Show as table</summary>{table}</details>"
        f"{step}"
    )


def _samples(samples: Sequence[Sample] | None) -> str:
    if not samples:
        return ""
    rows = [(escape(sample.prompt), escape(sample.original), _marked(sample)) for sample in samples]
    return "<h2>Sample outputs</h2>" + _table("Greedy decoding", ("prompt", "original", "quantized"), rows)


def _marked(sample: Sample) -> str:
    """Return the quantized model's text, with everything from the first difference on marked."""
    num_equal = common_length(sample.original, sample.quantized)
    same, rest = sample.quantized[:num_equal], sample.quantized[num_equal:]
    return escape(same) + (f"<mark>{escape(rest)}</mark>" if rest else "")


def _loading(exports: Mapping[str, ExportSummary]) -> str:
    """Render the lines that load each export, in every program that was seen to load such files."""
    parts = []
    for name, export in exports.items():
        parts.append(f"<h3>{escape(name)}</h3>")
        programs = export.programs or {"": export.load}
        parts.extend(
            f"<p>{escape(program)}</p><pre>{escape(lines)}</pre>" if program else f"<pre>{escape(lines)}</pre>"
            for program, lines in programs.items()
        )
        parts.extend(f"<p>{escape(reason)}</p>" for reason in export.refusals.values())
    return "<h2>Use it</h2>" + "".join(parts)


def _listing(title: str, lines: Sequence[str]) -> str:
    return f"<h2>{title}</h2><ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>" if lines else ""


def _json(title: str, data: Any) -> str:
    text = escape(json.dumps(data, indent=2, ensure_ascii=False))
    return f"<details><summary>{escape(title)}</summary><pre>{text}</pre></details>"


def _table(caption: str, head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Render a table. Its cells are HTML already; the first cell of a row names the row."""
    cells = (f'<th scope="col">{escape(name)}</th>' if name else "<td></td>" for name in head)
    top = "".join(cells) if any(head) else ""
    body = "".join(
        f'<tr><th scope="row">{row[0]}</th>' + "".join(f"<td>{cell}</td>" for cell in row[1:]) + "</tr>" for row in rows
    )
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f"<table>{title}{f'<thead><tr>{top}</tr></thead>' if top else ''}<tbody>{body}</tbody></table>"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"
