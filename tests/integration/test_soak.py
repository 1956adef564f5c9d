"""The soak in short, and that it sees what it is there to see. `make soak` is the long one."""

import random
import time
from pathlib import Path

import pytest

from tests.soak.__main__ import soak
from tests.soak.client import Client
from tests.soak.invariants import check_at_rest, check_now, come_to_rest
from tests.soak.service import Service

pytestmark = pytest.mark.slow


def test_a_minute_of_faults() -> None:
    assert soak(7, 1.0) == []


def test_it_sees_what_is_lost_damaged_and_left(tmp_path: Path) -> None:
    with Service(tmp_path) as service:
        client = Client(service, random.Random(0))
        while len(client.jobs) < 3:
            client.submit()
            time.sleep(0.2)
        assert come_to_rest(client) == [] == [*check_now(client), *check_at_rest(client)]
        succeeded = [job_id for job_id, known in client.jobs.items() if known.final == "succeeded"]

        folder = next((service.seen_home / "artifacts" / succeeded[0]).iterdir())
        (folder / "model.safetensors").write_bytes(b"damaged")
        (service.seen_home / "artifacts" / "job_unknown" / "files").mkdir(parents=True)
        with service.database() as connection:
            connection.execute("DELETE FROM event WHERE job_id = %s AND seq = 2", [succeeded[0]])
        wrong = " ".join([*check_now(client), *check_at_rest(client)])
        assert "damaged files" in wrong and "job_unknown" in wrong and "events have gaps" in wrong

        with service.database() as connection:
            connection.execute("DELETE FROM event WHERE job_id = %s", [succeeded[0]])
            connection.execute("UPDATE attempt SET outcome = 'lost' WHERE job_id = %s", [succeeded[0]])
        assert "after 0 attempts that succeeded" in " ".join(check_now(client))
