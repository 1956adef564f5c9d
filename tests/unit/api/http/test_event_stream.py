"""The streams of one project share what the process has: they read in turn, and send one piece in a round."""

import asyncio
import threading
from typing import Any

from api.http.event_stream import Feed


def make_feed() -> Feed:
    """A feed without a database: none of its streams is registered here."""
    missing: Any = None
    return Feed(missing, missing)


def test_streams_of_a_project_send_one_piece_in_a_round() -> None:
    async def run() -> list[str]:
        feed, sent = make_feed(), list[str]()

        async def send(project: str) -> None:
            await feed.give_way(project)
            sent.append(project)

        tasks = [asyncio.create_task(send("a")) for _ in range(20)]
        await asyncio.sleep(0)
        tasks.append(asyncio.create_task(send("b")))
        await asyncio.gather(*tasks)
        return sent

    sent = asyncio.run(run())
    assert sent.count("a") == 20 and sent.index("b") < 5


def test_streams_of_a_project_read_one_after_the_other() -> None:
    """Another project's stream does not wait for them. Those that want the same have one reading."""

    async def run() -> tuple[int, list[int]]:
        feed, gate, lock = make_feed(), threading.Event(), threading.Lock()
        now = most = num_readings = 0

        def read_slowly() -> int:
            nonlocal now, most, num_readings
            with lock:
                now, num_readings = now + 1, num_readings + 1
                most = max(most, now)
            gate.wait(20)
            with lock:
                now -= 1
            return num_readings

        waiting = [asyncio.ensure_future(feed.read("job", "a", number // 2, read_slowly)) for number in range(10)]
        await asyncio.sleep(0)
        assert await asyncio.wait_for(feed.read("other", "b", 0, lambda: "at once"), 20) == "at once"
        gate.set()
        numbers = await asyncio.wait_for(asyncio.gather(*waiting), 20)
        return most, numbers

    most, numbers = asyncio.run(run())
    assert most == 1 and numbers == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
