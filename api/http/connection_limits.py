"""Serves connections: uvicorn's protocol with limits on what a client without a key can take of us.

A request head and a body have a time limit each, and a body cannot come in tiny chunks. Of too many connections, the
caller who holds most loses one: whoever holds few, probes and sign-ins among them, always gets through. Data after a
response that did not wait for it is discarded unparsed.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_CONNECTIONS = 800
"""Connections of a process: below the 1024 descriptors that it usually may open."""
HEAD_S = 15.0
"""Time limit of a request's head, from its first byte on; on a new connection, from the beginning."""
BODY_S = 30.0
"""Time limit of a body, with another second for each ``MIN_BODY_BYTES_PER_S`` of it."""
MIN_BODY_BYTES_PER_S = 16 << 10
LINGER_S = 30.0
"""Time for which the rest of an unwanted body is discarded, so that its sender can read our response."""
STALL_S = 120.0
"""Time after which a client that accepts none of the data sent to it is disconnected."""

FREE_CHUNKS = 1000
MIN_CHUNK_BYTES = 256
"""Lower bound on the average chunk of a body, after ``FREE_CHUNKS`` chunks: each costs time as a request does."""


class CountedConnection(h11.Connection):
    """A connection that raises RemoteProtocolError for a body in tiny chunks.

    Responses that do not wait for the body close the connection, and say so: a client would otherwise send its next
    request into a connection that is about to close.
    """

    num_chunks = num_body_bytes = 0

    def send_with_data_passthrough(self, event: h11.Event) -> list[bytes] | None:
        if isinstance(event, h11.Response) and self.their_state is h11.SEND_BODY:
            headers = [*event.headers, (b"connection", b"close")]
            event = h11.Response(status_code=event.status_code, headers=headers, reason=event.reason)
        return super().send_with_data_passthrough(event)

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self.num_chunks = self.num_body_bytes = 0
            if {b"content-length", b"transfer-encoding"} <= {name for name, _ in event.headers}:
                raise h11.RemoteProtocolError("two lengths")  # a proxy may believe the other one (RFC 9112, 6.3)
        elif isinstance(event, h11.Data):
            self.num_chunks += event.chunk_start
            self.num_body_bytes += len(event.data)
            if self.num_chunks > FREE_CHUNKS + self.num_body_bytes // MIN_CHUNK_BYTES:
                raise h11.RemoteProtocolError("chunks_too_small")
        return event


class BoundedProtocol(H11Protocol):
    """A connection. ``waiting_since`` is the time of its start, or of its last response."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.conn: CountedConnection = CountedConnection(h11.SERVER, self.config.h11_max_incomplete_event_size or 16384)
        self.waiting_since = self.loop.time()
        self._awaited: object = None  # the request whose head or body is on its way
        self._timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._is_over = False

    # called by asyncio

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await("head", HEAD_S)
        if len(self.connections) > MAX_CONNECTIONS:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._timer, self._stall_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._is_over:
            super().data_received(data)
            self._look_what_is_awaited()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall_timer = self.loop.call_later(STALL_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall_timer is not None:
            self._stall_timer.cancel()

    # called by uvicorn

    def on_response_complete(self) -> None:
        self.waiting_since = self.loop.time()
        if self.conn.their_state is h11.SEND_BODY and not self.transport.is_closing():
            self.server_state.total_requests += 1
            self._linger()
            return
        super().on_response_complete()
        self._look_what_is_awaited()

    def send_400_response(self, msg: str) -> None:
        if self.conn.num_chunks > FREE_CHUNKS:
            detail = f"The chunks of the body average fewer than {MIN_CHUNK_BYTES} bytes: send larger chunks."
            self._refuse(400, "chunks_too_small", detail)
        else:
            self._refuse(400, "invalid_http", "This is not a valid HTTP request.")

    # our own

    @property
    def is_waiting(self) -> bool:
        """The connection waits: no request is under way that has arrived in full, or at least with a valid key."""
        cycle = self.cycle
        if self._is_over or cycle is None or cycle.response_complete:
            return True
        return cycle.more_body and "caller" not in cycle.scope["state"]

    @property
    def holder(self) -> str:
        """The key of the connection's last request, or the address that it comes from if no key was valid so far."""
        caller = self.cycle.scope["state"].get("caller") if self.cycle is not None else None
        return caller.key_id if caller is not None else f"address {self.client[0] if self.client else ''}"

    def _make_room(self) -> None:
        """Close a connection of the caller who holds most: one that waits, if there is one, and the oldest of these."""
        held: defaultdict[str, list[BoundedProtocol]] = defaultdict(list)
        for connection in self.connections:
            if isinstance(connection, BoundedProtocol) and connection is not self:
                held[connection.holder].append(connection)
        most = max(map(len, held.values()))
        losing = [connection for group in held.values() if len(group) == most for connection in group]
        min(losing, key=lambda connection: (not connection.is_waiting, connection.waiting_since)).transport.abort()

    def _look_what_is_awaited(self) -> None:
        """Start the timer of a head or a body that has begun; stop it for one that has arrived."""
        if self._is_over:
            return
        state = self.conn.their_state
        if state is h11.SEND_BODY:
            self._await(self.cycle, BODY_S)
        elif state is h11.IDLE and (self.cycle is None or self.conn.trailing_data[0]):
            self._await("head", HEAD_S)
        else:
            self._await(None, 0)

    def _await(self, what: object, seconds: float) -> None:
        if what is self._awaited:
            return
        self._awaited = what
        if self._timer is not None:
            self._timer.cancel()
        began = self.loop.time()
        self._timer = None if what is None else self.loop.call_later(seconds, self._check_progress, began)

    def _check_progress(self, began: float) -> None:
        """Refuse a request whose time is over, unless its body comes fast enough, or we ourselves have not read it."""
        if isinstance(self._awaited, str):
            self._refuse(408, "request_timeout", f"The request headers took longer than {HEAD_S:g} s.")
            return
        over_at = began + BODY_S + self.conn.num_body_bytes / MIN_BODY_BYTES_PER_S
        left_s = max(over_at - self.loop.time(), 1.0 if self.flow.read_paused else 0.0)
        if left_s > 0:
            self._timer = self.loop.call_later(left_s, self._check_progress, began)
        else:
            self._refuse(408, "request_timeout", f"After {BODY_S:g} s, the body must arrive at 16 KiB/s on average.")

    def _refuse(self, status: int, code: str, detail: str) -> None:
        """Answer in place of the app, which is told that nobody listens any more, and hang up."""
        if self._is_over or self.transport.is_closing():
            return
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
            if cycle.response_started:
                self.transport.abort()
                return
        self.transport.write(_problem(status, code, detail))
        self._linger()

    def _linger(self) -> None:
        """Hang up with a delay: unread data would make the kernel drop our response."""
        self._is_over = True
        self._await(None, 0)
        self._unset_keepalive_if_required()
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._timer = self.loop.call_later(LINGER_S, self.transport.abort)


def _problem(status: int, code: str, detail: str) -> bytes:
    """Return a whole response in the form of ``api.http.errors``."""
    phrase = HTTPStatus(status).phrase
    problem = {
        "type": f"urn:bitfoundry:error:{code}",
        "title": phrase,
        "status": status,
        "detail": detail,
        "code": code,
    }
    body = json.dumps(problem).encode()
    head = f"HTTP/1.1 {status} {phrase}\r\nContent-Type: application/problem+json\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"Connection: close\r\n\r\n" + body
