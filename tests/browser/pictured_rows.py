"""The rows that the pictures of the pages show: a project at a fixed time, written straight into the database."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import text
from sqlalchemy.orm import Session

from api.http.security import SCOPES, hash_secret
from api.store.engine import connect, dispose
from api.store.manifest import MANIFEST
from api.store.states import FINAL, HELD, State
from api.store.tables.accounts import AuditEntry, HubToken, SignIn, Webhook
from api.store.tables.chats import Chat, ChatTurn
from api.store.tables.jobs import ApiKey, Artifact, Attempt, Base, Dataset, Event, Job, LogLine, Member, Project, Worker
from api.store.tables.publications import Publication
from api.store.tables.registry import AliasRequest, RegisteredModel, RegistryAlias, RegistryVersion
from api.store.tables.shares import Share
from quantcore.config import presets
from quantcore.config.job_spec import JobSpec
from tests.browser import pictured_report
from tests.browser.pictured_report import CALIBRATION, EVALUATION, MODEL, NUM_BLOCKS, Result

NOW = datetime(2026, 11, 26, 8, 0, tzinfo=UTC)
LONG_AGO = datetime(2000, 1, 1, tzinfo=UTC)  # by any clock of a service
IN_A_LONG_TIME = datetime(2100, 1, 1, tzinfo=UTC)
PROJECT, EMPTY_PROJECT = ("prj_" + digit * 32 for digit in "12")
TOKENS = {PROJECT: "picture", EMPTY_PROJECT: "newcomer"}
"""The sign-in tokens of two browsers: one of the project with everything, one of a project without any job."""
SHARED = "p" * 43
"""The token of the link to the report of W4A16."""
KEY, EMPTY_KEY = "1a2b3c4d5e6f", "2b3c4d5e6f1a"
WORKER = "gpu-1:4711:6320dd97"
OTHER_MODEL = "/models/qwen-0.5b-chat"
NOT_FINITE = "The weight of model.layers.3.mlp.up_proj has 12 values that are not finite."


def id_of(prefix: str, name: str) -> str:
    return f"{prefix}_{hashlib.sha256(name.encode()).hexdigest()[:32]}"


NUM_BLOCKS_DONE = 12
"""Of the run that goes on."""
FP8, INT8, W4A16, MXFP4, AGAIN, RUNNING, WAITING, NEXT, FAILED, CANCELLED, PAUSED = (
    id_of("job", name) for name in "fp8 int8 w4a16 mxfp4 again running waiting next failed cancelled paused".split()
)
RESULTS = {
    FP8: Result("fp8_e4m3 per_channel", 163_120_000, 0.0061, "faithful", 0.026, ("compressed_tensors",)),
    INT8: Result("int8 per_channel", 163_390_000, 0.0094, "faithful", 0.031, ("compressed_tensors",)),
    W4A16: Result("uint4 per_group 64", 112_480_000, 0.0585, "good", 0.078, ("quark", "compressed_tensors")),
    MXFP4: Result("mxfp4 per_group 32", 110_260_000, 0.1794, "degraded", 0.109, ("quark",)),
    AGAIN: Result("int8 per_channel", 61_020_000, 0.0127, "faithful", 0.033, ("compressed_tensors",)),
}


def fill(database_url: str, home: Path) -> None:
    """Write all rows, and below ``home`` the files of the artifacts. The service's own worker must have left."""
    sessions = connect(database_url)
    try:
        with sessions.begin() as session:
            # Rows keep their own times and states: no trigger fires for a session that replays another's writes.
            session.execute(text("SET LOCAL session_replication_role = replica"))
            for rows in (_accounts(), _jobs(home), _histories(), _around()):
                _add(session, rows)
    finally:
        dispose(sessions)


def _add(session: Session, rows: Iterable[Base]) -> None:
    session.add_all(rows)
    session.flush()


def _ago(minutes: float) -> datetime:
    return NOW - timedelta(minutes=minutes)


def _accounts() -> Iterable[Base]:
    yield Project(
        id=PROJECT, name="search", max_running=4, max_waiting=200, max_stored_bytes=10**12, created_at=_ago(90_000)
    )
    yield Project(id=EMPTY_PROJECT, name="newcomers", created_at=_ago(60))
    for name, role in (("Ada", "editor"), ("Grace", "admin")):
        yield Member(id=id_of("mem", name), project_id=PROJECT, name=name, role=role, created_at=_ago(71_000))
    keys = (
        (KEY, PROJECT, "nightly pipeline", list(SCOPES), {}),
        (
            "3c4d5e6f1a2b",
            PROJECT,
            "laptop of Ada",
            ["jobs:read", "jobs:write"],
            {"expires_at": _ago(-43_200), "member_id": id_of("mem", "Ada")},
        ),
        ("4d5e6f1a2b3c", PROJECT, "old runner", ["jobs:read"], {"revoked_at": _ago(3000)}),
        ("5e6f1a2b3c4d", PROJECT, "trial", ["jobs:read", "jobs:chat"], {"expires_at": _ago(1500)}),
        (EMPTY_KEY, EMPTY_PROJECT, "newcomer", list(SCOPES), {}),
    )
    for number, (key_id, project_id, name, scopes, more) in enumerate(keys):
        times = {"created_at": _ago(80_000 - 9000 * number), "last_used_at": _ago(7 + 4000 * number)}
        yield ApiKey(
            id=key_id, project_id=project_id, name=name, secret_sha256=key_id.encode(), scopes=scopes, **times, **more
        )
    for project_id, key_id in ((PROJECT, KEY), (EMPTY_PROJECT, EMPTY_KEY)):
        yield SignIn(
            token_sha256=hash_secret(TOKENS[project_id]), api_key_id=key_id, secret_sha256=key_id.encode(),
            expires_at=IN_A_LONG_TIME,
        )  # fmt: skip
    yield HubToken(project_id=PROJECT, name="team", sealed=b"-", created_at=_ago(9000), updated_at=_ago(9000))


def _jobs(home: Path) -> Iterable[Base]:
    derived = f"/data/artifacts/{INT8}/{'0' * 64}"
    finished = (
        (FP8, "SmolLM2 fp8", "fp8", {"id": MODEL}, 5760),
        (INT8, "SmolLM2 int8_dynamic", "int8_dynamic", {"id": MODEL}, 2910),
        (W4A16, "SmolLM2 w4a16", "w4a16", {"id": MODEL}, 190),
        (MXFP4, "SmolLM2 mxfp4", "mxfp4", {"id": MODEL}, 95),
        (AGAIN, None, "int8_dynamic", {"path": derived}, 60),
    )
    for number, (job_id, name, preset, model, minutes) in enumerate(finished, start=1):
        result = RESULTS[job_id]
        job = _job(job_id, State.SUCCEEDED, preset, minutes, name=name, model=model, labels={"team": "search"})
        job.spec |= {"export": list(result.exports)}
        job.summary, job.phases, job.attempt = pictured_report.summary(result), _phases(minutes), 1
        artifact = _artifact(job, result, home, fence=number)
        job.artifact_id = artifact.id
        yield from (job, artifact, Attempt(
            job_id=job_id, number=1, fence=number, worker=f"{WORKER}:0", started_at=job.started_at,
            ended_at=job.finished_at, outcome="succeeded",
        ))  # fmt: skip
    yield _running()
    yield _job(NEXT, State.QUEUED, "nvfp4", 6, name="SmolLM2 nvfp4", labels={"team": "search"}, priority=7)
    yield _job(WAITING, State.QUEUED, "w4a16_sym", 4, model={"path": OTHER_MODEL})
    yield _failed()
    yield _job(
        CANCELLED, State.CANCELLED, "int8_static", 1450, name="a run with a long name that was started by mistake"
    )
    yield _job(PAUSED, State.PAUSED, "w3a16", 1500, name="waits for the weekend", model={"path": OTHER_MODEL})


def _job(
    job_id: str, state: State, preset: str, minutes: float, *, model: dict[str, Any] | None = None,
    labels: dict[str, str] | None = None, **columns: Any,
) -> Job:  # fmt: skip
    """Return a job that was submitted that many minutes ago; one that has ended took a little more than five."""
    spec = JobSpec(config=presets.resolve(preset), calibration=CALIBRATION, evaluation=EVALUATION)  # type: ignore[arg-type]
    created_at = _ago(minutes)
    columns = {
        "started_at": _ago(minutes - 0.1) if state in FINAL | HELD else None,
        "finished_at": _ago(minutes - 5.4) if state in FINAL else None,
        "summary": None, "error": None, "phases": [], "num_events": 0, "num_log_lines": 0, "attempt": 0,
    } | columns  # fmt: skip
    return Job(
        id=job_id, project_id=PROJECT, submitted_by=KEY, state=state, preset=preset, spec=spec.to_dict(),
        model=model or {"id": MODEL}, labels=labels or {}, created_at=created_at, updated_at=created_at,
        run_at=LONG_AGO + (created_at - LONG_AGO) / 10**6, state_times={state: created_at.isoformat()},
        needs_memory_bytes=1_130_000_000, **columns,
    )  # fmt: skip


def _phases(minutes: float, *, ended: Sequence[float] = (0.2, 2.3, 205.5, 209.5, 316.3)) -> list[dict[str, Any]]:
    """Return the phases of a job that was submitted that many minutes ago, by the second at which each ended."""
    names = ("resolve", "plan", "quantize", "export", "verify")
    amounts = {"quantize": (NUM_BLOCKS, "block"), "verify": (483, "tensor")}
    found, start = [], _ago(minutes - 0.1)
    for name, end_s in zip(names, ended, strict=False):
        number, unit = amounts.get(name, (None, None))
        end = _ago(minutes - 0.1) + timedelta(seconds=end_s)
        found.append(
            {"name": name, "state": "done", "started_at": start.isoformat(), "ended_at": end.isoformat(),
             "done": number, "total": number, "unit": unit}
        )  # fmt: skip
        start = end
    return found


def _running() -> Job:
    job = _job(RUNNING, State.RUNNING, "w4a16", 2, name="SmolLM2 w4a16, again", labels={"team": "search"})
    job.attempt, job.fence, job.worker, job.lease_expires_at = 1, 101, f"{WORKER}:0", IN_A_LONG_TIME
    *before, quantize = _phases(2, ended=(0.2, 2.3, 0))
    job.phases = [*before, quantize | {"state": "running", "ended_at": None, "done": NUM_BLOCKS_DONE}]
    job.phase, job.updated_at = "quantize", NOW
    job.progress = _progress(NUM_BLOCKS_DONE)
    return job


def _progress(done: int) -> dict[str, Any]:
    memory_bytes = 455_000_000 + 1_500_000 * done
    return {"phase": "quantize", "done": done, "total": NUM_BLOCKS, "unit": "block", "eta_s": 8.6 * (NUM_BLOCKS - done),
            "memory_bytes": memory_bytes}  # fmt: skip


def _failed() -> Job:
    job = _job(FAILED, State.FAILED, "w4a16", 1380, name="qwen w4a16", model={"path": OTHER_MODEL})
    *before, quantize = _phases(1380, ended=(0.2, 2.3, 41.7))
    job.phases = [*before, quantize | {"state": "stopped", "done": 3, "total": 24}]
    job.attempt = job.failure_count = 1
    job.error = {
        "code": "nonfinite_weights", "message": NOT_FINITE,
        "hint": "The checkpoint is damaged: download it again, and clone the job.", "retryable": False,
        "detail": "block 3: 12 of 4,718,592 values are NaN", "block": 3,
    }  # fmt: skip
    return job


def _artifact(job: Job, result: Result, home: Path, *, fence: int) -> Artifact:
    """Return the artifact's row. Its folder has the report and a manifest, which are all that a page reads."""
    report = json.dumps(pictured_report.report(result, presets.resolve(str(job.preset)))).encode()
    files = {"report.json": report, "report.html": b"<!doctype html>"}
    sizes = {f"{name}/model.safetensors": result.size_bytes for name in result.exports}
    sizes |= {f"{name}/config.json": 1893 for name in result.exports} | {"README.md": 2641, "reproduce.sh": 1836}
    entries = [(name, len(data), hashlib.sha256(data).hexdigest()) for name, data in files.items()]
    entries += [(name, size, hashlib.sha256(name.encode()).hexdigest()) for name, size in sizes.items()]
    manifest = json.dumps(
        {
            "format": 1,
            "files": [{"path": path, "size": size, "sha256": sha256} for path, size, sha256 in sorted(entries)],
        }
    ).encode()
    digest = hashlib.sha256(manifest).hexdigest()
    folder = home / "artifacts" / job.id / digest
    folder.mkdir(parents=True)
    for name, data in (files | {MANIFEST: manifest}).items():
        (folder / name).write_bytes(data)
    return Artifact(
        id=job.id.replace("job", "art"), job_id=job.id, fence=fence, manifest_sha256=digest, path=str(folder),
        num_bytes=sum(size for _, size, _ in entries), created_at=job.finished_at,
    )  # fmt: skip


def _histories() -> Iterable[Base]:
    for job_id, result in RESULTS.items():
        yield from _events(job_id, result, 190, NUM_BLOCKS, end={"state": "succeeded", "attempt": 1})
    yield from _events(RUNNING, RESULTS[W4A16], 2, NUM_BLOCKS_DONE, end=None)
    error = {
        "code": "nonfinite_weights",
        "message": NOT_FINITE,
    }
    yield from _events(FAILED, RESULTS[W4A16], 1380, 3, end={"state": "failed", "attempt": 1, "error": error})
    lines = (
        ("info", "worker: phase resolve began"), ("info", "worker: phase plan began"),
        ("info", "worker: phase quantize began"), ("debug", "block 0: 7 layers in 1.4 s"),
        ("warning", "block 2: mlp.down_proj has 3 dead input channels; they keep their scale"),
        ("error", "block 3: 12 of 4,718,592 values of mlp.up_proj are NaN"),
        ("info", "worker: the engine ended with status 1"),
    )  # fmt: skip
    for job_id, minutes, shown in ((FAILED, 1380, lines), (W4A16, 190, lines[:4]), (RUNNING, 2, lines[:4])):
        for seq, (level, line) in enumerate(shown, start=1):
            at = _ago(minutes - 0.1) + timedelta(seconds=5 * seq)
            yield LogLine(job_id=job_id, seq=seq, at=at, attempt=1, level=level, text=line)


def _events(
    job_id: str, result: Result, minutes: float, num_blocks: int, *, end: dict[str, Any] | None
) -> Iterable[Event]:
    """Yield the events of a job's only attempt."""
    happened: list[tuple[str, dict[str, Any]]] = [
        ("state_changed", {"state": "queued"}), ("state_changed", {"state": "running", "attempt": 1}),
        *(("phase_started", {"phase": phase}) for phase in ("resolve", "plan", "quantize")),
    ]  # fmt: skip
    layers = pictured_report.layers(result, num_blocks)
    for block in range(num_blocks):
        happened += [("layer_quantized", layer) for layer in layers if layer["block"] == block]
        happened += [("progress", _progress(block + 1)), ("saved", {"next_block": block + 1, "num_blocks": NUM_BLOCKS})]
    if end and end["state"] == "succeeded":
        happened += [("phase_started", {"phase": phase}) for phase in ("export", "verify")]
    happened += [("state_changed", end)] if end else []
    start, step = _ago(minutes), timedelta(seconds=110 / len(happened))
    for seq, (kind, data) in enumerate(happened, start=1):
        yield Event(job_id=job_id, seq=seq, at=start + seq * step, kind=kind, data=data)


def _around() -> Iterable[Base]:
    """Yield what else the project has: workers, data, webhooks, a publication, a chat, a link, an audit log."""
    for number, (host, memory_gb, devices, more) in enumerate(
        (
            ("gpu-1", 128, [{"kind": "cuda", "name": "NVIDIA H100", "memory_bytes": 85_000_000_000}], {}),
            ("gpu-2", 128, [{"kind": "rocm", "name": "AMD MI300X", "memory_bytes": 206_000_000_000}],
             {"drain_requested_at": _ago(3)}),
            ("cpu-1", 32, [], {"blocked_reason": "less than 2.1 GB of disk is free"}),
        )
    ):  # fmt: skip
        yield Worker(
            id=WORKER if host == "gpu-1" else f"{host}:{310 + number}:0a1b2c3d", host=host, num_slots=1 + number % 2,
            memory_bytes=memory_gb * 10**9, devices=devices, started_at=_ago(1700), beat_at=_ago(0.05 * (number + 1)),
            live_until=IN_A_LONG_TIME, sandbox="landlock 6", memory_limit="cgroup", **more,
        )  # fmt: skip
    yield from _data()
    yield from _webhooks()
    yield from _registry()
    yield Publication(
        id=id_of("pub", "w4a16"), job_id=W4A16, project_id=PROJECT, target={"repo_id": "acme/SmolLM2-135M-w4a16"},
        state="published", attempt=1, revision="7c1d5a0e" * 5, url="https://huggingface.co/acme/SmolLM2-135M-w4a16",
        created_at=_ago(180), finished_at=_ago(178),
    )  # fmt: skip
    yield Share(
        id=id_of("shr", "w4a16"), job_id=W4A16, token_sha256=hash_secret(SHARED), key_id=KEY, created_at=_ago(170),
        expires_at=IN_A_LONG_TIME,
    )  # fmt: skip
    yield from _chat()
    actions = (
        ("key.create", "3c4d5e6f1a2b", {"name": "laptop of Ada", "scopes": ["jobs:read", "jobs:write"]}),
        ("dataset.upload", id_of("dst", "support-chats.jsonl"), {}),
        ("job.submit", FAILED, {}), ("job.cancel", CANCELLED, {}), ("job.submit", W4A16, {}),
        ("job.publish", W4A16, {"target": {"repo_id": "acme/SmolLM2-135M-w4a16"}}),
        ("share.create", W4A16, {"share_id": id_of("shr", "w4a16"), "expires_in_s": 604_800}),
        ("worker.drain", "gpu-2:311:0a1b2c3d", {}), ("job.submit", RUNNING, {}),
    )  # fmt: skip
    for number, (action, object_id, detail) in enumerate(actions):
        key_id = None if action == "key.create" else KEY
        yield AuditEntry(
            id=1000 + number, at=_ago(1900 - 235 * number), project_id=PROJECT, key_id=key_id, action=action,
            object_id=object_id, detail=detail,
        )  # fmt: skip


def _registry() -> Iterable[Base]:
    """Yield a model with a request that is pending, and another one with its first version."""
    bot, search = id_of("mdl", "support-bot"), id_of("mdl", "search")
    versions = ((bot, 1, FP8, 5700), (bot, 2, INT8, 2900), (bot, 3, W4A16, 150), (search, 1, AGAIN, 40))
    for model_id, name, latest in ((bot, "support-bot", 3), (search, "search-reranker", 1)):
        yield RegisteredModel(
            id=model_id, project_id=PROJECT, name=name, last_version=latest, created_at=_ago(5700)
        )  # fmt: skip
    for model_id, version, job_id, minutes in versions:
        yield RegistryVersion(
            model_id=model_id, version=version, job_id=job_id, key_id=KEY, created_at=_ago(minutes)
        )  # fmt: skip
    for alias, version in (("candidate", 3), ("production", 2)):
        yield RegistryAlias(model_id=bot, alias=alias, version=version, moved_at=_ago(140))
    yield AliasRequest(
        id=id_of("rqs", "w4a16"), model_id=bot, alias="production", from_version=2, to_version=3, state="pending",
        reason="A third smaller, and it answers the new support questions.", asked_by="3c4d5e6f1a2b",
        created_at=_ago(120),
    )  # fmt: skip


def _data() -> Iterable[Dataset]:
    histogram = [{"from": 2**power, "to": 2 ** (power + 1), "count": 90 * power} for power in range(5, 11)]
    for number, (name, column, num_rows) in enumerate(
        (("support-chats.jsonl", "messages", 4_096), ("docs.csv", "text", 512))
    ):
        yield Dataset(
            id=id_of("dst", name), project_id=PROJECT, submitted_by=KEY, name=name, format=name.rpartition(".")[2],
            sha256=hashlib.sha256(name.encode()).hexdigest(), num_bytes=1_213 * num_rows, columns=["id", column],
            text_column=column, created_at=_ago(1660 + 4000 * number),
            statistics={"num_rows": num_rows, "num_empty": 0, "num_duplicates": 3, "num_chats": num_rows,
                        "chars": {"sum": 900 * num_rows, "min": 40, "median": 900, "max": 2000,
                                  "histogram": histogram}},
        )  # fmt: skip


def _webhooks() -> Iterable[Webhook]:
    shown = (
        ("https://ci.example.org/hooks/bitfoundry", "json", ["job.succeeded", "job.failed"], {}),
        ("https://hooks.slack.com/services/T0/B0/secret", "slack", ["job.failed"], {"failing_since": _ago(20)}),
        ("https://old.example.org/hook", "json", ["job.queued", "job.running"],
         {"disabled_at": _ago(5000), "disabled_reason": "no delivery has succeeded for 3 days"}),
    )  # fmt: skip
    for url, form, event_types, more in shown:
        yield Webhook(
            id=id_of("whk", url), project_id=PROJECT, url=url, format=form, event_types=event_types, sealed_secret=b"-",
            created_at=_ago(20_000), **more,
        )  # fmt: skip


def _chat() -> Iterable[Base]:
    chat_id = id_of("chat", "w4a16")
    yield Chat(
        id=chat_id, job_id=W4A16, project_id=PROJECT, max_new_tokens=64, needs_memory_bytes=10**9, state="ended",
        reason="closed", has_template=True, seq=4, created_at=_ago(160), waits_until=_ago(150), started_at=_ago(159),
        used_at=_ago(158), ended_at=IN_A_LONG_TIME,
    )  # fmt: skip
    answers = {
        "original": "Paris is the capital of France. It lies on the Seine.",
        "quantized": "Paris is the capital of France. It is its largest city.",
    }
    yield ChatTurn(
        chat_id=chat_id, number=1, prompt="What is the capital of France?", state="answered", seq=4,
        answer={name: {"text": answer, "num_tokens": 14, "time_s": 0.6} for name, answer in answers.items()}
        | {"first_difference": 9, "first_different_char": 35},
    )  # fmt: skip
