"""A job's events or its log as they come: a stream that takes itself up again where it broke off."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

import httpx2

from bitfoundry.client.answers import Event, LogLine
from bitfoundry.client.transport import AWAY, NUM_TRIES, Transport
from bitfoundry.errors import ApiError

SILENCE_S = 45.0  # the service says something every 15 s, if only that there is nothing new
PAUSE_S = 1.0

T = TypeVar("T", Event, LogLine)


def follow(transport: Transport, path: str, after: int, made: type[T]) -> Iterator[T]:
    """What comes after number `after` until the job has ended (`made` of it: events, lines), each once.

    ApiError when the service stays away.
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
                    each = made.model_validate_json(data)
                    num_failures, after = 0, each.seq
                    yield each
        except httpx2.TransportError as error:
            if num_failures >= NUM_TRIES:
                raise transport.no_answer(error) from error
        except ApiError as error:
            if error.status not in AWAY or num_failures >= NUM_TRIES:
                raise
        num_failures += 1
        transport.pause(min(PAUSE_S * 2**num_failures, 30.0))


def messages(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """(event, data) of every message in a stream of server-sent events; comments and other fields are passed over."""
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
