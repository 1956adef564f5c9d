"""Files that are made to cost memory and time: they cost their sender a turn, and nobody else anything."""

import gzip
import io
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx2
import psutil
import pyarrow
import pytest
from pyarrow import parquet

from api.http.security import create_key
from api.settings import Settings
from api.store.engine import Sessions
from api.store.ids import new_id
from api.store.tables.jobs import Project
from tests.support.faults import ApiProcess
from tests.support.service import wait_gone
from tests.support.waiting import PATIENCE_S, wait_until

MAX_READER_BYTES = 5 << 29  # its limit of 2 GiB, and the libraries that it maps
ANSWER_S = 40  # an upload of somebody else, on a busy machine; what is slow here takes minutes
HEALTH_S = 5


def dictionary_bomb(chars: int = 8 << 20, num_rows: int = 4000) -> bytes:
    """Some hundred bytes of Parquet: one long text in a dictionary, and thousands of rows that all name it."""
    indices = pyarrow.array([0] * num_rows, pyarrow.int32())
    column = pyarrow.DictionaryArray.from_arrays(indices, pyarrow.array(["a" * chars]))
    file = io.BytesIO()
    parquet.write_table(pyarrow.table({"text": column}), file, compression="zstd", store_schema=False)
    return file.getvalue()


def slow_file() -> bytes:
    """20 kB that are allowed, and take a reader twenty seconds: almost five million short rows."""
    return gzip.compress(b"text\n" + b"a b\n" * 4_900_000)


def post_raw(api: ApiProcess, key: str, name: str, content: bytes) -> socket.socket:
    """An upload whose answer is not waited for."""
    request = httpx2.Request(
        "POST", f"{api.url}/v1/datasets", headers={"Authorization": f"Bearer {key}"}, files={"file": (name, content)}
    )
    head = "".join(f"{header}: {value}\r\n" for header, value in request.headers.items())
    connection = socket.create_connection(("127.0.0.1", api.port))
    connection.sendall(f"POST /v1/datasets HTTP/1.1\r\n{head}\r\n".encode() + request.read())
    return connection


def readers(api: ApiProcess) -> list[psutil.Process]:
    found = []
    for process in psutil.Process(api.process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "examine" in process.cmdline():
                found.append(process)
    return found


class Watch:
    """Asks how the process is while others do it harm: the slowest answer, the largest reader, the most of them."""

    def __init__(self, api: ApiProcess) -> None:
        self.slowest_s, self.most_bytes, self.most_readers = 0.0, 0, 0
        self._api, self._over = api, threading.Event()
        self._threads = [threading.Thread(target=each) for each in (self._ask, self._measure)]

    @contextmanager
    def running(self) -> Iterator[None]:
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            for thread in self._threads:
                thread.join()

    def _ask(self) -> None:
        with httpx2.Client(base_url=self._api.url, trust_env=False, timeout=PATIENCE_S) as http:
            while not self._over.wait(0.05):
                began = time.monotonic()
                assert http.get("/healthz/live").status_code == 200
                self.slowest_s = max(self.slowest_s, time.monotonic() - began)

    def _measure(self) -> None:
        while not self._over.wait(0.05):
            found = readers(self._api)
            self.most_readers = max(self.most_readers, len(found))
            for process in found:
                with suppress(psutil.NoSuchProcess):
                    self.most_bytes = max(self.most_bytes, process.memory_info().rss)


@pytest.mark.slow
def test_files_that_cost_much_cost_only_their_sender(settings: Settings, sessions: Sessions, tmp_path: Path) -> None:
    other = new_id("prj")
    with sessions.begin() as session:
        session.add(Project(id=other, name="other"))
    key, other_key = create_key(sessions, "a"), create_key(sessions, "b", project_id=other)
    bomb, slow = dictionary_bomb(), slow_file()
    with ApiProcess(settings, tmp_path / "api.log") as api, ExitStack() as attack:
        watch = Watch(api)
        with watch.running():
            for n in range(4):
                attack.enter_context(post_raw(api, key, f"{n}.parquet", bomb))
            for n in range(25):
                attack.enter_context(post_raw(api, key, f"{n}.csv.gz", slow))
            for _ in range(3):
                began = time.monotonic()
                answer = httpx2.post(
                    f"{api.url}/v1/datasets",
                    headers={"Authorization": f"Bearer {other_key}"},
                    files={"file": ("rows.jsonl", b'{"text": "a row"}\n')},
                    trust_env=False,
                    timeout=2 * ANSWER_S,
                )
                assert answer.status_code == 201, answer.text
                assert time.monotonic() - began < ANSWER_S
            assert readers(api), "the attack is still under way"
        assert watch.slowest_s < HEALTH_S
        assert watch.most_readers <= 2 and 0 < watch.most_bytes < MAX_READER_BYTES
        attack.close()
        # readers do not go on for clients that are gone
        wait_until(lambda: not (readers(api) or list(settings.uploads_dir.iterdir())), timeout_s=ANSWER_S)


@pytest.mark.slow
def test_a_reader_ends_with_the_service(settings: Settings, sessions: Sessions, tmp_path: Path) -> None:
    key, slow = create_key(sessions, "a"), slow_file()
    with ApiProcess(settings, tmp_path / "api.log") as api, post_raw(api, key, "a.csv.gz", slow):
        found = wait_until(lambda: readers(api))
        api.kill()
        wait_gone([process.pid for process in found], timeout_s=10)
