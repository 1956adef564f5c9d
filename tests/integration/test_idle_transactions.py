"""A process that is suspended within a transaction gives its locks away in the end."""

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from api.settings import Settings
from api.store import engine


def test_a_transaction_that_does_nothing_is_ended(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "DATABASE_IDLE_S", 1)
    url = settings.database_url.get_secret_value()
    frozen, other = engine.connect(url), engine.connect(url)
    holder = frozen()
    holder.execute(text("LOCK TABLE job"))
    with other.begin() as session:  # waits for the lock, which nobody gives back
        session.execute(text("LOCK TABLE job"))
    with pytest.raises(DBAPIError, match="idle-in-transaction"):
        holder.execute(text("SELECT 1"))
    holder.invalidate()
    for sessions in (frozen, other):
        engine.dispose(sessions)
