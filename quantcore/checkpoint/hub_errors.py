"""What can go wrong with the Hugging Face Hub, as ModelErrors with stable codes.

Only the kind and the HTTP status of the library's error go into ours: its text may hold a signed address, and the
text of an answer is a stranger's. Imports huggingface_hub, so only ``hub`` imports it, and late.
"""

from __future__ import annotations

import errno
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

from quantcore.errors import ModelError

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def explained(model_id: str, revision: str) -> Iterator[None]:
    """Whatever the library raises inside leaves as a ModelError; ModelErrors pass as they are."""
    try:
        yield
    except ModelError:
        raise
    except (httpx2.HTTPError, XetDownloadError, OSError, ValueError) as error:
        raise explain(error, model_id, revision) from error


def explain(error: BaseException, model_id: str, revision: str) -> ModelError:
    """The ModelError for an error of huggingface_hub or of the connection."""
    if isinstance(error, LocalEntryNotFoundError) and error.__cause__ is not None:
        return explain(error.__cause__, model_id, revision)  # the library wraps what happened on the wire
    if isinstance(error, GatedRepoError):
        return ModelError(
            f"The model '{model_id}' is gated: its owner decides who may download it.",
            code="hub_gated",
            hint="Accept its terms on its page on the Hub, with the account of the token (model.hub_token, HF_TOKEN).",
        )
    if isinstance(error, RevisionNotFoundError):
        return ModelError(
            f"The model '{model_id}' has no revision '{revision}'.",
            code="hub_revision_not_found",
            hint="Give a branch, a tag or a commit of the model; leave it out for the newest.",
        )
    if isinstance(error, RepositoryNotFoundError):
        return _not_found(model_id)
    if isinstance(error, HFValidationError):
        return ModelError(f"'{model_id}' is not a model id.", code="invalid_model_id", hint="It looks like org/name.")
    if isinstance(error, RemoteEntryNotFoundError):  # listed a moment ago
        return ModelError(f"A file of '{model_id}' is gone from the Hub.", code="missing_shard")
    if isinstance(error, HfHubHTTPError):
        return _of_status(error, model_id)
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        return ModelError(
            f"The disk is full: '{model_id}' does not fit.",
            code="disk_full",
            hint="Free space in the cache folder (HF_HOME).",
            retryable=True,
        )
    if isinstance(error, PermissionError):
        return ModelError(
            "The cache folder for models cannot be written.",
            code="cache_not_writable",
            hint="Let HF_HOME name a folder that the service may write to.",
        )
    if isinstance(error, OfflineModeIsEnabled):
        return _unreachable(model_id, "HF_HUB_OFFLINE is set", "Unset it where the service runs, or give a folder.")
    return _unreachable(model_id, type(error).__name__)


def _of_status(error: HfHubHTTPError, model_id: str) -> ModelError:
    status = error.response.status_code
    if status in (401, 403):
        return ModelError(
            f"The Hub refuses the token it was given for '{model_id}' (HTTP {status}).",
            code="hub_auth",
            hint="Name a valid token with read access (model.hub_token), or give the service one in HF_TOKEN.",
        )
    if status == 404:
        return _not_found(model_id)
    if status == 429:
        seconds = error.response.headers.get("Retry-After", "")
        return ModelError(
            "The Hub answers no more requests from here for a while (HTTP 429).",
            code="hub_rate_limited",
            hint=f"Try again in {seconds} s." if seconds.isdecimal() else "Try again in a few minutes.",
            retryable=True,
        )
    return _unreachable(model_id, f"HTTP {status}")


def _not_found(model_id: str) -> ModelError:
    return ModelError(
        f"There is no model '{model_id}' on the Hub that can be seen from here.",
        code="hub_not_found",
        hint="Check the spelling (org/name). A private model needs a token with access (model.hub_token, HF_TOKEN).",
    )


def _unreachable(model_id: str, why: str, hint: str = "") -> ModelError:
    return ModelError(
        f"The Hub cannot be reached, or did not answer as one, for '{model_id}' ({why}).",
        code="hub_unreachable",
        hint=hint or "Try again in a moment; without a connection give a model folder instead.",
        retryable=True,
    )
