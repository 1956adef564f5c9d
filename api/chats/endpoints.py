"""The routes of chats. Each needs the scope ``jobs:chat``: a chat takes a worker's memory and time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Response
from fastapi.responses import StreamingResponse
from sqlalchemy.orm import Session

from api.chats import stream
from api.chats.schemas import ChatCreate, ChatOut, ChatPrompt, TurnOut
from api.http.deps import Context, ContextDep
from api.http.errors import Problem, may
from api.http.security import Chatter
from api.http.strict_json import StrictJsonRoute
from api.jobs.endpoints import JobId, no_such_job, open_job
from api.jobs.events import FromWhere, stream_of, streaming
from api.jobs.stream import Start
from api.store.accounts import audit
from api.store.accounts.audit import Caller
from api.store.engine import reading
from api.store.queue import chats, jobs
from api.store.queue.chats import CannotChat
from api.store.tables.chats import Chat, EndReason

of_jobs = APIRouter(prefix="/jobs/{job_id}/chat", tags=["chats"], route_class=StrictJsonRoute)
router = APIRouter(prefix="/chats/{chat_id}", tags=["chats"], route_class=StrictJsonRoute, responses=may(404))

ChatId = Annotated[str, Path(pattern="^chat_[0-9a-f]{32}$")]
STREAM_EXAMPLE = 'event: turn\ndata: {"seq": 7, "number": 1, "state": "answering", "original": {"text": "Par"}}\n\n'


@of_jobs.post("", status_code=201, responses=may(404, 409, 422))
def open_chat(
    job_id: JobId,
    caller: Chatter,
    context: ContextDep,
    body: ChatCreate = ChatCreate(),  # noqa: B008  it is frozen
) -> ChatOut:
    """Open a chat with a succeeded job's result and its original: a worker loads both models.

    A project has one chat at a time. The chat ends when no worker takes it in time, when it is idle, and when a job
    needs its worker.
    """
    settings = context.settings
    if body.max_new_tokens > settings.chat_max_new_tokens:
        raise Problem(
            422,
            "too_many_tokens",
            f"An answer has at most {settings.chat_max_new_tokens} tokens.",
            errors=[{"pointer": "/max_new_tokens", "detail": "too large", "code": "too_many_tokens"}],
        )
    with context.sessions.begin() as session:
        job = jobs.lock_own(session, caller.project_id, job_id)
        if job is None:
            raise no_such_job()
        with _explained():
            chat = chats.begin(session, job, max_new_tokens=body.max_new_tokens, wait_s=settings.chat_wait_s)
        audit.note(session, caller, "chat.open", chat.id, job_id=job_id)
        shown = ChatOut.of(chat, settings.chat_max_turns, [])
    context.upkeep.relay_now()
    return shown


@of_jobs.get("", responses=may(404))
def get_chat_of_job(job_id: JobId, caller: Chatter, context: ContextDep) -> ChatOut:
    """Return the newest chat with a job's result, with its turns."""
    with open_job(context.sessions, caller, job_id) as (session, _):
        chat = chats.find_last(session, job_id)
        if chat is None:
            raise _no_such_chat()
        return _show(session, chat, context)


@router.get("")
def get_chat(chat_id: ChatId, caller: Chatter, context: ContextDep) -> ChatOut:
    """Return a chat with its turns."""
    with reading(context.sessions) as session:
        return _show(session, _find(session, caller, chat_id), context)


@router.post("/turns", status_code=202, responses=may(409, 422))
def ask_chat(chat_id: ChatId, body: ChatPrompt, caller: Chatter, context: ContextDep) -> TurnOut:
    """Give both models a prompt. One prompt is answered at a time; the stream has the answers as they grow."""
    with context.sessions.begin() as session:
        _find(session, caller, chat_id)
        chat = chats.lock(session, chat_id)
        if chat is None:
            raise _no_such_chat()
        with _explained():
            turn = chats.ask(session, chat, body.prompt, max_turns=context.settings.chat_max_turns)
        audit.note(session, caller, "chat.ask", chat_id, number=turn.number)
        return TurnOut.of(turn)


@router.delete("", status_code=204)
def end_chat(chat_id: ChatId, caller: Chatter, context: ContextDep) -> None:
    """End a chat: its worker is free within seconds. What was said can be read for a day."""
    with context.sessions.begin() as session:
        _find(session, caller, chat_id)
        chat = chats.lock(session, chat_id)
        if chat is not None:
            chats.end(session, chat, EndReason.CLOSED)
        audit.note(session, caller, "chat.end", chat_id)


def find_start(chat_id: ChatId, caller: Chatter, context: ContextDep, after: FromWhere) -> Start | None:
    """Return the start of the stream, None if there is nothing to come. All errors belong here."""
    with reading(context.sessions) as session:
        _find(session, caller, chat_id)
    max_turns = context.settings.chat_max_turns
    return stream.find_start(context.feed, context.sessions, chat_id, after, caller, max_turns)


@router.get("/stream", response_class=StreamingResponse, responses=streaming("Turns", STREAM_EXAMPLE))
async def stream_chat(
    chat_id: ChatId, context: ContextDep, start: Annotated[Start | None, Depends(find_start)]
) -> Response:
    """Stream a chat as server-sent events, until it has ended.

    `turn` has a turn that has changed since ``Last-Event-ID`` (or ``after``), `chat` the chat itself.
    """
    if start is None:
        return Response(status_code=204)
    told = stream.tell_chat(context.feed, context.sessions, chat_id, start, context.settings.chat_max_turns)
    return stream_of(told)


def _find(session: Session, caller: Caller, chat_id: str) -> Chat:
    """Return the chat if it is the project's. Raises Problem 404."""
    chat = chats.find(session, chat_id)
    if chat is None or chat.project_id != caller.project_id:
        raise _no_such_chat()
    return chat


def _show(session: Session, chat: Chat, context: Context) -> ChatOut:
    return ChatOut.of(chat, context.settings.chat_max_turns, chats.read_turns(session, chat.id))


def _no_such_chat() -> Problem:
    return Problem(404, "chat_not_found", "There is no such chat.")


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except CannotChat as error:
        raise Problem(409, error.code, error.message, hint=error.hint) from error
