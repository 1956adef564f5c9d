"""The verdict on a job's result, as the commands show it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bitfoundry.client.answers import Job


def verdict_text(job: Job) -> str:
    """Return the level of a result, and whether it missed its goal: a cell of a list. Empty without a verdict."""
    if job.summary is None or job.summary.verdict is None:
        return ""
    goal = job.summary.goal
    return job.summary.verdict.level + (", goal missed" if goal and not goal.is_met else "")


def verdict_rows(job: Job) -> dict[str, str]:
    """Return the verdict in words, its level with the reason, and the commands to try next."""
    if job.summary is None or job.summary.verdict is None:
        return {}
    verdict = job.summary.verdict
    steps = [f"{step.text}\nbitfoundry clone {job.id} {step.flags}" for step in verdict.steps]
    return {
        "result": verdict.sentence or "",
        "verdict": f"{verdict.level}: {verdict.reason}",
        "next": "\n".join(steps) or verdict.advice or "",
    }


def shipping_warning(name: str, job: Job) -> str:
    """Return why the result ``name`` of a job may not be shipped as it is, in words. Empty if it may."""
    from quantcore.config.verdict_levels import UNPUBLISHED

    verdict, goal = (job.summary.verdict, job.summary.goal) if job.summary else (None, None)
    missed = f"{name} missed its goal: {goal.why}." if goal and not goal.is_met else ""
    if not verdict:
        return missed or f"{name} has no verdict: how close it is to the original was not judged."
    if verdict.level not in UNPUBLISHED:
        return missed
    return f"{name} is {verdict.level}. {verdict.sentence or verdict.reason} {missed}".rstrip()
