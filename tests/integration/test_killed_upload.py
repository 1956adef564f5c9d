"""An API that is killed in the middle of an upload: the part that was there is, the other is not, and all goes on."""

import hashlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx2
import pytest

from api.http.security import create_key
from api.settings import Settings
from api.store.engine import Sessions
from tests.support.faults import ApiProcess
from tests.support.waiting import PATIENCE_S, wait_until

ROWS = b'{"text": "a few words of a row"}\n'
PARTS = (ROWS * 50_000, ROWS * 10)


@pytest.mark.slow
def test_an_upload_goes_on_after_the_api_was_killed(settings: Settings, sessions: Sessions, tmp_path: Path) -> None:
    headers = {"Authorization": f"Bearer {create_key(sessions, 'k')}"}
    first, second = (hashlib.sha256(part).hexdigest() for part in PARTS)

    def slowly() -> Iterator[bytes]:
        """So that most of it is on the disk, and the rest never comes."""
        yield PARTS[0][: len(PARTS[0]) - len(ROWS)]
        deadline = time.monotonic() + PATIENCE_S
        while api.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)

    def put_slowly() -> None:
        with suppress(httpx2.TransportError):
            client.put(f"{upload}/parts/1", params={"sha256": first}, content=slowly())

    with (
        ApiProcess(settings, tmp_path / "api.log") as api,
        httpx2.Client(base_url=api.url, headers=headers, trust_env=False, timeout=PATIENCE_S) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        upload = f"/v1/uploads/{client.post('/v1/uploads', json={'filename': 'a.jsonl'}).json()['id']}"
        assert client.put(f"{upload}/parts/2", params={"sha256": second}, content=PARTS[1]).status_code == 200
        cut = pool.submit(put_slowly)
        wait_until(lambda: any(path.stat().st_size >= 1 << 20 for path in settings.uploads_dir.glob("*.part")))
        api.kill()
        cut.result(PATIENCE_S)
        api.start()
        assert [part["number"] for part in client.get(upload).json()["parts"]] == [2]
        assert client.put(f"{upload}/parts/1", params={"sha256": first}, content=PARTS[0]).status_code == 200
        whole = hashlib.sha256(b"".join(PARTS)).hexdigest()
        done = client.post(f"{upload}/complete", json={"sha256": whole})
        assert (done.status_code, done.json()["sha256"]) == (201, whole), done.text
    (kept,) = settings.datasets_dir.iterdir()
    assert hashlib.sha256(kept.read_bytes()).hexdigest() == whole
