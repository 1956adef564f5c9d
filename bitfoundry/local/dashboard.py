"""Builds the dashboard of a checkout once, if npm is installed. Wheels and images contain it built."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import bitfoundry

ROOT = Path(bitfoundry.__file__).parents[1]


def build_if_missing(log: Path, say: Callable[[str], None], root: Path = ROOT) -> None:
    """Build the dashboard of the checkout ``root`` if it is missing.

    The service runs without it, so a failed build is only reported."""
    sources = root / "dashboard"
    if (root / "api" / "ui" / "index.html").is_file() or not (sources / "package.json").is_file():
        return
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    npm = shutil.which("npm", path=path)
    if npm is None:
        return
    say("building the dashboard (once)")
    environment = os.environ | {"PATH": path}
    with log.open("wb") as output:
        for command in (["ci"], ["run", "build"]):
            ended = subprocess.run(
                [npm, "--silent", *command], cwd=sources, env=environment, stdout=output, stderr=subprocess.STDOUT
            )
            if ended.returncode != 0:
                say(f"the dashboard could not be built (see {log}); the API runs without it")
                return
