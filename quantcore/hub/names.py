"""The names of models elsewhere: ``org/name`` on the Hugging Face Hub, or the URL of a folder in an object store."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

from quantcore.errors import ModelError

STORE_SCHEMES = ("s3", "gs", "az")
"""Amazon S3 and servers with its interface; Google Cloud Storage; Azure Blob Storage (``az://container/folder``)."""
MAX_NAME_BYTES = 255  # of a file or folder, on the usual disks

_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_MODEL_ID = re.compile(f"{_PART}/{_PART}")


def is_model_id(text: str) -> bool:
    """Return True for ``org/name`` in the Hub's syntax; never for a path or an address."""
    return _MODEL_ID.fullmatch(text) is not None and not re.search(r"--|\.\.|\.git$", text)


def is_store_url(text: str) -> bool:
    """Return True for a plain URL of a folder in an object store, such as ``s3://bucket/models/name``."""
    return text.partition("://")[0] in STORE_SCHEMES and is_plain_url(text)


def store_name(url: str) -> str:
    """Return the name of a model in an object store: the last part of its URL."""
    return url.rstrip("/").rpartition("/")[2]


def is_remote(text: str) -> bool:
    """Return True for the name of a model that must be downloaded."""
    return is_model_id(text) or is_store_url(text)


def find_local(name: str) -> Path | None:
    """Return the folder or file ``name``; None for a model elsewhere. Raises ModelError ``model_not_found``."""
    path = Path(name)
    if path.exists():
        return path
    if is_remote(name):
        return None
    raise ModelError(
        f"There is no model at {name}.",
        code="model_not_found",
        hint="Use a folder with config.json, a GGUF file, a model on the Hub (org/name), or a folder in an object "
        "store (s3://bucket/folder, gs://..., az://...).",
    )


def is_plain_url(text: str) -> bool:
    """Return True for ``scheme://place/folder``.

    It has no user or password, no query, no fragment, no chain (``::``), no ``..`` and nothing encoded.
    """
    try:
        parts = urlsplit(text)
    except ValueError:
        return False
    plain = text.isprintable() and " " not in text and "\\" not in text and "::" not in text and unquote(text) == text
    return bool(
        plain
        and parts.scheme
        and text.startswith(f"{parts.scheme}://")
        and not (parts.query or parts.fragment or "@" in parts.netloc or "?" in text or "#" in text)
        and is_plain_path(parts.path.strip("/"))
        and (parts.scheme != "file" or not parts.netloc)
    )


def is_plain_path(path: str) -> bool:
    """Return True for a relative path without ``.`` and ``..`` whose names every disk takes."""
    pure = PurePosixPath(path)
    return (
        bool(path)
        and str(pure) == path
        and not pure.is_absolute()
        and path.isprintable()
        and not {"..", "."} & set(pure.parts)
        and "\\" not in path
        and all(len(part.encode()) <= MAX_NAME_BYTES for part in pure.parts)
    )


def is_below(url: str, prefixes: tuple[str, ...]) -> bool:
    """Return True if ``url`` is one of ``prefixes`` or lies in it; whole path segments are compared."""
    return any(url.rstrip("/") == prefix.rstrip("/") or url.startswith(prefix.rstrip("/") + "/") for prefix in prefixes)
