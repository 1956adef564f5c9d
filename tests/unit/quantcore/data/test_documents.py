"""Rows of data files as documents: the tools beside a chat, and a file that is one text."""

import json
from pathlib import Path
from typing import Any

import pytest

from quantcore.config.texts import TextPart
from quantcore.data.documents import is_prose, read_documents
from quantcore.errors import CalibrationError

CHAT = [{"role": "user", "content": "hello"}]
TOOLS = [{"type": "function", "function": {"name": "weather"}}]


def written(folder: Path, *rows: dict[str, Any]) -> TextPart:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return TextPart(source=str(path))


def rendered(messages: list[Any], tools: list[Any] | None = None) -> str:
    return f"{messages[0]['content']} {tools}"


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)])
def test_a_template_gets_the_tools_beside_a_chat(tools: object, tmp_path: Path) -> None:
    rows = ({"messages": CHAT, "tools": tools}, {"messages": CHAT, "tools": None}, {"messages": CHAT})
    expected = [f"hello {TOOLS}", "hello None", "hello None"]
    assert list(read_documents(written(tmp_path, *rows), rendered)) == expected


def test_tools_that_are_no_list_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="Line 1: the column 'tools'"):
        list(read_documents(written(tmp_path, {"messages": CHAT, "tools": "a hammer"}), rendered))


def test_a_file_with_one_row_is_a_single_text(tmp_path: Path) -> None:
    """It was given to calibration as a whole, and nothing was left to measure on."""
    assert is_prose(written(tmp_path, {"text": "long"}))
    assert not is_prose(written(tmp_path, {"text": "long"}, {"text": "longer"}))
