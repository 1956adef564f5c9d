"""What a person does, step by step: commands in a shell of their own, the number of steps, and the time they took."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

COMMAND_LIMIT_S = 1200
BITFOUNDRY = Path(sys.executable).with_name("bitfoundry")


@dataclass
class Journey:
    """One person's steps. ``environment`` and ``folder``: where their commands run."""

    person: str
    folder: Path
    environment: Mapping[str, str]
    steps: list[tuple[str, float]] = field(default_factory=list)
    """(what was done, seconds it took)."""

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Count and time a step; a failure inside it names the step."""
        start = time.monotonic()
        try:
            yield
        except BaseException as error:
            error.add_note(f"step {len(self.steps) + 1} of the {self.person}: {what}")
            raise
        self.steps.append((what, time.monotonic() - start))

    def use_service(self, url: str, key: str) -> None:
        """Let the commands from now on use this service with this key."""
        self.environment = {**self.environment, "BITFOUNDRY_URL": url, "BITFOUNDRY_API_KEY": key, "NO_PROXY": "*"}

    def bitfoundry(self, *arguments: str | Path, status: int = 0) -> str:
        """Run a command as a person does, and return all that it showed. ``status``: the one that it must end with."""
        done = subprocess.run(
            [BITFOUNDRY, *arguments],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMMAND_LIMIT_S,
        )
        assert done.returncode == status, f"bitfoundry {' '.join(map(str, arguments))}\n{done.stdout}"
        assert "Traceback" not in done.stdout, done.stdout
        return done.stdout

    def json(self, *arguments: str | Path) -> Any:
        """Run a command with ``--json``, and return what it printed."""
        line = [BITFOUNDRY, *arguments, "--json"]
        done = subprocess.run(
            line, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=COMMAND_LIMIT_S
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)

    def summary(self) -> str:
        """Return a line for each step, and their number and minutes."""
        lines = [f"  {seconds:6.1f} s  {what}" for what, seconds in self.steps]
        minutes = sum(seconds for _, seconds in self.steps) / 60
        return "\n".join([f"{self.person}: {len(self.steps)} steps, {minutes:.1f} min", *lines])


def environment_of(home: Path, **variables: str) -> dict[str, str]:
    """Return the environment of a person whose data folder is ``home``, and whose models are those of the tests."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("BITFOUNDRY_")}
    config = home.parent / f"{home.name}-config"
    return ours | {"BITFOUNDRY_HOME": str(home), "XDG_CONFIG_HOME": str(config), "COLUMNS": "120"} | variables
