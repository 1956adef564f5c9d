"""A lease is kept while the database answers, and given up in time when it does not."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import OperationalError

from api.settings import Settings
from api.store.engine import Sessions, connect, dispose
from api.store.queue import control, jobs, leases
from api.store.queue.events import NewEvent
from api.store.queue.leases import Lease, LeaseLost, Order
from tests.support.waiting import give_time, wait_until
from worker.lease import HeldLease

pytestmark = pytest.mark.short_leases


class Heard:
    """What the lease calls."""

    def __init__(self) -> None:
        self.cancel = threading.Event()
        self.lost = threading.Event()

    def obey(self, order: Order) -> None:
        assert order is Order.CANCEL
        self.cancel.set()


@contextmanager
def hold(sessions: Sessions, settings: Settings, lease: Lease, heard: Heard) -> Iterator[HeldLease]:
    held = HeldLease(
        lease,
        sessions,
        settings,
        claimed_at=time.monotonic(),
        on_order=heard.obey,
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


@pytest.mark.slow
def test_it_outlives_the_first_lease(sessions: Sessions, settings: Settings, lease: Lease) -> None:
    heard = Heard()
    short = settings.model_copy(update={"lease_s": 3, "heartbeat_s": 0.3})
    with hold(sessions, short, lease, heard) as held:
        for _ in range(8):
            give_time(0.5)
            assert reap(sessions) == 0
        held.write(leases.record, happened=[NewEvent("x")], columns={})
    assert not heard.lost.is_set()
    wait_until(lambda: reap(sessions) == 1)  # nobody beats any more


@pytest.mark.slow
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
        control.cancel(session, lease.job_id)
    heard = Heard()
    with hold(sessions, settings, lease, heard):
        assert heard.cancel.wait(2)
    heard = Heard()
    slow = settings.model_copy(update={"heartbeat_s": 60})
    with hold(sessions, slow, lease, heard) as held:
        held.write(leases.record, happened=[NewEvent("x")], columns={})
        assert heard.cancel.is_set()


class Flaky:
    """Sessions of a database that is away for the first ``failures`` transactions."""

    def __init__(self, sessions: Sessions, failures: int) -> None:
        self._sessions = sessions
        self.failures = failures

    def begin(self) -> Any:
        if self.failures:
            self.failures -= 1
            raise OperationalError("SELECT 1", None, ConnectionError("away"))
        return self._sessions.begin()


def test_a_write_insists_until_the_database_is_back(sessions: Sessions, settings: Settings, lease: Lease) -> None:
    flaky = Flaky(sessions, failures=3)
    heard = Heard()
    patient = settings.model_copy(update={"heartbeat_s": 0.2})
    with hold(flaky, patient, lease, heard) as held:  # type: ignore[arg-type]
        held.write(leases.record, happened=[NewEvent("late")], columns={"phase": "late"})
    assert flaky.failures == 0
    assert not heard.lost.is_set()
    with sessions.begin() as session:
        job = jobs.find(session, lease.job_id)
        assert job is not None
        assert job.phase == "late"
