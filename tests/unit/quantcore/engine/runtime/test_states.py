"""Hidden states in one tensor or in a file without a name."""

import weakref

import pytest
import torch

from quantcore.engine.runtime import devices, states
from quantcore.engine.runtime.hidden import Hidden
from quantcore.engine.runtime.states import StatesInMemory, StatesOnDisk, states_kept
from quantcore.errors import ModelError

CPU = torch.device("cpu")
NUM = 5


def some(dtype=torch.bfloat16):
    return [torch.randn(1, 7, 12, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(NUM)]


@pytest.fixture(params=["memory", "disk"])
def kept(request, tmp_path):
    return StatesInMemory(NUM) if request.param == "memory" else StatesOnDisk(NUM, tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_put_comes_back(kept, dtype):
    given = some(dtype)
    kept.extend(given)
    assert len(kept) == NUM and all(torch.equal(one, other) for one, other in zip(kept, given, strict=True))
    kept[3] = given[0] + 1
    assert torch.equal(kept[3], given[0] + 1) and torch.equal(kept[-2], kept[3])
    assert torch.equal(kept[2], given[2]) and torch.equal(kept[4], given[4])
    assert [torch.equal(one, other) for one, other in zip(kept[:2], given[:2], strict=True)] == [True, True]


def test_what_is_put_is_not_held(kept):
    state = some()[0]
    alive = weakref.ref(state)
    kept.append(state)
    state += 1
    assert torch.equal(kept[0], some()[0])
    del state
    assert alive() is None


def test_no_file_is_seen(tmp_path):
    kept = StatesOnDisk(NUM, tmp_path)
    kept.extend(some())
    assert not list(tmp_path.iterdir())


def test_strides(kept):
    wide = torch.randn(1, 12, 7).transpose(1, 2)
    kept.append(wide)
    kept.append(wide + 1)
    assert torch.equal(kept[0], wide) and torch.equal(kept[1], wide + 1)


def test_what_does_not_fit_is_refused(kept):
    kept.extend(some())
    with pytest.raises(ModelError, match=r"1, 8, 12.*1, 7, 12"):
        kept[0] = torch.zeros(1, 8, 12, dtype=torch.bfloat16)
    with pytest.raises(IndexError):
        kept[NUM]
    with pytest.raises(IndexError):
        kept[-NUM - 1] = some()[0]
    with pytest.raises(IndexError, match="5 hidden states"):
        kept.append(some()[0])
    with pytest.raises(IndexError):
        kept.insert(0, some()[0])
    with pytest.raises(TypeError):
        del kept[0]
    assert len(kept) == NUM and torch.equal(kept[4], some()[4])


def test_states_of_a_wider_dtype_stand_beside_the_others(kept):
    """Mamba's blocks return float32 where the embedding gives bfloat16."""
    kept.extend(some())
    wide = torch.randn(1, 7, 12)
    kept[1] = wide
    assert torch.equal(kept[1], wide) and kept[1].dtype == torch.float32
    assert all(torch.equal(kept[i], some()[i]) and kept[i].dtype == torch.bfloat16 for i in (0, 2, 3, 4))
    other = kept.copy()
    kept[1] = some()[1]
    assert torch.equal(kept[1], some()[1]) and torch.equal(other[1], wide)


def test_a_copy_goes_its_own_way(kept):
    kept.extend(some())
    for other in (Hidden(kept).copy().states, Hidden(list(kept)).copy().states):
        other[1] = other[0]
        other[2].zero_()
        assert torch.equal(kept[1], some()[1]) and torch.equal(kept[2], some()[2])
        assert torch.equal(other[1], some()[0])
    assert type(kept.copy()) is type(kept)


def test_the_limit_is_a_share_of_the_free_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(states, "free_memory_bytes", lambda device: 4000)
    assert isinstance(states_kept(NUM, 1000, CPU, tmp_path), StatesInMemory)
    assert isinstance(states_kept(NUM, 1001, CPU, tmp_path), StatesOnDisk)


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
