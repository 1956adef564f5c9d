"""A service on the real PostgreSQL and Valkey, to be attacked."""

from tests.support.service_fixtures import (  # noqa: F401  fixtures
    client,
    get_job,
    hub,
    make_model,
    read_pids,
    server,
    sessions,
    settings,
    start_here,
    start_worker,
    submit,
    wait_for,
)
