"""Digests that are computed beside other work."""

import hashlib
import threading

import pytest
import torch

from quantcore.checkpoint import hashing
from quantcore.checkpoint.hashing import AT_ONCE, Hashing


@pytest.mark.parametrize("in_threads", [False, True])
def test_digests_are_those_of_the_bytes(in_threads):
    tensors = {f"{number}": torch.arange(100.0).view(10, 10).T + number for number in range(6)}
    found, work = {}, Hashing(in_threads=in_threads)
    for name, tensor in tensors.items():
        work.add(found, name, tensor)
    work.settle()
    assert found == {
        name: hashlib.sha256(one.contiguous().numpy().tobytes()).hexdigest() for name, one in tensors.items()
    }


def test_few_tensors_are_held_at_a_time(monkeypatch):
    running, most, may_end = set(), [], threading.Event()

    def slow(tensor):
        running.add(int(tensor))
        most.append(len(running))
        may_end.wait(10)
        running.discard(int(tensor))
        return "digest"

    monkeypatch.setattr(hashing, "digest", slow)
    work, found = Hashing(in_threads=True), {}
    threading.Timer(0.2, may_end.set).start()
    for number in range(5):
        work.add(found, str(number), torch.tensor(number))
    work.settle()
    assert len(found) == 5 and max(most) <= AT_ONCE


def test_a_failure_is_raised(monkeypatch):
    def fail(tensor):
        raise MemoryError("none left")

    monkeypatch.setattr(hashing, "digest", fail)
    work = Hashing(in_threads=True)
    work.add({}, "weight", torch.zeros(1))
    with pytest.raises(MemoryError, match="none left"):
        work.settle()
