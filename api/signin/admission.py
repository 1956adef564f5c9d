"""Gives a person the members and keys that the claims grant, at each sign-in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from api.http import security
from api.oidc.config import Grant
from api.oidc.provider import Identity
from api.store.accounts import audit, keys, members, projects
from api.store.accounts.audit import Caller
from api.store.ids import new_id
from api.store.tables.jobs import ApiKey, Member

ROLES = security.ROLES | {"operator": security.SCOPES}
"""The scopes of each role that the operator's file can grant, each with all scopes of those before it."""
WIDTH = tuple(ROLES)
MAX_NAME = 200


@dataclass(frozen=True)
class Admitted:
    """The key of a project that a person was let into."""

    project_name: str
    key: ApiKey


def matching(grants: Sequence[Grant], identity: Identity) -> list[Grant]:
    """Return the grants whose claim the person has. An email counts only if the provider has verified it."""
    claims = dict(identity.claims) | {"email": identity.email}
    return [grant for grant in grants if grant.value in texts_of(claims.get(grant.claim))]


def texts_of(claim: Any) -> list[str]:
    """Return the texts of a claim: itself, or those in its list."""
    return [value for value in (claim if isinstance(claim, list) else [claim]) if isinstance(value, str)]


def admit(
    session: Session, grants: Sequence[Grant], identity: Identity, lasts_s: float, request_id: str
) -> list[Admitted]:
    """Give the person what the grants say, and take away all else. Returns the keys, by the names of their projects.

    A project that does not exist is left out. The person has one member and one key in each of the others: nobody
    knows the key's secret, and it ends ``lasts_s`` seconds from now.
    """
    roles: dict[str, str] = {}
    for grant in grants:
        if project := projects.find_by_name(session, grant.project):
            roles[project.id] = max(grant.role, roles.get(project.id, WIDTH[0]), key=WIDTH.index)
    present = {row.project_id: row for row in members.find_of_subject(session, identity.issuer, identity.subject)}
    for project_id in sorted(roles.keys() | present.keys()):  # in one order: two sign-ins at once wait, and never lock
        projects.lock(session, project_id)
    present = {row.project_id: row for row in members.find_of_subject(session, identity.issuer, identity.subject)}
    for project_id in present.keys() - roles.keys():
        _take_away(session, present[project_id], request_id)
    until = session.scalars(select(func.clock_timestamp() + timedelta(seconds=lasts_s))).one()
    admitted = []
    for project_id, role in roles.items():
        member = _update_member(session, present.get(project_id), project_id, identity, role)
        key = _update_key(session, member, ROLES[role])
        key.expires_at = until
        session.flush()
        caller = Caller(project_id, key.id, frozenset(key.scopes), request_id)
        who = {"issuer": identity.issuer, "subject": identity.subject, "email": identity.email}
        audit.note(session, caller, "key.sign_in", key.id, role=role, member_id=member.id, **who)
        project = projects.find(session, project_id)
        assert project is not None
        admitted.append(Admitted(project.name, key))
    return sorted(admitted, key=lambda one: one.project_name)


def _update_member(session: Session, member: Member | None, project_id: str, identity: Identity, role: str) -> Member:
    """Return the person's row with the present name and role. A person has one row for ever, also when removed."""
    if member is None:
        member = Member(id=new_id("mem"), project_id=project_id, issuer=identity.issuer, subject=identity.subject)
        member.name, member.role = member.id, role
        session.add(member)
    member.removed_at = None
    member.role = "admin" if role == "operator" else role
    member.name = _free_name(session, member, identity)
    session.flush()
    return member


def _free_name(session: Session, member: Member, identity: Identity) -> str:
    name = next(_names_of(identity))
    with session.no_autoflush:  # the name of before may be another member's by now
        other = members.find_by_name(session, member.project_id, name)
    return name if other is None or other.id == member.id else f"{name[:150]} ({member.id})"


def _names_of(identity: Identity) -> Iterator[str]:
    for name in (identity.email, identity.claims.get("preferred_username")):
        if isinstance(name, str) and 0 < len(name) <= MAX_NAME and name.isprintable():
            yield name
    yield identity.subject[:MAX_NAME]


def _update_key(session: Session, member: Member, scopes: Sequence[str]) -> ApiKey:
    """Return the member's key with these scopes; a new one if there is none, or it was revoked."""
    present = keys.find_of_member(session, member.id)
    if present:
        present[0].scopes = [*scopes]
        return present[0]
    key, _ = security.new_key(member.project_id, member.name, scopes, None, member)
    keys.add(session, key)
    return key


def _take_away(session: Session, member: Member, request_id: str) -> None:
    """Remove the member, whose claims grant nothing in this project any more, and revoke the key."""
    for key in keys.find_of_member(session, member.id):
        keys.revoke(session, key)
        caller = Caller(member.project_id, key.id, frozenset(key.scopes), request_id)
        audit.note(session, caller, "member.remove", member.id, name=member.name, reason="no grant")
    if member.removed_at is None:
        members.remove(session, member)


def describe(grants: Sequence[Grant], claims: Mapping[str, Any]) -> str:
    """Return what the person has in the claims that the grants look at, for the person to read."""
    parts = []
    for name in dict.fromkeys(grant.claim for grant in grants):
        values = [value[:80] for value in texts_of(claims.get(name)) if value.isprintable()][:10]
        parts.append(f"'{name}' has {', '.join(values)}" if values else f"'{name}' is missing")
    return "; ".join(parts)
