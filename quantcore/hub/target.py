"""The target of a publication, in the terms of huggingface_hub."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Annotated
from urllib.parse import unquote, urlsplit

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from quantcore.hub.download import is_model_id
from quantcore.sandbox.opening import resolved

MAIN = "main"
RESERVED = frozenset({".git", ".cache"})
MAX_NAME_BYTES = 255  # of a file or folder, on the usual disks
BRANCH = r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,127}$"


class Target(BaseModel):
    """A repository on the Hub (``repo_id``), or a folder behind a URL (``to``): exactly one of the two.

    A missing repository is created, and only then ``private`` is used; a missing branch ``revision`` is created, too.
    With ``create_pr`` the commit becomes a pull request against main. ``path_in_repo`` is the folder in the repository;
    the default is its root. A folder behind a URL that holds another artifact is overwritten only with ``replace``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    repo_id: Annotated[str, Field(max_length=256, examples=["org/name"])] | None = None
    private: StrictBool = False
    revision: Annotated[str, Field(pattern=BRANCH)] = MAIN
    create_pr: StrictBool = False
    commit_message: Annotated[str, StringConstraints(min_length=1, max_length=200)] | None = None
    path_in_repo: Annotated[str, Field(max_length=512)] = ""
    to: Annotated[str, Field(min_length=1, max_length=2048, examples=["s3://bucket/models/name"])] | None = None
    replace: StrictBool = False

    @model_validator(mode="after")
    def _make_sense(self) -> Target:
        if (self.repo_id is None) == (self.to is None):
            raise _invalid("set either `repo_id` (a repository on the Hub) or `to` (a URL)")
        if self.to is not None:
            if self.model_fields_set - {"to", "hub_token", "force", "replace"}:
                raise _invalid("with `to`, remove the fields for the Hub")
            check_url(self.to)
            return self
        if self.replace:
            raise _invalid("`replace` is only for `to`: a repository on the Hub keeps its history")
        if not is_model_id(self.repo_id or ""):
            raise PydanticCustomError("invalid_repo_id", "`repo_id` must look like org/name")
        if self.path_in_repo and not (_is_plain(self.path_in_repo) and _is_free(self.path_in_repo)):
            raise _invalid(
                "`path_in_repo` must be a relative path without '..', .git and .cache, such as quantized/int4"
            )
        if not _is_branch(self.revision):
            raise _invalid("`revision` must be a valid git branch name, such as main or int4")
        if self.create_pr and self.revision != MAIN:
            raise _invalid("`create_pr` opens a pull request against main: remove `revision`")
        if self.commit_message is not None and not self.commit_message.isprintable():
            raise _invalid("`commit_message` must be one line of printable characters")
        return self

    def place(self, path: str) -> str:
        """Return the path of an artifact's file in the repository."""
        return f"{self.path_in_repo}/{path}" if self.path_in_repo else path

    def __str__(self) -> str:
        return self.to or f"{self.repo_id}@{self.revision}"


def check_url(text: str) -> None:
    """Raise PydanticCustomError ``invalid_publish`` unless ``text`` is a plain ``scheme://place/folder``.

    Plain: no user or password, no query, no fragment, no chain (``::``), no ``..``, nothing encoded.
    """
    parts = urlsplit(text)
    plain = text.isprintable() and " " not in text and "\\" not in text and "::" not in text and unquote(text) == text
    folders = parts.path.strip("/")
    if not (
        plain
        and parts.scheme
        and text.startswith(f"{parts.scheme}://")
        and not (parts.query or parts.fragment or "@" in parts.netloc or "?" in text or "#" in text)
        and _is_plain(folders)
        and (parts.scheme != "file" or not parts.netloc)
    ):
        raise _invalid(
            "`to` must be a plain URL of a folder, such as s3://bucket/models/name or file:///srv/models/name"
        )


def is_url(text: str) -> bool:
    """Return True if ``check_url`` accepts the URL."""
    try:
        check_url(text)
    except PydanticCustomError:
        return False
    return True


def real_url(url: str) -> str:
    """Replace a folder on this machine by its real path, links followed; return any other URL unchanged.

    Raises the errors of ``opening.resolved``.
    """
    scheme, _, path = url.rstrip("/").partition("://")
    return f"file://{resolved(path)}" if scheme == "file" else url.rstrip("/")


def is_below(url: str, prefixes: tuple[str, ...]) -> bool:
    """Return True if ``url`` is one of ``prefixes`` or lies in it; whole path segments are compared."""
    return any(url.rstrip("/") == prefix.rstrip("/") or url.startswith(prefix.rstrip("/") + "/") for prefix in prefixes)


def _is_plain(path: str) -> bool:
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


def _is_free(path: str) -> bool:
    """Return True if the Hub accepts files below ``path``: it reserves some folders."""
    return not RESERVED & {part.lower() for part in path.split("/")}


def _is_branch(name: str) -> bool:
    """Return False for names that ``BRANCH`` allows but git-check-ref-format(1) forbids."""
    parts = name.split("/")
    return ".." not in name and all(part and part[0] != "." and not part.endswith((".lock", ".")) for part in parts)


def _invalid(what: str) -> PydanticCustomError:
    return PydanticCustomError("invalid_publish", what)
