"""A receiver of webhooks."""

import json
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.support.waiting import PATIENCE_S, wait_until


@dataclass
class Message:
    """A message that a receiver got."""

    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def content(self) -> dict[str, Any]:
        return json.loads(self.body)  # type: ignore[no-any-return]


@dataclass
class Receiver:
    """A real HTTP server; ``answers``: those to the next requests (status, headers, delay in seconds)."""

    url: str
    messages: list[Message] = field(default_factory=list)
    answers: list[tuple[int, dict[str, str], float]] = field(default_factory=list)
    status: int = 204

    def wait(self, number: int, timeout_s: float = PATIENCE_S) -> list[Message]:
        wait_until(
            lambda: len(self.messages) >= number,
            timeout_s=timeout_s,
            note=lambda: f"{len(self.messages)} of {number} messages came",
        )
        return self.messages


@contextmanager
def serve(context: ssl.SSLContext | None = None) -> Iterator[Receiver]:
    class Handler(BaseHTTPRequestHandler):
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            receiver.messages.append(Message(self.path, {k.lower(): v for k, v in self.headers.items()}, body))
            status, headers, delay_s = receiver.answers.pop(0) if receiver.answers else (receiver.status, {}, 0.0)
            time.sleep(delay_s)
            try:
                self.send_response(status)
                for name, value in {"Content-Length": "0", **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
            except OSError:
                pass  # the client has hung up

        def log_message(self, format: str, *arguments: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    if context:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    port = server.server_address[1]
    receiver = Receiver(f"{'https' if context else 'http'}://127.0.0.1:{port}/hook?x=1")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
