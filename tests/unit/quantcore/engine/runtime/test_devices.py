"""Which device is used, and what is known of it."""

import pytest
import torch

from quantcore.engine.runtime import devices
from quantcore.errors import ConfigError
from tests.support.accelerator import on_accelerator


def test_the_default_device_may_be_named(monkeypatch):
    assert devices.default_device() == torch.device("cpu")
    monkeypatch.setenv(devices.DEVICE, "cuda:1")
    assert devices.default_device() == torch.device("cuda", 1)


def test_devices_are_found_by_name():
    def work(counts):
        names = [None, "cpu", "sim", "sim:0"]
        with pytest.raises(ConfigError) as caught:
            devices.named_device("sim:1")
        return [str(devices.named_device(name)) for name in names], caught.value.message, caught.value.allowed

    found, message, allowed = on_accelerator(work)
    assert found == ["sim", "cpu", "sim", "sim:0"]
    assert message == "Unknown device 'sim:1'." and allowed == ("cpu", "sim", "sim:0")
    assert devices.named_device(None) == torch.device("cpu")


def test_a_device_is_described():
    assert devices.about(torch.device("cpu")) == {"type": "cpu"}
    sim = on_accelerator(lambda _: devices.about(devices.default_device()), memory_bytes=1 << 20)
    assert sim == {"type": "sim", "memory_bytes": 1 << 20}


def test_the_host_waits_for_the_device():
    def work(counts):
        before = counts.waits.total()
        devices.wait_for(devices.default_device())
        devices.wait_for(torch.device("cpu"))
        return counts.waits.total() - before

    assert on_accelerator(work) == 1
