"""Calls for chats with a job's result and its original: `client.chats`. They need the scope `jobs:chat`."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any
from urllib.parse import quote

from bitfoundry.client.answers import ChatEvent, ChatTurn
from bitfoundry.client.follow import follow
from bitfoundry.client.project_answers import Chat as Chat
from bitfoundry.client.transport import Transport

UNANSWERED = ("waiting", "answering")


class Chats:
    """Calls for chats."""

    def __init__(self, service: Transport) -> None:
        self._service = service

    def open(self, job_id: str, *, max_new_tokens: int | None = None) -> Chat:
        """Open a chat with the result of a succeeded job. Raises ApiError `chat_in_progress` if the project has one."""
        body = {} if max_new_tokens is None else {"max_new_tokens": max_new_tokens}
        return self._chat("POST", f"/v1/jobs/{quote(job_id, safe='')}/chat", body=body)

    def of_job(self, job_id: str) -> Chat:
        """Return the newest chat with a job's result. Raises ApiError `chat_not_found`."""
        return self._chat("GET", f"/v1/jobs/{quote(job_id, safe='')}/chat")

    def get(self, chat_id: str) -> Chat:
        """Return a chat with its turns. Raises ApiError `chat_not_found`."""
        return self._chat("GET", _path(chat_id))

    def ask(self, chat_id: str, prompt: str) -> ChatTurn:
        """Give both models a prompt, without waiting for the answers. Raises ApiError `chat_ended`."""
        answer = self._service.send("POST", f"{_path(chat_id)}/turns", body={"prompt": prompt})
        return ChatTurn.model_validate_json(answer.content)

    def stream(self, chat_id: str, *, after: int = 0) -> Iterator[ChatTurn]:
        """Yield turns each time that they have changed after the change number `after`, until the chat has ended."""
        for event in follow(self._service, f"{_path(chat_id)}/stream", after, ChatEvent):
            if event.number is not None:
                yield ChatTurn.model_validate(event.model_dump())

    def say(self, chat_id: str, prompt: str) -> ChatTurn:
        """Give both models a prompt, and return the turn when it is `answered` or has `failed`."""
        asked = self.ask(chat_id, prompt)
        with closing(follow(self._service, f"{_path(chat_id)}/stream", asked.seq, ChatEvent)) as events:
            for event in events:
                if event.number == asked.number and event.state not in UNANSWERED:
                    break
        turns = self.get(chat_id).turns or []
        return next(turn for turn in turns if turn.number == asked.number)

    def end(self, chat_id: str) -> None:
        """End a chat. What was said can be read for a day."""
        self._service.send("DELETE", _path(chat_id))

    def _chat(self, method: str, path: str, *, body: dict[str, Any] | None = None) -> Chat:
        return Chat.model_validate_json(self._service.send(method, path, body=body).content)


def _path(chat_id: str) -> str:
    return f"/v1/chats/{quote(chat_id, safe='')}"
