"""From what an engine prints to rows: in order, without secrets, nothing lost in silence."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from api.store.queue.leases import LeaseLost
from tests.support.waiting import wait_until
from worker import joblog
from worker.joblog import JobLog, guess_level
from worker.redaction import Redactor


class FakeLease:
    """Keeps what would be written."""

    def __init__(self) -> None:
        self.written: list[list[tuple[str, str]]] = []
        self.lost = False

    def write(self, change: Any, *, lines: Any) -> None:
        if self.lost:
            raise LeaseLost
        self.written.append([(line.level, line.text) for line in lines])


def make(lease: FakeLease) -> JobLog:
    return JobLog(lease, Redactor(["a-secret-value"]))  # type: ignore[arg-type]


def test_lines_arrive_whole_clean_and_in_order() -> None:
    lease, lines = FakeLease(), [b"one\n", b"  10%|#\r 50%|##\r100%|###\n", b"\n", b"a-secret-value here\xff\n"]
    log = make(lease)
    log.follow(iter([*lines, b"\x1b[31mERROR red\x1b[0m\x00\x07 end\n", b"x" * 9000]))
    log.close()
    [written] = lease.written
    assert written == [
        ("info", "one"),
        ("info", "100%|###"),
        ("info", "*** here\ufffd"),
        ("error", "ERROR red end"),
        ("info", "x" * joblog.MAX_LINE_CHARACTERS),
    ]


def test_what_has_come_is_written_while_the_engine_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joblog, "FLUSH_S", 0.05)
    lease, go_on = FakeLease(), threading.Event()

    def lines() -> Iterator[bytes]:
        yield b"early\n"
        go_on.wait(5)
        yield b"late\n"

    log = make(lease)
    log.follow(lines())
    wait_until(lambda: lease.written, timeout_s=60)
    assert lease.written == [[("info", "early")]]
    go_on.set()
    log.close()
    assert lease.written[1:] == [[("info", "late")]]


def test_lines_that_could_not_be_kept_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joblog, "MAX_WAITING", 3)
    lease = FakeLease()
    log = make(lease)
    for number in range(10):
        log.add(str(number), "info")
    log.close()
    [[warning, *kept]] = lease.written
    assert warning == ("warning", "7 lines were dropped here: they arrived faster than they could be written")
    assert kept == [("info", "7"), ("info", "8"), ("info", "9")]


def test_a_lost_lease_ends_the_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joblog, "FLUSH_S", 0.01)
    lease = FakeLease()
    lease.lost = True
    log = make(lease)
    log.follow(iter([b"x\n"]))
    for thread in log._threads:
        thread.join(5)
        assert not thread.is_alive()
    log.add("y", "info")
    with pytest.raises(LeaseLost):
        log.close()


def test_the_tail_is_the_last_words() -> None:
    log = make(FakeLease())
    log.follow(iter(f"line {number} {'x' * 90}\n".encode() for number in range(100)))
    log.close()
    assert log.tail.endswith(f"line 99 {'x' * 90}")
    assert len(log.tail) <= joblog.MAX_TAIL_CHARACTERS


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("2026 ERROR x: y", "error"),
        ("Traceback (most recent call last):", "error"),
        ("torch.OutOfMemoryError: no", "error"),
        ("/a/b.py:3: UserWarning: careful", "warning"),
        ("WARNING x", "warning"),
        ("DEBUG x", "debug"),
        ("no errors were found", "info"),
        ("terrors", "info"),
    ],
)
def test_levels_are_read_from_the_line(text: str, level: str) -> None:
    assert guess_level(text, "info") == level
    assert guess_level("  indented", level) == level
