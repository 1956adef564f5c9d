"""Serves ``/metrics`` in the text format of Prometheus.

The numbers are read from the database at every scrape: every process returns the same. The route needs a key with the
scope ``operator``, which Prometheus sends with ``authorization: {credentials: ...}``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fastapi import APIRouter, Response
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from sqlalchemy.orm import Session

from api import disk
from api.disk import Disk
from api.http.deps import ContextDep
from api.http.event_stream import Feed
from api.http.security import Operator
from api.store.accounts import projects
from api.store.queue import measures
from api.store.queue.measures import Measures

router = APIRouter(tags=["metrics"])


MAX_PROJECTS = 100
"""Number of projects, the oldest, whose quotas are among the metrics: all of them could be too many time series."""


class Quota(NamedTuple):
    """A quota of a project."""

    project: str
    quota: str
    used: int
    limit: int | None


class _Snapshot:
    """The numbers of a scrape as metric families of Prometheus."""

    def __init__(self, measured: Measures, quotas: Sequence[Quota], disk: Disk) -> None:
        self._measured = measured
        self._quotas = quotas
        self._disk = disk

    def collect(self) -> Iterator[Metric]:
        measured = self._measured
        yield _labelled("bitfoundry_jobs", "Jobs by state.", "state", measured.jobs)
        yield _labelled("bitfoundry_workers", "Live workers by state.", "state", measured.workers)
        yield _plain("bitfoundry_oldest_wait_seconds", "Waiting time of the oldest due job.", measured.oldest_wait_s)
        if measured.lease_left_s is not None:
            left = "Time until the first lease expires; below 0, its worker is lost."
            yield _plain("bitfoundry_lease_left_seconds", left, measured.lease_left_s)
        yield _plain(
            "bitfoundry_heartbeat_age_seconds",
            "Since the last heartbeat of the least recent worker.",
            measured.beat_age_s,
        )
        yield _plain("bitfoundry_outbox_messages", "Messages waiting for the broker.", measured.outbox)
        yield _plain("bitfoundry_outbox_lag_seconds", "Waiting time of the oldest of them.", measured.outbox_age_s)
        yield _plain(
            "bitfoundry_webhook_deliveries_pending", "Webhook messages waiting to be sent.", measured.deliveries
        )
        yield _plain("bitfoundry_webhook_lag_seconds", "Waiting time of the oldest.", measured.delivery_age_s)
        yield _plain("bitfoundry_disk_free_bytes", "Free space on the data folder's disk.", self._disk.free_bytes)
        yield _plain(
            "bitfoundry_disk_reserved_bytes", "Part of it reserved for the database.", self._disk.reserved_bytes
        )
        about = (
            "Stored files that are damaged, missing or not referenced by the database (`python -m api fsck` "
            "lists them)."
        )
        yield _labelled("bitfoundry_integrity_findings", about, "kind", measured.integrity)
        memory = GaugeMetricFamily(
            "bitfoundry_gpu_memory_bytes", "Memory of the live workers' GPUs.", labels=["worker", "gpu", "name", "what"]
        )
        for place, sizes in measured.devices.items():
            for what, size in sizes.items():
                memory.add_metric([*place, what], size)
        yield memory
        used = GaugeMetricFamily(
            "bitfoundry_quota_used", "Used part of a project's quota.", labels=["project", "quota"]
        )
        limit = GaugeMetricFamily(
            "bitfoundry_quota_limit", "Limit of the quota, if there is one.", labels=["project", "quota"]
        )
        for quota in self._quotas:
            used.add_metric([quota.project, quota.quota], quota.used)
            if quota.limit is not None:
                limit.add_metric([quota.project, quota.quota], quota.limit)
        yield used
        yield limit
        ended = "that ended within the last hour"
        numbers = {name: number for name, (number, _) in measured.phase_s.items()}
        seconds = {name: total for name, (_, total) in measured.phase_s.items()}
        about = "Verdicts on the results of jobs that succeeded within the last hour; none: not measured."
        yield _labelled("bitfoundry_verdicts", about, "verdict", measured.verdicts)
        yield _labelled("bitfoundry_phase_runs", f"Finished phases of jobs {ended}.", "phase", numbers)
        yield _labelled("bitfoundry_phase_seconds", f"Seconds in finished phases of jobs {ended}.", "phase", seconds)


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
def get_metrics(caller: Operator, context: ContextDep) -> Response:
    """Return the metrics: jobs by state, waits, leases, outbox, webhooks, disk, workers, phases, quotas of projects."""
    with context.sessions.begin() as session:
        measured = measures.measure(session)
        quotas = _read_quotas(session, context.feed)
    registry = CollectorRegistry()
    registry.register(_Snapshot(measured, quotas, disk.look(context.settings)))
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)


def _read_quotas(session: Session, feed: Feed) -> list[Quota]:
    oldest = projects.find_all(session)[:MAX_PROJECTS]
    usage = projects.measure_all(session, [project.id for project in oldest])
    quotas = []
    for project in oldest:
        used = vars(usage[project.id]) | {"num_streams": feed.count_streams(project.id)}
        for name, quota in projects.QUOTAS.items():
            quotas.append(Quota(project.name, name, used[quota.used], projects.limit_of(project, name)))
    return quotas


def _plain(name: str, about: str, value: float) -> Metric:
    return GaugeMetricFamily(name, about, value=value)


def _labelled(name: str, about: str, label: str, values: dict[str, int] | dict[str, float]) -> Metric:
    family = GaugeMetricFamily(name, about, labels=[label])
    for label_value, value in values.items():
        family.add_metric([label_value], value)
    return family
