"""``/metrics`` in the text format of Prometheus, read from the database at every scrape: every process says the same.

It wants a key with the scope ``operator``, which Prometheus sends with ``authorization: {credentials: ...}``.
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
from api.http.feed import Feed
from api.http.security import Operator
from api.store.accounts import projects
from api.store.queue import measures
from api.store.queue.measures import Measures

router = APIRouter(tags=["metrics"])


MAX_PROJECTS = 100
"""The oldest ones have their quotas among the metrics: there may be more projects than time series are good for."""


class Quota(NamedTuple):
    """One quota of one project."""

    project: str
    quota: str
    used: int
    limit: int | None


class _Snapshot:
    """One scrape's numbers as Prometheus' families."""

    def __init__(self, found: Measures, quotas: Sequence[Quota], disk: Disk) -> None:
        self._found = found
        self._quotas = quotas
        self._disk = disk

    def collect(self) -> Iterator[Metric]:
        found = self._found
        yield _labelled("bitfoundry_jobs", "Jobs by state.", "state", found.jobs)
        yield _labelled("bitfoundry_workers", "Live workers by state.", "state", found.workers)
        yield _plain("bitfoundry_oldest_wait_seconds", "Wait of the oldest due job.", found.oldest_wait_s)
        if found.lease_left_s is not None:
            left = "Until the first lease runs out; below 0 its worker is lost."
            yield _plain("bitfoundry_lease_left_seconds", left, found.lease_left_s)
        yield _plain("bitfoundry_heartbeat_age_seconds", "Of the quietest worker.", found.beat_age_s)
        yield _plain("bitfoundry_outbox_messages", "Messages that wait for the broker.", found.outbox)
        yield _plain("bitfoundry_outbox_lag_seconds", "For how long the oldest of them has waited.", found.outbox_age_s)
        yield _plain("bitfoundry_webhook_deliveries_pending", "Webhook messages to be sent.", found.deliveries)
        yield _plain("bitfoundry_webhook_lag_seconds", "For how long the oldest has waited.", found.delivery_age_s)
        yield _plain("bitfoundry_disk_free_bytes", "Free on the data folder's disk.", self._disk.free_bytes)
        yield _plain("bitfoundry_disk_reserved_bytes", "Of it, kept for the database.", self._disk.reserved_bytes)
        about = "Stored files that are damaged, missing, or that no row names (`python -m api fsck` lists them)."
        yield _labelled("bitfoundry_integrity_findings", about, "kind", found.integrity)
        memory = GaugeMetricFamily(
            "bitfoundry_gpu_memory_bytes", "Of the live workers' GPUs.", labels=["worker", "gpu", "name", "what"]
        )
        for place, sizes in found.devices.items():
            for what, size in sizes.items():
                memory.add_metric([*place, what], size)
        yield memory
        used = GaugeMetricFamily("bitfoundry_quota_used", "Of a project's quota.", labels=["project", "quota"])
        limit = GaugeMetricFamily("bitfoundry_quota_limit", "If there is one.", labels=["project", "quota"])
        for each in self._quotas:
            used.add_metric([each.project, each.quota], each.used)
            if each.limit is not None:
                limit.add_metric([each.project, each.quota], each.limit)
        yield used
        yield limit
        ended = "that ended within the last hour"
        numbers = {name: number for name, (number, _) in found.phase_s.items()}
        seconds = {name: total for name, (_, total) in found.phase_s.items()}
        yield _labelled("bitfoundry_phase_runs", f"Phases done, of jobs {ended}.", "phase", numbers)
        yield _labelled("bitfoundry_phase_seconds", f"Seconds in phases done, of jobs {ended}.", "phase", seconds)


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
def get_metrics(caller: Operator, context: ContextDep) -> Response:
    """Jobs by state, waits, leases, outbox, webhooks, disk, workers, phases, quotas of projects."""
    with context.sessions.begin() as session:
        found = measures.measure(session)
        quotas = _read_quotas(session, context.feed)
    registry = CollectorRegistry()
    registry.register(_Snapshot(found, quotas, disk.look(context.settings)))
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)


def _read_quotas(session: Session, feed: Feed) -> list[Quota]:
    known = projects.find_all(session)[:MAX_PROJECTS]
    usage = projects.measure_all(session, [project.id for project in known])
    found = []
    for project in known:
        used = vars(usage[project.id]) | {"num_streams": feed.count_streams(project.id)}
        for name, quota in projects.QUOTAS.items():
            found.append(Quota(project.name, name, used[quota.used], projects.limit_of(project, name)))
    return found


def _plain(name: str, about: str, value: float) -> Metric:
    return GaugeMetricFamily(name, about, value=value)


def _labelled(name: str, about: str, label: str, values: dict[str, int] | dict[str, float]) -> Metric:
    family = GaugeMetricFamily(name, about, labels=[label])
    for each, value in values.items():
        family.add_metric([each], value)
    return family
