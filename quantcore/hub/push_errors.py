"""Turns failures of publishing to the Hub or to a folder into errors with stable codes.

Only the kind and the HTTP status of a library's error go into ours: its text may hold a signed address or a key, and
the text of a response is not trusted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import httpx2
from huggingface_hub.errors import (
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from quantcore.errors import PublishError, QuantError
from quantcore.hub.hub_errors import rate_limited
from quantcore.hub.object_store import Fault, fault_of


@contextmanager
def hub_explained(repo_id: str, revision: str) -> Iterator[None]:
    """Turn errors of huggingface_hub raised inside into PublishError; errors of ours pass unchanged."""
    try:
        yield
    except QuantError:
        raise
    except (httpx2.HTTPError, OSError, ValueError, RuntimeError) as error:  # hf_xet raises RuntimeError, too
        raise explain_hub(error, repo_id, revision) from error


def explain_hub(error: BaseException, repo_id: str, revision: str) -> QuantError:
    """Return our error for an error of huggingface_hub or of the connection."""
    if type(error) is RuntimeError and error.__cause__ is not None:
        return explain_hub(error.__cause__, repo_id, revision)  # the library wraps the error of one of several files
    if isinstance(error, RevisionNotFoundError):
        return PublishError(f"'{repo_id}' has no branch '{revision}'.", code="hub_revision_not_found")
    if isinstance(error, RepositoryNotFoundError):
        return PublishError(
            f"The repository '{repo_id}' does not exist or this token has no access to it.",
            code="hub_not_found",
            hint="Check the spelling (org/name) and that the token's account has write access.",
        )
    if isinstance(error, HfHubHTTPError):
        return _of_status(error, repo_id)
    if isinstance(error, OSError) and not isinstance(error, httpx2.HTTPError):
        if isinstance(error, OfflineModeIsEnabled):
            return _unreachable("HF_HUB_OFFLINE is set")
        return _unreachable(type(error).__name__)
    if isinstance(error, ValueError | RuntimeError) and _speaks_of_storage(str(error)):
        return _storage_limit(repo_id)
    if isinstance(error, ValueError):  # a response that rejects a file, or the model card
        return _rejected(repo_id, "it rejected a file or the model card")
    return _unreachable(type(error).__name__)


def _of_status(error: HfHubHTTPError, repo_id: str) -> QuantError:
    status = error.response.status_code
    if status in (402, 413, 507) or (status == 403 and _speaks_of_storage(_message_of(error))):
        return _storage_limit(repo_id)
    if status == 401:
        return PublishError(
            "The Hub rejected this token (HTTP 401).",
            code="hub_auth",
            hint="Store a valid token under the name given as hub_token: `bitfoundry hub-tokens put NAME`.",
        )
    if status == 403:
        return PublishError(
            f"The token may not write to '{repo_id}' (HTTP 403).",
            code="hub_forbidden",
            hint="Use a token with write access to that account or organization, or open a pull request (create_pr).",
        )
    if status in (409, 412):
        return conflict(repo_id)
    if status == 429:
        return rate_limited(error, PublishError)
    if status >= 500:
        return _unreachable(f"HTTP {status}")
    return _rejected(repo_id, f"HTTP {status}")


def conflict(repo_id: str) -> PublishError:
    return PublishError(
        f"The branch of '{repo_id}' changed before each attempt to commit.",
        code="hub_conflict",
        hint="Try again later, or use a separate branch (revision).",
        retryable=True,
    )


def _storage_limit(repo_id: str) -> PublishError:
    return PublishError(
        f"The account of '{repo_id}' has no storage left on the Hub.",
        code="hub_storage_limit",
        hint="Free storage or raise its limit, then publish again: files that were already sent are not sent twice.",
    )


def _rejected(repo_id: str, why: str) -> PublishError:
    return PublishError(
        f"The Hub rejected this commit to '{repo_id}' ({why}).",
        code="hub_rejected",
        hint="See the Hub's rules for names and model cards.",
    )


def _unreachable(why: str) -> PublishError:
    return PublishError(
        f"The Hub cannot be reached, or sent an invalid answer ({why}).",
        code="hub_unreachable",
        hint="Try again in a moment.",
        retryable=True,
    )


def _message_of(error: HfHubHTTPError) -> str:
    return error.response.headers.get("X-Error-Message", "") or str(error.server_message or "")


def _speaks_of_storage(text: str) -> bool:
    return "storage" in text.lower() and "limit" in text.lower()


@contextmanager
def storage_explained(url: str) -> Iterator[None]:
    """Turn all errors of a store or a disk raised inside into PublishError; errors of ours pass unchanged."""
    try:
        yield
    except QuantError:
        raise
    except Exception as error:
        raise _of_storage(error, url) from error


def _of_storage(error: Exception, url: str) -> PublishError:
    fault = fault_of(error)
    if fault is Fault.FORBIDDEN:
        return PublishError(
            f"The service may not write to {url}.",
            code="target_forbidden",
            hint="The operator must grant write access to the worker's account, or to its keys for that store.",
        )
    if fault is Fault.FULL:
        return PublishError(f"There is no space left at {url}.", code="disk_full", retryable=True)
    if fault is Fault.NOT_FOUND:
        return PublishError(
            f"There is no bucket or container at {url}.",
            code="target_not_found",
            hint="Make it first: publishing makes folders, but no buckets.",
        )
    return _target_unreachable(url, type(error).__name__)


def _target_unreachable(url: str, why: str) -> PublishError:
    return PublishError(
        f"{url} cannot be written ({why}).", code="target_unreachable", hint="Try again in a moment.", retryable=True
    )
