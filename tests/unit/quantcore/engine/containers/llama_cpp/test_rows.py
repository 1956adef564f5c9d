"""Tensors are read back from wherever their rows lie in the file."""

import torch
from safetensors.torch import save_file

from quantcore.checkpoint.headers import read_tensor_headers
from quantcore.checkpoint.layout import TensorLayout
from quantcore.engine.containers.llama_cpp.rows import MAP, MappedSource, Placed, RowMap
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
    assert rows.save(tmp_path / MAP, ["qkv", "norm", "lost"], staged) == []

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


def _headers(folder):
    from quantcore.checkpoint.headers import read_safetensors_header

    return read_safetensors_header(folder / "file.safetensors")
