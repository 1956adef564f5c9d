"""The page about jobs: its examples run against a real service with a real worker, its tables are true."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from api.store.engine import Sessions
from api.store.states import ACTIONS, State
from tests.support.docs import DOCS, blocks_of, read_page
from tests.support.models import tiny_model
from tests.support.service import Server, WorkerProcess
from tests.support.waiting import wait_until

STATES = (DOCS / "reference" / "job-states.md").read_text()


def test_the_table_of_states_is_the_map() -> None:
    rows = re.findall(r"^\| `(\w+)` \|.*\| ([a-z, ]+) \|$", STATES, flags=re.MULTILINE)
    shown = {state: actions.split(", ") for state, actions in rows}
    assert shown == {state: [action for action, states in ACTIONS.items() if state in states] for state in State}


@pytest.mark.slow
def test_the_page(
    server: Server,
    make_model: Callable[..., Path],
    start_worker: Callable[..., WorkerProcess],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No worker takes the jobs while the page changes those that wait."""
    names = {"URL": server.url, "KEY": server.key, "MODEL": str(make_model(log="WARNING careful"))}
    environment = {"MODEL": names["MODEL"], **server.environment}
    reading = read_page("how-to/jobs.md", tmp_path, names=names, at={"Follow": start_worker}, **environment)
    said = capsys.readouterr().out
    assert "l19 0.01 40.0" in said
    assert re.search(r"^quantize done \S+ 19 20 block$", said, flags=re.MULTILINE)
    assert "WARNING careful" in said
    assert "both: ['succeeded', 'succeeded']" in said
    assert "stub engine starts" in reading.outputs[-1]
    assert re.search(r"state_changed .*state=succeeded", reading.outputs[-1])
    first, second = (json.loads((tmp_path / f"answer.{number}.json").read_text()) for number in (1, 2))
    assert first["id"] == second["id"]


@pytest.mark.slow
def test_the_page_of_sweeps(
    server: Server,
    make_model: Callable[..., Path],
    start_worker: Callable[..., WorkerProcess],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    start_worker()
    read_page("how-to/sweeps.md", tmp_path, names={"URL": server.url, "KEY": server.key, "MODEL": str(make_model())})
    said = capsys.readouterr().out
    assert said.count("'/calibration/num_samples': 4} succeeded") == 2
    assert "'succeeded': 4" in said


@pytest.mark.slow
def test_the_page_of_retention(server: Server, tmp_path: Path) -> None:
    assert "20" in read_page("how-to/retention.md", tmp_path, **server.environment).output


@pytest.mark.slow
def test_the_page_of_operators(
    server: Server, start_worker: Callable[..., WorkerProcess], sessions: Sessions, tmp_path: Path
) -> None:
    start_worker()
    with server.connect() as http:
        wait_until(lambda: http.get("/v1/workers").json()["data"])
    read_page("how-to/operate.md", tmp_path, **server.environment)
    assert "bitfoundry_jobs" in (tmp_path / "metrics.txt").read_text()


@pytest.mark.slow
def test_the_page_of_the_command_line(
    server: Server, start_worker: Callable[..., WorkerProcess], tmp_path: Path
) -> None:
    """The findings and the groups of the self-test have the names that the page shows, in this order."""
    start_worker()
    printed = read_page("how-to/command-line.md", tmp_path, **server.environment).output
    findings, groups = [block.shown for block in blocks_of("how-to/command-line.md") if block.language == "console"]
    finding = re.compile(r"^(?:ok|warning) +([a-z]+) ", re.MULTILINE)
    assert finding.findall(printed) == finding.findall(findings)
    group = re.compile(r"^ (\w[\w ]*?)  +\d", re.MULTILINE)
    assert group.findall(printed) == group.findall(groups) != []
    assert "agreed after" in printed


@pytest.mark.slow
def test_the_readme(
    server: Server, make_model: Callable[..., Path], start_worker: Callable[..., WorkerProcess], tmp_path: Path
) -> None:
    """Its shell on the real engine, its HTTP and its Python on a service."""
    start_worker()
    model = tiny_model(tmp_path / "SmolLM2-135M-Instruct", num_hidden_layers=1, max_position_embeddings=2048)
    (model / "chat_template.jinja").write_text("{% for message in messages %}{{ message['content'] }}\n{% endfor %}")
    names = {"URL": server.url, "KEY": server.key, "MODEL": str(make_model())}
    reading = read_page("README.md", tmp_path, names=names, MODEL=names["MODEL"], **server.environment)
    assert reading.names["job"].state == "succeeded"
    assert json.loads((tmp_path / "job.json").read_text())["state"] == "queued"
    [shown] = [block.shown for block in blocks_of("README.md") if block.language == "console"]
    rows = re.compile(r"^ (\w[\w ]*?)  +", re.MULTILINE)
    assert set(rows.findall(shown)) <= set(rows.findall(reading.outputs[0]))


@pytest.mark.slow
def test_the_page_of_evaluation(
    server: Server, make_model: Callable[..., Path], start_worker: Callable[..., WorkerProcess], tmp_path: Path
) -> None:
    model = tiny_model(
        tmp_path / "SmolLM2-135M-Instruct", num_hidden_layers=1, max_position_embeddings=2048, head_dim=32
    )  # a KV cache of q8_0 has blocks of 32
    (model / "chat_template.jinja").write_text("{% for message in messages %}{{ message['content'] }}\n{% endfor %}")
    names = {"URL": server.url, "KEY": server.key, "MODEL": str(make_model())}
    reading = read_page("how-to/evaluate.md", tmp_path, names=names, **server.environment)
    assert "perplexity" in reading.output and reading.names["job"].gate == "fail"


@pytest.mark.slow
def test_the_page_from_file_to_file(
    server: Server, make_model: Callable[..., Path], start_worker: Callable[..., WorkerProcess], tmp_path: Path
) -> None:
    start_worker()
    tiny_model(tmp_path / "SmolLM2-135M-Instruct", num_hidden_layers=1)
    read_page("how-to/file-to-file.md", tmp_path, MODEL=str(make_model()), **server.environment)
    assert (tmp_path / "out" / "MANIFEST.json").is_file()
