"""Jobs that several workers do together: real workers, whose stub engines say which node they are.

Those that are to be killed are processes of their own; the others are threads of the test's.
"""

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import func, select, text, update

from api.settings import Settings
from api.store.engine import Sessions
from api.store.queue import clock, control, leases, node_slots, waiting, workers
from api.store.queue.leases import Failure, Lease, LeaseLost, Order
from api.store.tables.jobs import Attempt, Job, Worker
from api.store.tables.node_slots import NodeSlot, NodeSlotState
from quantcore.config import presets
from tests.support.attempts import AWorker, StartHere, outcomes, run_as
from tests.support.params import with_rare
from tests.support.service import STUB_ENGINE, WorkerProcess, is_alive, wait_for_empty, wait_gone
from tests.support.waiting import wait_until

MakeModel = Callable[..., Path]
Submit = Callable[..., str]
StartWorker = Callable[..., WorkerProcess]
WaitFor = Callable[..., Job]
GetJob = Callable[[str], Job]
ReadPids = Callable[..., list[list[int]]]
LIMIT_S = 240


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """The stub engine is told which node it is; leaders wait for a few seconds."""
    command = f"{{python}} -S {STUB_ENGINE} {{launcher}}"
    more = {"engine_command": command, "gather_s": 20, "node_address": "127.0.0.1"}
    return settings.model_copy(update=more)


@pytest.fixture
def wait_for(wait_for: WaitFor) -> WaitFor:
    """Several workers take their time to start."""
    return partial(wait_for, timeout_s=LIMIT_S)


def appear(sessions: Sessions, *names: str, memory_bytes: int = 1 << 40, num_slots: int = 1) -> None:
    """Workers that live, as rows."""
    with sessions.begin() as session:
        for name in names:
            workers.beat(session, workers.Registration(name, name, num_slots, memory_bytes), devices=[], live_s=60)


def claim(sessions: Sessions, worker: str = "a:0", **options: Any) -> Lease | None:
    with sessions.begin() as session:
        return leases.claim(session, worker=worker, lease_s=30, **options)


def sit(sessions: Sessions, worker: str, **options: Any) -> node_slots.NodeSlotLease | None:
    with sessions.begin() as session:
        return node_slots.take(session, worker=worker, lease_s=30, **options)


def reason(sessions: Sessions, job_id: str) -> str:
    with sessions.begin() as session:
        return waiting.explain(session, [session.get_one(Job, job_id)])[job_id].reason


def started(sessions: Sessions, lease: Lease) -> bool:
    with sessions.begin() as session:
        return node_slots.start(session, lease, endpoint="here:1")


def led(sessions: Sessions, *names: str, nodes: int = 2) -> tuple[Lease, list[node_slots.NodeSlotLease]]:
    """A job that the workers of these names have; the first one leads."""
    appear(sessions, *names)
    lease = claim(sessions, f"{names[0]}:0")
    seats = [sit(sessions, f"{name}:0") for name in names[1:]]
    assert lease is not None and lease.nodes == nodes and started(sessions, lease)
    return lease, [seat for seat in seats if seat]


def test_one_waits_for_as_many_workers_as_it_needs(sessions: Sessions, submit: Submit) -> None:
    job_id = submit(nodes=2)
    assert claim(sessions) is None and reason(sessions, job_id) == "no live worker"
    appear(sessions, "a")
    assert claim(sessions) is None and reason(sessions, job_id) == "needs 2 workers at once: 1 available"
    appear(sessions, "drained")
    with sessions.begin() as session:
        workers.drain(session, session.get_one(Worker, "drained"))
    assert claim(sessions) is None
    appear(sessions, "b")
    lease = claim(sessions)
    assert lease is not None and lease.nodes == 2


def test_what_is_for_more_workers_than_there_are_keeps_nobody_waiting(sessions: Sessions, submit: Submit) -> None:
    """Also where there are enough, but with too little memory."""
    appear(sessions, "a")
    appear(sessions, "small", memory_bytes=1000)
    submit(nodes=64), submit(nodes=2, needs_memory_bytes=2000)
    small = submit()
    lease = claim(sessions)
    assert lease is not None and lease.job_id == small


def test_no_node_of_it_runs_on_the_host_that_it_avoids(sessions: Sessions, submit: Submit) -> None:
    appear(sessions, "a", "b")
    job_id = submit(nodes=2)
    with sessions.begin() as session:
        session.execute(update(Job).values(avoid_host="b"))
    assert claim(sessions, "a:0") is None
    assert reason(sessions, job_id) == "needs 2 workers at once: 1 available"
    appear(sessions, "c")
    lease = claim(sessions, "a:0")
    assert lease is not None and sit(sessions, "b:0") is None
    seat = sit(sessions, "c:0")
    assert seat is not None and started(sessions, lease)


def test_one_that_is_next_keeps_its_place_while_workers_are_busy(sessions: Sessions, submit: Submit) -> None:
    """Else jobs for one worker would pass it for ever."""
    appear(sessions, "a", "b")
    first, job_of_two, last = submit(), submit(nodes=2), submit()
    held = claim(sessions, "a:0")
    assert held is not None and held.job_id == first
    assert claim(sessions, "b:0") is None, "b waits for a"
    assert reason(sessions, job_of_two) == "needs 2 workers at once: 1 of 2 idle"
    assert reason(sessions, last) == "1 job ahead in the queue"
    with sessions.begin() as session:
        session.execute(update(Job).where(Job.id == first).values(priority=9))
        leases.release(session, held)
        control.cancel(session, first)
    lease = claim(sessions, "a:0")
    assert lease is not None and lease.job_id == job_of_two


def test_seats(sessions: Sessions, submit: Submit) -> None:
    """One a worker, none for the leader's own, none twice, none for who has too little memory."""
    appear(sessions, "a", "b", "c", num_slots=2)
    submit(nodes=3, needs_memory_bytes=2000)
    lease = claim(sessions, "a:0")
    assert lease is not None
    assert sit(sessions, "a:1") is None
    assert sit(sessions, "b:0", memory_bytes=1000) is None
    first = sit(sessions, "b:0", memory_bytes=2000)
    assert first is not None and sit(sessions, "b:1") is None
    assert not started(sessions, lease)
    second = sit(sessions, "c:0")
    assert second is not None and [first.node_rank, second.node_rank] == [1, 2]
    assert sit(sessions, "d:0") is None
    with sessions.begin() as session:
        assert node_slots.find_endpoint(session, second) is None
        assert [job.id for job in workers.find_jobs(session, "c")] == [lease.job_id]
    assert started(sessions, lease)
    with sessions.begin() as session:
        assert node_slots.find_endpoint(session, first) == node_slots.find_endpoint(session, second) == "here:1"


def test_many_who_want_the_seats(sessions: Sessions, submit: Submit) -> None:
    names = [f"w{number}" for number in range(12)]
    appear(sessions, "a", *names)
    submit(nodes=6)
    assert claim(sessions)
    found: list[node_slots.NodeSlotLease | None] = []
    together = threading.Barrier(len(names))

    def race(name: str) -> None:
        together.wait()
        found.append(sit(sessions, f"{name}:0"))

    threads = [threading.Thread(target=race, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seat.node_rank for seat in found if seat) == [1, 2, 3, 4, 5]


def test_two_that_gather_never_count_the_same_workers(sessions: Sessions, submit: Submit) -> None:
    """Three workers are enough for one of two jobs: the other does not hold the third one."""
    appear(sessions, "a", "b", "c")
    submit(nodes=2), submit(nodes=2)
    for _ in range(8):
        won: list[Lease | None] = []
        together = threading.Barrier(3)

        def race(name: str, won: list[Lease | None] = won, together: threading.Barrier = together) -> None:
            together.wait()
            won.append(claim(sessions, f"{name}:0"))

        threads = [threading.Thread(target=race, args=(name,)) for name in "abc"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        [lease] = [lease for lease in won if lease]
        with sessions.begin() as session:
            leases.put_back(session, lease)


ENDS: dict[str, Callable[..., Any]] = {
    "fail": lambda session, lease: leases.fail(session, lease, Failure("x", "x"), retry_base_s=1),
    "release": leases.release,
    "put_back": leases.put_back,
    "succeed": lambda session, lease: leases.succeed(
        session, lease, manifest_sha256="s", path="/x", num_bytes=1, summary={}
    ),
    "reap": lambda session, lease: session.execute(
        text("UPDATE job SET lease_expires_at = now() - interval '1 s' WHERE fence IS NOT NULL")
    ) and leases.reap(session),
    "run out": lambda session, lease: session.execute(
        text("UPDATE job SET lease_expires_at = now() - interval '1 s' WHERE fence IS NOT NULL")
    ),
}  # fmt: skip


def test_the_lease_of_a_clock_that_was_set_back_ends_in_time(sessions: Sessions, submit: Submit) -> None:
    """Both the leader's and those of the nodes."""
    submit(nodes=2)
    led(sessions, "a", "b")
    with sessions.begin() as session:
        session.execute(text("UPDATE job SET lease_expires_at = lease_expires_at + interval '1 h'"))
        session.execute(text("UPDATE seat SET expires_at = expires_at + interval '1 h' WHERE state = 'taken'"))
    with sessions.begin() as session:
        assert clock.shorten_leases(session, lease_s=60) == 2
    with sessions.begin() as session:
        assert clock.shorten_leases(session, lease_s=60) == 0


@pytest.mark.parametrize("end", ENDS)
def test_a_seat_ends_with_the_leaders_lease(end: str, sessions: Sessions, submit: Submit) -> None:
    submit(nodes=2)
    lease, [seat] = led(sessions, "a", "b")
    with sessions.begin() as session:
        node_slots.renew(session, seat, lease_s=30)
    with sessions.begin() as session:
        ENDS[end](session, lease)
    for use in (
        lambda session: node_slots.renew(session, seat, lease_s=30),
        lambda session: node_slots.find_endpoint(session, seat),
        lambda session: node_slots.leave(session, seat, state=NodeSlotState.DONE),
    ):
        with pytest.raises(LeaseLost), sessions.begin() as session:
            use(session)
    with sessions.begin() as session:
        assert session.scalar(select(func.count()).select_from(NodeSlot)) == (end == "run out")


def test_what_the_leader_hears(sessions: Sessions, submit: Submit) -> None:
    submit(nodes=4)
    lease, [one, two, three] = led(sessions, "a", "b", "c", "d", nodes=4)

    def beat() -> Order | None:
        with sessions.begin() as session:
            return node_slots.renew_leader(session, lease, lease_s=30)

    assert beat() is None
    with sessions.begin() as session:
        node_slots.leave(session, one, state=NodeSlotState.DONE)
    assert beat() is None
    with sessions.begin() as session:
        node_slots.leave(session, two, state=NodeSlotState.LEFT)
    assert beat() is Order.NODE_LEFT
    with sessions.begin() as session:
        session.execute(update(NodeSlot).where(NodeSlot.node_rank == 3).values(expires_at=func.now()))
    assert beat() is Order.NODE_LOST
    with sessions.begin() as session:
        node_slots.leave(session, three, state=NodeSlotState.FAILED, failure=Failure("x", "x"))
    assert beat() is Order.NODE_LOST
    with sessions.begin() as session:
        control.cancel(session, lease.job_id)
    assert beat() is Order.CANCEL, "what a client wants comes first"


def test_who_leaves_before_the_start_leaves_the_seat(sessions: Sessions, submit: Submit) -> None:
    submit(nodes=2)
    appear(sessions, "a", "b", "c")
    assert claim(sessions)
    seat = sit(sessions, "b:0")
    assert seat is not None
    with sessions.begin() as session:
        node_slots.leave(session, seat, state=NodeSlotState.LEFT)
    assert sit(sessions, "c:0") == seat


def test_put_back_is_as_if_it_had_never_been_claimed(sessions: Sessions, submit: Submit, get_job: GetJob) -> None:
    job_id = submit(nodes=2, max_runtime_s=100)
    appear(sessions, "a", "b")
    lease = claim(sessions)
    assert lease is not None
    with sessions.begin() as session:
        session.execute(text("UPDATE job SET state_times = state_times || jsonb_build_object('running', 'yesterday')"))
        leases.put_back(session, lease)
        assert session.scalar(select(func.count()).select_from(Attempt)) == 0
    job = get_job(job_id)
    assert (job.state, job.attempt, job.failure_count, job.lost_count, job.used_runtime_s) == ("queued", 0, 0, 0, 0)
    lease = claim(sessions)
    assert lease is not None and lease.attempt == 1
    with sessions.begin() as session:
        control.cancel(session, job_id)
        leases.put_back(session, lease)
    assert get_job(job_id).state == "cancelled"


def test_a_job_for_two_workers_over_http(client: TestClient, make_model: MakeModel) -> None:
    asked: dict[str, Any] = {"model": {"path": str(make_model())}, "config": {"preset": "fp8"}}
    assert client.post("/v1/jobs", json=asked).json()["nodes"] == 1
    job = client.post("/v1/jobs", json={**asked, "nodes": 2}).json()
    assert job["nodes"] == 2
    assert client.post(f"/v1/jobs/{job['id']}/clone", json={}).json()["nodes"] == 2
    assert client.post(f"/v1/jobs/{job['id']}/clone", json={"nodes": 3}).json()["nodes"] == 3
    tuned = {**presets.resolve("w4a16").to_dict(), "algo_config": [{"name": "gptq"}, {"name": "distill"}]}
    answer = client.post("/v1/jobs", json={**asked, "config": tuned, "nodes": 2})
    assert (answer.status_code, answer.json()["errors"][0]["pointer"]) == (422, "#/nodes"), answer.text
    for wrong in (0, 65, "2", 1.5):
        answer = client.post("/v1/jobs", json={**asked, "nodes": wrong})
        assert (answer.status_code, answer.json()["errors"][0]["pointer"]) == (422, "#/nodes"), answer.text


def test_two_workers_do_it_together(
    sessions: Sessions, make_model: MakeModel, submit: Submit, start_here: StartHere, wait_for: WaitFor,
    client: TestClient, settings: Settings,
) -> None:  # fmt: skip
    """Once both are there; the one that comes first waits, and says so. Both log to their ends, one writes."""
    start_here()
    job_id = submit(make_model(node_mode="ends late"), nodes=2)
    reason = "needs 2 workers at once: 1 available"
    wait_until(lambda: client.get(f"/v1/jobs/{job_id}").json()["waiting_reason"] == reason, timeout_s=LIMIT_S)
    start_here()
    job = wait_for(job_id, "succeeded")
    assert (job.attempt, job.failure_count) == (1, 0)
    lines = {line["text"] for line in client.get(f"/v1/jobs/{job_id}/logs").json()["data"]}
    assert {"stub engine starts", "node 1: stub engine starts", "node 1: stub engine ends"} <= lines
    assert "node 1: worker: the engine ended with status 0" in lines
    assert client.get(f"/v1/jobs/{job_id}").json()["phases"][0]["name"] == "gather"
    wait_for_empty(settings.work_dir)


@pytest.mark.slow
def test_two_jobs_for_two_workers_on_three(
    make_model: MakeModel, submit: Submit, start_here: StartHere, wait_for: WaitFor
) -> None:
    """Nobody waits for a worker that waits for somebody else."""
    model = make_model()
    jobs = [submit(model, nodes=nodes) for nodes in (2, 2, 3, 1, 2)]
    for _ in range(3):
        start_here()
    for job_id in jobs:
        job = wait_for(job_id, "succeeded")
        assert job.attempt == 1


@pytest.mark.parametrize("how", with_rare(["cancel", "pause", "drain", "node drained"], ["pause", "drain"]))
def test_when_it_is_stopped_all_nodes_end(
    how: str, sessions: Sessions, make_model: MakeModel, submit: Submit, start_here: StartHere, wait_for: WaitFor,
    read_pids: ReadPids, settings: Settings, tmp_path: Path,
) -> None:  # fmt: skip
    job_id, two, pids = run_slowly(sessions, make_model, submit, start_here, wait_for, read_pids, tmp_path)
    if how in ("cancel", "pause"):
        with sessions.begin() as session:
            getattr(control, how)(session, job_id)
    else:
        two["leader" if how == "drain" else "node"].drain()
    job = wait_for(job_id, {"cancel": "cancelled", "pause": "paused"}.get(how, "queued"))
    wait_gone(pids, LIMIT_S)
    assert (job.failure_count, job.lost_count) == (0, 0)
    assert outcomes(sessions, job_id) == [{"cancel": "cancelled", "pause": "paused"}.get(how, "drained")]
    if how == "cancel":
        wait_for_empty(settings.work_dir)


def run_slowly(
    sessions: Sessions, make_model: MakeModel, submit: Submit, start: Callable[[], AWorker], wait_for: WaitFor,
    read_pids: ReadPids, tmp_path: Path, mode: str = "slow",
) -> tuple[str, dict[str, AWorker], list[int]]:  # fmt: skip
    """A job that two workers are at: its id, who is which, and all processes of its engines."""
    files = tmp_path / "pids", tmp_path / "node_pids"
    model = make_model(mode=mode, node_mode="waits", pids=str(files[0]), node_pids=str(files[1]))
    two = [start(), start()]
    job_id = submit(model, nodes=2)
    wait_for(job_id, "running", phase="quantize")
    pids = [pid for file in files for found in read_pids(file, timeout_s=LIMIT_S) for pid in found]
    assert len(pids) == 4 and all(map(is_alive, pids))
    return job_id, run_as(sessions, job_id, two), pids


def test_a_node_that_takes_too_much_memory_ends_the_job(
    sessions: Sessions, make_model: MakeModel, submit: Submit, start_here: StartHere, wait_for: WaitFor
) -> None:
    """Each node has the limit of the plan, not the leader's alone; the job's error is the node's."""
    for _ in range(2):
        start_here()
    job_id = submit(make_model(mode="slow", node_mode="eats"), nodes=2, needs_memory_bytes=64 << 20)
    job = wait_for(job_id, "failed")
    assert job.error is not None and (job.error["code"], job.error["retryable"]) == ("memory_limit", False)
    assert "64 MiB" in job.error["message"] and outcomes(sessions, job_id) == ["failed"]


@pytest.mark.slow
@pytest.mark.short_leases
@pytest.mark.parametrize("who", ["leader", "node"])
def test_kill_9_of_either(
    who: str, sessions: Sessions, make_model: MakeModel, submit: Submit, start_worker: StartWorker,
    start_here: StartHere, wait_for: WaitFor, read_pids: ReadPids, tmp_path: Path,
) -> None:  # fmt: skip
    """No process of either is left, and with a third worker it goes on."""
    job_id, processes, pids = run_slowly(
        sessions, make_model, submit, start_worker, wait_for, read_pids, tmp_path, mode="slow_once"
    )
    processes[who].kill()
    wait_gone(pids, LIMIT_S)
    start_here()
    job = wait_for(job_id, "succeeded")
    ends = outcomes(sessions, job_id)
    assert ends[0] == {"leader": "lost", "node": "retry"}[who] and ends[-1] == "succeeded"
    if who == "node":
        with sessions.begin() as session:
            first = session.scalars(select(Attempt).where(Attempt.job_id == job_id).order_by(Attempt.number)).first()
            assert first is not None and first.error is not None
            assert (first.error["code"], first.error["retryable"]) == ("node_lost", True)
    assert job.attempt == 2


@pytest.mark.slow
@pytest.mark.short_leases
def test_a_worker_that_was_stopped_too_long_leads_nobody(
    sessions: Sessions, make_model: MakeModel, submit: Submit, start_worker: StartWorker, start_here: StartHere,
    wait_for: WaitFor, read_pids: ReadPids, tmp_path: Path,
) -> None:  # fmt: skip
    """Its node ends with its lease, and takes another seat when it comes to that."""
    job_id, processes, pids = run_slowly(
        sessions, make_model, submit, start_worker, wait_for, read_pids, tmp_path, mode="slow_once"
    )
    processes["leader"].suspend(sessions)
    wait_gone(pids[2:], LIMIT_S)
    start_here()
    wait_for(job_id, "succeeded")


def test_what_a_node_says_is_why_the_job_failed(
    make_model: MakeModel, submit: Submit, start_here: StartHere, wait_for: WaitFor
) -> None:
    start_here(), start_here()
    job = wait_for(submit(make_model(mode="slow", node_mode="fails"), nodes=2), "failed")
    assert job.error is not None
    assert {name: job.error[name] for name in ("code", "retryable", "rank", "block")} == {
        "code": "nonfinite_weights", "retryable": False, "rank": 1, "block": 7
    }  # fmt: skip
    assert job.attempt == 1


@pytest.mark.slow
def test_workers_that_share_no_disk(
    make_model: MakeModel, submit: Submit, start_here: StartHere, wait_for: WaitFor, settings: Settings,
    tmp_path: Path,
) -> None:  # fmt: skip
    start_here()
    start_here(settings.model_copy(update={"data_dir": tmp_path / "elsewhere"}))
    job = wait_for(submit(make_model(mode="slow"), nodes=2), "failed")
    assert job.error is not None
    assert (job.error["code"], job.error["retryable"]) == ("workspace_not_shared", False)
    assert "BITFOUNDRY_DATA_DIR" in job.error["hint"]


def test_an_address_that_nobody_knows(
    make_model: MakeModel, submit: Submit, start_here: StartHere, wait_for: WaitFor, settings: Settings
) -> None:
    unknown = settings.model_copy(update={"node_address": "no-such-host.invalid"})
    start_here(unknown), start_here(unknown)
    job = wait_for(submit(make_model(), nodes=2), "failed")
    assert job.error is not None and job.error["code"] == "invalid_node_address"
    assert "BITFOUNDRY_NODE_ADDRESS" in job.error["hint"]


@pytest.mark.slow
def test_a_worker_that_does_not_come(
    sessions: Sessions, make_model: MakeModel, submit: Submit, start_here: StartHere, wait_for: WaitFor,
    settings: Settings, get_job: GetJob,
) -> None:  # fmt: skip
    """One that seems to live: the leader lets go of the job and takes others, which nothing is charged for."""
    appear(sessions, "silent")
    start_here(settings.model_copy(update={"gather_s": 1}))
    job_id = submit(make_model(), nodes=2)
    wait_for(job_id, "running", phase="gather")
    wait_for(job_id, "queued")
    with sessions.begin() as session:
        workers.leave(session, "silent")
    wait_for(submit(make_model("other")), "succeeded")
    job = get_job(job_id)
    assert (job.state, job.attempt, job.failure_count) == ("queued", 0, 0)
    wait_for_empty(settings.work_dir)
