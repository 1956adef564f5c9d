"""Every fault and every promise that the pages list has tests, and they exist."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "failure-modes.md").read_text()
ROWS = re.findall(r"^\| (F\d+) .*\| ([^|]*) \|$", PAGE, flags=re.MULTILINE)


def test_the_list_is_whole() -> None:
    assert [name for name, _ in ROWS] == [f"F{number}" for number in range(1, len(ROWS) + 1)]
    assert len(ROWS) >= 30


def test_its_tests_exist() -> None:
    security = (ROOT / "docs" / "concepts" / "security.md").read_text()
    promises = re.findall(r"^\| ([^|]*) \|[^|]*\| (`tests/[^|]*) \|$", security, flags=re.MULTILINE)
    assert len(promises) >= 15
    for fault, cell in [*ROWS, *promises]:
        named = re.findall(r"`(tests/[^`]+)::(\w+)`", cell)
        assert named, fault
        for file, name in named:
            tree = ast.parse((ROOT / file).read_text())
            assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, (fault, file, name)
