"""`make demo` in small: the same code with a tiny random model, one preset and little text."""

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
    monkeypatch.setattr(demo, "CALIBRATION", {"source": "builtin", "num_samples": 2, "seq_len": 64})
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    with tempfile.TemporaryDirectory(prefix="bf-test-", dir="/tmp") as folder:
        model_dir = tiny_model(Path(folder) / "models" / "tiny")
        monkeypatch.setattr(demo_model, "prepare", lambda say: model_dir)
        show = demo.Demo(Path(folder) / "home", presets=["fp8"])
        (job,) = show.run()
        assert job.state == "succeeded", job.error
        link = Path(folder).resolve() / "home" / "demo" / "fp8"
        assert (link / "quark" / "config.json").is_file()
        show.save_picture(tmp_path / "demo.svg")
    said = capsys.readouterr()
    for part in (
        "verdict",
        "perplexity",
        "worst layer",
        "peak memory",
        f"import_model_from_safetensors(None, '{link}/quark')",
    ):
        assert part in said.out, part
    assert "What to do next" in said.out and "--effort best" in said.out
    assert "POST /v1/jobs, preset fp8 → 202 job_" in said.err
    picture = (tmp_path / "demo.svg").read_text()
    assert picture.startswith("<svg")
    assert "make&#160;demo" in picture
    assert "@font-face" not in picture  # it loads nothing from anywhere
    left = [process for process in psutil.Process().children(recursive=True) if process.pid not in before]
    assert [process for process in left if process.status() != psutil.STATUS_ZOMBIE] == []
