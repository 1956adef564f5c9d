"""Where kernels are used."""

import subprocess
import sys

import pytest
import torch

from quantcore.tensors.kernels import switch

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def on_the_cpu(interpreter, monkeypatch):
    """As if it was a GPU."""
    monkeypatch.setattr(switch, "DEVICES", ("cpu",))
    switch._runs_one.cache_clear()
    yield
    switch._runs_one.cache_clear()


def test_only_on_the_devices_that_run_them(monkeypatch):
    assert switch.are_used_on(CPU) and not switch.are_used_on(torch.device("xpu"))
    monkeypatch.setenv(switch.KERNELS, "off")
    assert not switch.are_used_on(CPU)


def test_not_without_triton(monkeypatch):
    monkeypatch.setattr(switch, "find_spec", lambda name: None)
    assert not switch.are_used_on(CPU)


def test_where_none_can_be_compiled_it_is_said_once(monkeypatch, caplog):
    def fail(*_):
        raise RuntimeError("Failed to find C compiler")

    from quantcore.tensors.kernels import trial

    monkeypatch.setattr(trial, "doubled", fail)
    assert not switch.are_used_on(CPU) and not switch.are_used_on(CPU)
    assert len(caplog.records) == 1 and "cannot compile kernels here (RuntimeError)" in caplog.text


def test_triton_is_not_loaded_where_kernels_are_not_used():
    code = "import torch, quantcore.engine.solvers.gptq; from quantcore.tensors.kernels import switch; import sys; "
    code += "switch.are_used_on(torch.device('cpu')); print('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"
