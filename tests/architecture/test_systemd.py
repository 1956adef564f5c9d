"""The unit for a worker of a Slurm cluster: systemd accepts it, and it agrees with the code and its page."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import bitfoundry
from api.settings import Settings
from tests.support.sources import ROOT

UNIT = ROOT / "deploy" / "slurm" / "bitfoundry-worker.service"
PAGE = (ROOT / "docs" / "how-to" / "slurm.md").read_text()
STOP_MARGIN_S = 30
"""More than a worker needs to hand its jobs back once its engines have ended (8 s in test_faults_worker.py)."""
EXPOSURE = 20
"""In tenths, of 10 that systemd gives to a unit without any protection. What is left is the network."""


def values(key: str) -> list[str]:
    return re.findall(rf"^{key}=(.*)$", UNIT.read_text(), re.MULTILINE)


def environment_file() -> dict[str, str]:
    """The variables of the page's example."""
    (block,) = re.findall(r"```ini\n(DATABASE_URL.*?)```", PAGE, re.DOTALL)
    return dict(line.split("=", 1) for line in block.splitlines())


def test_systemd_accepts_it_and_its_protection(tmp_path: Path) -> None:
    """With a program that exists here. A key that systemd does not know fails."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not installed")
    unit = tmp_path / UNIT.name
    unit.write_text(
        UNIT.read_text().replace(shlex.split(values("ExecStart")[0])[0], str(Path(sys.executable).resolve()))
    )
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", unit], capture_output=True, text=True
    )
    assert (checked.returncode, checked.stderr) == (0, "")
    security = ["systemd-analyze", "security", "--offline=true", "--no-pager", f"--threshold={EXPOSURE}", unit]
    rated = subprocess.run(security, capture_output=True, text=True)
    assert rated.returncode == 0, rated.stdout


def test_the_unit_agrees_with_the_code() -> None:
    program, *arguments = shlex.split(values("ExecStart")[0])
    assert arguments == ["-m", "worker"] and program == f"/shared/bitfoundry/{bitfoundry.__version__}/bin/python"
    assert int(values("TimeoutStopSec")[0]) >= Settings.model_fields["stop_grace_s"].default + STOP_MARGIN_S
    assert values("KillMode") == ["mixed"], "SIGTERM is the worker's alone; what it started ends with it"
    assert values("Restart") == ["always"]


def test_the_unit_agrees_with_the_page() -> None:
    given = environment_file()
    others = {"DATABASE_URL", "BROKER_URL", "HF_HOME"}
    assert given.keys() - others <= {f"BITFOUNDRY_{name.upper()}" for name in Settings.model_fields}
    names = {name.removeprefix("BITFOUNDRY_").lower(): value for name, value in given.items() if name != "HF_HOME"}
    settings = Settings(**{name: value for name, value in names.items() if name != "secret_key"})  # type: ignore[arg-type]
    assert (settings.launcher, settings.slots) == ("slurm", 4)
    assert values("ProtectSystem") == ["strict"], "nothing else can be written"
    assert values("ReadWritePaths")[0].split() == [str(settings.data_dir), given["HF_HOME"]]
    assert set(re.findall(r"/shared/bitfoundry/([\d.]+)", PAGE)) == {bitfoundry.__version__}
    assert values("EnvironmentFile")[0] in PAGE and str(UNIT.relative_to(ROOT)) in PAGE
    assert values("User") == re.findall(r"useradd --system (\w+)", PAGE)
