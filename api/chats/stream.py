"""Streams a chat as server-sent events: ``turn`` with each turn that has changed, then ``chat`` with the chat."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial

from api.chats.schemas import ChatOut, TurnOut
from api.http.event_stream import Feed
from api.http.security import CHAT
from api.jobs.stream import News, Start, is_over, tell
from api.store.accounts.audit import Caller
from api.store.engine import Sessions, reading
from api.store.queue import chats
from api.store.tables.chats import ChatState


def tell_chat(feed: Feed, sessions: Sessions, chat_id: str, start: Start, max_turns: int) -> AsyncIterator[str]:
    """Stream what has changed since ``start``, then each change, until the chat has ended."""
    return tell(feed, chat_id, start, "chat", partial(_read, sessions, chat_id, max_turns))


def find_start(
    feed: Feed, sessions: Sessions, chat_id: str, after: int, caller: Caller, max_turns: int
) -> Start | None:
    """Return the start of a stream; None if the chat has ended with no change after ``after``. Raises QuotaExceeded."""
    if is_over(_read(sessions, chat_id, max_turns, after), after):
        return None
    with reading(sessions) as session:
        return Start(after, feed.admit(session, caller, CHAT))


def _read(sessions: Sessions, chat_id: str, max_turns: int, after: int) -> News:
    with reading(sessions) as session:
        chat = chats.find(session, chat_id)  # first: what is read later is at least as new
        if chat is None:
            return News("", after, False, "deleted")
        if chat.seq <= after:
            return News("", after, False, _ended(chat.state))
        turns = chats.read_turns(session, chat_id, after=after)
    parts = [f"event: turn\ndata: {TurnOut.of(turn).model_dump_json()}\n\n" for turn in turns]
    parts.append(f"id: {chat.seq}\nevent: chat\ndata: {ChatOut.of(chat, max_turns).model_dump_json()}\n\n")
    return News("".join(parts), chat.seq, False, _ended(chat.state))


def _ended(state: str) -> str | None:
    return "ended" if state == ChatState.ENDED else None
