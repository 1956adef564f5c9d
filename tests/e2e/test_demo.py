"""`make demo` in small: the same code with a tiny random model, one preset, one goal and little text."""

import tempfile
from pathlib import Path

import psutil
import pytest

from bitfoundry.commands import demo
from bitfoundry.local import demo_model
from tests.support.models import tiny_model


def test_the_demo_runs_shows_and_leaves_nothing_running(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.delenv("DATABASE_URL", raising=False)
    monkeypatch.delenv("BROKER_URL", raising=False)
    few = {"calibration": {"num_samples": 2, "seq_len": 64}}
    goal = {"runtime": "vllm", "device": "24GB", "min_recovery": "best"}
    requests = {"fp8": {"config": "fp8", **few}, "for a goal": {"goal": goal, **few}}
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    with tempfile.TemporaryDirectory(prefix="bf-test-", dir="/tmp") as folder:
        model_dir = tiny_model(Path(folder) / "models" / "tiny")
        monkeypatch.setattr(demo_model, "prepare", lambda say: model_dir)
        show = demo.Demo(Path(folder) / "home", requests=requests)
        for job in show.run():
            assert job.state == "succeeded", job.error
        links = Path(folder).resolve() / "home" / "demo"
        assert (links / "fp8" / "config.json").is_file() and (links / "for-a-goal" / "config.json").is_file()
        show.save_picture(tmp_path / "demo.svg")
    said = capsys.readouterr()
    for part in (
        "verdict",
        "perplexity",
        "worst layer",
        "peak memory",
        f"from_pretrained('{links}/fp8')",
    ):
        assert part in said.out, part
    assert "What to do next" in said.out and "bitfoundry auto MODEL" in said.out
    assert 'POST /v1/jobs {"config": "fp8", "calibration"' in said.err
    picture = (tmp_path / "demo.svg").read_text()
    assert picture.startswith("<svg")
    assert "make&#160;demo" in picture
    assert "@font-face" not in picture  # it loads nothing from anywhere
    left = [process for process in psutil.Process().children(recursive=True) if process.pid not in before]
    assert [process for process in left if process.status() != psutil.STATUS_ZOMBIE] == []
