"""A minimal HTTP client.

On two cores a client's CPU time is lost to the service, and a thousand full clients would not fit on this machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Self
from urllib.parse import urlsplit

TIMEOUT_S = 30.0


class Connection:
    """A persistent HTTP/1.1 connection for one request at a time; it reads only answers with a Content-Length."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: str) -> None:
        self._reader, self._writer, self._head = reader, writer, head

    @classmethod
    async def open(cls, url: str, headers: Mapping[str, str]) -> Self:
        """Connect to the host of ``url``; ``headers`` go with every request."""
        address = urlsplit(url)
        assert address.hostname is not None
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        head = "".join(f"{name}: {value}\r\n" for name, value in {"Host": address.netloc, **headers}.items())
        return cls(reader, writer, head)

    async def ask(self, method: str, path: str, headers: Mapping[str, str], body: bytes = b"") -> tuple[int, str]:
        """Send a request; return (status, ETag). Raises TimeoutError, and OSError or EOFError if the server is lost."""
        own = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        length = f"Content-Length: {len(body)}\r\n" if body else ""
        async with asyncio.timeout(TIMEOUT_S):
            self._writer.write(f"{method} {path} HTTP/1.1\r\n{self._head}{own}{length}\r\n".encode() + body)
            status, answered = _parse(await self._reader.readuntil(b"\r\n\r\n"))
            if status not in (204, 304):
                await self._reader.readexactly(int(answered["content-length"]))
        return status, answered.get("etag", "")

    @property
    def is_open(self) -> bool:
        """True while the server keeps the connection, too: it closes those that are idle for long."""
        return not self._reader.at_eof()

    def close(self) -> None:
        self._writer.close()


def _parse(head: bytes) -> tuple[int, dict[str, str]]:
    """Return (status, the headers with names in lower case)."""
    first, *lines = head.decode("latin-1").rstrip().split("\r\n")
    pairs = (line.partition(":") for line in lines)
    return int(first.split(" ", 2)[1]), {name.lower(): value.strip() for name, _, value in pairs}
