"""Live streams of a job's events and log lines, and of chats, which reconnect where they broke off."""

from collections.abc import Generator, Iterable, Iterator
from typing import TypeVar

import httpx2

from bitfoundry.client.answers import ChatEvent, Event, LogLine
from bitfoundry.client.transport import AWAY, NUM_TRIES, Transport
from bitfoundry.errors import ApiError

SILENCE_S = 45.0  # the service sends something every 15 s, a comment if nothing is new
PAUSE_S = 1.0

T = TypeVar("T", Event, LogLine, ChatEvent)


def follow(transport: Transport, path: str, after: int, made: type[T]) -> Generator[T]:
    """Yield each event or line (of the class `made`) after number `after` once, until the job or chat has ended.

    Raises ApiError if the service stays away.
    """
    num_failures = 0
    while True:
        try:
            with transport.stream(path, headers={"Last-Event-ID": str(after)}, timeout_s=SILENCE_S) as answer:
                if answer.status_code == 204:
                    return
                for kind, data in messages(answer.iter_lines()):
                    if kind == "end":
                        return
                    item = made.model_validate_json(data)
                    num_failures, after = 0, item.seq
                    yield item
        except httpx2.TransportError as error:
            if num_failures >= NUM_TRIES:
                raise transport.no_answer(error) from error
        except ApiError as error:
            if error.status not in AWAY or num_failures >= NUM_TRIES:
                raise
        num_failures += 1
        transport.pause(min(PAUSE_S * 2**num_failures, 30.0))


def messages(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield (event, data) of every message in a stream of server-sent events; comments and other fields are skipped."""
    kind, data = "message", list[str]()
    for line in lines:
        if not line:
            if data:
                yield kind, "\n".join(data)
            kind, data = "message", []
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "event":
            kind = value
        elif field == "data":
            data.append(value)
