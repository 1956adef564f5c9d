"""Hidden states in memory or in a file without a name."""

import weakref

import pytest
import torch

from quantcore.runtime import devices, states
from quantcore.runtime.states import StatesOnDisk, copied, states_kept

CPU = torch.device("cpu")


def some(dtype=torch.bfloat16, num=5):
    return [torch.randn(1, 7, 12, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(num)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_on_disk_comes_back(tmp_path, dtype):
    given = some(dtype)
    kept = StatesOnDisk(tmp_path)
    kept.extend(given)
    assert len(kept) == 5 and all(torch.equal(one, other) for one, other in zip(kept, given, strict=True))
    kept[3] = given[0] + 1
    assert torch.equal(kept[3], given[0] + 1) and torch.equal(kept[-2], kept[3])
    assert torch.equal(kept[2], given[2]) and torch.equal(kept[4], given[4])
    assert [torch.equal(one, other) for one, other in zip(kept[:2], given[:2], strict=True)] == [True, True]


def test_nothing_stays_in_memory_and_no_file_is_seen(tmp_path):
    kept = StatesOnDisk(tmp_path)
    state = some()[0]
    alive = weakref.ref(state)
    kept.append(state)
    del state
    assert alive() is None
    kept[0] += 1  # what is read is a copy: it has to be put back
    assert not list(tmp_path.iterdir())
    one = kept[0]
    one.zero_()
    assert kept[0].any()


def test_parts_of_a_tensor_and_strides(tmp_path):
    kept = StatesOnDisk(tmp_path)
    wide = torch.randn(1, 12, 7).transpose(1, 2)
    kept.append(wide)
    kept.append(wide + 1)
    assert torch.equal(kept[0], wide) and torch.equal(kept[1], wide + 1)


def test_a_state_of_another_shape_or_place_is_refused(tmp_path):
    kept = StatesOnDisk(tmp_path)
    kept.extend(some())
    with pytest.raises(ValueError, match=r"7, 12.*bfloat16"):
        kept[0] = torch.zeros(1, 8, 12, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="float32"):
        kept.append(torch.zeros(1, 7, 12))
    with pytest.raises(IndexError):
        kept[5]
    with pytest.raises(IndexError):
        kept.insert(0, some()[0])
    with pytest.raises(TypeError):
        del kept[0]
    assert len(kept) == 5 and torch.equal(kept[4], some()[4])


@pytest.mark.parametrize("on_disk", [True, False])
def test_copies_are_kept_where_the_states_are(tmp_path, on_disk):
    given = StatesOnDisk(tmp_path) if on_disk else []
    given.extend(some())
    copy, doubled = copied(given), copied(given, lambda state: state * 2)
    assert type(copy) is type(doubled) is type(given)
    copy[1] = copy[0]
    assert torch.equal(given[1], some()[1]) and torch.equal(doubled[1], some()[1] * 2)


def test_the_limit_is_a_share_of_the_free_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(states, "free_memory_bytes", lambda device: 4000)
    assert states_kept(1000, CPU, tmp_path) == []
    assert isinstance(states_kept(1001, CPU, tmp_path), StatesOnDisk)


@pytest.mark.parametrize(
    ("limit", "used", "expected"),
    [(None, None, 8_000_000 * 1024), ("max\n", "5\n", 8_000_000 * 1024), ("7000\n", "3000\n", 4000), ("7", "9", 0)],
)
def test_free_memory_is_that_of_the_system_or_of_the_container(tmp_path, monkeypatch, limit, used, expected):
    (tmp_path / "meminfo").write_text("MemTotal:  9000000 kB\nMemFree:  10 kB\nMemAvailable:    8000000 kB\n")
    monkeypatch.setattr(devices, "MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(devices, "CGROUP", tmp_path)
    if limit is not None:
        (tmp_path / "memory.max").write_text(limit)
        (tmp_path / "memory.current").write_text(used)
    assert devices.free_memory_bytes(CPU) == expected
