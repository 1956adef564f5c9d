"""The examples of the pages, run in a shell."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.support.service import Server


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page, flags=re.DOTALL)


def run(script: str, server: Server, folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "BITFOUNDRY_URL": server.url,
        "BITFOUNDRY_API_KEY": server.key,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "NO_PROXY": "127.0.0.1",
        "COLUMNS": "200",
        **more,
    }
    command = ["bash", "-euo", "pipefail", "-c", script]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
