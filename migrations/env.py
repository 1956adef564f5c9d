"""Alembic's entry. The database comes from DATABASE_URL, or from ``api.store.migrate``."""

import os

from alembic import context
from sqlalchemy import create_engine

import api.store.tables.accounts
import api.store.tables.chats
import api.store.tables.node_slots
import api.store.tables.publications
import api.store.tables.registry
import api.store.tables.shares  # noqa: F401  their tables are part of the metadata
from api.store.tables.jobs import Base
from quantcore.config.time_limits import DATABASE_CONNECT_S, DATABASE_MIGRATION_S

config = context.config
database_url = config.attributes.get("database_url") or os.environ.get("DATABASE_URL")
if not database_url:
    raise SystemExit("Set DATABASE_URL, for example postgresql+psycopg://user@host/database")

limits = f"-c lock_timeout=10s -c statement_timeout={DATABASE_MIGRATION_S}s"
engine = create_engine(database_url, connect_args={"options": limits, "connect_timeout": DATABASE_CONNECT_S})
try:
    with engine.connect() as connection:
        context.configure(connection=connection, target_metadata=Base.metadata, compare_server_default=True)
        with context.begin_transaction():
            # Two processes that start at once must not migrate at once.
            connection.exec_driver_sql("SELECT pg_advisory_xact_lock(hashtext('bitfoundry.migrations'))")
            context.run_migrations()
finally:
    engine.dispose()
