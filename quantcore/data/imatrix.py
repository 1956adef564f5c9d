"""Finds the importance matrix that a config names. ``quantcore.engine.calibration.imatrix`` reads it. No torch."""

from __future__ import annotations

from pathlib import Path

from quantcore.errors import CalibrationError

HINT = "Make one with llama-imatrix or `bitfoundry imatrix`."


def find_imatrix(path: str | Path) -> Path:
    """Return the path of the file. Raises CalibrationError ``imatrix_not_found``."""
    if not Path(path).is_file():
        raise CalibrationError(
            f"There is no importance matrix at {path}.", code="imatrix_not_found", hint=HINT, field="/algo_config"
        )
    return Path(path)
