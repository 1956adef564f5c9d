"""Checks the target of an artifact when it is requested, so that nobody waits hours for a wrong name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from api.http.deps import Context
from api.jobs.schemas import PublishTo
from api.store.accounts import hub_tokens
from api.store.accounts.audit import Caller
from api.store.queue import publish_targets
from quantcore.errors import PublishError, QuantError
from quantcore.hub import access


@dataclass(frozen=True)
class Checked:
    """A checked target. ``stored``: the target with every default filled in. ``url``: its address.

    ``exists``: something is there already; None where only the publication itself finds out.
    """

    stored: dict[str, Any]
    url: str
    exists: bool | None


def checker(context: Context, caller: Caller) -> Callable[[PublishTo], Checked]:
    """Return ``check`` for the targets that this caller may write to."""
    return lambda target: check(target, context, caller)


def check(asked: PublishTo, context: Context, caller: Caller) -> Checked:
    """Check that the caller may write to the target.

    Raises PublishError: ``target_not_allowed`` and ``target_taken`` for a URL, ``hub_token_required`` and ``hub_*`` for
    a repository.
    """
    if asked.to is not None:
        url = context.settings.find_output(asked.to)
        with context.sessions.begin() as session:
            if publish_targets.is_of_another(session, caller.project_id, url):
                raise taken(asked.to)
        return Checked({"to": url, "force": asked.force, "replace": asked.replace}, url, None)
    name = asked.hub_token
    if name is None:
        raise PublishError(
            "Publishing to the Hub needs one of the project's tokens that may write there.",
            code="hub_token_required",
            hint="Keep one, `bitfoundry hub-tokens put NAME`, and name it as hub_token.",
            field="/publish/hub_token",
        )
    with context.sessions.begin() as session:
        sealed = hub_tokens.find_sealed(session, caller.project_id, name)
    try:
        token = hub_tokens.unseal(context.settings.vault, sealed, caller.project_id, name)
        repository = access.check_hub(asked, token)
    except QuantError as error:
        error.field = error.field.replace("/model/", "/publish/") or "/publish/repo_id"
        raise
    return Checked(asked.model_dump(mode="json", exclude_none=True), repository.url, repository.exists)


def taken(url: str) -> PublishError:
    return PublishError(
        f"Another project publishes to '{url}', or to a folder in or around it.",
        code="target_taken",
        hint="Give another folder: one belongs to the project that first published to it.",
        field="/publish/to",
    )
