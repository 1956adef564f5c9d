"""Estimates the time that a job needs, from the phases of earlier jobs of its project.

The engine estimates its present phase alone. What the phases to come will take is scaled from jobs that did the same
kind of work: the same algorithms, amounts of text, measurements and formats. Without such a job there is no estimate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from statistics import median
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from api.store.queue.phases import DONE, Phase
from api.store.states import State
from api.store.tables.jobs import Job

NUM_SEARCHED = 50
"""Number of the project's newest succeeded jobs among which similar ones are looked for."""
NUM_COMPARED = 5
MIN_SHARE = 0.1
"""Share of an earlier job that must lie in the phases compared with it: the first second scales no hour."""
SEVERAL_PASSES = frozenset({"verify"})
"""Phases whose progress starts again with each pass, so that the engine's estimate is of one pass."""
_AMOUNTS = {
    "calibration": ("num_samples", "seq_len"),
    "evaluation": (
        "num_windows",
        "seq_len",
        "stride",
        "num_prompts",
        "num_answers",
        "num_behaviour_prompts",
        "behaviour_len",
        "kv_cache_dtypes",
        "tasks",
        "limit",
        "num_fewshot",
    ),
}


@dataclass(frozen=True)
class Earlier:
    """A job that has succeeded: its model and preset, its kind of work, and its seconds by phase, in their order."""

    model: Mapping[str, Any]
    preset: str | None
    work: tuple[str, ...]
    phases_s: Mapping[str, float]


def estimate_all(session: Session, found: Sequence[Job]) -> dict[str, float]:
    """Return by id the seconds left of those jobs in ``found`` that run, as of their last sign of life.

    A job is missing where nothing is known. A search for a goal is, because it repeats phases for as long as it pays.
    """
    running = [job for job in found if job.state == State.RUNNING and job.phases and not job.spec.get("goal")]
    earlier = {project: _find_earlier(session, project) for project in {job.project_id for job in running}}
    estimates = {job.id: _estimate_job(job, earlier[job.project_id]) for job in running}
    return {job_id: left_s for job_id, left_s in estimates.items() if left_s is not None}


def expect(
    session: Session, project_id: str, model: Mapping[str, Any], spec: Mapping[str, Any], preset: str | None
) -> tuple[float | None, float | None]:
    """Return the median seconds of the project's newest jobs with this model and the same kind of work, if any.

    The second value is a rough one where there is none: that of jobs with the same model and preset, whose texts,
    measurements or formats differ.
    """
    work = _work_of(spec)
    earlier = [each for each in _find_earlier(session, project_id) if each.phases_s and each.model == model]
    if same := [each for each in earlier if each.work == work]:
        return _median_s(same), None
    alike = [each for each in earlier if preset is not None and each.preset == preset]
    return None, _median_s(alike) if alike else None


def _median_s(earlier: Sequence[Earlier]) -> float:
    return round(median(sum(each.phases_s.values()) for each in earlier[:NUM_COMPARED]), 1)


def estimate(
    phases: Sequence[Phase],
    progress: Mapping[str, Any] | None,
    elapsed_s: float,
    earlier_s: Mapping[str, float],
    *,
    is_whole: bool,
) -> float | None:
    """Return the seconds left of an attempt if its phases relate as those of the earlier job, None without a basis.

    The present phase has taken ``elapsed_s`` seconds. ``is_whole``: False for an attempt that may have resumed, whose
    ended phases took less than they do from the start. The result is never below the engine's own estimate.
    """
    name = phases[-1]["name"]
    if name not in earlier_s:
        return None
    left_s, whole_s = _of_phase(name, progress, elapsed_s, is_whole=is_whole)
    taken_s = _seconds_by_phase(phases) if is_whole else {}
    if whole_s is not None:
        taken_s[name] = taken_s.get(name, 0.0) + whole_s
    shared = taken_s.keys() & earlier_s.keys()
    compared_s = sum(earlier_s[each] for each in shared)
    if not compared_s or compared_s < MIN_SHARE * sum(earlier_s.values()):
        return None
    scale = sum(taken_s[each] for each in shared) / compared_s
    if whole_s is None:
        left_s = max(left_s, scale * earlier_s[name] - elapsed_s)
    order = [*earlier_s]
    return left_s + scale * sum(earlier_s[each] for each in order[order.index(name) + 1 :])


def _of_phase(
    name: str, progress: Mapping[str, Any] | None, elapsed_s: float, *, is_whole: bool
) -> tuple[float, float | None]:
    """Return the engine's seconds left of the present phase, and the phase's seconds from its start if it tells."""
    if progress is None or progress.get("phase") != name:
        return 0.0, None
    left_s, done, total = (_positive(progress.get(each)) for each in ("eta_s", "done", "total"))
    if name in SEVERAL_PASSES or not done:
        return left_s, None
    if done < total and left_s:
        return left_s, left_s * total / (total - done)
    return left_s, elapsed_s if is_whole else None


def _estimate_job(job: Job, earlier: Sequence[Earlier]) -> float | None:
    """Return the median of the estimates by similar jobs; those of the same model alone, if there are any."""
    work = _work_of(job.spec)
    similar = [each for each in earlier if each.work == work]
    similar = [each for each in similar if each.model == job.model] or similar
    elapsed_s = (job.updated_at - datetime.fromisoformat(job.phases[-1]["started_at"])).total_seconds()
    estimates = (
        estimate(job.phases, job.progress, elapsed_s, each.phases_s, is_whole=job.attempt == 1)
        for each in similar[:NUM_COMPARED]
    )
    known = [left_s for left_s in estimates if left_s is not None]
    return round(median(known), 1) if known else None


def _find_earlier(session: Session, project_id: str) -> list[Earlier]:
    """Return the newest jobs that succeeded at their first attempt, whose phases are whole."""
    wanted = (
        select(Job.model, Job.preset, Job.spec, Job.phases)
        .where(Job.project_id == project_id, Job.state == State.SUCCEEDED, Job.attempt == 1)
        .order_by(Job.created_at.desc(), Job.id.desc())
        .limit(NUM_SEARCHED)
    )
    return [
        Earlier(model, preset, _work_of(spec), _seconds_by_phase(phases))
        for model, preset, spec, phases in session.execute(wanted)
    ]


def _work_of(spec: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what decides how the times of a job's phases relate, apart from its model and scheme."""
    algorithms = [entry.get("name") for entry in spec.get("config", {}).get("algo_config") or ()]
    amounts = [(spec.get(part) or {}).get(name) for part, names in _AMOUNTS.items() for name in names]
    mixed = (spec.get("mix") or {}).get("schemes") or ()
    rest = (spec.get("export"), spec.get("file2file"), spec.get("nodes"), len(mixed), algorithms, spec.get("goal"))
    return tuple(map(repr, (*amounts, *rest)))


def _seconds_by_phase(phases: Sequence[Phase]) -> dict[str, float]:
    """Return the seconds of the phases that are done, all rounds of one together."""
    seconds: dict[str, float] = {}
    for phase in phases:
        if phase["state"] == DONE:
            start, end = (datetime.fromisoformat(phase[name]) for name in ("started_at", "ended_at"))
            seconds[phase["name"]] = seconds.get(phase["name"], 0.0) + (end - start).total_seconds()
    return seconds


def _positive(value: Any) -> float:
    """Return a number that an engine printed, 0 for anything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 < value < 2**63 else 0.0
