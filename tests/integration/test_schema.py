"""The migration and what the database itself refuses."""

import json
from collections.abc import Callable, Iterator

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import create_engine, inspect, text
from sqlalchemy.exc import IntegrityError

from api.store import migrate
from api.store.accounts import projects
from api.store.engine import Sessions
from api.store.queue import control, jobs, leases
from api.store.states import FINAL, HELD, MOVES, State
from quantcore.config import presets
from quantcore.config.job_spec import Evaluation, JobSpec


@pytest.fixture
def empty_database(postgres_url: str) -> Iterator[str]:
    """A database without our tables."""
    admin = create_engine(postgres_url, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(text("CREATE DATABASE empty_one"))
    yield postgres_url.replace(f"/{admin.url.database}?", "/empty_one?")
    with admin.connect() as connection:
        connection.execute(text("DROP DATABASE empty_one WITH (FORCE)"))
    admin.dispose()


def test_up_down_up_and_no_difference(empty_database: str) -> None:
    migrate.upgrade(empty_database)
    migrate.downgrade(empty_database)
    engine = create_engine(empty_database)
    assert inspect(engine).get_table_names() == ["alembic_version"]
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT count(*) FROM pg_proc WHERE proname = 'guard_job'")) == 0
        assert connection.scalar(text("SELECT count(*) FROM pg_class WHERE relname = 'fence_seq'")) == 0
    engine.dispose()
    migrate.upgrade(empty_database)
    migrate.check(empty_database)


# Projects came with one release, the one column for what a job asks with another: every process was of that release or
# newer from then on.
NOT_FOR_OLDER_PROCESSES = {("0010", "job"), ("0010", "sweep"), ("0010", "api_key"), ("0140", "job")}


def test_older_processes_work_on_a_newer_schema(empty_database: str) -> None:
    """In a rolling deploy workers of the release before meet the new schema: what they read and write must stay.

    Each step only adds; a new column has a default or may be NULL, so that who does not know it can insert.
    """
    engine = create_engine(empty_database)
    before: dict[str, dict[str, str]] = {}
    for revision in migrate.revisions():
        migrate.upgrade(empty_database, revision)
        found = inspect(engine)
        after = {}
        for table in found.get_table_names():
            columns = {column["name"]: column for column in found.get_columns(table)}
            after[table] = {name: str(column["type"]) for name, column in columns.items()}
            new = columns.keys() - before.get(table, columns).keys()
            bound = {name for name in new if not columns[name]["nullable"] and columns[name]["default"] is None}
            assert not bound or (revision, table) in NOT_FOR_OLDER_PROCESSES, (revision, table, bound)
        for table, columns_before in before.items():
            kept = {name: after.get(table, {}).get(name) for name in columns_before}
            assert kept == columns_before or (revision, table) in NOT_FOR_OLDER_PROCESSES, (revision, table)
        before = after
    engine.dispose()


def test_a_database_with_jobs_goes_down_and_up(
    postgres_url: str, sessions: Sessions, submit: Callable[..., str]
) -> None:
    """What the old schema does not know becomes something that it does; nothing is lost on the way."""
    paused, pausing, cancelling, ended, waiting = (submit() for _ in range(5))
    with sessions.begin() as session:
        control.pause(session, paused)
        held = [leases.claim(session, worker="w", lease_s=60) for _ in range(3)]
        control.pause(session, pausing)
        control.cancel(session, cancelling)
        assert held[2]
        leases.fail(session, held[2], leases.Failure("bad", "bad"), retry_base_s=1)
    migrate.downgrade(postgres_url, "0001")
    try:
        with sessions.begin() as session:
            found = dict(session.execute(text("SELECT id, state FROM job")).all())
            before = dict(session.execute(text("SELECT id, version FROM job")).all())
            after = dict(session.execute(text("UPDATE job SET name = 'renamed' RETURNING id, version")).all())
        with pytest.raises(IntegrityError, match="cannot move"), sessions.begin() as session:
            session.execute(text("UPDATE job SET state = 'queued', finished_at = NULL WHERE state = 'failed'"))
    finally:
        migrate.upgrade(postgres_url)
    assert after == {job_id: version + 1 for job_id, version in before.items()}  # the old guard is back
    assert found == {paused: "queued", pausing: "queued", waiting: "queued", cancelling: "cancelling", ended: "failed"}
    with sessions.begin() as session:
        assert control.retry(session, ended)
        assert held[1]
        leases.release(session, held[1])  # held since before the time of its start was kept
        job = jobs.find(session, cancelling)
        assert job and (job.state, job.used_runtime_s) == ("cancelled", 0)
        assert set(job.state_times) == {"queued", "cancelling", "cancelled"}
        assert leases.claim(session, worker="w", lease_s=60)


def test_a_job_of_the_release_before_shows_and_can_be_claimed(
    postgres_url: str, sessions: Sessions, client: TestClient
) -> None:
    """What it asked for moves into one column, in the order in which its patterns stood, and back."""
    config = presets.resolve("w4a16").to_dict()
    layers = {name: {"weight": config["global_quant_config"]["weight"]} for name in ("*.z_proj", "*.a_proj")}
    old = {
        "config": json.dumps(config | {"layer_quant_config": layers}),
        "mix": None,
        "calibration": '{"source": "builtin", "num_samples": 3, "seq_len": 64, "seed": 1}',
        "export": ["awq", "quark"],
        "evaluation": '{"num_windows": 5, "seq_len": 32, "num_prompts": 0, "tasks": [], "batch_size": 8}',
        "gate": "fail",
        "max_shard_size": "90MB",
        "file2file": False,
        "shard_blocks": True,
        "nodes": 2,
    }
    columns = ", ".join(old)
    migrate.downgrade(postgres_url, "0130")
    try:
        with sessions.begin() as session:
            session.execute(
                text(
                    f"INSERT INTO job (id, project_id, labels, model, {columns}) VALUES "
                    f"(:id, :project, '{{}}', '{{\"path\": \"/m\"}}', {', '.join(f':{name}' for name in old)})"
                ),
                {"id": f"job_{'0' * 32}", "project": projects.DEFAULT} | old,
            )
    finally:
        migrate.upgrade(postgres_url)
    shown = client.get(f"/v1/jobs/job_{'0' * 32}").json()
    newer = {"evaluation": {"num_answers": Evaluation().num_answers}}  # an option that it could not have: by default
    for name, value in old.items():
        given = json.loads(value) if isinstance(value, str) and value.startswith("{") else value
        assert shown[name] == (given | newer[name] if name in newer else given), name
    assert list(shown["config"]["layer_quant_config"]) == ["*.z_proj", "*.a_proj"]
    with sessions.begin() as session:
        job = jobs.find(session, f"job_{'0' * 32}")
        assert job is not None and job.version == 1
        spec = JobSpec.model_validate(job.spec)
        assert (spec.nodes, spec.gate, spec.calibration.num_samples) == (2, "fail", 3)
    migrate.downgrade(postgres_url, "0130")
    try:
        with sessions.begin() as session:
            back = session.execute(text(f"SELECT {columns} FROM job")).one()._asdict()
    finally:
        migrate.upgrade(postgres_url)
    for name, value in back.items():
        given = old[name]
        assert value == (json.loads(given) if isinstance(given, str) and given.startswith("{") else given), name


def set_state(sessions: Sessions, job_id: str, state: State, *, reach: bool) -> None:
    """Move a job to ``state`` with all that the constraints want; with the trigger off if ``reach``."""
    held, final = state in HELD, state in FINAL
    with sessions.begin() as session:
        session.execute(text(f"SET LOCAL session_replication_role = {'replica' if reach else 'origin'}"))
        session.execute(
            text(
                """UPDATE job SET state = :state,
                fence = CASE WHEN :held THEN 1 END, worker = CASE WHEN :held THEN 'w' END,
                lease_expires_at = CASE WHEN :held THEN clock_timestamp() END,
                finished_at = CASE WHEN :final THEN clock_timestamp() END,
                error = '{"code": "x"}', artifact_id = 'art_x' WHERE id = :id"""
            ),
            {"state": state, "held": held, "final": final, "id": job_id},
        )


@pytest.mark.parametrize("old", State)
def test_the_trigger_knows_the_map_of_moves(old: State, sessions: Sessions, submit: Callable[..., str]) -> None:
    job_id = submit()
    with sessions.begin() as session:
        session.execute(
            text(
                "INSERT INTO artifact (id, job_id, fence, manifest_sha256, path, num_bytes)"
                " VALUES ('art_x', :id, 1, '', '', 0)"
            ),
            {"id": job_id},
        )
    for new in State:
        set_state(sessions, job_id, old, reach=True)
        if new == old or new in MOVES[old]:
            set_state(sessions, job_id, new, reach=False)
        else:
            with pytest.raises(IntegrityError, match="cannot move"):
                set_state(sessions, job_id, new, reach=False)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE job SET state = 'dreaming'",
        "UPDATE job SET state = 'running'",  # without a lease
        "UPDATE job SET fence = 1, worker = 'w', lease_expires_at = now()",  # a lease on a queued job
        "UPDATE job SET fence = 1",  # half a lease
        "UPDATE job SET state = 'cancelled'",  # without finished_at
        "UPDATE job SET finished_at = now()",
    ],
)
def test_the_database_refuses_half_truths(statement: str, sessions: Sessions, submit: Callable[..., str]) -> None:
    submit()
    with pytest.raises(IntegrityError), sessions.begin() as session:
        session.execute(text(statement))


def test_failed_needs_a_code_and_succeeded_an_artifact(sessions: Sessions, submit: Callable[..., str]) -> None:
    submit()
    with sessions.begin() as session:
        assert leases.claim(session, worker="w", lease_s=10)
    ended = "fence = NULL, worker = NULL, lease_expires_at = NULL, finished_at = now()"
    for state in ("failed", "succeeded"):
        with pytest.raises(IntegrityError), sessions.begin() as session:
            session.execute(text(f"UPDATE job SET state = '{state}', {ended}"))


def test_one_open_attempt_a_job(sessions: Sessions, submit: Callable[..., str]) -> None:
    job_id = submit()
    with sessions.begin() as session:
        assert leases.claim(session, worker="w", lease_s=10)
    second = "INSERT INTO attempt (job_id, number, fence, worker) VALUES (:id, 2, 999, 'other')"
    with pytest.raises(IntegrityError, match="uq_attempt_open"), sessions.begin() as session:
        session.execute(text(second), {"id": job_id})
