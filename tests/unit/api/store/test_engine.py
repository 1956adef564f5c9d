"""What a log says of a database that cannot be used."""

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DataError, OperationalError

from api.store.engine import connect, dispose, reason_of
from bitfoundry.local.postgres import Postgres


def test_the_reason_is_that_of_the_driver_without_a_password() -> None:
    sessions = connect("postgresql+psycopg://nobody:hunter2@/nothing?host=/nowhere")
    with pytest.raises(OperationalError) as failure, sessions.begin() as session:
        session.execute(text("SELECT 1"))
    assert reason_of(failure.value).startswith("OperationalError: connection")
    assert "/nowhere" in reason_of(failure.value) and "hunter2" not in reason_of(failure.value)
    dispose(sessions)


def test_values_of_a_statement_are_not_told(postgres: Postgres) -> None:
    sessions = connect(postgres.url_of("postgres"))
    with pytest.raises(DataError, match="hunter2") as failure, sessions.begin() as session:
        session.execute(text("SELECT CAST(:value AS integer)"), {"value": "hunter2"})
    assert reason_of(failure.value) == "DataError"
    dispose(sessions)
