"""Writes the engine's events as lines of the run's log: its blocks, warnings, candidates and checks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Line = tuple[str, str]
"""A line's text and its level."""


class EventText:
    """The lines of an attempt, one event after the other. Layers of one block are a line together."""

    def __init__(self) -> None:
        self._block: list[dict[str, Any]] = []

    def lines(self, event: dict[str, Any]) -> Iterator[Line]:
        """Yield the lines that an event makes. Progress makes none: there is too much of it."""
        kind = event.get("kind")
        if kind == "layer_quantized":
            if self._block and self._block[0].get("block") != event.get("block"):
                yield from self._take_block()
            self._block.append(event)
            return
        if kind != "progress":
            yield from self._take_block()
        if kind == "saved":
            yield f"saved: a stop continues at block {event.get('next_block')} of {event.get('num_blocks')}", "info"
        elif kind == "warning":
            yield f"{event.get('code')}: {event.get('message')}", "warning"
        elif kind == "candidate":
            yield _candidate(event.get("trial")), "info"
        elif kind == "gates":
            yield from _checks(event.get("results"))
        elif kind == "failed":
            yield f"{event.get('code')}: {event.get('message')}", "error"
        elif kind == "completed":
            yield "the result is complete and verified", "info"

    def _take_block(self) -> Iterator[Line]:
        layers, self._block = self._block, []
        if not layers:
            return
        name = "outside of the blocks" if layers[0].get("block") == -1 else f"block {layers[0].get('block')}"
        has_outputs = any(_number(each.get("output_error")) for each in layers)
        measure, what = ("output_error", "an output") if has_outputs else ("relative_error", "a weight")
        worst = max(layers, key=lambda each: _number(each.get(measure)))
        count = f"{len(layers)} layers" if len(layers) > 1 else "1 layer"
        schemes = ", ".join(sorted({str(each.get("scheme")) for each in layers}))
        error = f"{100 * _number(worst.get(measure)):.3g} % ({worst.get('name')})"
        yield f"{name}: {count} to {schemes}, largest error of {what} {error}", "info"


def _candidate(row: Any) -> str:
    trial = row if isinstance(row, dict) else {}
    size, recovery = (_number(trial.get(name)) for name in ("size_bytes", "recovery"))
    return f"candidate: {size / 1e6:.1f} MB, recovery {100 * recovery:.2f} %, {trial.get('algorithms')}"


def _checks(results: Any) -> Iterator[Line]:
    rows = [row for row in results if isinstance(row, dict)] if isinstance(results, list) else []
    failed = [row for row in rows if row.get("status") == "fail"]
    for row in failed:
        yield f"check {row.get('name')} failed: {row.get('value')}, limit {row.get('limit')}", "warning"
    yield f"{len(rows) - len(failed)} of {len(rows)} checks did not fail", "info"


def _number(value: Any) -> float:
    """Return a number that an engine printed, 0 for anything else."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0.0
