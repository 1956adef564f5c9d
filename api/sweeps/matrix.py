"""Turns a matrix of values into planned jobs: all of them, or one problem that names those that cannot work."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import ValidationError

from api.http.deps import Context
from api.http.errors import Problem, entry_of
from api.jobs import calibration, service, targets
from api.jobs.schemas import JobCreate
from api.jobs.service import Planned, Prepared
from api.store.accounts.audit import Caller
from api.sweeps.schemas import MAX_SWEEP_JOBS, SweepCreate
from quantcore.errors import ProofError, PublishError, QuantError

Values = dict[str, Any]
Place = tuple[str | None, ...]


@dataclass(frozen=True)
class SweepJob:
    """A job of a sweep: its values (JSON pointer -> value), its request, and the plan."""

    values: Values
    body: JobCreate
    planned: Planned


def plan_all(sweep: SweepCreate, context: Context, caller: Caller) -> list[SweepJob]:
    """Plan every job of the sweep. A model or a text that several jobs share is looked at once.

    Raises Problem 422 with an entry for each different fault, ``sweep_too_large`` for too many.
    """
    _check_size(sweep)
    locate, check = cache(calibration.locator(context, caller)), cache(targets.checker(context, caller))
    places: set[Place] = set()
    prepared: list[tuple[Values, JobCreate, Prepared]] = []
    jobs: list[SweepJob] = []
    entries: list[dict[str, Any]] = []
    for values in combinations(sweep.matrix):
        asked = fill_in(sweep.job, values)
        try:
            with _noting(entries, values):
                body = JobCreate.model_validate(asked)
                _take_place(body, places)
                prepared.append((values, body, service.prepare(body, context, locate)))
        except ValidationError as error:
            faults = error.errors()
            entries += [
                _entry(values, entry_of({**fault, "loc": ("body", *fault["loc"])}, JobCreate)) for fault in faults
            ]
            rest = _without(asked, [fault["loc"] for fault in faults])
            if rest is not None:
                with _noting(entries, values):
                    service.prepare(rest, context, locate)
    plans = service.plan_all([each for _, _, each in prepared], context, caller, locate)
    for (values, body, _), planned in zip(prepared, plans, strict=True):
        with _noting(entries, values):
            if isinstance(planned, QuantError):
                raise planned
            jobs.append(SweepJob(values, body, service.with_target(body, planned, check)))
    if entries:
        entries = _merged(entries)
        more = f" There are {len(entries)} different faults." if len(entries) > 1 else ""
        codes = {entry["code"] for entry in entries}
        raise Problem(
            422,
            codes.pop() if len(codes) == 1 else "invalid_sweep",
            f"{len(jobs)} of {_size(sweep)} jobs of this sweep are valid. Nothing was queued.{more}",
            hint=entries[0].get("hint", ""),
            errors=entries,
        )
    return jobs


@contextmanager
def _noting(entries: list[dict[str, Any]], values: Values) -> Iterator[None]:
    """Add an entry for a fault of the job with these values. Faults of the service itself are raised."""
    try:
        yield
    except QuantError as error:
        if error.retryable or isinstance(error, ProofError):
            raise
        entry = {"pointer": f"#{error.field}", "detail": error.message, "code": error.code}
        more = {"allowed": list(error.allowed), "hint": error.hint}
        entries.append(_entry(values, entry | {name: value for name, value in more.items() if value}))


def _without(asked: Mapping[str, Any], places: Sequence[tuple[Any, ...]]) -> JobCreate | None:
    """Return the request without what is wrong at these places, to find its other faults; None if it is none then."""
    rest = copy.deepcopy(dict(asked))
    for *way, last in places:
        if not way and last in ("config", "mix", "goal"):
            return None  # one of them says which scheme it is
        place: Any = rest
        for part in way:
            place = place.get(part) if isinstance(place, dict) else None
        if isinstance(place, dict):
            place.pop(last, None)
    try:
        return JobCreate.model_validate(rest)
    except (ValidationError, QuantError):
        return None


def _merged(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each different fault once; its ``values`` are those that all of the jobs with it have."""
    merged: dict[tuple[str, str], dict[str, Any]] = {}
    for entry in entries:
        first = merged.setdefault((entry["pointer"], entry["detail"]), entry)
        values = {axis: value for axis, value in first["values"].items() if entry["values"].get(axis) == value}
        merged[entry["pointer"], entry["detail"]] = first | {"values": values}
    return list(merged.values())


def _take_place(body: JobCreate, places: set[Place]) -> None:
    """Reserve the target of a job. Raises PublishError if another job of the sweep has it: the later would win."""
    to = body.publish
    if to is None or to.create_pr:
        return
    place = (to.repo_id, to.revision, to.path_in_repo, to.to)
    if place in places:
        raise PublishError(
            f"Several jobs of the sweep would publish to {to}.",
            code="publish_collision",
            hint="Vary the target as well: /publish/repo_id, .../revision, .../path_in_repo or .../to.",
            field="/publish",
        )
    places.add(place)


def combinations(matrix: Mapping[str, list[Any]]) -> Iterator[Values]:
    """Yield the combinations of a matrix; the last axis moves fastest.

    {"/a": [1, 2], "/b": [3]} -> {"/a": 1, "/b": 3}, {"/a": 2, "/b": 3}
    """
    for chosen in itertools.product(*matrix.values()):
        yield dict(zip(matrix, chosen, strict=True))


def fill_in(job: Mapping[str, Any], values: Values) -> dict[str, Any]:
    """Return ``job`` with every value put where its JSON pointer (RFC 6901) says; objects on the way are made.

    Raises Problem 422 ``invalid_pointer`` for a way that leads through something other than objects and lists.
    """
    filled = copy.deepcopy(dict(job))
    for pointer, value in values.items():
        *way, last = [part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:]]
        place: Any = filled
        try:
            for part in way:
                place = place[int(part)] if isinstance(place, list) else place.setdefault(part, {})
            if isinstance(place, list):
                place[int(last)] = copy.deepcopy(value)
            else:
                place.update({last: copy.deepcopy(value)})
        except (AttributeError, IndexError, ValueError) as error:
            raise Problem(
                422,
                "invalid_pointer",
                f"The job has no field '{pointer}'.",
                hint="A pointer can pass through existing lists and through objects; missing objects are created.",
                errors=[{"pointer": f"#/matrix/{_escape(pointer)}", "detail": "no such field in the job"}],
            ) from error
    return filled


def _check_size(sweep: SweepCreate) -> None:
    if (size := _size(sweep)) > MAX_SWEEP_JOBS:
        raise Problem(
            422,
            "sweep_too_large",
            f"This sweep has {size} jobs; the limit is {MAX_SWEEP_JOBS}.",
            hint="Split it along one of its axes.",
            errors=[{"pointer": "#/matrix", "detail": f"{size} combinations", "code": "sweep_too_large"}],
        )
    for pointer, axis in sweep.matrix.items():
        if any(value in axis[:index] for index, value in enumerate(axis)):
            raise Problem(
                422,
                "invalid_sweep",
                f"The axis '{pointer}' has a duplicate value.",
                errors=[{"pointer": f"#/matrix/{_escape(pointer)}", "detail": "a duplicate value"}],
            )


def _size(sweep: SweepCreate) -> int:
    size = 1
    for axis in sweep.matrix.values():
        size *= len(axis)
    return size


def _entry(values: Values, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry about jobs of the sweep: the pointer leads into ``job``, ``values`` says which jobs."""
    return {**entry, "pointer": f"#/job{entry['pointer'].removeprefix('#')}", "values": values}


def _escape(pointer: str) -> str:
    return pointer.replace("~", "~0").replace("/", "~1")
