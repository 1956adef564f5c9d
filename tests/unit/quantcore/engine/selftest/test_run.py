"""The self-test on the CPU alone, and how it compares."""

import pytest
import torch

from quantcore.engine.selftest import run
from quantcore.engine.selftest.parts import EXACT, NONE, Computed, Part
from quantcore.engine.selftest.run import check, compare, selftest, without_folders
from quantcore.errors import ConfigError, NumericsError
from quantcore.events import silence

CPU = torch.device("cpu")


def computed(codes=(), numbers=()):
    return Computed(torch.tensor(codes, dtype=torch.int16), torch.tensor(numbers))


def part(compute, reference=None, **more):
    return Part("group", "name", EXACT, lambda device: compute(), reference, **more)


def test_codes_and_numbers_are_compared():
    found = compare(computed([1, 2, 3, 4], [1.0, 2.0]), computed([1, 2, 0, 4], [1.0, 4.0]))
    assert (found.num_codes, found.share, found.largest) == (4, 0.25, 0.5)
    found = compare(computed([1, 2], [0.0]), computed([], [0.0]))
    assert (found.num_codes, found.share, found.largest) == (0, None, 0.0), "a reference may lack codes"
    with pytest.raises(NumericsError, match="NaN or infinite"):
        compare(computed([], [float("nan")]), computed([], [1.0]))
    with pytest.raises(ValueError, match=r"shape \[2\], instead of \[3\]"):
        compare(computed([1, 2]), computed([1, 2, 3]))


def test_the_cpu_alone_is_compared_with_what_there_is():
    threads = []

    def compute():
        threads.append(torch.get_num_threads())
        return computed([1])

    before = torch.get_num_threads()
    assert check(part(compute, lambda: computed([1])), CPU, 3).beside == "a reference"
    assert threads == [1, 1], "the second run is timed"
    found = check(part(compute), CPU, 3)
    assert (found.beside, found.verdict, found.difference.num_codes) == ("3 threads", "agreed", 1)
    found = check(part(compute, is_long=True), CPU, 3)
    assert (found.beside, found.verdict, found.difference, found.beside_s) == ("its own proof", "agreed", None, None)
    assert torch.get_num_threads() == before


def test_failures_are_told_without_folders():
    def broken():
        raise RuntimeError("no kernel image in /home/somebody/torch/lib/libtorch_cuda.so for this device")

    found = check(part(broken), CPU, 1)
    assert found.verdict == "failed" and found.difference is None
    assert found.error == "RuntimeError: no kernel image in libtorch_cuda.so for this device"

    def missing():
        raise KeyError("x")

    assert check(part(missing), CPU, 1).error == "KeyError: 'x'"

    def stopped():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check(part(stopped), CPU, 1)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("in /tmp/abc-1/x.py:12", "in x.py:12"),
        ("'/home/me/.cache/a b'", "'a b'"),
        (r"C:\Users\me\a.dll is missing", "a.dll is missing"),
        ("1/2 of a/b", "1/2 of a/b"),
    ],
)
def test_folders_are_left_out(text, shown):
    assert without_folders(text) == shown


def test_the_report_names_versions_and_no_machine(monkeypatch):
    monkeypatch.setattr(run, "todo", lambda: [part(lambda: computed([1])), part(lambda: computed([1]), lambda: NONE)])
    events = []
    found = selftest("cpu", events.append)
    assert not found.agreed, "the second one has a broken reference"
    assert [one.verdict for one in found.checks] == ["agreed", "failed"]
    assert found.device == {"type": "cpu"} and found.num_threads >= 1
    assert {"torch", "python", "quantcore", "transformers", "system", "machine"} <= found.environment.keys()
    assert "device" not in found.environment
    assert [event.kind for event in events] == ["phase_started", "progress", "progress"]


def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(ConfigError) as caught:
        selftest("cuda", silence)
    assert (caught.value.code, caught.value.allowed) == ("unknown_device", ("cpu",))
