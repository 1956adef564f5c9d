"""A service on the real PostgreSQL and Valkey, with a worker that has control groups."""

from tests.support.service_fixtures import (  # noqa: F401  fixtures
    get_job,
    make_model,
    sessions,
    settings,
    start_worker,
    submit,
)
