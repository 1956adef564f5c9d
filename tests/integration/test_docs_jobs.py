"""The page about jobs: its examples run against a real service with a real worker, its tables are true."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from api.store.states import ACTIONS, State
from tests.support.service import Server, WorkerProcess

PAGE = (Path(__file__).parents[2] / "docs" / "jobs.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


def test_the_table_of_states_is_the_map() -> None:
    rows = re.findall(r"^\| `(\w+)` \|.*\| ([a-z, ]+) \|$", PAGE, flags=re.MULTILINE)
    shown = {state: actions.split(", ") for state, actions in rows}
    assert shown == {state: [action for action, states in ACTIONS.items() if state in states] for state in State}


def test_the_python(
    server: Server,
    make_model: Callable[..., Path],
    start_worker: Callable[..., WorkerProcess],
    capsys: pytest.CaptureFixture[str],
) -> None:
    start_worker()
    names: dict[str, Any] = {"URL": server.url, "KEY": server.key, "MODEL": str(make_model(log="WARNING careful"))}
    for block in blocks("python"):
        exec(compile(block, "docs/jobs.md", "exec"), names)
    said = capsys.readouterr().out
    assert said.count("'/calibration/num_samples': 4} succeeded") == 2
    assert "'succeeded': 4" in said
    assert "l19 0.01 40.0" in said
    assert re.search(r"^quantize done \S+ 19 20 block$", said, flags=re.MULTILINE)
    assert "WARNING careful" in said
    assert "both: ['succeeded', 'succeeded']" in said


def test_the_shell(
    server: Server, make_model: Callable[..., Path], start_worker: Callable[..., WorkerProcess], tmp_path: Path
) -> None:
    environment = os.environ | {
        "BITFOUNDRY_URL": server.url,
        "BITFOUNDRY_API_KEY": server.key,
        "MODEL": str(make_model()),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "NO_PROXY": "127.0.0.1",
    }
    *waiting, running = blocks("sh")
    for script in ("".join(waiting), running):
        if script == running:
            start_worker()
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script], env=environment, cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr + done.stdout
    assert "stub engine starts" in done.stdout
    assert re.search(r"state_changed .*state=succeeded", done.stdout)
    first, second = (json.loads((tmp_path / f"answer.{number}.json").read_text()) for number in (1, 2))
    assert first["id"] == second["id"]
