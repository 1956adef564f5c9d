"""Tensors are read back from wherever their rows lie in the file."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from quantcore.checkpoint.headers import read_tensor_headers
from quantcore.checkpoint.layout import TensorLayout
from quantcore.engine.containers.llama_cpp.rows import MappedSource, Placed, RowMap
from quantcore.errors import ModelError
from quantcore.export.gguf.header import GgufHeader
from quantcore.export.gguf.laid_out import ROW_MAP, has_model, read_laid_out
from quantcore.tensors.source import Source


def test_rows_in_order_permuted_divided_merged_and_missing(tmp_path):
    """``file`` stands for the tensors of the GGUF file: safetensors have the same headers."""
    qkv, norm, lost = torch.arange(12.0).view(6, 2).bfloat16(), torch.tensor([1.5, 2.5]), torch.ones(3, 2)
    (tmp_path / "staged").mkdir()
    save_file({"qkv": qkv, "norm": norm, "lost": lost}, tmp_path / "staged/model.safetensors")
    save_file({"q": qkv[[1, 0]].float(), "kv": qkv[2:].float(), "n": norm}, tmp_path / "file.safetensors")
    rows = RowMap()
    rows.add("qkv", Placed("q", [1, 0, -1, -1, -1, -1]))
    rows.add("qkv", Placed("kv", [-1, -1, 0, 1, 2, 3]))
    rows.add("norm", Placed("n", [0]))
    rows.add("lost", Placed("q", [0, -1, 1]))  # one row is nowhere
    staged = Source(tmp_path / "staged", read_tensor_headers(tmp_path / "staged"))
    assert rows.save(tmp_path / ROW_MAP, ["qkv", "norm", "lost"], staged, {}) == []

    layouts = {
        "qkv": TensorLayout("BF16", (6, 2)),
        "norm": TensorLayout("F32", (2,)),
        "lost": TensorLayout("F32", (3, 2)),
    }
    headers = {name: each for name, each in _headers(tmp_path).items() if name in ("q", "kv", "n")}
    source = MappedSource(tmp_path, tmp_path / "file.safetensors", headers, layouts)
    assert {name: (each.dtype, each.shape) for name, each in source.tensors.items()} == {
        name: (each.dtype, each.shape) for name, each in layouts.items()
    }
    for name, tensor in {"qkv": qkv, "norm": norm, "lost": lost}.items():
        assert torch.equal(source.read(name), tensor) and source.read(name).dtype == tensor.dtype
    assert torch.equal(source.rows("qkv")(range(1, 3)), qkv[1:3])


def test_with_the_map_the_file_is_a_model_again(tmp_path):
    """Permuted rows, rows in the middle of a merged tensor, a vector, and a tensor that only the map has."""
    given = {"q": torch.randn(4, 2), "k": torch.randn(3, 2), "norm": torch.randn(2), "lost": torch.randn(3, 2)}
    (tmp_path / "staged").mkdir()
    save_file(given, tmp_path / "staged/model.safetensors")
    file = {"qk": torch.cat([given["q"][[2, 0, 3, 1]], given["k"]]), "n": given["norm"]}
    save_file(file, tmp_path / "file.safetensors")
    rows = RowMap()
    rows.add("q", Placed("qk", [1, 3, 0, 2]))
    rows.add("k", Placed("qk", [4, 5, 6]))
    rows.add("norm", Placed("n", [0]))
    staged = Source(tmp_path / "staged", read_tensor_headers(tmp_path / "staged"))
    rows.save(tmp_path / ROW_MAP, given, staged, {"model_type": "own"})
    header = GgufHeader(tmp_path / "file.safetensors", {}, _headers(tmp_path))
    config, tensors = read_laid_out(header)
    source = Source(tmp_path, tensors)
    assert has_model(header.path) and config == {"model_type": "own"}
    for name, tensor in given.items():
        assert torch.equal(source.read(name), tensor) and tensors[name].num_bytes == tensor.nbytes, name
    assert torch.equal(source.rows("q")(range(1, 3)), given["q"][1:3])
    assert torch.equal(source.rows("k")(range(1, 3)), given["k"][1:3])

    rows.save(tmp_path / ROW_MAP, ["q"], staged, {})
    fewer = {"qk": replace(header.tensors["qk"], shape=(2, 2), end=header.tensors["qk"].begin + 16)}
    with pytest.raises(ModelError, match="does not fit") as damaged:
        read_laid_out(replace(header, tensors=fewer))
    assert damaged.value.code == "invalid_gguf"
    divided = RowMap()
    divided.add("q", Placed("qk", [0, 1, -1, -1]))
    divided.add("q", Placed("n", [-1, -1, 0, 0]))
    divided.save(tmp_path / ROW_MAP, ["q"], staged, {})
    with pytest.raises(ModelError, match="'q' lies in several tensors") as refused:
        read_laid_out(header)
    assert refused.value.code == "unsupported_architecture"
    (tmp_path / ROW_MAP).unlink()
    assert not has_model(header.path)


def _headers(folder):
    from quantcore.checkpoint.headers import read_safetensors_header

    return read_safetensors_header(folder / "file.safetensors")
