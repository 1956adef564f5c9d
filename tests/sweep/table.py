"""The page that the sweep writes: how many classes of each kind work in each way, and what each class lacks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch
import transformers

from tests.sweep.classes import TASKS
from tests.sweep.quantizing import EXPORTS, WAYS, Outcome, Row

SIGNS = {"ok": "yes", "refused": "no", "crashed": "crash"}


def write_table(rows: Sequence[Row], path: Path) -> None:
    """Write the Markdown page, and the folder that it is in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(_lines(rows)) + "\n")


def summary(rows: Sequence[Row]) -> list[str]:
    """Return the lines of the table that counts classes by kind and way."""
    lines = [
        f"| kind | built | {' | '.join(WAYS)} | in float without a reason | altered towers |",
        "|---|---|" + "---|" * (len(WAYS) + 2),
    ]
    for kind in TASKS:
        built = [row for row in rows if row.model_class.kind == kind and row.outcomes]
        if built:
            cells = [*(_share(built, way) for way in WAYS), _in_classes(built, "unexplained")]
            lines.append(f"| {' | '.join((kind, str(len(built)), *cells, _in_classes(built, 'altered')))} |")
    return lines


def _share(rows: Sequence[Row], way: str) -> str:
    verdicts = Counter(row.outcomes[way].verdict for row in rows)
    crashes = f", {verdicts['crashed']} crashed" if verdicts["crashed"] else ""
    return f"{verdicts['ok']} ({100 * verdicts['ok'] / len(rows):.0f} %){crashes}"


def _in_classes(rows: Sequence[Row], what: str) -> str:
    classes = [row for row in rows if any(getattr(outcome, what) for outcome in row.outcomes.values())]
    return f"in {len(classes)} classes" if classes else "none"


def _lines(rows: Sequence[Row]) -> Iterator[str]:
    built, not_built = ([row for row in rows if bool(row.outcomes) is wanted] for wanted in (True, False))
    yield from _introduction()
    yield from summary(rows)
    yield ""
    yield "## What does not work"
    yield ""
    yield "A refusal names its reason before anything is quantized."
    yield ""
    for row in built:
        for reason, ways in _reasons(row).items():
            yield f"- {row.model_class.name}, {', '.join(ways)}: {_escaped(reason)}"
    yield ""
    yield "## Every class"
    yield ""
    yield f"| class | {' | '.join(WAYS)} |"
    yield "|---|" + "---|" * len(WAYS)
    for row in built:
        yield f"| {row.model_class.name} | {' | '.join(_cell(row.outcomes[way]) for way in WAYS)} |"
    yield ""
    yield "## Not built"
    yield ""
    yield "The default config of these classes cannot build a model, builds a large one, or needs another package."
    yield ""
    for row in not_built:
        yield f"- {row.model_class.name}: {_escaped(row.not_built)}"


def _introduction() -> Iterator[str]:
    yield "# Architectures"
    yield ""
    yield (
        f"`make sweep` wrote this page on {datetime.now(UTC):%Y-%m-%d}, with Transformers {transformers.__version__}"
        f" and torch {torch.__version__.partition('+')[0]}. It takes each class of Transformers that generates text,"
        " reads images or sound with text, fills in masked tokens, or embeds texts. Of each it builds a tiny model"
        " with random weights, and quantizes that to the compressed-tensors format (another one in brackets) in four"
        " ways:"
    )
    yield ""
    for way, how in WAYS.items():
        steps = " and ".join(step["name"] for step in how.get("algo_config", ())) or "no algorithm"
        yield f"- **{way}**: `{how['preset']}`, {steps}{', file to file' if 'file2file' in how else ''}"
    yield ""
    yield (
        "Every linear weight of a result must be quantized, or the report must say why it is not. The table counts the"
        " classes that work, and those with weights that are in float without a reason, or with tensors of a tower that"
        " are not those of the model."
    )
    yield ""


def _reasons(row: Row) -> dict[str, list[str]]:
    """Return why ways do not work, each reason with its ways."""
    reasons: dict[str, list[str]] = {}
    for way, outcome in row.outcomes.items():
        if outcome.verdict != "ok":
            reason = outcome.detail.partition(": ")[2] if outcome.verdict == "refused" else outcome.detail
            reasons.setdefault(reason, []).append(way)
    return reasons


def _cell(outcome: Outcome) -> str:
    if outcome.verdict == "ok":
        yes = "yes" if outcome.export == EXPORTS[0] else f"yes ({outcome.export})"
        return f"{yes}, {len(outcome.unexplained)} unexplained" if outcome.unexplained else yes
    return f"{SIGNS[outcome.verdict]}: {_escaped(outcome.detail.partition(': ')[0])}"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
