"""Two answers in a terminal: in columns or one above the other, and what differs is marked."""

from collections.abc import Generator
from io import StringIO

import pytest
from rich.console import Console

from quantcore.cli.chat_view import MARK, MIN_COLUMNS, layout, show_lines, show_streamed
from quantcore.report.answers import Answer, Turn


def turn(original: str = "one two", quantized: str = "one six", token: int | None = 1, char: int | None = 4) -> Turn:
    answers = [Answer(text=text, num_tokens=2, time_s=0.5) for text in (original, quantized)]
    return Turn(
        prompt="count", original=answers[0], quantized=answers[1], first_difference=token, first_different_char=char
    )


def shown(turn: Turn, width: int, height: int = 25) -> str:
    console = Console(file=StringIO(), width=width, height=height, force_terminal=True, color_system=None)
    console.print(layout(turn, width))
    return console.file.getvalue()


def test_wide_terminals_have_two_columns_and_narrow_ones_stack_them() -> None:
    rows = [line.split() for line in shown(turn(), MIN_COLUMNS).splitlines()]
    assert rows[:2] == [["original", "quantized"], ["one", "two", "one", "six"]]
    stacked = shown(turn(), MIN_COLUMNS - 1).splitlines()
    assert [line.strip() for line in stacked] == [
        "original", "one two", "2 tokens, 0.5 s", "",
        "quantized", "one six", "2 tokens, 0.5 s, differs from token 2 on",
    ]  # fmt: skip


def test_long_lines_stay_in_their_column() -> None:
    lines = shown(turn("A" * 100, "B" * 100), MIN_COLUMNS).splitlines()
    assert all(len(line) <= MIN_COLUMNS for line in lines)
    rows = [line for line in lines if "A" in line]
    assert "".join(rows).count("A") == "".join(rows).count("B") == 100
    assert max(line.rfind("A") for line in rows) < min(line.find("B") for line in rows)


def test_what_differs_is_marked_not_by_colour_alone() -> None:
    console = Console(file=StringIO(), width=40, force_terminal=True, color_system="standard")
    console.print(layout(turn(), 40))
    assert "one \x1b[1;4;33msix\x1b[0m" in console.file.getvalue()
    assert "bold" in MARK and "underline" in MARK
    console = Console(file=StringIO(), width=40, force_terminal=True, color_system="standard")
    console.print(layout(turn("one", "one", None, None), 40))
    assert "\x1b[1;4;33m" not in console.file.getvalue() and "0.5 s, no difference" in console.file.getvalue()


def test_a_model_cannot_control_the_terminal() -> None:
    text = shown(turn("\x1b[2J\x9b5mred\ttab\nnext"), 40)
    assert "\x1b" not in text and "\x9b" not in text and "\ufffd[2J\ufffd5mred" in text and "\nnext" in text


def test_the_end_of_a_growing_answer_is_shown_and_at_last_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")  # a dumb terminal shows no growing answer
    console = Console(file=StringIO(), width=40, height=6, force_terminal=True, color_system=None)
    lines = [f"line {number}" for number in range(20)]
    closed = False

    def growing() -> Generator[Turn]:
        nonlocal closed
        try:
            yield turn("start", "\n".join(lines[:10]), None, None)
            assert "line 9" in console.file.getvalue() and "line 3" not in console.file.getvalue()
            yield turn("start", "\n".join(lines), None, None)
        finally:
            closed = True

    show_streamed(growing(), console)
    assert closed and all(line in console.file.getvalue() for line in lines)


def test_without_a_terminal_answers_are_lines(capsys: pytest.CaptureFixture[str]) -> None:
    show_lines(turn())
    assert capsys.readouterr().out == (
        "> count\n\n[original: 2 tokens, 0.5 s]\none two\n\n"
        "[quantized: 2 tokens, 0.5 s, differs from token 2 on]\none six\n\n"
    )
