"""Digests that are computed beside other work."""

import hashlib
import threading

import pytest
import torch

from quantcore.tensors import hashing
from quantcore.tensors.hashing import PARTS_AHEAD, Hashing, tensor_digest


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Parts of 64 bytes."""
    monkeypatch.setattr(hashing, "PART_BYTES", 64)


def by_hand(tensor):
    data = tensor.contiguous().numpy().tobytes()
    parts = [data[start : start + 64] for start in range(0, len(data) or 1, 64)]
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


@pytest.mark.parametrize("num_threads", [1, 4])
def test_digests_are_those_of_the_bytes(num_threads):
    tensors = {f"{number}": torch.arange(100.0).view(10, 10).T + number for number in range(20)}
    tensors |= {"one": torch.tensor(1.0), "none": torch.empty(0), "half": torch.ones(33).bfloat16()}
    found, work = {}, Hashing(num_threads)
    for name, tensor in tensors.items():
        work.add(found, name, tensor)
    work.settle()
    assert found == {name: by_hand(one.view(torch.int16) if name == "half" else one) for name, one in tensors.items()}
    assert found == {name: tensor_digest(one) for name, one in tensors.items()}
    assert len(set(found.values())) == len(found)


def test_few_parts_wait_at_a_time(monkeypatch):
    begun, taken, may_end = [], [], threading.Event()

    def slow(part, is_ready):
        begun.append(part)
        may_end.wait(10)
        return b"digest"

    def parts(tensor):
        for part in torch.split(tensor, 1):
            taken.append(part)
            yield part

    monkeypatch.setattr(hashing, "_digest_of_part", slow)
    monkeypatch.setattr(hashing, "_parts", parts)
    work, found = Hashing(2), {}
    waited = []
    timer = threading.Timer(0.3, lambda: (waited.append((len(begun), len(taken))), may_end.set()))
    timer.start()
    work.add(found, "weight", torch.zeros(50))
    work.settle()
    assert waited == [(2, 2 * PARTS_AHEAD + 1)] and len(begun) == 50 and list(found) == ["weight"]


def test_a_failure_is_raised(monkeypatch):
    def fail(part, is_ready):
        raise MemoryError("none left")

    monkeypatch.setattr(hashing, "_digest_of_part", fail)
    work = Hashing(2)
    with pytest.raises(MemoryError, match="none left"):
        work.add({}, "weight", torch.zeros(1))
        work.settle()
