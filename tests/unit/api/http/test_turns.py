"""Turns: one piece of work of a project at a time, few at once, and the projects one after the other."""

import asyncio

import pytest

from api.http import turns
from api.http.errors import Problem
from api.http.turns import Turns


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_projects_take_turns() -> None:
    async def run() -> tuple[list[str], int]:
        taken, order, now, most = Turns(), list[str](), set[str](), 0

        async def work(name: str) -> None:
            nonlocal most
            async with taken.take(name[0]):
                order.append(name)
                assert name[0] not in now, "one of a project at a time"
                now.add(name[0])
                most = max(most, len(now))
                await settle()
                now.discard(name[0])

        names = [f"a{n}" for n in range(6)] + ["b0", "b1", "c0"]
        await asyncio.gather(*map(work, names))
        return order, most

    order, most = asyncio.run(run())
    assert most == turns.NUM_AT_ONCE + turns.NUM_SHORT
    assert order.index("b0") <= 1 and order.index("c0") <= 4 and order.index("b1") <= 4
    assert [name for name in order if name[0] == "a"] == [f"a{n}" for n in range(6)]


def test_who_leaves_the_line_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        taken = Turns()

        async def hold(project_id: str, until: asyncio.Event) -> None:
            async with taken.take(project_id):
                await until.wait()

        over = asyncio.Event()
        first = asyncio.create_task(hold("a", over))
        waiting = [asyncio.create_task(hold("a", over)) for _ in range(3)]
        await settle()
        for task in (waiting[0], waiting[2]):
            task.cancel()
        await settle()
        assert len(taken._waiting["a"]) == 1, "those that left do not count as waiting"
        first.cancel()  # while it has its turn
        await settle()
        over.set()
        await asyncio.wait_for(waiting[1], 10)
        async with taken.take("a"):
            pass
        assert not taken._waiting and not taken._busy

        monkeypatch.setattr(turns, "MAX_WAIT_S", 0.05)
        async with taken.take("a"):
            with pytest.raises(Problem, match="waiting to be read"):
                async with taken.take("a"):
                    raise AssertionError("a turn while another one is under way")
            monkeypatch.setattr(turns, "MAX_WAITING", 0)
            with pytest.raises(Problem):
                async with taken.take("b"):
                    pass
        monkeypatch.undo()
        async with taken.take("a"), taken.take("b"):
            pass
        assert not taken._waiting and not taken._busy

    asyncio.run(run())


def test_a_short_piece_waits_for_no_long_ones_of_others() -> None:
    """Two projects hold both places for long, a third one with long work waits, and a fourth with short work does not.

    Of two that wait, the one with the shorter work is first, and who has used much comes last, however short it is.
    """

    async def run() -> list[str]:
        taken, order, gates = Turns(), list[str](), {name: asyncio.Event() for name in "abcdefg"}

        async def work(name: str, num_bytes: int) -> None:
            async with taken.take(name, num_bytes):
                order.append(name)
                await gates[name].wait()

        long, short = 10**10, 10**3
        tasks = [asyncio.create_task(work(name, size)) for name, size in (("a", long), ("b", long), ("c", long))]
        await settle()
        assert order == ["a", "b"]
        tasks.append(asyncio.create_task(work("d", short)))
        await settle()
        assert order == ["a", "b", "d"], "it goes beside the long ones, before the long one that waits"
        taken._used["e"] = turns.SHORT_S * 2, turns.time.monotonic()
        waiting = (("e", short), ("f", 50 * short), ("g", short))
        tasks += [asyncio.create_task(work(name, size)) for name, size in waiting]
        for name in "dgf":
            await settle()
            gates[name].set()
        await settle()
        assert order == ["a", "b", "d", "g", "f"], "one that has used much takes no place for short work"
        for gate in gates.values():
            gate.set()
        await asyncio.gather(*tasks)
        assert not taken._waiting and not taken._busy
        return order

    assert asyncio.run(run())[-2:] == ["e", "c"]
