"""Slurm as a launcher: ``sbatch``, ``squeue``, ``sacct`` and ``scancel``. Tried with Slurm 22.05.

The operator's template is the batch script. It holds the account, the partition, GPUs, modules and containers, and
``{command}`` where the engine starts: ``srun`` starts it once on each node. What a job needs is asked for by options
of sbatch, which win over the template.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from api.settings import Settings
from quantcore.errors import ConfigError
from worker.launchers import LAUNCHERS, End, LauncherAway, Request, Status

TIMEOUT_S = 60
COMMAND = "{command}"
TEMPLATE = f"#!/bin/bash\nsrun --kill-on-bad-exit=1 {COMMAND}\n"
LOG = "slurm.log"
KEPT_VARIABLES = ("PATH", "HOME", "USER", "LANG", "SLURM_CONF")

_PENDING = {"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "CONFIGURING", "RESV_DEL_HOLD"}
_ENDS = {
    "COMPLETED": End.EXITED,
    "FAILED": End.EXITED,
    "CANCELLED": End.CANCELLED,
    "TIMEOUT": End.OUT_OF_TIME,
    "DEADLINE": End.OUT_OF_TIME,
    "OUT_OF_MEMORY": End.OUT_OF_MEMORY,
    "PREEMPTED": End.INTERRUPTED,
    "NODE_FAIL": End.INTERRUPTED,
    "BOOT_FAIL": End.INTERRUPTED,
    "REVOKED": End.INTERRUPTED,
}
_UNKNOWN_JOB = re.compile("Invalid job id|Job/step already completing or completed")
_NEVER = re.compile(  # of sbatch: other faults may go away by themselves
    "invalid|unrecognized|not permitted|does not exist|is not available|violates|exceeds|denied|unable to open file"
    "|not a valid|must be|This does not look like a batch script|can not be satisfied",
    re.IGNORECASE,
)


@LAUNCHERS.add("slurm")
class Slurm:
    """The cluster whose commands are in the PATH."""

    name = "slurm"

    def __init__(self, settings: Settings) -> None:
        """Read the template of the settings. Raises ConfigError ``invalid_settings``."""
        self._template = read_template(settings.launcher_template)
        missing = [name for name in ("sbatch", "squeue", "scancel") if shutil.which(name) is None]
        if missing:
            raise ConfigError(
                f"The commands of Slurm are not in the PATH: {', '.join(missing)}.",
                code="invalid_settings",
                hint="Start this worker where jobs can be submitted, or unset BITFOUNDRY_LAUNCHER.",
            )

    @staticmethod
    def preview(settings: Settings, request: Request) -> str:
        script = script_of(read_template(settings.launcher_template), request)
        return f"{shlex.join([*command_of(request), 'slurm.sh'])}\n\n{script}"

    def submit(self, request: Request) -> str:
        script = request.folder / "slurm.sh"
        script.write_text(script_of(self._template, request))
        script.chmod(0o700)
        answer = _run([*command_of(request), str(script)], request.environment)
        if answer.returncode:
            said = answer.stderr.strip()
            if not _NEVER.search(said):
                raise LauncherAway(said)
            raise ConfigError(
                f"Slurm refused the job: {said}",
                code="launcher_refused",
                hint="The operator can check the template (BITFOUNDRY_LAUNCHER_TEMPLATE) and the limits of the"
                " partition. Then retry the job.",
            )
        return answer.stdout.strip().partition(";")[0]

    def find(self, name: str) -> dict[str, Path]:
        lines = _ask(["squeue", "--noheader", f"--name={name}", "--format=%A|%Z"]).splitlines()
        return {number: Path(folder) for number, _, folder in (line.partition("|") for line in lines)}

    def status(self, allocation: str) -> Status:
        command = ["squeue", "--noheader", "--states=all", f"--jobs={allocation}", "--format=%T|%N|%r"]
        answer = _run(command)
        if answer.returncode and not _UNKNOWN_JOB.search(answer.stderr):
            raise LauncherAway(answer.stderr.strip())
        line = answer.stdout.strip()
        word, nodes, reason = line.split("|", 2) if line else _remembered(allocation)
        if word in _ENDS or not word:
            return Status(word or "unknown", end=_ENDS.get(word, End.FORGOTTEN), nodes=nodes)
        is_pending = word in _PENDING
        return Status(word, is_running=not is_pending, reason=reason if is_pending else "", nodes=nodes)

    def cancel(self, allocation: str) -> None:
        answer = _run(["scancel", allocation])
        if answer.returncode and not _UNKNOWN_JOB.search(answer.stderr):
            raise LauncherAway(answer.stderr.strip())


def read_template(file: Path | None) -> str:
    """Return the text of a template. Raises ConfigError ``invalid_settings`` for one without ``{command}``."""
    if file is None:
        return TEMPLATE
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"The template '{file}' (BITFOUNDRY_LAUNCHER_TEMPLATE) cannot be read: {error}.", code="invalid_settings"
        ) from error
    if text.count(COMMAND) != 1 or not text.startswith("#!"):
        raise ConfigError(
            f"The template '{file}' (BITFOUNDRY_LAUNCHER_TEMPLATE) is not a batch script with {COMMAND} once.",
            code="invalid_settings",
            hint=f"Begin with {TEMPLATE!r} and add to it.",
        )
    return text


def script_of(template: str, request: Request) -> str:
    """Return the batch script."""
    return template.replace(COMMAND, shlex.join(request.argv))


def command_of(request: Request) -> list[str]:
    """Return the command line of sbatch without the script.

    ``singleton`` keeps a second allocation of a job waiting until the first has ended, whoever submitted it.
    """
    return [
        *("sbatch", "--parsable", f"--job-name={request.name}", "--dependency=singleton", "--requeue"),
        *(f"--nodes={request.nodes}", f"--ntasks={request.nodes}", "--ntasks-per-node=1"),
        *(f"--cpus-per-task={request.cpus}", f"--mem={-(-request.memory_bytes // 2**20)}M"),
        *(f"--chdir={request.folder}", f"--output={request.folder / LOG}", "--open-mode=append", "--export=ALL"),
    ]


def _remembered(allocation: str) -> tuple[str, str, str]:
    """Return state, nodes and reason of a job that only the accounting knows; empty texts if that knows nothing."""
    command = ["sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={allocation}", "--format=State,NodeList"]
    if shutil.which("sacct") is None or (answer := _run(command)).returncode or not answer.stdout.strip():
        return "", "", ""
    state, _, nodes = answer.stdout.strip().splitlines()[-1].partition("|")
    return state.partition(" ")[0], nodes, ""  # "CANCELLED by 1000"


def _ask(command: Sequence[str]) -> str:
    answer = _run(command)
    if answer.returncode:
        raise LauncherAway(answer.stderr.strip())
    return answer.stdout


def _run(command: Sequence[str], environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command of Slurm. It gets nothing of the worker's environment but what it needs: no address, no key."""
    kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    try:
        return subprocess.run(
            command, env={**kept, **(environment or {})}, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LauncherAway(f"{command[0]}: {error}") from error
