"""The loads of the benchmark. Times are in seconds; every load counts its failures."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import httpx2
from sqlalchemy import func, select, text

from api.store.accounts import projects
from api.store.queue import jobs, leases
from api.store.queue.events import NewEvent
from api.store.tables.jobs import Job
from bench.service.client import Connection
from bench.service.stack import Stack
from quantcore.config import presets
from quantcore.config.job_spec import JobSpec

NUM_WAKE_UPS = 20
NUM_POLLS = 5
SPEC = JobSpec(config=presets.resolve("fp8")).to_dict()
LOST = (OSError, EOFError)  # TimeoutError is an OSError


def submissions(stack: Stack, rate: float, seconds: float) -> dict[str, Any]:
    """Submit ``rate`` jobs a second, each when it is due and not when the one before has been answered."""
    body = json.dumps({"model": {"path": str(stack.model)}, "config": {"preset": "int8_dynamic"}}).encode()
    idle: list[Connection] = []
    times: list[float] = []
    statuses: Counter[str] = Counter()

    async def submit(number: int) -> None:
        began = time.monotonic()
        headers = {"Content-Type": "application/json", "Idempotency-Key": f"bench {number}"}
        while idle and not idle[-1].is_open:
            idle.pop().close()
        try:
            connection = idle.pop() if idle else await Connection.open(stack.url, stack.headers)
            statuses[str((await connection.ask("POST", "/v1/jobs", headers, body))[0])] += 1
            idle.append(connection)
        except LOST as error:
            statuses[type(error).__name__] += 1
        times.append(time.monotonic() - began)

    async def all_of_them() -> float:
        began, sent = time.monotonic(), []
        for number in range(round(rate * seconds)):
            await asyncio.sleep(max(0.0, began + number / rate - time.monotonic()))
            sent.append(asyncio.create_task(submit(number)))
        await asyncio.gather(*sent)
        for connection in idle:
            connection.close()
        return time.monotonic() - began

    took_s = asyncio.run(all_of_them())
    with stack.sessions.begin() as session:
        stored = session.scalar(select(func.count()).select_from(Job))
    return {"per_second": round(len(times) / took_s, 1), "statuses": statuses, "stored": stored} | _spread(times)


def pollers(stack: Stack, num_clients: int, seconds: float) -> dict[str, Any]:
    """Poll with ``num_clients`` clients, each once a second for one job, with the ETag of its last answer."""
    with stack.sessions.begin() as session:
        ids = session.scalars(select(Job.id).limit(num_clients)).all()
    times: list[float] = []
    statuses: Counter[str] = Counter()

    async def poll(job_id: str, first_s: float) -> None:
        await asyncio.sleep(first_s)
        until, tag = time.monotonic() + seconds, ""
        connection = await Connection.open(stack.url, stack.headers)
        while (began := time.monotonic()) < until:
            try:
                status, tag = await connection.ask("GET", f"/v1/jobs/{job_id}", {"If-None-Match": tag} if tag else {})
                statuses[str(status)] += 1
            except LOST as error:
                statuses[type(error).__name__] += 1
                connection.close()
                connection = await Connection.open(stack.url, stack.headers)
            times.append(time.monotonic() - began)
            await asyncio.sleep(max(0.0, began + 1 - time.monotonic()))
        connection.close()

    async def all_of_them() -> None:
        job_ids = [ids[number % len(ids)] for number in range(num_clients)]
        await asyncio.gather(*(poll(job_id, n / num_clients) for n, job_id in enumerate(job_ids)))

    began = time.monotonic()
    asyncio.run(all_of_them())
    return {"per_second": round(len(times) / (time.monotonic() - began), 1), "statuses": statuses} | _spread(times)


def streams(stack: Stack, num_clients: int, seconds: float) -> dict[str, Any]:
    """Measure the time from an event's commit to each of ``num_clients`` streams of one job, two events a second."""
    with stack.sessions.begin() as session:
        job_id = jobs.submit(
            session, project_id=projects.DEFAULT, submitted_by=None, name="streamed", labels={},
            preset=None, priority=9, model={"path": "/m"}, spec=SPEC,
        ).id  # fmt: skip
        lease = leases.claim(session, worker="bench", lease_s=3600)
    assert lease is not None and lease.job_id == job_id
    late: list[float] = []
    num_heard: list[int] = []
    num_sent = 0

    async def listen(client: httpx2.AsyncClient) -> None:
        heard = 0
        try:
            async with client.stream("GET", f"/v1/jobs/{job_id}/events/stream") as answer:
                async for line in answer.aiter_lines():
                    if line.startswith("data: ") and '"sent"' in line:
                        late.append(time.time() - json.loads(line[6:])["data"]["sent"])
                        heard += 1
        finally:
            num_heard.append(heard)

    def tell() -> None:
        nonlocal num_sent
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            with stack.sessions.begin() as session:
                leases.record(session, lease, happened=[NewEvent("bench", {"sent": time.time()})], columns={})
            num_sent += 1
            time.sleep(0.5)
        with stack.sessions.begin() as session:
            leases.release(session, lease)
            session.execute(text("UPDATE job SET state = 'cancelled', finished_at = clock_timestamp() WHERE id = :id"),
                            {"id": job_id})  # fmt: skip

    async def all_of_them() -> list[BaseException | None]:
        limits = httpx2.Limits(max_connections=num_clients)
        async with httpx2.AsyncClient(
            base_url=stack.url, headers=stack.headers, trust_env=False, timeout=60, limits=limits
        ) as client:
            listening = [asyncio.create_task(listen(client)) for _ in range(num_clients)]
            await asyncio.sleep(3)
            await asyncio.to_thread(tell)
            return await asyncio.gather(*listening, return_exceptions=True)

    errors = [type(error).__name__ for error in asyncio.run(all_of_them()) if error]
    whole = sum(heard == num_sent for heard in num_heard)
    return {"heard_all": whole, "of": num_clients, "events": num_sent, "errors": Counter(errors)} | _spread(late)


def claims(stack: Stack, num_queued: int) -> dict[str, Any]:
    """Measure claims while ``num_queued`` jobs wait, and the first page of the list."""
    with stack.sessions.begin() as session:
        job = jobs.submit(
            session, project_id=projects.DEFAULT, submitted_by=None, name="queued", labels={}, preset=None,
            model={"path": "/m"}, spec=SPEC,
        )  # fmt: skip
        columns = ", ".join(column.name for column in Job.__table__.columns if column.name not in ("id", "nodes"))
        copies = text(
            f"INSERT INTO job (id, {columns}) SELECT 'job_' || md5(n::text), {columns}"
            " FROM job, generate_series(1, :number) AS n WHERE id = :id"
        )
        session.execute(copies, {"number": num_queued, "id": job.id})
    with stack.sessions.begin() as session:
        session.execute(text("ANALYZE job"))
        waiting = session.scalar(select(func.count()).where(Job.state == "queued"))
    times, listed = [], []
    for _ in range(300):
        began = time.monotonic()
        with stack.sessions.begin() as session:
            assert leases.claim(session, worker="bench", lease_s=3600)
        times.append(time.monotonic() - began)
    with httpx2.Client(base_url=stack.url, headers=stack.headers, trust_env=False, timeout=30) as client:
        for _ in range(50):
            began = time.monotonic()
            assert client.get("/v1/jobs").status_code == 200
            listed.append(time.monotonic() - began)
    return {"waiting": waiting} | _spread(times) | {"list": _spread(listed)}


def wake_ups(stack: Stack) -> dict[str, Any]:
    """Measure the time from a job's row to its claim by an idle worker: one that is woken, and one that polls (10 s).

    The engine is a program that fails at once. Times are by the database's clock: ``started_at - created_at``.
    """
    with stack.sessions.begin() as session:
        session.execute(text("UPDATE job SET run_at = 'infinity' WHERE state = 'queued'"))
    with_valkey = _wake_ups(stack, stack.broker_url, NUM_WAKE_UPS)
    return {"with Valkey": with_valkey, "without": _wake_ups(stack, "redis+socket:///nowhere/valkey.sock", NUM_POLLS)}


def _wake_ups(stack: Stack, broker_url: str, number: int) -> dict[str, Any]:
    body = {"model": {"path": str(stack.model)}, "config": {"preset": "int8_dynamic"}}
    ids = []
    with (
        stack.worker(broker_url),
        httpx2.Client(base_url=stack.url, headers=stack.headers, trust_env=False, timeout=30) as client,
    ):
        time.sleep(8)  # it starts, looks, and finds nothing
        for _ in range(number):
            ids.append(client.post("/v1/jobs", json=body).json()["id"])
            while not _is_claimed(stack, ids[-1]):
                time.sleep(0.05)
            time.sleep(random.uniform(1.0, 3.0))  # it is idle again, anywhere between two polls
    waits = select(func.extract("epoch", Job.started_at - Job.created_at)).where(Job.id.in_(ids))
    with stack.sessions.begin() as session:
        return _spread([float(wait_s) for wait_s in session.scalars(waits)])


def _is_claimed(stack: Stack, job_id: str) -> bool:
    with stack.sessions.begin() as session:
        return session.scalar(select(Job.started_at).where(Job.id == job_id)) is not None


def _spread(times: Sequence[float]) -> dict[str, Any]:
    """Return p50, p95, p99 and the largest, in seconds."""
    if len(times) < 2:
        return {"p50": None, "p95": None, "p99": None, "max": None}
    cuts = statistics.quantiles(times, n=100, method="inclusive")
    spread = {"p50": cuts[49], "p95": cuts[94], "p99": cuts[98], "max": max(times)}
    return {name: round(value, 4) for name, value in spread.items()}
