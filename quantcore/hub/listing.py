"""The files of a model elsewhere, and which of them are fetched. No torch."""

from __future__ import annotations

import fnmatch
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from quantcore.checkpoint.artifact import sha256
from quantcore.checkpoint.besides import weights_without_index
from quantcore.checkpoint.headers import MAX_INDEX_BYTES
from quantcore.checkpoint.side_files import MODULES, SIDE_FILES, TEMPLATES
from quantcore.errors import ModelError
from quantcore.events import Emit

CONFIG = "config.json"
CARD = "README.md"
INDEX = "model.safetensors.index.json"
MANIFEST = "MANIFEST.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle")
MAX_FETCHED_CARD_BYTES = 1 << 20  # the card's front matter goes into the card of the quantized model
NUM_CONNECTIONS = 8

_OF_MODULE = re.compile(r"\d+_\w{1,50}/(config\.json|model\.safetensors)")  # see ``artifact.module_files``
_TEMPLATE = re.compile(rf"{TEMPLATES}/[\w-][\w.-]{{0,100}}\.jinja")  # see ``artifact.inner_files``


@dataclass(frozen=True)
class RemoteFile:
    """A file of a model elsewhere, with its size in bytes."""

    size: int


class Listing(ABC):
    """The files of a model elsewhere at one moment: ``sha``, 40 hex digits, stands for their contents.

    ``files`` are those in its root, by name, and those of sentence-transformers' modules, such as
    ``1_Pooling/config.json``.
    """

    name: str
    sha: str

    @property
    @abstractmethod
    def files(self) -> Mapping[str, RemoteFile]: ...

    @abstractmethod
    def read(self, name: str, begin: int, num_bytes: int) -> bytes:
        """Read at most ``num_bytes`` of a file from ``begin`` on, even if the server sends more."""

    @abstractmethod
    def download(self, names: list[str], emit: Emit, folder: Path | None = None) -> Path:
        """Download and check files; return their folder, which is ``folder``, or one in a cache."""

    def read_start(self, name: str, num_bytes: int) -> bytes:
        """Read the first ``num_bytes`` of a file; an empty range cannot be requested."""
        return self.read(name, 0, num_bytes) if self.files[name].size else b""

    def read_index(self) -> bytes:
        """Return the file that lists the tensors of all shards, "" if there is none."""
        return self.read_start(INDEX, MAX_INDEX_BYTES) if INDEX in self.files else b""


def is_wanted(path: str) -> bool:
    """Return True for a file in the root of a model, or of one of its modules or templates."""
    return is_in_root(path) or bool(_OF_MODULE.fullmatch(path) or _TEMPLATE.fullmatch(path))


def is_in_root(path: str) -> bool:
    """Return True for the plain name of a file without a folder."""
    return Path(path).name == path and path not in ("", ".", "..") and "\\" not in path and path.isprintable()


def files_to_download(listing: Listing, index: bytes) -> list[str]:
    """Select the files to download: config, index, card, side files, weights; never a pickle."""
    files = listing.files
    side = (name for name in files if matches(name, SIDE_FILES) and not matches(name, PICKLES))
    card = (CARD,) if CARD in files and files[CARD].size <= MAX_FETCHED_CARD_BYTES else ()
    top = (name for name in (CONFIG, INDEX, *card) if name in files)
    of_modules = filter(_OF_MODULE.fullmatch, files if MODULES in files else ())
    templates = filter(_TEMPLATE.fullmatch, files)
    return sorted({*top, *side, *of_modules, *templates, *weights(files, index)})


def weights(files: Iterable[str], index: bytes) -> list[str]:
    """Return the safetensors files that ``read_local`` will read: those of the index if there is one, else all.

    Index entries that are not files in the root are left out here; ``read_local`` rejects such an index.
    """
    names = [name for name in files if name.endswith(".safetensors") and is_in_root(name)]
    if INDEX not in files:
        return weights_without_index(sorted(names))
    try:
        named = set(json.loads(index)["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []
    return sorted(named & set(names))


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Return True if a file's name matches one of the shell patterns, case-sensitively."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def check_manifest(folder: Path, names: Iterable[str], manifest: bytes) -> None:
    """Check downloaded files against the MANIFEST.json of the publisher. Raises ModelError ``hub_hash_mismatch``."""
    try:
        listed = {str(entry["path"]): str(entry["sha256"]) for entry in json.loads(manifest)["files"]}
    except (ValueError, KeyError, TypeError, RecursionError):
        return  # an unrelated file of that name
    for name in names:
        if name in listed and sha256(folder / name) != listed[name]:
            raise ModelError(
                f"{name} does not match {MANIFEST}: one of them was changed after publication.",
                code="hub_hash_mismatch",
                hint="Ask the publisher of the model, or pull an earlier revision.",
            )
