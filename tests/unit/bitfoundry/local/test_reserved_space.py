"""PostgreSQL on a disk that is full, on a real one: a small disk of a process's own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.faults import on_a_small_disk

FILL_AND_COME_BACK = """
import sys, time
from contextlib import suppress
from pathlib import Path

import psycopg

from bitfoundry.local import reserved_space
from bitfoundry.local.stack import Postgres
from bitfoundry.local.supervision import Supervised

reserved_space.BALLAST_BYTES, reserved_space.MIN_FREE_BYTES = 32 << 20, 48 << 20
home = Path(sys.argv[1]) / "home"
server = Postgres(home)
url = server.start().replace("+psycopg", "", 1)
tended = Supervised(server, print)
assert (len(sys.argv) > 2) or not server.ballast.make()

def execute(statement):
    with psycopg.connect(url, autocommit=True) as session:
        return session.execute(statement).fetchone()

with psycopg.connect(url) as session:
    session.execute("CREATE TABLE kept AS SELECT 7 AS n")
with suppress(OSError), (home / "filler").open("wb", buffering=0) as filler:
    while True:
        filler.write(bytes(1 << 16))
with suppress(psycopg.Error):
    while True:  # what it writes to its log does not fit
        execute("SELECT pg_logical_emit_message(false, 'x', repeat('x', 1000000))")
server._process.wait(30)
print("ended", flush=True)

def comes_back(limit_s):
    limit = time.monotonic() + limit_s
    while time.monotonic() < limit:
        tended.look()
        with suppress(psycopg.Error):
            return execute("SELECT n FROM kept") == (7,)
        time.sleep(0.1)
    return False

print("while the disk is full:", comes_back(4 if len(sys.argv) > 2 else 30), flush=True)
(home / "filler").unlink()
print("with room:", comes_back(30), flush=True)
server.ballast.make()
print("ballast:", (home / "postgres.ballast").exists(), flush=True)
server.stop()
"""


def run(disk: Path, *more: str) -> str:
    prefix = on_a_small_disk(disk, size="180m")
    command = [*prefix, "sh", "-c", 'chmod 755 "$1"; shift; exec "$@"', "sh", str(disk), sys.executable, "-c"]
    done = subprocess.run(
        [*command, FILL_AND_COME_BACK, str(disk), *more], capture_output=True, text=True, timeout=120, env=os.environ
    )
    assert "ended" in done.stdout, done.stderr
    return done.stdout


def test_the_ballast_lets_it_start_on_a_full_disk(tmp_path: Path) -> None:
    said = run(tmp_path / "disk")
    assert "while the disk is full: True\nwith room: True\nballast: True\n" in said


@pytest.mark.slow
def test_without_a_ballast_it_starts_once_there_is_room(tmp_path: Path) -> None:
    said = run(tmp_path / "disk", "without")
    assert "while the disk is full: False\n" in said
    assert "with room: True\n" in said
