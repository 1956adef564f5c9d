"""What ranks send each other; ``tests/integration/test_ranks.py`` has jobs on several."""

from collections import deque

import torch
from torch import nn

from quantcore.engine.runtime.ranks import _Parcel
from tests.support.accelerator import on_accelerator


def sent(value):
    """``value`` as another rank receives it: both ends of an exchange in one process."""
    packed_on_the_way, bytes_on_the_way = [], deque()
    _Parcel.exchange(_Parcel.of(value), packed_on_the_way.extend, bytes_on_the_way.append)

    def receive_packed(packed):
        packed[:] = packed_on_the_way

    return _Parcel.exchange(None, receive_packed, lambda here: here.copy_(bytes_on_the_way.popleft())).open()


def test_each_tensor_stays_on_the_host_or_on_the_device():
    def work(counts):
        here, there = torch.arange(6.0).view(2, 3).T, torch.ones(2, device="sim")
        found = sent({"text": here, "sums": [there, there], "count": 3})
        same = torch.equal(found["text"], here), torch.equal(found["sums"][0].cpu(), there.cpu())
        devices = found["text"].device.type, found["sums"][0].device.type
        return same, devices, found["sums"][0] is found["sums"][1], found["count"]

    assert on_accelerator(work) == ((True, True), ("cpu", "sim"), True, 3)


def test_a_parameter_stays_a_parameter():
    found = sent(nn.Parameter(torch.ones(2)))
    assert isinstance(found, nn.Parameter) and found.tolist() == [1, 1]
