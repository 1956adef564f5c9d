"""Tensors that are read before they are asked for."""

import pytest
import torch
from safetensors.torch import save_file

from quantcore.checkpoint.headers import read_tensor_headers
from quantcore.engine.runtime import read_ahead
from quantcore.engine.runtime.read_ahead import ReadAhead
from quantcore.errors import ModelError
from quantcore.tensors.source import Source


@pytest.fixture
def source(tmp_path):
    save_file({name: torch.randn(4, 5) for name in "abc"}, tmp_path / "model.safetensors")
    return Source(tmp_path, read_tensor_headers(tmp_path))


def test_it_gives_what_the_source_gives(source):
    ahead = ReadAhead(source)
    ahead.expect(["a", "b", "not there"])
    assert list(ahead._ahead) == ["a", "b"]
    for name in ("b", "c", "a", "a"):
        assert torch.equal(ahead.read(name), source.read(name))
    assert not ahead._ahead, "each is held until it is read"


def test_what_is_not_read_is_forgotten(source):
    ahead = ReadAhead(source)
    ahead.expect(["a"])
    ahead.expect(["b"])
    assert list(ahead._ahead) == ["b"]


def test_too_much_is_not_read_ahead(source, monkeypatch):
    ahead = ReadAhead(source)
    monkeypatch.setattr(read_ahead, "free_memory_bytes", lambda device: 8 * 80 - 1)
    ahead.expect(["a"])
    assert not ahead._ahead
    monkeypatch.setattr(read_ahead, "free_memory_bytes", lambda device: 8 * 80)
    ahead.expect(["a"])
    assert list(ahead._ahead) == ["a"]


def test_an_error_comes_where_the_tensor_is_read(source, tmp_path):
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes()[:-10])
    ahead = ReadAhead(source)
    ahead.expect(["a", "b", "c"])
    with pytest.raises(ModelError, match="ends inside"):
        for name in "abc":
            ahead.read(name)
