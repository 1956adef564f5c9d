"""The invariants of the service: those that hold at every moment, and those that hold at rest."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from typing import Any

import psycopg

from tests.soak.client import Client, Known
from tests.soak.service import Service

FINAL = {"succeeded", "failed", "cancelled"}
REST_S = 300.0
# What a job of each kind may fail with by itself, and what any job may fail with where workers and disks do.
OWN_CODES = {"killed": "engine_crashed", "fails": "nonfinite_weights", "fails_retryable": "nonfinite_weights",
             "tamper": "artifact_corrupt"}  # fmt: skip
CODES_OF_FAULTS = {"disk_full", "worker_lost", "worker_error", "engine_crashed"}

ATTEMPTS = """
SELECT job_id, count(*) AS num, max(number) AS last, count(*) FILTER (WHERE ended_at IS NULL) AS num_open,
  count(*) FILTER (WHERE outcome = 'succeeded') AS num_succeeded,
  array_agg(fence ORDER BY number) AS fences, (array_agg(outcome ORDER BY number DESC))[1] AS last_outcome
FROM attempt GROUP BY job_id
"""
EVENTS = "SELECT job_id, count(*) AS num, max(seq) AS last FROM event GROUP BY job_id"
JOBS = """
SELECT job.id, job.state, job.error, job.num_events, artifact.path, artifact.manifest_sha256
FROM job LEFT JOIN artifact ON artifact.id = job.artifact_id
"""


def check_now(client: Client) -> list[str]:
    """Return the broken invariants at this moment. Nothing can be checked while the database is away."""
    wrong = [*client.broken]
    client.num_checks += 1
    try:
        with client.service.database() as connection:
            rows = connection.execute(JOBS).fetchall()
            attempts = {row["job_id"]: row for row in connection.execute(ATTEMPTS).fetchall()}
            events = {row["job_id"]: row for row in connection.execute(EVENTS).fetchall()}
    except psycopg.Error:
        client.num_blind += 1
        return wrong
    for row in rows:
        job = client.jobs.get(row["id"])
        wrong += [f"{row['id']} ({job.mode if job else 'unanswered'}): {what}" for what in _check_job(row, job)]
        if counts := attempts.get(row["id"]):
            wrong += [f"{row['id']}: {what}" for what in _check_attempts(row["state"], counts)]
        if (counts := events.get(row["id"])) and not counts["num"] == counts["last"] == row["num_events"]:
            wrong.append(f"{row['id']}: the events have gaps: {counts}, {row['num_events']} counted")
    stored = {row["id"] for row in rows}
    lost = [job_id for job_id, job in client.jobs.items() if job_id not in stored and not job.may_be_gone]
    return wrong + [f"{job_id}: accepted, and gone" for job_id in lost]


def _check_job(row: dict[str, Any], job: Known | None) -> Iterator[str]:
    state = row["state"]
    if job is not None:
        if job.final and state != job.final and not job.may_move:
            yield f"it was {job.final} and is {state}"
        if state in FINAL:
            job.final, job.may_move = state, job.may_move and state != "succeeded"
            job.code = row["error"]["code"] if state == "failed" else ""
        if state == "failed" and row["error"]["code"] not in {OWN_CODES.get(job.mode), *CODES_OF_FAULTS}:
            yield f"it failed with {row['error']}"
        if state == "succeeded" and job.mode in OWN_CODES:
            yield "it succeeded, and cannot have"
    if (state == "succeeded") != (row["path"] is not None):
        yield f"it is {state} and its artifact is {row['path']}"


def _check_attempts(state: str, counts: dict[str, Any]) -> Iterator[str]:
    if counts["num"] != counts["last"] or counts["fences"] != sorted(counts["fences"]):
        yield f"its attempts are out of order: {counts}"
    if counts["num_open"] > (state in ("running", "cancelling", "pausing")):
        yield f"it is {state} with {counts['num_open']} open attempts"
    if counts["num_succeeded"] != (state == "succeeded"):
        yield f"it is {state} after {counts['num_succeeded']} attempts that succeeded"
    if state == "succeeded" and counts["last_outcome"] != "succeeded":
        yield f"an attempt came after the one that succeeded: {counts}"


def come_to_rest(client: Client) -> list[str]:
    """Repeat unanswered requests, resume paused jobs, and wait until all jobs have ended. Return what is left."""
    client.service.await_ready()
    deadline = time.monotonic() + REST_S
    while time.monotonic() < deadline:
        for key in [*client.unanswered]:
            client.submit_again(key)
        try:
            with client.service.database() as connection:
                waiting = connection.execute("SELECT id, state FROM job WHERE NOT state = ANY(%s)", [[*FINAL]])
                rows = waiting.fetchall()
        except psycopg.Error:
            rows = [{"id": "?", "state": "no database"}]
        for row in rows:
            if row["state"] == "paused":
                client.service.ask("POST", f"/v1/jobs/{row['id']}/resume")
        if not rows and not client.unanswered:
            return []
        time.sleep(1)
    return [f"after {REST_S:.0f} s without faults {row['id']} is {row['state']}" for row in rows] or [
        f"after {REST_S:.0f} s without faults {len(client.unanswered)} submissions had no answer"
    ]


def check_at_rest(client: Client) -> list[str]:
    """Check that each artifact is whole, byte by byte, and that attempts have left no process and no folder."""
    service, wrong = client.service, []
    with service.database() as connection:
        rows = [row for row in connection.execute(JOBS).fetchall() if row["path"] is not None]
    wrong += [f"{row['id']}: {what}" for row in rows for what in _check_artifact(service, row)]
    deadline = time.monotonic() + 60
    left: list[str] = ["?"]
    while left and time.monotonic() < deadline:
        left = [" ".join(process.cmdline()) for process in service.part("engine")]
        left += [path.name for path in (service.seen_home / "work").glob("*")]
        time.sleep(1)
    kept = {row["id"] for row in rows}
    artifacts = [path.name for path in (service.seen_home / "artifacts").glob("*") if any(path.glob("*"))]
    wrong += [f"left behind: {name}" for name in left]
    wrong += [f"{name}: files of a job that has no artifact" for name in artifacts if name not in kept]
    logs = "".join(path.read_text(errors="replace") for path in (service.seen_home / "logs").glob("*.log"))
    return wrong + (["the key is in a log"] if service.key.rpartition("_")[2] in logs else [])


def _check_artifact(service: Service, row: dict[str, Any]) -> Iterator[str]:
    folder = service.seen_home / str(row["path"]).partition(f"{service.home}/")[2]
    try:
        manifest = (folder / "MANIFEST.json").read_bytes()
        files = json.loads(manifest)["files"]
        digests = {file["path"]: hashlib.sha256((folder / file["path"]).read_bytes()).hexdigest() for file in files}
    except (OSError, ValueError) as error:
        yield f"its artifact cannot be read: {error}"
        return
    if hashlib.sha256(manifest).hexdigest() != row["manifest_sha256"]:
        yield "its manifest is another one"
    if damaged := [file["path"] for file in files if digests[file["path"]] != file["sha256"]]:
        yield f"damaged files: {damaged}"
