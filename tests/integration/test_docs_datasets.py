"""The page about datasets: its examples run against a real service, its tables are true."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantcore.data.hub_dataset import ALIASES
from tests.support.service import Server, WorkerProcess

PAGE = (Path(__file__).parents[2] / "docs" / "datasets.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


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
    section = PAGE.partition("## What can be wrong")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    codes = {code for cell in rows for code in re.findall(r"`([a-z_]+)`", cell)}
    root = Path(__file__).parents[2]
    source = "".join(path.read_text() for package in ("api", "quantcore") for path in (root / package).rglob("*.py"))
    assert len(codes) > 20
    assert [code for code in codes if f'"{code}"' not in source] == []


def test_the_shell_and_the_python(
    server: Server,
    make_model: Callable[..., Path],
    start_worker: Callable[..., WorkerProcess],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = make_model()
    environment = os.environ | {
        "BITFOUNDRY_URL": server.url,
        "BITFOUNDRY_API_KEY": server.key,
        "MODEL": str(model),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "NO_PROXY": "127.0.0.1",
    }
    script = "".join(blocks("sh"))
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert "support chats" in done.stdout and "Question 2" in done.stdout and "parameters" in done.stdout
    assert json.loads((tmp_path / "model.json").read_text())["num_blocks"] == 2

    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"URL": server.url, "KEY": server.key}
    for block in blocks("python"):
        exec(compile(block, "docs/datasets.md", "exec"), names)
    said = capsys.readouterr().out
    assert re.search(r"dst_[0-9a-f]{32} 2000", said) and "Line 1 {'messages'" in said and "\n400 0 0 " in said
