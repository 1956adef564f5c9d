"""What `restore` says at its end; the restoring itself is tested with the local stack."""

from pathlib import Path

import pytest

from bitfoundry.commands import main as cli
from bitfoundry.local import backup


@pytest.mark.parametrize("is_usual", [True, False])
def test_restored_data_are_started_and_not_the_old(
    is_usual: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It said `bitfoundry up`, which starts the usual data folder, whatever folder was restored."""
    monkeypatch.setenv("BITFOUNDRY_HOME", str(tmp_path / "usual"))
    monkeypatch.setattr(backup, "restore", lambda file, folder, say, **how: None)
    folder = tmp_path / ("usual" if is_usual else "it is new")
    assert cli.run(["restore", "a.backup", "--home", str(folder), "--trust"]) == 0
    command = "bitfoundry up" if is_usual else f"bitfoundry up --home '{folder}'"
    assert capsys.readouterr().out == f"Restored to {folder}. Start it with `{command}`.\n"
