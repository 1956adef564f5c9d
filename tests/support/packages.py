"""Packages made from the recipes in docs/extending, installed into their own folders."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "docs" / "extending"
FENCE = re.compile(r"^```(\w+)(?: title=\"(.+?)\")?\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)


def files_of(page: str) -> dict[str, str]:
    """Return the files that a recipe shows: path -> content."""
    text = (RECIPES / f"{page}.md").read_text()
    return {title: content for _, title, content in FENCE.findall(text) if title}


def blocks_of(page: str, language: str) -> list[str]:
    """Return the blocks of a language that are no files."""
    text = (RECIPES / f"{page}.md").read_text()
    return [content for kind, title, content in FENCE.findall(text) if kind == language and not title]


def write_files(folder: Path, files: Mapping[str, str]) -> Path:
    """Write ``files`` below ``folder``, and return the folder."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder


def install(sources: Sequence[Path], target: Path) -> None:
    """Build the packages in ``sources`` and install them into ``target``, without the network."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--target", str(target)]
    ran = subprocess.run([*pip, *options, *map(str, sources)], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr


def declare(target: Path, package: str, group: str, entry_points: Mapping[str, str]) -> None:
    """Put the metadata of an installed package into ``target``, as pip writes it, with these entry points."""
    lines = [f"[{group}]", *(f"{name} = {value}" for name, value in entry_points.items())]
    metadata = f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n"
    folder = f"{package.replace('-', '_')}-1.0.dist-info"
    write_files(target, {f"{folder}/METADATA": metadata, f"{folder}/entry_points.txt": "\n".join(lines) + "\n"})


def run_python(target: Path, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run this Python with the packages in ``target``, as installed ones."""
    environment = {**os.environ, "PYTHONPATH": f"{target}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=600
    )
