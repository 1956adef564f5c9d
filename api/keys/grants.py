"""The rules of giving and taking scopes: what a caller may grant, and that a project keeps a key that manages it."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime

from sqlalchemy.orm import Session

from api.http import security
from api.http.errors import Problem
from api.store.accounts import keys, members
from api.store.accounts.audit import Caller
from api.store.tables.jobs import ApiKey, Member


def check_may_grant(session: Session, caller: Caller, scopes: Iterable[str], until: datetime | None) -> None:
    """Check that the caller may grant ``scopes`` until that time (None: for ever).

    The caller has all of them, and the caller's own key ends no sooner. Raises Problem 403.
    """
    for scope in scopes:
        security.check_scope(caller, scope)
    own = keys.find(session, caller.project_id, caller.key_id or "")
    own_end = own.expires_at if own else None
    if own_end is not None and (until is None or until > own_end):
        raise Problem(
            403,
            "expires_too_late",
            f"Your key expires at {own_end.isoformat()}: you cannot grant anything beyond that time.",
            hint="Create a key that expires by then (`expires_at`), or use a key that expires later.",
            errors=[
                {"pointer": "#/expires_at", "detail": "later than the expiry of your own key"}
                | {"code": "expires_too_late", "allowed": [own_end.isoformat()]}
            ],
        )


def check_in_future(expires_at: datetime | None) -> None:
    """Check that a key which ends then can be used before. Raises Problem 422."""
    if expires_at is not None and expires_at <= datetime.now(UTC):
        entry = {"pointer": "#/expires_at", "detail": "is in the past", "code": "invalid_request"}
        raise Problem(422, "invalid_request", "`expires_at` must be in the future.", errors=[entry])


def check_not_locked_out(session: Session, caller: Caller) -> None:
    """Check, after a change, that a valid key of the project can still manage it. Raises Problem 409.

    The project must be locked since before the change: of two admins who remove each other, one fails.
    """
    if not keys.is_any_live_with(session, caller.project_id, security.ADMIN):
        raise Problem(
            409,
            "last_admin",
            "The project would be locked out: no valid key would have the scope 'admin'.",
            hint="Add another member with the role admin first, or create another key with that scope.",
        )


def check_not_of_provider(member: Member | None) -> None:
    """Check that nobody but the OpenID provider decides about this member's role and keys. Raises Problem 409."""
    if member is not None and member.subject is not None:
        raise Problem(
            409,
            "member_of_provider",
            f"'{member.name}' signs in through the OpenID provider, which decides about the name, role and key.",
            hint="Change the person's groups at the provider, or add another member with an API key.",
        )


def check_may_take(caller: Caller, taken: Iterable[ApiKey]) -> None:
    """Check that the caller may revoke these keys: an operator's takes an operator. Raises Problem 403."""
    if any(security.OPERATOR in key.scopes for key in taken):
        security.check_scope(caller, security.OPERATOR)


def open_member(session: Session, project_id: str, member_id: str) -> Member:
    """Return a present member of the project. Raises Problem 404."""
    member = members.find(session, project_id, member_id)
    if member is None:
        raise Problem(404, "member_not_found", "There is no such member.")
    return member
