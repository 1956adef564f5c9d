"""The simulated device itself: what CUDA refuses is refused, and what CUDA would feel is counted, by line."""

import torch
from torch import nn

from tests.support.accelerator import on_accelerator
from tests.support.device_counts import Counts, place


def message_of(work):
    """What an operation says when it is refused, None if it is not."""
    try:
        work()
    except RuntimeError as error:
        return str(error)
    return None


def test_devices_are_not_mixed():
    def work(counts):
        here, there = torch.ones(3, 3), torch.ones(3, 3, device="sim")
        refused = [
            lambda: here + there,
            lambda: here @ there,
            lambda: torch.cat([here, there]),
            lambda: nn.functional.linear(there, here),
            lambda: torch.where(there > 0, here, there),
            lambda: there.index_select(0, torch.tensor([0])),
            lambda: here[torch.tensor([0], device="sim")],
            lambda: there.add_(here),
        ]
        allowed = [
            lambda: there + torch.tensor(2.0),
            lambda: there * 2,
            lambda: there[torch.tensor([0])],
            lambda: there.copy_(here),
            lambda: torch.where(there > 0, there, torch.tensor(0.0)),
        ]
        return [message_of(one) for one in refused], [message_of(one) for one in allowed], place()

    refused, allowed, here = on_accelerator(work)
    assert all("at least two devices" in (message or "") for message in refused), refused
    assert refused[0].rpartition(":")[0].endswith("tests/accelerator/test_device.py"), "it names our line"
    assert allowed == [None] * len(allowed)
    assert here.startswith("tests/accelerator/test_device.py:")


def test_waits_are_counted_by_line():
    def work(counts):
        x = torch.arange(6.0, device="sim")
        waiting = [
            lambda: x.sum().item(),
            lambda: x.tolist(),
            lambda: x.nonzero(),
            lambda: torch.equal(x, x),
            lambda: x[x > 2],
            lambda: x.masked_select(x > 2),
            lambda: bool((x > 0).any()),
            lambda: torch.unique(x),
            lambda: f"{x}",
            lambda: x.cpu(),
            lambda: x.long().bincount(),
        ]
        silent = [
            lambda: x.sum(),
            lambda: torch.where(x > 2, x, 0),
            lambda: x.argsort(stable=True).split([2, 4]),
            lambda: x[2:],
            lambda: x[torch.tensor([1, 2], device="sim")],
            lambda: torch.linalg.cholesky_ex(torch.eye(3, device="sim")),
        ]
        found = []
        for one in waiting + silent:
            before = counts.waits.total()
            one()
            found.append(counts.waits.total() - before)
        return found, len(waiting), list(counts.waits)

    found, num_waiting, lines = on_accelerator(work)
    assert found == [1] * num_waiting + [0] * (len(found) - num_waiting)
    assert len(lines) == num_waiting and all(line.startswith("tests/accelerator/test_device.py:") for line in lines)


def test_copies_are_counted_with_their_bytes():
    def work(counts):
        there = torch.ones(4, 8).to("sim")
        torch.tensor([1.0, 2.0], device="sim")
        there[[0, 1]]  # a list as an index is copied from the host
        there[0].cpu()
        host = torch.empty(8)
        host.copy_(there[1])
        there.clone().to("sim")
        torch.ones(2).pin_memory().to("sim")
        return counts

    counts = on_accelerator(work)
    assert counts.to_device.places.total() == 4 and counts.to_device.num_bytes == 4 * 32 + 8 + 16 + 8
    assert counts.to_device.pinned_bytes == 8
    assert counts.to_host.places.total() == 2 and counts.to_host.num_bytes == 2 * 32


def test_launches_are_those_of_kernels():
    def work(counts):
        x = torch.empty(4, 8, device="sim")
        assert x.T[1:].unsqueeze(0).squeeze(0).shape == (7, 4)
        before = counts.launches.total()
        x.zero_().add_(1).matmul(x.T)
        return before, counts.launches

    before, launches = on_accelerator(work)
    assert before == 0
    assert launches == {"aten.zero_.default": 1, "aten.add_.Tensor": 1, "aten.mm.default": 1}


def test_memory_is_held_by_storages_and_bounded():
    def work(counts):
        x = torch.zeros(1000, device="sim")  # 4000 bytes, of which 512 at a time are given out
        view = x[10:]
        held = [counts.held_bytes]
        del x
        held.append(counts.held_bytes)
        del view
        held.append(counts.held_bytes)
        refused = message_of(lambda: torch.zeros(10_000, device="sim"))
        return held, refused, counts.held_bytes, counts.peak_bytes, torch.accelerator.get_memory_info()

    held, refused, left, peak, info = on_accelerator(work, memory_bytes=10_240)
    assert held == [4096, 4096, 0]
    assert "out of memory" in refused
    assert (left, peak, info) == (0, 4096, (10_240, 10_240))


def test_a_model_learns_there():
    """In-place steps, gradients and new data of a parameter: the same numbers as on the CPU."""

    def train(device):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)).to(device)
        x = torch.randn(5, 8).to(device)
        model(x).square().sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
        model[0].weight.data = model[0].weight.data * 2
        with torch.inference_mode():
            return model(x)[1:].cpu().clone()

    assert torch.equal(train("cpu"), on_accelerator(lambda _: train("sim")))


def test_the_device_is_gone_afterwards():
    def work(counts: Counts):
        return torch.accelerator.is_available(), str(torch.accelerator.current_accelerator(check_available=True))

    assert on_accelerator(work) == (True, "sim")
    assert not torch.accelerator.is_available()
