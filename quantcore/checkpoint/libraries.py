"""Gives other libraries copies and open files of a model in a temporary folder, never the model's folder itself.

Libraries open any path that a config names. In the temporary folder they find only plain files that were checked.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from quantcore.checkpoint.artifact import SIDE_FILES, side_files
from quantcore.checkpoint.opening import MAX_SIDE_FILE_BYTES, open_file, path_for_libraries, read_bytes
from quantcore.errors import ModelError

TOKENIZER_FILES = (*SIDE_FILES, "*.json", "*.txt", "*.tiktoken", "*.spm", "*.codes")
"""Files that a tokenizer's class may read; each class has its own names."""

TOKENIZER_CONFIG = "tokenizer_config.json"
INDEX = ".safetensors.index.json"
MAX_FILES = 200


@contextmanager
def tokenizer_files(folder: Path) -> Iterator[Path]:
    """Yield a folder with a copy of the tokenizer's files, without the paths that its config may name.

    Raises ModelError as ``opening.open_file``; ``file_too_large`` if all of them together are too large.
    """
    names = [name for name in side_files(folder, TOKENIZER_FILES) if not name.endswith(INDEX)]
    total = 0
    with tempfile.TemporaryDirectory(prefix="bitfoundry-tokenizer-") as scratch:
        for name in names:
            data = read_bytes(folder / name)
            total += len(data)
            if total > MAX_SIDE_FILE_BYTES or len(names) > MAX_FILES:
                raise ModelError(
                    f"Beside the weights there are {len(names)} files, or more than {MAX_SIDE_FILE_BYTES >> 20} MiB.",
                    code="file_too_large",
                    hint="Keep in the model's folder what belongs to the model.",
                )
            (Path(scratch) / name).write_bytes(_without_paths(data) if name == TOKENIZER_CONFIG else data)
        yield Path(scratch)


@contextmanager
def opened_weights(folder: Path) -> Iterator[Path]:
    """Yield a folder with the weight files under their names and a copy of their index, without the model's configs."""
    with tempfile.TemporaryDirectory(prefix="bitfoundry-weights-") as scratch, ExitStack() as stack:
        for name in side_files(folder, ("*.safetensors", "*.gguf")):
            lend(folder / name, Path(scratch), stack)
        for name in side_files(folder, (f"*{INDEX}",)):
            (Path(scratch) / name).write_bytes(read_bytes(folder / name))
        (Path(scratch) / "generation_config.json").write_text("{}")  # Transformers wants one; nothing is generated
        yield Path(scratch)


def lend(file: Path, scratch: Path, stack: ExitStack) -> None:
    """Link ``file`` under its name in ``scratch``, open until ``stack`` closes."""
    (scratch / file.name).symlink_to(path_for_libraries(stack.enter_context(open_file(file)), file))


def _without_paths(tokenizer_config: bytes) -> bytes:
    """Return the config without the entries that name files; the library finds these by their default names."""
    try:
        config: Any = json.loads(tokenizer_config)
    except (ValueError, RecursionError):
        return tokenizer_config  # the library says what is wrong with it
    if not isinstance(config, dict):
        return tokenizer_config
    return json.dumps({key: value for key, value in config.items() if not key.endswith("_file")}).encode()
