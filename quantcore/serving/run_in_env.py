"""Runs our scripts in the environment of another program, without the rest of the engine.

``inside_env`` is the part that runs there.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from quantcore.checkpoint.headers import read_json
from quantcore.errors import ConfigError, ModelError
from quantcore.sandbox.environment import of_other_programs

INSIDE_ENV = Path(__file__).with_name("inside_env.py")
STOPWATCH = Path(__file__).with_name("stopwatch.py")
VLLM_TASKS = Path(__file__).with_name("vllm_tasks.py")
NUM_LINES = 15  # of a program's last output before it died


def kv_cache_dtype(model: str | Path) -> str:
    """Return vLLM's setting for the KV cache of ``model``: it uses the scales in the files only for ``fp8``."""
    file = Path(model) / "config.json"
    config = read_json(file, "no_config") if file.is_file() else {}
    quantization_config = config.get("quantization_config") or {}
    quark_export = quantization_config.get("export") or {}
    has_scales = quantization_config.get("kv_cache_scheme") or quark_export.get("kv_cache_group")
    return "fp8" if has_scales else "auto"


def run_in_env(script: Path, task: dict[str, Any], *, python: str, program: str) -> dict[str, Any]:
    """Run ``script`` with the interpreter ``python`` of the environment where ``program`` is installed.

    ``task`` names at least the ``model``. Raises ConfigError ``no_runtime``, ModelError ``runtime_failed``.
    """
    command = [python, "-I", str(INSIDE_ENV), str(script)]  # -I: the files beside it are not for that environment
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=of_other_programs(),
        )
    except OSError as error:
        raise ConfigError(
            f"{python} cannot be started: {error.strerror}.",
            code="no_runtime",
            hint=f"Use the interpreter of the environment where {program} is installed.",
        ) from error
    try:
        output, complaints = process.communicate(json.dumps(task))
    finally:
        process.kill()
    lines = [line for line in output.splitlines() if line.startswith("RESULT ")]
    result: dict[str, Any] = json.loads(lines[0][7:]) if lines else {}
    if "missing" in result:
        raise ConfigError(
            f"{python} belongs to an environment without {program}: there is no module {result['missing']}.",
            code="no_runtime",
            hint="Install it there, or use the interpreter of an environment that has it.",
        )
    if "error" in result or not result:
        last = result.get("error") or "\n".join(complaints.splitlines()[-NUM_LINES:]) or f"status {process.returncode}"
        raise ModelError(
            f"{program} does not serve {task['model']}: {last}",
            code="runtime_failed",
            hint="See docs/reference/compatibility.md for the formats that each program reads.",
        )
    return result
