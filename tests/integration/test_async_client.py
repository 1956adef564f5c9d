"""The client for asyncio against a real service: the same calls, many at a time, streams and downloads that go on."""

import asyncio
import inspect
import time
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx2
import pytest

from bitfoundry.client import async_client
from bitfoundry.client.account import Account
from bitfoundry.client.async_client import AsyncClient
from bitfoundry.client.chats import Chats
from bitfoundry.client.datasets import Datasets
from bitfoundry.client.retention import Retention
from bitfoundry.client.service import Client
from bitfoundry.client.webhooks import Webhooks
from bitfoundry.errors import ApiError, WaitTimeout
from tests.support.service import Server, WorkerProcess


def test_it_can_do_all_that_the_other_can() -> None:
    twins: dict[type, type] = {
        Client: AsyncClient, Account: async_client.AsyncAccount, Webhooks: async_client.AsyncWebhooks,
        Chats: async_client.AsyncChats, Datasets: async_client.AsyncDatasets, Retention: async_client.AsyncRetention,
    }  # fmt: skip
    for original, twin in twins.items():
        names = {name for name, member in vars(original).items() if inspect.isfunction(member) and name[0] != "_"}
        assert names - set(vars(twin)) == set(), original
        for name in names - {"close"}:
            method, same = getattr(original, name), getattr(twin, name)
            assert (same.__doc__, inspect.signature(same)) == (method.__doc__, inspect.signature(method)), name
            iterates = str(inspect.signature(method).return_annotation).startswith("collections.abc.Iterator")
            assert inspect.isasyncgenfunction(same) == iterates, name


@pytest.mark.slow
def test_a_job_from_the_request_to_the_download(
    server: Server, make_model: Callable[..., Path], start_worker: Callable[..., WorkerProcess], tmp_path: Path
) -> None:
    async def act() -> None:
        async with AsyncClient(server.url, server.key) as client:
            jobs = await asyncio.gather(*(client.submit(make_model(str(n)), config="fp8") for n in range(3)))
            assert {job.id async for job in client.list(states=["queued"], page_size=2)} == {job.id for job in jobs}
            start_worker()
            seqs = [event.seq async for event in client.stream_events(jobs[0].id)]
            assert seqs == list(range(1, len(seqs) + 1))
            ended = await asyncio.gather(*(client.wait(job.id, poll_s=0.1) for job in jobs))
            assert [job.state for job in ended] == ["succeeded"] * 3
            folder = await client.download(jobs[0].id, tmp_path / "artifact")
            assert (folder / "sub/report.json").read_text() == '{"summary": {}}'
            lines = [line.text async for line in client.logs(jobs[1].id)]
            assert "stub engine starts" in lines
            file = tmp_path / "a.jsonl"
            file.write_text('{"text": "one"}\n{"text": "two"}\n')
            made = await client.datasets.upload(file)
            assert [each.id async for each in client.datasets.list()] == [made.id]
            assert (await client.account.own_key()).name == "test"
            assert list(await client.webhooks.list()) == []
            with pytest.raises(ApiError) as unknown:
                await client.get("job_" + "0" * 32)
            assert unknown.value.code == "job_not_found"

    asyncio.run(act())


def test_waiting_holds_up_nobody_and_can_be_cancelled(server: Server, submit: Callable[..., str]) -> None:
    job_id = submit()

    async def act() -> None:
        async with AsyncClient(server.url, server.key) as client:
            began = time.monotonic()
            with pytest.raises(WaitTimeout):
                await client.wait(job_id, timeout_s=0.6, poll_s=0.2)
            alone_s, began = time.monotonic() - began, time.monotonic()
            waits = [client.wait(job_id, timeout_s=0.6, poll_s=0.2) for _ in range(30)]
            errors = await asyncio.gather(*waits, return_exceptions=True)
            assert all(isinstance(error, WaitTimeout) for error in errors)
            assert time.monotonic() - began < 20 * alone_s  # one behind the other would take 30 times as long
            seen: list[int] = []

            async def listen() -> None:
                async for event in client.stream_events(job_id):
                    seen.append(event.seq)

            listening = asyncio.create_task(listen())
            while not seen:
                await asyncio.sleep(0.05)
            listening.cancel()
            with pytest.raises(asyncio.CancelledError):
                await listening
            assert (await client.cancel(job_id)).state == "cancelled"  # the connection is whole
            async with aclosing(client.stream_events(job_id)) as stream:
                assert (await anext(stream)).seq == 1  # who stops listening leaves nothing open

    asyncio.run(act())


class Cutting(httpx2.BaseTransport):
    """Real answers of a real service, of which a file's body breaks off after so many bytes."""

    def __init__(self, after: int) -> None:
        self._real = httpx2.HTTPTransport()
        self._after = after
        self.ranges: list[str | None] = []

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        answer = self._real.handle_request(request)
        if "artifacts/" not in request.url.path:
            return answer
        self.ranges.append(request.headers.get("Range"))
        content = answer.read()

        def broken() -> Any:
            yield content[: self._after]
            if len(content) > self._after:
                raise httpx2.ReadError("cut off")

        answer.close()
        headers = {name: value for name, value in answer.headers.items() if name != "content-length"}
        return httpx2.Response(answer.status_code, headers=headers, content=broken())

    def close(self) -> None:
        self._real.close()


@pytest.mark.slow
def test_a_download_that_breaks_off_goes_on_at_its_last_byte(
    server: Server, make_model: Callable[..., Path], start_worker: Callable[..., WorkerProcess],
    wait_for: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    start_worker()
    with Client(server.url, server.key) as client:
        job = client.wait(client.submit(make_model(), config="fp8").id, poll_s=0.1)
        whole = client.download(job.id, tmp_path / "whole")
    cutting = Cutting(7000)
    with Client(server.url, server.key, transport=cutting) as client:
        again = client.download(job.id, tmp_path / "again")
    for path in whole.rglob("*"):
        assert path.is_dir() or (again / path.relative_to(whole)).read_bytes() == path.read_bytes()
    assert cutting.ranges[:3] == [None, "bytes=7000-", "bytes=14000-"]
    assert list(again.rglob("*.partial")) == []
    # A part from another run, too; and one that is not the file's is seen.
    (again / "model.safetensors").unlink()
    content = (whole / "model.safetensors").read_bytes()
    (again / "model.safetensors.partial").write_bytes(content[:100])
    cutting = Cutting(10**9)
    with Client(server.url, server.key, transport=cutting) as client:
        client.download(job.id, again)
    assert cutting.ranges == ["bytes=100-"]
    assert (again / "model.safetensors").read_bytes() == content
