"""Turns failures of the Hugging Face Hub into errors with stable codes, for models and datasets.

Only the kind and the HTTP status of the library's error go into ours: its text may hold a signed address, and the
text of a response is not trusted. Imports huggingface_hub, so other modules import this one late.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import httpx2
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    XetDownloadError,
)

from quantcore.errors import DISK_FULL, CalibrationError, ModelError, QuantError

ERRORS: dict[str, type[QuantError]] = {"model": ModelError, "dataset": CalibrationError}


@contextmanager
def explained(repository: str, revision: str, *, kind: str = "model") -> Iterator[None]:
    """Turn errors of the library raised inside into ModelError, or CalibrationError for a ``dataset``.

    Errors of ours pass unchanged.
    """
    try:
        yield
    except QuantError:
        raise
    except (httpx2.HTTPError, XetDownloadError, OSError, ValueError) as error:
        raise explain(error, repository, revision, kind=kind) from error


def explain(error: BaseException, repository: str, revision: str, *, kind: str = "model") -> QuantError:
    """Return our error for an error of huggingface_hub or of the connection."""
    if isinstance(error, LocalEntryNotFoundError) and error.__cause__ is not None:
        return explain(error.__cause__, repository, revision, kind=kind)  # the library wraps the network error
    raised = ERRORS[kind]
    if isinstance(error, GatedRepoError):
        return gated(repository, kind)
    if isinstance(error, RevisionNotFoundError):
        return raised(
            f"The {kind} '{repository}' has no revision '{revision}'.",
            code="hub_revision_not_found",
            hint=f"Use a branch, a tag or a commit of the {kind}, or omit it for the latest.",
        )
    if isinstance(error, RepositoryNotFoundError):
        return _not_found(repository, kind)
    if isinstance(error, HFValidationError):
        return raised(f"'{repository}' is not a {kind} id.", code=f"invalid_{kind}_id", hint="It looks like org/name.")
    if isinstance(error, RemoteEntryNotFoundError):  # listed a moment ago
        return raised(f"A file of '{repository}' no longer exists on the Hub.", code="missing_shard")
    if isinstance(error, HfHubHTTPError):
        return _of_status(error, repository, kind)
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        return raised(
            f"The disk is full: '{repository}' does not fit.",
            code="disk_full",
            hint="Free space in the cache folder (HF_HOME).",
            retryable=True,
        )
    if isinstance(error, PermissionError):
        return raised(
            "The cache folder for models cannot be written.",
            code="cache_not_writable",
            hint="Set HF_HOME to a folder that the service can write to.",
        )
    if isinstance(error, OfflineModeIsEnabled):
        hint = "Unset it for the service, or use a local file or folder."
        return _unreachable(repository, "HF_HUB_OFFLINE is set", kind, hint)
    return _unreachable(repository, type(error).__name__, kind)


def _of_status(error: HfHubHTTPError, repository: str, kind: str) -> QuantError:
    raised = ERRORS[kind]
    status = error.response.status_code
    if status in (401, 403):
        return raised(
            f"The Hub rejected the token for '{repository}' (HTTP {status}).",
            code="hub_auth",
            hint="Use a valid token with read access: model.hub_token, or HF_TOKEN of the service.",
        )
    if status == 404:
        return _not_found(repository, kind)
    if status == 429:
        return rate_limited(error, raised)
    return _unreachable(repository, f"HTTP {status}", kind)


def rate_limited(error: HfHubHTTPError, raised: type[QuantError]) -> QuantError:
    seconds = error.response.headers.get("Retry-After", "")
    return raised(
        "The Hub has reached its rate limit for this service (HTTP 429).",
        code="hub_rate_limited",
        hint=f"Try again in {seconds} s." if seconds.isdecimal() else "Try again in a few minutes.",
        retryable=True,
    )


def gated(repository: str, kind: str) -> QuantError:
    return ERRORS[kind](
        f"The {kind} '{repository}' is gated: downloading needs its owner's approval.",
        code="hub_gated",
        hint="Accept its terms on its Hub page with the account of the token (model.hub_token, HF_TOKEN).",
    )


def _not_found(repository: str, kind: str) -> QuantError:
    return ERRORS[kind](
        f"The {kind} '{repository}' does not exist on the Hub or is not accessible.",
        code="hub_not_found",
        hint="Check the spelling (org/name), or the path if it is on this machine. For a private one, set HF_TOKEN to "
        "a token with access to it.",
    )


def _unreachable(repository: str, why: str, kind: str, hint: str = "") -> QuantError:
    local = {"model": "model folder", "dataset": "data file"}[kind]
    return ERRORS[kind](
        f"The Hub cannot be reached, or sent an invalid answer, for '{repository}' ({why}).",
        code="hub_unreachable",
        hint=hint or f"Try again in a moment. If you mean a {local} on this machine, check its path.",
        retryable=True,
    )
