"""The routes of requests to move a protected alias: ask, list, approve, refuse, withdraw."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Response
from sqlalchemy.orm import Session

from api.http.conditional import UNCHANGED, PagesDep
from api.http.deps import SessionsDep
from api.http.errors import Problem, may
from api.http.security import Admin, Reader, Writer
from api.http.strict_json import StrictJsonRoute
from api.registry.endpoints import ModelName, actors_of, lock_model, move_alias, no_such_version, tell
from api.registry.schemas import AliasRequestCreate, AliasRequestOut, AliasRequestPage, Decision, RequestQuery
from api.store.accounts import audit, keys, registry, webhooks
from api.store.accounts.audit import Caller
from api.store.accounts.registry import APPROVED, PENDING, REFUSED, WITHDRAWN
from api.store.engine import Sessions, reading
from api.store.tables.registry import AliasRequest, RegisteredModel

router = APIRouter(prefix="/registry", tags=["registry"], route_class=StrictJsonRoute)

RequestId = Annotated[str, Path(pattern="^rqs_[0-9a-f]{32}$")]
NO_COMMENT = Decision()


@router.post("/models/{name}/requests", status_code=201, responses=may(404, 409, 422))
def request_alias(
    name: ModelName, body: AliasRequestCreate, caller: Writer, sessions: SessionsDep, response: Response
) -> AliasRequestOut:
    """Ask to move a protected alias to a version, or to remove it with `version` null.

    It is safe to repeat: your pending request for the same move is returned again, with 200.
    """
    with sessions.begin() as session:
        model = lock_model(session, caller, name)
        before = next((each for each in registry.find_pending(session, model) if each.alias == body.alias), None)
        if before is not None:
            is_same = (before.to_version, before.reason, before.asked_by) == (body.version, body.reason, caller.key_id)
            if not is_same:
                detail = f"The request {before.id} to move the alias '{body.alias}' is pending."
                raise Problem(409, "request_pending", detail, hint="It must be decided or withdrawn first.")
            response.status_code = 200
            return _show(session, before, model)
        _check_move(session, caller, model, body)
        request = registry.ask(session, model, body.alias, body.version, body.reason, caller.key_id)
        versions = {"from_version": request.from_version, "version": body.version}
        asked: dict[str, Any] = {"request_id": request.id, "reason": body.reason} | versions
        audit.note(session, caller, "registry.request", f"{name}@{body.alias}", **asked)
        tell(session, caller, webhooks.ALIAS_REQUESTED, model, alias=body.alias, **asked)
        response.headers["Location"] = f"/v1/registry/requests/{request.id}"
        return _show(session, request, model)


@router.get("/requests", response_model=AliasRequestPage, responses=UNCHANGED | may(422))
def list_alias_requests(
    query: Annotated[RequestQuery, Query()],
    caller: Reader,
    sessions: SessionsDep,
    pages: PagesDep,
) -> AliasRequestPage | Response:
    """List the requests, newest first; the Link header leads to the next page."""
    wanted = {"state": query.state, "name": query.model, "before": query.cursor}
    with reading(sessions) as session:
        found = registry.page_of_requests(session, caller.project_id, limit=query.limit + 1, **wanted)
        actors = actors_of(session, {key_id for row, _ in found for key_id in (row.asked_by, row.decided_by)})
        verdicts = registry.verdicts_of(session, {(model.id, row.to_version) for row, model in found})
    shown = [AliasRequestOut.of(row, model, actors, verdicts) for row, model in found[: query.limit]]
    next_cursor = shown[-1].id if len(found) > query.limit else None
    page = AliasRequestPage(data=shown, has_more=next_cursor is not None, next_cursor=next_cursor)
    return pages.answer(page, next_cursor)


@router.get("/requests/{request_id}", responses=may(404))
def get_alias_request(request_id: RequestId, caller: Reader, sessions: SessionsDep) -> AliasRequestOut:
    """Return a request."""
    with reading(sessions) as session:
        found = registry.find_request(session, caller.project_id, request_id)
        if found is None:
            raise _no_such_request()
        return _show(session, *found)


@router.post("/requests/{request_id}/approve", responses=may(404, 409, 422))
def approve_alias_request(
    request_id: RequestId, caller: Admin, sessions: SessionsDep, body: Decision = NO_COMMENT
) -> AliasRequestOut:
    """Approve a request of somebody else: the alias moves now. Needs the key of a member with the role admin."""
    return _decide(sessions, caller, request_id, APPROVED, body)


@router.post("/requests/{request_id}/refuse", responses=may(404, 409, 422))
def refuse_alias_request(
    request_id: RequestId, caller: Admin, sessions: SessionsDep, body: Decision = NO_COMMENT
) -> AliasRequestOut:
    """Refuse a request of somebody else: the alias stays. Needs the key of a member with the role admin."""
    return _decide(sessions, caller, request_id, REFUSED, body)


@router.post("/requests/{request_id}/withdraw", responses=may(404, 409, 422))
def withdraw_alias_request(
    request_id: RequestId, caller: Writer, sessions: SessionsDep, body: Decision = NO_COMMENT
) -> AliasRequestOut:
    """Withdraw a request of your own."""
    return _decide(sessions, caller, request_id, WITHDRAWN, body)


def _decide(sessions: Sessions, caller: Caller, request_id: str, state: str, body: Decision) -> AliasRequestOut:
    with sessions.begin() as session:
        found = registry.lock_request(session, caller.project_id, request_id)
        if found is None:
            raise _no_such_request()
        request, model = found
        _check_may_decide(session, caller, request, state)
        if request.state != PENDING:
            raise Problem(409, "request_decided", f"The request was {request.state} before.")
        if state == APPROVED:
            _check_still_there(session, model, request)
        registry.decide(session, request, state, caller.key_id, body.comment)
        about: dict[str, Any] = {"request_id": request_id, "reason": request.reason, "comment": body.comment}
        versions: dict[str, Any] = {"from_version": request.from_version, "version": request.to_version}
        audit.note(session, caller, _ACTIONS[state], f"{model.name}@{request.alias}", **versions, **about)
        if state == APPROVED:
            move_alias(session, caller, model, request.alias, request.to_version, **about)
        elif state == REFUSED:
            tell(session, caller, webhooks.ALIAS_REFUSED, model, alias=request.alias, **versions, **about)
        return _show(session, request, model)


_ACTIONS = {APPROVED: "registry.approve", REFUSED: "registry.refuse", WITHDRAWN: "registry.withdraw"}


def _check_may_decide(session: Session, caller: Caller, request: AliasRequest, state: str) -> None:
    """Check that another member decides, or that the one who asked withdraws. Raises Problem 403.

    A member is the same one with each key. The key of a program has no member: it may ask, never decide.
    """
    people = keys.find_members(session, {key_id for key_id in (caller.key_id, request.asked_by) if key_id})
    own, asker = people.get(caller.key_id or ""), people.get(request.asked_by or "")
    is_own = caller.key_id == request.asked_by or (own is not None and asker is not None and own.id == asker.id)
    if state == WITHDRAWN:
        if not is_own:
            detail = "Only the one who asked can withdraw a request."
            raise Problem(403, "not_your_request", detail, hint="An admin can refuse it instead.")
        return
    if own is None:
        raise Problem(
            403,
            "member_required",
            "Only a member can decide a request, and this is the key of a program.",
            hint="Use the key of a member with the role admin (`bitfoundry members add`).",
        )
    if is_own:
        hint = "Ask another member with the role admin. If you work alone, withdraw it, and protect no alias."
        raise Problem(403, "own_request", "Nobody decides a request of their own.", hint=hint)


def _check_still_there(session: Session, model: RegisteredModel, request: AliasRequest) -> None:
    """Check that the alias still points where the request says that it does. Raises Problem 409."""
    present = registry.find_alias(session, model, request.alias)
    if (present.version if present else None) != request.from_version:
        now = f"points to version {present.version}" if present else "was removed"
        raise Problem(
            409,
            "alias_changed",
            f"The alias '{request.alias}' {now} since the request was made.",
            hint="Refuse the request. If the move is still wanted, ask for it again.",
        )


def _check_move(session: Session, caller: Caller, model: RegisteredModel, body: AliasRequestCreate) -> None:
    """Check that the alias is protected, and that the move is one. Raises Problem 404 or 409."""
    if body.alias not in registry.protected_aliases(session, caller.project_id):
        raise Problem(
            409,
            "alias_not_protected",
            f"The alias '{body.alias}' is not protected: it needs no request.",
            hint=f"Set it directly: PUT /v1/registry/models/{model.name}/aliases/{body.alias}.",
        )
    if body.version is not None and registry.find_entry(session, model, body.version) is None:
        raise no_such_version(model.name, body.version)
    present = registry.find_alias(session, model, body.alias)
    if (present.version if present else None) == body.version:
        now = f"points to version {body.version} already" if present else "does not exist"
        raise Problem(409, "nothing_to_move", f"The alias '{body.alias}' {now}.")


def _show(session: Session, request: AliasRequest, model: RegisteredModel) -> AliasRequestOut:
    actors = actors_of(session, {request.asked_by, request.decided_by})
    return AliasRequestOut.of(request, model, actors, registry.verdicts_of(session, {(model.id, request.to_version)}))


def _no_such_request() -> Problem:
    return Problem(404, "request_not_found", "There is no such request.")
