"""The API is restarted under those who listen: they come back by themselves, miss nothing, hear nothing twice."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from api.http.security import create_key
from api.settings import Settings
from api.store.engine import Sessions
from api.store.queue import leases
from api.store.queue.events import NewEvent
from bitfoundry.client.async_client import AsyncClient
from tests.support.faults import ApiProcess

NUM_CLIENTS = 50
NUM_RESTARTS = 2


@pytest.mark.slow
def test_fifty_streams_outlive_restarts(
    settings: Settings, sessions: Sessions, submit: Callable[..., str], tmp_path: Path
) -> None:
    key = create_key(sessions, "k")
    job_id = submit()
    with sessions.begin() as session:
        lease = leases.claim(session, worker="w", lease_s=600)
    assert lease

    def record(number: int) -> None:
        with sessions.begin() as session:
            leases.record(session, lease, happened=[NewEvent("progress", {"done": number})] * 2, columns={})

    async def listen(client: AsyncClient) -> list[int]:
        return [event.seq async for event in client.stream_events(job_id)]

    async def act(api: ApiProcess) -> None:
        for restart in range(NUM_RESTARTS + 1):
            for number in range(20):
                await asyncio.to_thread(record, number)
                await asyncio.sleep(0.05)
            if restart < NUM_RESTARTS:
                await asyncio.to_thread(api.stop if restart else api.kill)
                await asyncio.to_thread(record, 100)
                await asyncio.to_thread(api.start)
        with sessions.begin() as session:
            leases.succeed(session, lease, manifest_sha256="s", path="/p", num_bytes=1, summary={})

    async def run(api: ApiProcess) -> list[list[int]]:
        async with AsyncClient(api.url, key) as client:
            listening = [asyncio.create_task(listen(client)) for _ in range(NUM_CLIENTS)]
            await asyncio.sleep(2)
            await act(api)
            return await asyncio.wait_for(asyncio.gather(*listening), 120)

    began = time.monotonic()
    with ApiProcess(settings, tmp_path / "api.log") as api:
        heard = asyncio.run(run(api))
    num_events = 2 + 2 * (20 * (NUM_RESTARTS + 1) + NUM_RESTARTS) + 1
    assert heard == [[*range(1, num_events + 1)]] * NUM_CLIENTS
    assert time.monotonic() - began < 120
