"""Gives other libraries copies and open files of a model in a temporary folder, never the model's folder itself.

Libraries open any path that a config names. In the temporary folder they find only plain files that were checked, and
of files with settings only what is known to be harmless.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantcore.checkpoint.harmless import FILTERED, VOCABULARIES, KeyPath, harmless_file
from quantcore.checkpoint.side_files import side_files
from quantcore.errors import ModelError
from quantcore.sandbox.opening import MAX_SIDE_FILE_BYTES, open_file, path_for_libraries, read_bytes

TOKENIZER_FILES = (
    *FILTERED, *VOCABULARIES, "tokenizer.*.json", "*.txt", "*.model", "*.spm", "*.tiktoken", "*.codes", "*.jinja",
    "prophetnet.tokenizer",
)  # fmt: skip
"""Files that the class of a tokenizer or a processor may read; each class has its own names."""

INDEX = ".safetensors.index.json"
MAX_FILES = 200


@dataclass(frozen=True)
class TokenizerFiles:
    """A folder with copies of the files of a tokenizer or a processor, and what was left out of them.

    ``left_out``: file -> the paths of the keys of its settings that are not known to be harmless.
    """

    folder: Path
    left_out: Mapping[str, tuple[KeyPath, ...]]


@contextmanager
def tokenizer_files(folder: Path) -> Iterator[TokenizerFiles]:
    """Yield copies of the tokenizer's files of the model in ``folder``.

    Raises ModelError as ``opening.open_file``; ``file_too_large`` if all of them together are too large.
    """
    names = side_files(folder, TOKENIZER_FILES)
    total, left_out = 0, {}
    with tempfile.TemporaryDirectory(prefix="bitfoundry-tokenizer-") as scratch:
        for name in names:
            data = read_bytes(folder / name)
            total += len(data)
            if total > MAX_SIDE_FILE_BYTES or len(names) > MAX_FILES:
                raise ModelError(
                    f"Apart from the weights there are {len(names)} files, or more than {MAX_SIDE_FILE_BYTES >> 20} "
                    "MiB.",
                    code="file_too_large",
                    hint="Remove files that do not belong to the model from its folder.",
                )
            if name in FILTERED:
                data, left_out[name] = harmless_file(name, data)
            (Path(scratch) / name).write_bytes(data)
        yield TokenizerFiles(Path(scratch), left_out)


@contextmanager
def opened_weights(folder: Path) -> Iterator[Path]:
    """Yield a folder with the weight files under their names and a copy of their index, without the model's configs."""
    with tempfile.TemporaryDirectory(prefix="bitfoundry-weights-") as scratch, ExitStack() as stack:
        weights = side_files(folder, ("*.safetensors", "*.gguf"))
        for name in weights:
            lend(folder / name, Path(scratch), stack)
        for name in side_files(folder, (f"*{INDEX}",)):
            (Path(scratch) / name).write_bytes(_own_shards(read_bytes(folder / name), weights))
        (Path(scratch) / "generation_config.json").write_text("{}")  # Transformers wants one; nothing is generated
        yield Path(scratch)


def lend(file: Path, scratch: Path, stack: ExitStack) -> None:
    """Link ``file`` under its name in ``scratch``, open until ``stack`` closes."""
    (scratch / file.name).symlink_to(path_for_libraries(stack.enter_context(open_file(file)), file))


def _own_shards(index: bytes, names: Collection[str]) -> bytes:
    """Return an index of tensors with the entries that lead to one of the files ``names``."""
    try:
        weight_map: Mapping[str, Any] = json.loads(index)["weight_map"]
        own = {name: file for name, file in weight_map.items() if file in names}
        return json.dumps({"metadata": {}, "weight_map": own}).encode()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return b"{}"  # the reader of headers has said what is wrong with it
