"""The model card, README.md: what the Hub shows. Measured numbers, how to load it, and what the source's card says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData, metadata_load

from quantcore.checkpoint.folder import find_gguf
from quantcore.checkpoint.opening import open_file, path_for_libraries
from quantcore.hub.download import MAX_FETCHED_CARD_BYTES

KEPT_FIELDS = tuple("license license_name license_link language pipeline_tag library_name datasets tags".split())
"""Of the source's front matter: what stays true of the quantized model. Its scores (model-index) do not."""


def model_card(report: dict[str, Any], source: Path) -> str:
    """Markdown with front matter; ``source`` is the float model's folder."""
    known = source_metadata(source)
    name = report["model"].get("id") or Path(report["model"]["path"]).name
    front = {key: known[key] for key in KEPT_FIELDS if key in known}
    front |= {"base_model": base_model(report, known)}
    front |= {"base_model_relation": "quantized"} if "id" in report["model"] else {}
    front["tags"] = list(dict.fromkeys([*_strings(known.get("tags")), "quantized", *report["summary"]["exports"]]))
    sections = [
        f"# {escape(name)}, quantized",
        _intro(report, name),
        _numbers(report),
        _warnings(report),
        _loading(report),
        _scheme(report),
        "`report.html` shows every layer and every check, `report.json` says the same to programs. `reproduce.sh` makes"
        " the same weights again. `MANIFEST.json` lists all files with their SHA-256.",
        _licence(known),
    ]
    text = ModelCardData(**{key: value for key, value in front.items() if value}).to_yaml() + "\n"
    return f"---\n{text}---\n\n" + "\n\n".join(filter(None, sections)) + "\n"


def source_metadata(source: Path) -> dict[str, Any]:
    """The front matter of the source's card; nothing if there is none that can be read."""
    folder = source.parent if find_gguf(source) is not None and source.is_file() else source
    card = folder / "README.md"
    try:
        with open_file(card, max_bytes=MAX_FETCHED_CARD_BYTES) as file:
            found = metadata_load(path_for_libraries(file, card))
    except Exception:  # a stranger's YAML: whatever is wrong with it, the card is not worth a job
        return {}
    return found if isinstance(found, dict) else {}


def base_model(report: dict[str, Any], known: dict[str, Any]) -> str | list[str] | None:
    """The model on the Hub that was quantized; for a folder what its card says it comes from."""
    if "id" in report["model"]:
        return str(report["model"]["id"])
    named = _strings(known.get("base_model"))
    return named or None


def escape(text: str) -> str:
    """Text that Markdown and HTML take as it is."""
    shown = "".join(character if character.isprintable() else " " for character in text)
    return re.sub(r"([\\`*_{}\[\]()#+!|<>&~])", r"\\\1", shown)


def code(text: str) -> str:
    """A span of code, whatever is in it; a pipe would end a cell of a table."""
    shown = "".join(character if character.isprintable() else " " for character in text).replace("|", "¦")
    ticks = "`" * (max((len(run) for run in re.findall("`+", shown)), default=0) + 1)
    return f"{ticks}{' ' if len(ticks) > 1 else ''}{shown}{' ' if len(ticks) > 1 else ''}{ticks}"


def _intro(report: dict[str, Any], name: str) -> str:
    summary = report["summary"]
    schemes = sorted({layer["scheme"] for layer in report["layers"]})
    commit = f" at commit {code(report['model']['sha'])}" if "sha" in report["model"] else ""
    return (
        f"This is {code(name)}{commit} with {summary['num_layers_quantized']} layers quantized"
        f" ({', '.join(map(code, schemes))}) by Bitfoundry {report['environment']['quantcore']}."
        f" Linear layers that were kept as they were: {summary['num_layers_kept']}.{_mix(report['mix'])}"
    )


def _mix(mix: dict[str, Any] | None) -> str:
    if mix is None:
        return ""
    layers = ", ".join(f"{num} {code(scheme)}" for scheme, num in mix["chosen"]["layers"].items())
    return (
        f" The scheme of each layer was chosen by what its rounding costs, for {code(budget(mix))}: {layers};"
        f" {mix['chosen']['bits']:.2f} bits a weight."
    )


def budget(mix: dict[str, Any]) -> str:
    """'max_bits 4.5': what a mix was chosen for."""
    return " ".join(f"{name} {value}" for name, value in mix["asked"].items() if name != "schemes")


def _numbers(report: dict[str, Any]) -> str:
    summary, quality = report["summary"], report["quality"]
    rows = [
        ("", "original", "quantized"),
        ("---", "---:", "---:"),
        ("size", _mega(summary["size_before_bytes"]), _mega(summary["size_after_bytes"])),
    ]
    if quality is None:
        return "## Measured\n\n" + _table(rows) + "\n\nNo evaluation was asked for."
    for name in ("token_perplexity", "word_perplexity", "byte_perplexity"):
        rows.append((name.replace("_", " "), with_error(quality["before"][name]), with_error(quality["after"][name])))
    for task, found in (report["harness"] or {}).items():
        for metric, pair in found.items():
            before, after = (pair[which] for which in ("original", "quantized"))
            rows.append((code(f"{task} {metric}"), with_error(before), with_error(after)))
    rows += [(code(task), "failed", "failed") for task in summary["failed_tasks"]]
    divergence = quality["divergence"]
    return (
        "## Measured\n\n" + _table(rows) + f"\n\nOn {quality['num_tokens']} held-out tokens"
        f" ({quality['num_windows']} windows of {quality['seq_len']}), ± one standard error. From the original's"
        f" predictions: mean KL divergence {with_error(divergence['kl_mean'])} nats a token, 99th percentile"
        f" {divergence['kl_p99']:.4g}; the same first choice for {with_error(divergence['top1_agreement'])} of all."
    )


def _warnings(report: dict[str, Any]) -> str:
    lines = [f"- {escape(' '.join(warning.split()))}" for warning in report["warnings"]]
    return "## Warnings\n\n" + "\n".join(lines) if lines else ""


def _loading(report: dict[str, Any]) -> str:
    parts = [
        f"{code(name)}, in {code(export['path'])}:\n\n```python\n{export['load']}\n```"
        for name, export in report["summary"]["exports"].items()
    ]
    return "## Loading\n\n" + "\n\n".join(parts)


def consumer_line(check: dict[str, Any]) -> str:
    """What another program made of an export, in a sentence."""
    if "not_checked" in check:
        return f"not read by another program: {check['not_checked']}"
    what = "the files of a small twin, exported in the same way" if check.get("of_twin") else "the files"
    return f"{check['consumer']} reads {what}; its logits differ by {check['logit_difference']:.1e} of their norm."


def _scheme(report: dict[str, Any]) -> str:
    missed = [row for row in report["summary"]["gates"] if row["status"] in ("warn", "fail")]
    lines = [f"- {row['gate']} {code(row['name'])}: {row['status']}. {escape(row['detail'])}" for row in missed]
    checks = [
        f"- {code(name)}: {escape(consumer_line(proof['consumer_check']))}" for name, proof in report["proof"].items()
    ]
    told = "\n".join(lines) or "Every gate was passed."
    if report["summary"]["gate"] == "off":
        told = "The gates were off: the result was held against no limit."
    return f"## Checks\n\n{told}\n\n" + "\n".join(checks)


def _licence(known: dict[str, Any]) -> str:
    licence = known.get("license")
    if not isinstance(licence, str):
        return "## Licence\n\nThe source names none in its card; what holds for the original holds for this model."
    return f"## Licence\n\n{code(licence)}, that of the original."


def _table(rows: list[tuple[str, str, str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def with_error(found: dict[str, float | None] | None) -> str:
    """``12.34 ± 0.05``"""
    if found is None or found["value"] is None:
        return "–"
    return f"{found['value']:.5g}" + ("" if found["stderr"] is None else f" ± {found['stderr']:.2g}")


def _strings(value: Any) -> list[str]:
    given = [value] if isinstance(value, str) else value if isinstance(value, list) else []
    return [one for one in given if isinstance(one, str)]


def _mega(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
