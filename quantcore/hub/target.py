"""The target of a publication, in the terms of huggingface_hub."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from quantcore.hub.names import is_model_id, is_plain_path, is_plain_url, is_store_url
from quantcore.sandbox.opening import resolved

MAIN = "main"
RESERVED = frozenset({".git", ".cache"})
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
        if self.path_in_repo and not (is_plain_path(self.path_in_repo) and _is_free(self.path_in_repo)):
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
    """Raise PydanticCustomError ``invalid_publish`` unless ``text`` is the plain URL of a folder here or in a store."""
    if not is_store_url(text) and not (text.startswith("file://") and is_plain_url(text)):
        raise _invalid(
            "`to` must be a plain URL of a folder, such as file:///srv/models/name, s3://bucket/models/name, "
            "gs://bucket/models/name or az://container/models/name"
        )


def real_url(url: str) -> str:
    """Replace a folder on this machine by its real path, links followed; return any other URL unchanged.

    Raises the errors of ``opening.resolved``.
    """
    scheme, _, path = url.rstrip("/").partition("://")
    return f"file://{resolved(path)}" if scheme == "file" else url.rstrip("/")


def _is_free(path: str) -> bool:
    """Return True if the Hub accepts files below ``path``: it reserves some folders."""
    return not RESERVED & {part.lower() for part in path.split("/")}


def _is_branch(name: str) -> bool:
    """Return False for names that ``BRANCH`` allows but git-check-ref-format(1) forbids."""
    parts = name.split("/")
    return ".." not in name and all(part and part[0] != "." and not part.endswith((".lock", ".")) for part in parts)


def _invalid(what: str) -> PydanticCustomError:
    return PydanticCustomError("invalid_publish", what)
