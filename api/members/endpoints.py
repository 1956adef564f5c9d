"""The routes of members: people of a project, whose keys have the scopes of their role."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Response
from sqlalchemy.orm import Session

from api.http import security
from api.http.deps import SessionsDep
from api.http.errors import Problem, may
from api.http.security import Admin
from api.http.strict_json import StrictJsonRoute
from api.keys.endpoints import note_creation
from api.keys.grants import (
    check_in_future,
    check_may_grant,
    check_may_take,
    check_not_locked_out,
    check_not_of_provider,
    open_member,
)
from api.keys.schemas import NewKeyOut
from api.members.schemas import MemberCreate, MemberList, MemberOut, MemberPatch, NewMemberOut, columns_of
from api.store.accounts import audit, keys, members, projects
from api.store.accounts.audit import Caller
from api.store.ids import new_id
from api.store.tables.jobs import Member

router = APIRouter(prefix="/members", tags=["members"], route_class=StrictJsonRoute)

MemberId = Annotated[str, Path(pattern="^mem_[0-9a-f]{32}$")]


@router.get("")
def list_members(caller: Admin, sessions: SessionsDep) -> MemberList:
    """List the project's present members with their roles, the number of their valid keys, and their last use."""
    with sessions.begin() as session:
        return MemberList(data=[MemberOut.of(listed) for listed in members.find_all(session, caller.project_id)])


@router.post("", status_code=201, responses=may(409, 422))
def add_member(body: MemberCreate, caller: Admin, sessions: SessionsDep, response: Response) -> NewMemberOut:
    """Add a member, with a first key to sign in with. The key is in this response and nowhere else."""
    check_in_future(body.expires_at)
    scopes = security.ROLES[body.role]
    with sessions.begin() as session:
        projects.lock(session, caller.project_id)
        check_may_grant(session, caller, scopes, body.expires_at)
        _check_name(session, caller, body.name)
        member = Member(id=new_id("mem"), project_id=caller.project_id, name=body.name, role=body.role)
        session.add(member)
        key, plain = security.new_key(caller.project_id, body.name, scopes, body.expires_at, member, follows_role=True)
        keys.add(session, key)
        audit.note(session, caller, "member.add", member.id, name=member.name, role=member.role)
        note_creation(session, caller, key)
        session.refresh(key)
        listed = members.find_listed(session, member)
    response.headers["Cache-Control"] = "no-store"
    return NewMemberOut(**columns_of(listed), first_key=NewKeyOut.with_secret(key, plain))


@router.patch("/{member_id}", responses=may(404, 409, 422))
def edit_member(member_id: MemberId, body: MemberPatch, caller: Admin, sessions: SessionsDep) -> MemberOut:
    """Change the name or the role. The member's keys have their new scopes from the next request on.

    A key gets the scopes of the new role; one whose scopes were named when it was made only loses what the role lacks.
    """
    changes = body.model_dump(exclude_unset=True)
    with sessions.begin() as session:
        projects.lock(session, caller.project_id)
        member = open_member(session, caller.project_id, member_id)
        check_not_of_provider(member)
        if changes.get("name", member.name) != member.name:
            _check_name(session, caller, body.name)
            member.name = body.name
        if "role" in changes:
            _change_role(session, caller, member, body.role)
        session.flush()
        audit.note(session, caller, "member.edit", member_id, **changes)
        return MemberOut.of(members.find_listed(session, member))


@router.delete("/{member_id}", status_code=204, responses=may(404, 409))
def remove_member(member_id: MemberId, caller: Admin, sessions: SessionsDep) -> None:
    """Remove a member and revoke the member's keys, for ever. The audit log goes on naming them.

    Whoever signs in through an OpenID provider comes back with the next sign-in, unless the provider's claims change.
    """
    with sessions.begin() as session:
        projects.lock(session, caller.project_id)
        member = open_member(session, caller.project_id, member_id)
        present = keys.find_of_member(session, member_id)
        check_may_take(caller, present)
        audit.note(session, caller, "member.remove", member_id, name=member.name)
        for key in present:
            keys.revoke(session, key)
            audit.note(session, caller, "key.revoke", key.id, member_id=member_id)
        members.remove(session, member)
        check_not_locked_out(session, caller)


def _change_role(session: Session, caller: Caller, member: Member, role: str) -> None:
    """Give the member the role, and its scopes to the keys that follow it. A key with named scopes gains none."""
    before, after = security.ROLES[member.role], security.ROLES[role]
    gained = [scope for scope in after if scope not in before]
    for scope in gained:
        security.check_scope(caller, scope)
    for key in keys.find_of_member(session, member.id):
        if key.follows_role:
            if gained:
                check_may_grant(session, caller, gained, key.expires_at)
            key.scopes = [*after]
        else:
            key.scopes = [scope for scope in key.scopes if scope in after]
    member.role = role
    session.flush()
    check_not_locked_out(session, caller)


def _check_name(session: Session, caller: Caller, name: str) -> None:
    if members.find_by_name(session, caller.project_id, name):
        entry = {"pointer": "#/name", "detail": "another member has this name", "code": "name_taken"}
        raise Problem(409, "name_taken", f"The project already has a member '{name}'.", errors=[entry])
