"""A lease is kept while the database answers, and given up in time when it does not."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from sqlalchemy import text

from api.settings import Settings
from api.store import jobs, leases
from api.store.engine import Sessions, connect, dispose
from api.store.events import NewEvent
from api.store.leases import Lease, LeaseLost
from worker.lease import HeldLease


class Heard:
    """What the lease calls."""

    def __init__(self) -> None:
        self.cancel = threading.Event()
        self.lost = threading.Event()


@contextmanager
def hold(sessions: Sessions, settings: Settings, lease: Lease, heard: Heard) -> Iterator[HeldLease]:
    held = HeldLease(
        lease,
        sessions,
        settings,
        claimed_at=time.monotonic(),
        on_cancel=heard.cancel.set,
        on_lost=heard.lost.set,
    )
    with held:
        yield held


@pytest.fixture
def lease(sessions: Sessions, settings: Settings, submit: Callable[..., str]) -> Lease:
    submit()
    with sessions.begin() as session:
        lease = leases.claim(session, worker="w", lease_s=settings.lease_s)
    assert lease is not None
    return lease


def reap(sessions: Sessions) -> int:
    with sessions.begin() as session:
        return leases.reap(session)


def test_it_outlives_the_first_lease(sessions: Sessions, settings: Settings, lease: Lease) -> None:
    heard = Heard()
    with hold(sessions, settings, lease, heard) as held:
        for _ in range(8):
            time.sleep(0.5)
            assert reap(sessions) == 0
        held.write(leases.record, happened=[NewEvent("x")], columns={})
    assert not heard.lost.is_set()
    time.sleep(settings.lease_s + 0.2)  # nobody beats any more
    assert reap(sessions) == 1


def test_it_ends_the_engine_before_the_lease_runs_out(settings: Settings, lease: Lease) -> None:
    nowhere = connect("postgresql+psycopg://nobody@/nothing?host=/nowhere")
    heard = Heard()
    started = time.monotonic()
    with hold(nowhere, settings, lease, heard) as held:
        assert heard.lost.wait(settings.lease_s)
        assert 1 < time.monotonic() - started < settings.lease_s
        with pytest.raises(LeaseLost):
            held.write(leases.record, happened=[], columns={})
    dispose(nowhere)


def test_a_taken_lease_is_noticed(sessions: Sessions, settings: Settings, lease: Lease) -> None:
    heard = Heard()
    with hold(sessions, settings, lease, heard):
        with sessions.begin() as session:
            session.execute(text("UPDATE job SET fence = fence + 1"))
        assert heard.lost.wait(2)


def test_a_cancel_travels_by_heartbeat_and_by_event(sessions: Sessions, settings: Settings, lease: Lease) -> None:
    with sessions.begin() as session:
        jobs.request_cancel(session, lease.job_id)
    heard = Heard()
    with hold(sessions, settings, lease, heard):
        assert heard.cancel.wait(2)
    heard = Heard()
    slow = settings.model_copy(update={"heartbeat_s": 60})
    with hold(sessions, slow, lease, heard) as held:
        held.write(leases.record, happened=[NewEvent("x")], columns={})
        assert heard.cancel.is_set()


def test_a_write_insists_until_the_database_is_back(sessions: Sessions, settings: Settings, lease: Lease) -> None:
    """The row is locked for longer than the server allows a wait."""
    impatient = connect(settings.database_url.get_secret_value() + "&options=-c%20lock_timeout%3D200ms")
    bind = impatient.kw["bind"]
    with bind.connect() as connection:
        assert connection.scalar(text("SELECT 1")) == 1
    locked = threading.Event()

    def lock() -> None:
        with sessions.begin() as session:
            jobs.lock(session, lease.job_id)
            locked.set()
            time.sleep(1.2)

    thread = threading.Thread(target=lock)
    thread.start()
    locked.wait()
    heard = Heard()
    with hold(sessions, settings, lease, heard) as held:
        held.write(leases.record, happened=[NewEvent("late")], columns={"phase": "late"})
    thread.join()
    dispose(impatient)
    assert not heard.lost.is_set()
