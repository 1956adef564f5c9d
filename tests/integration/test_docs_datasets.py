"""The page about datasets: its examples run against a real service, its tables are true."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from quantcore.data.hub_dataset import ALIASES
from tests.support.docs import DOCS, read_page
from tests.support.service import Server, WorkerProcess

PAGE = (DOCS / "how-to" / "datasets.md").read_text()


def test_the_table_of_names_is_that_of_the_code() -> None:
    section = PAGE.partition("| name | dataset |")[2].partition("\n\n")[0]
    shown = {}
    for line in section.splitlines()[2:]:
        names, *values = [cell.strip() for cell in line.strip("|").split("|")]
        keys = ("source", "config", "split", "column")
        row = {key: value.strip("`") for key, value in zip(keys, values, strict=True) if value}
        shown.update(dict.fromkeys(re.findall("`(.+?)`", names), row))
    assert shown == ALIASES


def test_every_code_of_the_table_is_one() -> None:
    section = PAGE.partition("## Errors")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    codes = {code for cell in rows for code in re.findall(r"`([a-z_]+)`", cell)}
    root = Path(__file__).parents[2]
    source = "".join(path.read_text() for package in ("api", "quantcore") for path in (root / package).rglob("*.py"))
    assert len(codes) > 20
    assert [code for code in codes if f'"{code}"' not in source] == []


@pytest.mark.slow
def test_the_shell_and_the_python(
    server: Server,
    make_model: Callable[..., Path],
    start_worker: Callable[..., WorkerProcess],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = {"URL": server.url, "KEY": server.key}
    environment = {"MODEL": str(make_model()), **server.environment}
    printed = read_page("how-to/datasets.md", tmp_path, names=names, **environment).output
    assert "support chats" in printed and "Question 2" in printed
    said = capsys.readouterr().out
    assert re.search(r"dst_[0-9a-f]{32} 2000", said) and "Line 1 {'messages'" in said and "\n400 0 0 " in said


def test_the_page_of_models(server: Server, make_model: Callable[..., Path], tmp_path: Path) -> None:
    printed = read_page("reference/models.md", tmp_path, MODEL=str(make_model()), **server.environment).output
    assert "parameters" in printed
    assert json.loads((tmp_path / "model.json").read_text())["num_blocks"] == 2
