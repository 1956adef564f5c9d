"""The results as a Markdown table: every engine beside ours, cell by cell."""

from __future__ import annotations

from collections.abc import Iterator
from string import ascii_uppercase
from typing import Any

from bench.engines.cells import ALGORITHMS, ENGINES, FLOAT, SCHEMES, Cell, all_cells

Row = dict[str, Any]
HEAD = (
    "engine", "perplexity", "over given", "KL", "top-1", "CPU s", "wall s", "peak MB", "ours / it: perplexity", "CPU",
    "memory",
)  # fmt: skip
AIMS = (
    ("perplexity at or below the best peer's", ("perplexity",), 1.0,
     "Where symmetric weights are just rounded, engines differ by their rule for a range alone (docs/decisions/0002)."
     " SmoothQuant's default strength (0.8) is made for int8, not for fp8. The signs of a rotation move perplexity by a"
     " percent where inputs have one static range: fp8 is 29.1 without them, 29.3 to 29.6 with three seeds."),
    ("half the CPU seconds of the fastest peer", ("quantize", "cpu_s"), 0.5,
     "Ours includes reading and writing the files, the peers' does not: most of it where weights are just rounded."),
    ("half the memory of the smallest peer", ("quantize", "peak_bytes"), 0.5,
     "Some 360 MB of our process are Python, torch and Transformers, before any weight (peak_before_bytes)."),
)  # fmt: skip
MEASURES = (("perplexity",), ("quantize", "cpu_s"), ("quantize", "peak_bytes"))


def markdown(results: dict[str, Any]) -> str:
    """Return the whole page for the content of a results file."""
    rows: list[Row] = results["rows"]
    parts = (_introduction(results), _cells(rows), _shortfalls(rows), _holes(rows), _failures(rows))
    return "\n".join(line for part in parts for line in part) + "\n"


def ratio(ours: dict[str, Any], other: dict[str, Any], *path: str) -> float | None:
    """Return our number over the other's at ``path``; None if one is missing or the other's is zero."""
    a, b = _at(ours, *path), _at(other, *path)
    return None if a is None or not b else a / b


def _introduction(results: dict[str, Any]) -> Iterator[str]:
    settings, machines = results["settings"], _machines(results["rows"])
    float_row = _float(results["rows"])
    yield f"# Engines, {results['date']}"
    yield ""
    yield (
        f"{settings['model']}; {settings['num_samples']} x {settings['seq_len']} tokens for calibration and "
        f"{settings['num_windows']} x {settings['seq_len']} held out, of {settings['text']}, the same for all. "
        f"{'; '.join(f'{letter}: {machine}' for machine, letter in machines.items())}; one thread. "
        f"Perplexity of the model as given, in bfloat16: {_number(float_row.get('perplexity'), 3)}. "
        f"{_grids(settings)}"
    )
    yield ""
    yield (
        "CPU and wall seconds are those of the quantize step. For ours they include reading and writing the files; for "
        "the peers they leave out imports, loading and saving. KL is the mean divergence of the given model's "
        "predictions in nats, top-1 the share of tokens for which both models predict the same. Peak memory is that of "
        "the whole process up to the end of that step. "
        "Each engine has its own defaults, except what its row in the JSON file names under `settings`. A ratio below "
        "1 is better for ours. `load` is the machine's load average when the row began: wall seconds mean little where "
        "it exceeds the cores. Only rows of one machine are held against each other."
    )


def _grids(settings: dict[str, Any]) -> str:
    """Return what is known of the levels of the model's weights: files from before 2026-11-29 do not say it."""
    if "grids" not in settings:
        return "Whether its weights lay on a grid was not looked at."
    found = "; ".join(settings["grids"])
    return f"Its weights lie on a grid: {found}." if found else "Its weights lie on no grid."


def _float(rows: list[Row]) -> Row:
    return next((row for row in rows if row["engine"] == FLOAT), {})


def _machines(rows: list[Row]) -> dict[str, str]:
    """Return a letter for each machine, in the order of their rows."""
    return dict(zip(dict.fromkeys(row["machine"] for row in rows), ascii_uppercase, strict=False))


def _cells(rows: list[Row]) -> Iterator[str]:
    machines, baseline = _machines(rows), _float(rows)
    for scheme, title in SCHEMES.items():
        for algorithm, how in ALGORITHMS.items():
            cell_rows = [row for row in rows if (row["scheme"], row["algorithm"]) == (scheme, algorithm)]
            cell_rows.sort(key=lambda row: (list(ENGINES).index(row["engine"]), machines[row["machine"]]))
            if not any(row["status"] == "ok" for row in cell_rows):
                continue
            yield from ("", f"## {scheme}, {algorithm}", "", f"{title}; {how}.", "")
            yield "| " + " | ".join((*HEAD, "load", "machine")) + " |"
            yield "|---|" + "---:|" * len(HEAD) + "---|"
            for row in cell_rows:
                yield f"{_line(row['engine'], row, _ours_beside(row, rows), baseline)} {machines[row['machine']]} |"
            notes = dict.fromkeys(f"- {ENGINES[row['engine']]}: {row['note']}." for row in cell_rows if row.get("note"))
            yield from ("", *notes) if notes else ()


def _ours_beside(row: Row, rows: list[Row]) -> Row:
    """Return our row of the same cell on the same machine, or an empty one."""
    same = ("scheme", "algorithm", "machine")
    ours = (other for other in rows if other["engine"] == "ours")
    return next((other for other in ours if all(other[key] == row[key] for key in same)), {})


def _line(engine: str, row: dict[str, Any], ours: dict[str, Any], baseline: dict[str, Any]) -> str:
    if row["status"] != "ok":
        return f"| {ENGINES[engine]} | {row['status']} |" + " |" * (len(HEAD) - 1)
    over = ratio(row, baseline, "perplexity")
    ratios = ["" if engine == "ours" else _number(ratio(ours, row, *path), 3) for path in MEASURES]
    values = (
        ENGINES[engine], _number(row["perplexity"], 3), "" if over is None else f"{100 * (over - 1):+.1f} %",
        _number(row.get("kl"), 5), _number(row.get("top1"), 3),
        _number(_at(row, "quantize", "cpu_s"), 1), _number(_at(row, "quantize", "wall_s"), 1),
        _number(_at(row, "quantize", "peak_bytes") / 1e6, 0), *ratios, _number(row["load_average"], 1),
    )  # fmt: skip
    return "| " + " | ".join(values) + " |"


def _shortfalls(rows: list[Row]) -> Iterator[str]:
    """Yield the cells in which an aim is missed, compared with the best peer in that, and the reason."""
    best: dict[str, dict[str, float]] = {aim: {} for aim, *_ in AIMS}
    for row in rows:
        if row["engine"] in ("ours", FLOAT) or row["status"] != "ok":
            continue
        ours = _ours_beside(row, rows)
        for aim, path, limit, _ in AIMS:
            if (value := ratio(ours, row, *path)) is not None and value > limit:
                cell = Cell("ours", row["scheme"], row["algorithm"]).name
                best[aim][cell] = max(value, best[aim].get(cell, 0.0))
    missed = {aim: cells for aim, cells in best.items() if cells}
    if missed:
        yield from ("", "## Aims that are missed", "")
    for aim, _, _, why in AIMS:
        if aim in missed:
            cells = ", ".join(f"{cell} {value:.3f}" for cell, value in missed[aim].items())
            yield f"- {aim}: {cells}. {why}"


def _holes(rows: list[Row]) -> Iterator[str]:
    """Yield the reasons why an engine has no row in a cell that others have."""
    seen = {(row["scheme"], row["algorithm"]) for row in rows}
    holes: dict[tuple[str, str], list[str]] = {}
    for cell in all_cells():
        if (cell.scheme, cell.algorithm) in seen and cell.missing:
            holes.setdefault((cell.engine, cell.missing), []).append(cell.name)
    if holes:
        yield from ("", "## Not there", "")
    for (engine, reason), names in holes.items():
        yield f"- {ENGINES[engine]}: {reason} ({', '.join(names)})"


def _failures(rows: list[Row]) -> Iterator[str]:
    failed = [row for row in rows if row["status"] != "ok"]
    if failed:
        yield from ("", "## Failed", "")
    for row in failed:
        name = Cell(row["engine"], row["scheme"], row["algorithm"]).name
        yield f"- {ENGINES[row['engine']]}, {name}: {row['status']}. `{row['error'].strip().splitlines()[-1]}`"


def _at(row: dict[str, Any], *path: str) -> Any:
    for key in path:
        row = row.get(key) if isinstance(row, dict) else None  # type: ignore[assignment]
    return row


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
