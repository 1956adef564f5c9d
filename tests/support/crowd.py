"""The many clients of one project, in a process of their own: ``with crowd(url, key, job_id, model):``."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from urllib.parse import quote, urlsplit

from api.http.event_stream import MAX_STREAMS_OF_KEY
from tests.support.service import ROOT

NUM_INSPECTORS, NUM_SUBMITTERS, NUM_READERS = 24, 2, 2
RETRY_S = 3.0  # as a stream's first line asks for


@contextmanager
def crowd(url: str, key: str, job_id: str, model: Path, log: Path) -> Iterator[None]:
    """Let the clients read all streams of the job that a key may have, and inspect, submit and list without a pause.

    ``model`` is what they inspect and submit. Their errors are in ``log``.
    """
    with log.open("wb") as stream:
        command = [sys.executable, "-m", "tests.support.crowd", url, key, job_id, str(model)]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=stream)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"all are there\n", log.read_text()
        yield
        assert process.poll() is None, log.read_text()
    finally:
        process.kill()
        process.communicate()


@asynccontextmanager
async def _ask(url: str, head: str, body: bytes = b"") -> AsyncIterator[tuple[int, asyncio.StreamReader]]:
    """Send a request on a new connection; yield its status and the rest of the answer."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        answered = await reader.readuntil(b"\r\n\r\n")
        yield int(answered.split(b" ", 2)[1]), reader
    finally:
        writer.close()


async def _main(url: str, key: str, job_id: str, model: str) -> None:
    headers = {"Host": "x", "Authorization": f"Bearer {key}", "Content-Type": "application/json", "Connection": "close"}
    rest = "HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    job = json.dumps({"model": {"path": model}, "config": {"preset": "fp8"}}).encode()
    num_open = 0

    async def stream() -> None:
        nonlocal num_open
        async with _ask(url, f"GET /v1/jobs/{job_id}/events/stream {rest}") as (status, reader):
            num_open += status == 200
            while await reader.read(1 << 20):
                pass
            num_open -= status == 200
        await asyncio.sleep(RETRY_S)

    async def read(request: str, body: bytes = b"") -> None:
        async with _ask(url, f"{request} {rest}", body) as (_, reader):
            await reader.read()

    async def inspect() -> None:
        await read(f"GET /v1/models/inspect?path={quote(model)}")

    async def submit() -> None:
        await read("POST /v1/jobs", job)

    async def list_jobs() -> None:
        await read("GET /v1/jobs")

    async def on_and_on(act: Callable[[], Awaitable[None]]) -> None:
        while True:
            with suppress(OSError, EOFError):
                await act()

    acts = [stream] * MAX_STREAMS_OF_KEY + [inspect] * NUM_INSPECTORS + [submit] * NUM_SUBMITTERS
    acts += [list_jobs] * NUM_READERS
    tasks = [asyncio.create_task(on_and_on(act)) for act in acts]
    while num_open < MAX_STREAMS_OF_KEY:
        await asyncio.sleep(0.1)
    print("all are there", flush=True)
    await asyncio.gather(*tasks)


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
