"""``report.html``: one file that asks nobody for anything. The chart is SVG, and a table says the same."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from quantcore.charts.errors import HEIGHT, LEFT, WIDTH, error_chart, grid, height
from quantcore.report.card import budget, consumer_line, with_error

_STYLE = """
:root{color-scheme:light dark;--ink:#1b1f24;--paper:#fff;--faint:#57606a;--line:#d0d7de;--mark:#0b5fb0;--pass:#116329;
--warn:#7d4e00;--fail:#a40e26}
@media (prefers-color-scheme:dark){:root{--ink:#e6edf3;--paper:#0d1117;--faint:#9198a1;--line:#3d444d;--mark:#6cb6ff;
--pass:#57d364;--warn:#e3b341;--fail:#ff8182}}
body{font:16px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:64rem;margin:0 auto;
padding:1.5rem}
h1,h2{line-height:1.2}table{border-collapse:collapse;width:100%;margin:.5rem 0 1rem;font-variant-numeric:tabular-nums}
th,td{border-bottom:1px solid var(--line);padding:.3rem .6rem;text-align:left;vertical-align:top}
td.n,th.n{text-align:right}caption{text-align:left;color:var(--faint)}pre{overflow:auto;background:transparent;
border:1px solid var(--line);padding:.8rem;white-space:pre-wrap;overflow-wrap:anywhere}
.pass{color:var(--pass)}.warn{color:var(--warn)}.fail{color:var(--fail)}.skipped{color:var(--faint)}
svg{width:100%;height:auto}svg text{fill:var(--faint);font-size:12px}svg line{stroke:var(--line)}
svg circle{fill:var(--mark)}svg circle.chosen{fill:var(--fail)}details{margin:.5rem 0}
"""

def page(report: dict[str, Any]) -> str:
    """The report for a person; everything in it is escaped."""
    name = report["model"].get("id") or Path(report["model"]["path"]).name
    sections = [
        f"<h1>{escape(name)}, quantized</h1>",
        _overview(report),
        _gates(report["summary"]),
        _quality(report["quality"]),
        _harness(report["harness"], report["summary"]["failed_tasks"]),
        _mix(report["mix"]),
        _layers(report["layers"]),
        _samples(report["samples"]),
        _listing("Warnings", report["warnings"]),
        _loading(report["summary"]["exports"]),
        _json("Config", report["config"]),
        _json("Calibration", report["calibration"]),
        _json("Evaluation", report["evaluation"]),
        _json("Provenance", report["provenance"] | {"model": report["model"]}),
        _json("Environment", report["environment"]),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(name)}, quantized</title><style>{_STYLE}</style></head><body><main>"
        + "\n".join(filter(None, sections))
        + "</main></body></html>\n"
    )


def _overview(report: dict[str, Any]) -> str:
    summary, worst = report["summary"], report["summary"]["worst_layer"]
    before, after = summary["size_before_bytes"], summary["size_after_bytes"]
    rows = [
        ("Size", f"{before / 1e6:.1f} MB → {after / 1e6:.1f} MB ({after / before:.1%})"),
        ("Layers", f"{summary['num_layers_quantized']} quantized, {summary['num_layers_kept']} kept"),
        ("Worst layer", f"{worst['name']}: relative error {worst['relative_error']:.4f}, {worst['sqnr_db']:.1f} dB"),
        ("Time", f"{summary['total_s']:.1f} s, of which {summary['quantize_s']:.1f} s quantizing"),
        ("Peak memory", _memory(summary)),
        *((f"Peak memory, {phase}", _memory(one)) for phase, one in summary["memory_by_phase"].items()),
        *((f"Peak memory, process {one['rank']}", _memory(one)) for one in summary.get("ranks", ())),
    ]
    exports = [(f"Files: {name}", f"{one['bytes'] / 1e6:.1f} MB") for name, one in summary["exports"].items()]
    proofs = report["proof"].items()
    checks = [(f"Read by others: {name}", consumer_line(proof["consumer_check"])) for name, proof in proofs]
    shown = (*rows, *exports, *checks)
    return _table("", ("", ""), [(f"<b>{escape(name)}</b>", escape(text)) for name, text in shown])


def _memory(one: dict[str, Any]) -> str:
    """What was held beside what was planned."""
    return f"{one['peak_memory_bytes'] / 1e6:.0f} MB, planned {one['planned_peak_memory_bytes'] / 1e6:.0f} MB"


def _gates(summary: dict[str, Any]) -> str:
    if summary["gate"] == "off":
        return "<h2>Gates</h2><p>The gates were off: the result was held against no limit.</p>"
    rows = [
        (
            escape(row["gate"]), escape(row["name"]), f'<b class="{row["status"]}">{row["status"]}</b>',
            _number(row["value"]), _number(row["limit"]), escape(row["detail"]),
        )
        for row in summary["gates"]
    ]  # fmt: skip
    caption = f"A gate that fails {'rejects the result' if summary['gate'] == 'fail' else 'is a warning'}."
    return "<h2>Gates</h2>" + _table(caption, ("gate", "what", "result", "value", "limit", "detail"), rows)


def _quality(quality: dict[str, Any] | None) -> str:
    if quality is None:
        return "<h2>Quality</h2><p>No evaluation was asked for.</p>"
    rows = [
        (name.replace("_", " "), with_error(quality["before"][name]), with_error(quality["after"][name]))
        for name in ("token_perplexity", "word_perplexity", "byte_perplexity")
    ]
    divergence = quality["divergence"]
    distances = [
        ("ratio of token perplexities", with_error(quality["ratio"])),
        ("mean KL divergence, nats a token", with_error(divergence["kl_mean"])),
        ("99th percentile of it", f"{divergence['kl_p99']:.4g}"),
        ("same first choice, share of tokens", with_error(divergence["top1_agreement"])),
        ("relative error of the logits", f"{divergence['logit_error']:.4g}"),
    ]
    caption = f"{quality['num_tokens']} tokens in {quality['num_windows']} held-out windows, ± one standard error"
    return (
        "<h2>Quality</h2>"
        + _table(caption, ("", "original", "quantized"), rows)
        + _table("Distance from the original", ("", ""), distances)
    )


def _harness(harness: dict[str, Any] | None, failed_tasks: dict[str, str]) -> str:
    failed = [
        f'<p><b class="fail">{escape(task)} failed</b>: {escape(reason)}</p>' for task, reason in failed_tasks.items()
    ]
    if not harness:
        return "<h2>lm-evaluation-harness</h2>" * bool(failed) + "".join(failed)
    rows = [
        (escape(task), escape(metric), with_error(pair["original"]), with_error(pair["quantized"]))
        for task, found in harness.items()
        for metric, pair in found.items()
    ]
    table = _table("", ("task", "metric", "original", "quantized"), rows)
    return "<h2>lm-evaluation-harness</h2>" + table + "".join(failed)


def _mix(mix: dict[str, Any] | None) -> str:
    """What was chosen, what it was chosen from."""
    if mix is None:
        return ""
    rows = [
        (
            escape(name), escape(", ".join(f"{num} {scheme}" for scheme, num in one["layers"].items())),
            f"{one['size_bytes'] / 1e6:.1f} MB", f"{one['bits']:.2f}", _number(one["loss"]),
        )
        for name, one in (("the mix", mix["chosen"]), *mix["uniform"].items())
    ]  # fmt: skip
    table = _table("", ("", "layers", "size", "bits a weight", "KL, reckoned"), rows)
    measured = with_error(mix["chosen"]["measured"]["divergence"]["kl_mean"])
    return (
        f"<h2>Mixed precision</h2><p>The scheme of each layer was chosen for {escape(budget(mix))}. Measured of the"
        f" mix, with weights rounded plainly: mean KL {measured} nats a token.</p>{table}{_frontier(mix)}"
    )


def _frontier(mix: dict[str, Any]) -> str:
    """Size against divergence as reckoned: a point for every mix that no other one of its size beats."""
    found, chosen = mix["frontier"], mix["chosen"]
    sizes = [one["size_bytes"] for one in (*found, chosen)]
    least, top = min(sizes), max(one["loss"] for one in (*found, chosen)) or 1.0
    scale = (WIDTH - LEFT - 12) / max(1, max(sizes) - least)

    def point(one: dict[str, Any], look: str) -> str:
        place = f'cx="{LEFT + (one["size_bytes"] - least) * scale:.1f}" cy="{height(one["loss"] / top):.1f}"'
        return f"<circle {place} {look}><title>{one['size_bytes'] / 1e6:.1f} MB, KL {one['loss']:.3g}</title></circle>"

    points = "".join(point(one, 'r="3"') for one in found) + point(chosen, 'r="6" class="chosen"')
    label = f"Size against divergence of {len(found)} mixes; the chosen one is the large point."
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{grid(top)}{points}'
        f'<text x="{LEFT}" y="{HEIGHT - 6}">{least / 1e6:.1f} MB</text>'
        f'<text x="{WIDTH - 4}" y="{HEIGHT - 6}" text-anchor="end">{max(sizes) / 1e6:.1f} MB</text></svg>'
    )


def _layers(layers: list[dict[str, Any]]) -> str:
    rows = [
        (escape(one["name"]), escape(one["scheme"]), f"{one['relative_error']:.5f}", f"{one['sqnr_db']:.1f}",
         _number(one["output_error"]))
        for one in layers
    ]  # fmt: skip
    table = _table("", ("layer", "scheme", "relative error", "SQNR, dB", "output error"), rows)
    return (
        "<h2>Layers</h2><p>How far each quantized weight is from the original, ‖W − Q‖ / ‖W‖, from the first layer to"
        f" the last.</p>{error_chart(layers)}<details><summary>The same as a table</summary>{table}</details>"
    )


def _samples(samples: list[dict[str, Any]] | None) -> str:
    if not samples:
        return ""
    rows = [tuple(escape(one[column]) for column in ("prompt", "original", "quantized")) for one in samples]
    return "<h2>Samples</h2>" + _table("The most likely continuation", ("prompt", "original", "quantized"), rows)


def _loading(exports: dict[str, Any]) -> str:
    parts = [f"<h3>{escape(name)}</h3><pre>{escape(one['load'])}</pre>" for name, one in exports.items()]
    return "<h2>Loading</h2>" + "".join(parts)


def _listing(title: str, lines: list[str]) -> str:
    return f"<h2>{title}</h2><ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>" if lines else ""


def _json(title: str, data: Any) -> str:
    text = escape(json.dumps(data, indent=2, ensure_ascii=False))
    return f"<details><summary>{escape(title)}</summary><pre>{text}</pre></details>"


def _table(caption: str, head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Cells are HTML already; the first of a row names it."""
    top = "".join(f'<th scope="col">{escape(name)}</th>' for name in head) if any(head) else ""
    body = "".join(
        f'<tr><th scope="row">{row[0]}</th>' + "".join(f"<td>{cell}</td>" for cell in row[1:]) + "</tr>" for row in rows
    )
    said = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f"<table>{said}{f'<thead><tr>{top}</tr></thead>' if top else ''}<tbody>{body}</tbody></table>"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"
