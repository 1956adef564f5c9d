"""Shows answers while they grow, two of them side by side, and marks where the quantized model's differs."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import closing

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from quantcore.report.answers import Answer, Turn

MIN_COLUMNS = 80
"""Width of a terminal below which the answers stand one above the other."""
TITLES = ("original", "quantized")
MARK = "bold underline yellow"
_CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def layout(turn: Turn, width: int) -> RenderableType:
    """Return both answers as two columns, or one above the other if ``width`` is less than ``MIN_COLUMNS``.

    In the quantized model's answer all tokens from the first one that differs are marked: behind it the models
    continue different texts. One model's answer stands alone, without a title.
    """
    answers = [Text(_printable(answer.text)) for answer in _answers(turn)]
    if turn.first_different_char is not None:
        answers[-1].stylize(MARK, turn.first_different_char)
    figures = [Text(text, style="dim") for text in _figures(turn)]
    if len(answers) == 1:
        return Group(*answers, *figures)
    if width < MIN_COLUMNS:
        first, second = Text(TITLES[0], style="bold"), Text(TITLES[1], style="bold")
        return Group(first, answers[0], figures[0], "", second, answers[1], figures[1])
    table = Table(box=None, expand=True, padding=(0, 2, 0, 0), show_edge=False)
    for title in TITLES:
        table.add_column(title, ratio=1, overflow="fold")
    table.add_row(*answers)
    table.add_row(*figures)
    return table


def show_streamed(turns: Generator[Turn], console: Console) -> None:
    """Show a turn while it grows: in the end all of it, before that the last lines that fit the terminal."""
    last: Turn | None = None
    with closing(turns), Live(console=console, auto_refresh=False, transient=True) as live:
        for last in turns:
            live.update(_Tail(layout(last, console.width)), refresh=True)
    if last is not None:
        console.print(layout(last, console.width), "")


def show_lines(turn: Turn) -> None:
    """Print a whole turn as lines of text."""
    print(f"> {turn.prompt}\n")
    titles = TITLES if turn.original else ("answer",)
    for title, answer, figures in zip(titles, _answers(turn), _figures(turn), strict=True):
        print(f"[{title}: {figures}]\n{_printable(answer.text)}\n", flush=True)


def show_json(turn: Turn) -> None:
    """Print a whole turn as a JSON object: ``prompt`` and ``answer`` of a model that answers alone."""
    alone = {"prompt": turn.prompt, "answer": turn.quantized.to_dict()}
    print(json.dumps(turn.to_dict() if turn.original else alone, ensure_ascii=False), flush=True)


def _answers(turn: Turn) -> list[Answer]:
    return [turn.original, turn.quantized] if turn.original else [turn.quantized]


def _figures(turn: Turn) -> list[str]:
    figures = [f"{answer.num_tokens} tokens, {answer.time_s:.1f} s" for answer in _answers(turn)]
    if turn.original:
        index = turn.first_difference
        figures[-1] += ", no difference" if index is None else f", differs from token {index + 1} on"
    return figures


def _printable(text: str) -> str:
    """Return the text without characters that control a terminal; each becomes one other character."""
    return text.translate(_CONTROLS)


class _Tail:
    """Shows the last lines of something, as many as the terminal has."""

    def __init__(self, shown: RenderableType) -> None:
        self._shown = shown

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self._shown, options.update(height=None), pad=False)
        for line in lines[-(console.height - 1) :]:
            yield from line
            yield Segment.line()
