"""Reading and writing safetensors: what we write, the safetensors library reads, and the other way round."""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from quantcore.checkpoint.headers import read_local, read_tensor_headers
from quantcore.checkpoint.layout import TensorLayout
from quantcore.errors import ModelError
from quantcore.tensors.sink import Sink
from quantcore.tensors.source import TORCH_DTYPES, Source
from tests.support.models import tiny_model

NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def some_tensors():
    return {
        "a": torch.randn(3, 5, dtype=torch.float32),
        "b": torch.randint(-128, 127, (7,), dtype=torch.int8),
        "c": torch.tensor(2.5, dtype=torch.bfloat16),
        "d": torch.randn(4, 6).to(torch.float8_e4m3fn),
        "e": torch.tensor([3, 5], dtype=torch.int64),
        "f": torch.empty(0, 4, dtype=torch.float16),
        "g": torch.randint(-(2**31), 2**31 - 1, (2, 3), dtype=torch.int32).T,
    }


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def layouts(tensors):
    return {name: TensorLayout(NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()}


@pytest.mark.parametrize("max_shard_bytes", [10**9, 40])
def test_the_safetensors_library_reads_what_the_sink_writes(tmp_path, max_shard_bytes):
    tensors = some_tensors()
    sink = Sink(tmp_path, layouts(tensors), max_shard_bytes)
    for name in reversed(tensors):
        sink.write(name, tensors[name])
    sink.finish()
    files = sorted(tmp_path.glob("*.safetensors"))
    assert (len(files) > 1) == (max_shard_bytes == 40)
    read = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
        read.update(load_file(file))
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(bits(read[name]), bits(tensor)), name
    if len(files) > 1:
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"].values()) == {file.name for file in files}
        assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in tensors.values())


def test_the_source_reads_what_the_safetensors_library_writes(tmp_path):
    tensors = {name: tensor.contiguous() for name, tensor in some_tensors().items()}
    save_file(tensors, tmp_path / "model.safetensors")
    source = Source(tmp_path, read_tensor_headers(tmp_path))
    for name, tensor in tensors.items():
        read = source.read(name)
        assert read.dtype == tensor.dtype and read.shape == tensor.shape
        assert torch.equal(bits(read), bits(tensor))
    with pytest.raises(ModelError, match="no tensor 'nope'"):
        source.read("nope")


def test_the_sink_refuses_what_was_not_planned_and_names_what_is_missing(tmp_path):
    sink = Sink(tmp_path, {"a": TensorLayout("F32", (2,)), "b": TensorLayout("I8", (1,))})
    with pytest.raises(RuntimeError, match="planned"):
        sink.write("a", torch.zeros(3))
    with pytest.raises(RuntimeError, match="planned"):
        sink.write("a", torch.zeros(2, dtype=torch.float16))
    sink.write("a", torch.zeros(2))
    with pytest.raises(RuntimeError, match="written twice"):
        sink.write("a", torch.zeros(2))
    with pytest.raises(RuntimeError, match="first 'b'"):
        sink.finish()
    sink.close()


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("good"))


@pytest.fixture
def model(good, tmp_path):
    return shutil.copytree(good, tmp_path / "model")


def edit_json(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def with_header(path, change):
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = change(data[8 : 8 + length])
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])


def index_of(model, weight_map):
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


BROKEN = {
    "no_config": lambda m: (m / "config.json").unlink(),
    "invalid_json": lambda m: (m / "config.json").write_text("{"),
    "invalid_json ": lambda m: (m / "config.json").write_text("[1]"),
    "invalid_json  ": lambda m: (m / "config.json").write_text('{"model_type": "llama", "x": NaN}'),
    "invalid_json   ": lambda m: (m / "config.json").write_text("[" * 100_000),
    "config_implausible": lambda m: (m / "config.json").write_text('{"a": "' + "x" * (5 << 20) + '"}'),
    "unsupported_architecture": lambda m: (m / "config.json").write_text('{"hidden_size": 4}'),
    "already_quantized": lambda m: edit_json(m / "config.json", quantization_config={"quant_method": "gptq"}),
    "no_weights": lambda m: (m / "model.safetensors").unlink(),
    "unsafe_weights_format": lambda m: (m / "model.safetensors").rename(m / "pytorch_model.bin"),
    "corrupt_weights": lambda m: (m / "model.safetensors").write_bytes((m / "model.safetensors").read_bytes()[:-7]),
    "corrupt_weights ": lambda m: (m / "model.safetensors").write_bytes(b"abc"),
    "corrupt_weights  ": lambda m: (m / "model.safetensors").write_bytes((1 << 62).to_bytes(8, "little") + b"{}"),
    "corrupt_weights   ": lambda m: with_header(m / "model.safetensors", lambda h: b"{not json"),
    "corrupt_weights    ": lambda m: with_header(m / "model.safetensors", lambda h: h.replace(b'"BF16"', b'"F32"', 1)),
    "corrupt_weights     ": lambda m: with_header(m / "model.safetensors", lambda h: h[:-1] + b"," + h[1:]),
    "header_too_large": lambda m: with_header(m / "model.safetensors", lambda h: h + b" " * (17 << 20)),
    "missing_shard": lambda m: index_of(m, {"a": "other.safetensors"}),
    "missing_tensors": lambda m: index_of(m, {"model.norm.weight": "model.safetensors", "nope": "model.safetensors"}),
    "unsafe_path": lambda m: index_of(m, {"a": "../good/model.safetensors"}),
    "unsafe_path ": lambda m: index_of(m, {"a": "/etc/passwd"}),
    "unsafe_path  ": lambda m: (
        (m / "model.safetensors").unlink(),
        (m / "model.safetensors").symlink_to("/etc/passwd"),
    ),
    "unsafe_weights_format ": lambda m: index_of(m, {"a": "config.json"}),
    "invalid_json    ": lambda m: (m / "model.safetensors.index.json").write_text('{"weight_map": 3}'),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_model_folder_gives_its_code(model, case):
    read_local(model)
    BROKEN[case](model)
    with pytest.raises(ModelError) as caught:
        read_local(model)
    assert caught.value.code == case.strip()


def test_a_folder_of_models_names_them(tmp_path):
    """The parent of a model's folder got "Provide the complete model folder"."""
    for number in range(7):
        (tmp_path / f"m{number}").mkdir()
        (tmp_path / f"m{number}" / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="contains folders of models") as caught:
        read_local(tmp_path)
    assert caught.value.code == "no_config"
    assert "m0, m1, m2, m3, m4 and 2 more" in caught.value.hint


def test_a_missing_folder_is_said_plainly(tmp_path):
    with pytest.raises(ModelError, match="no model folder") as caught:
        read_local(tmp_path / "nowhere")
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize("what", ["the folder", "a shard", "the tokenizer"])
def test_files_that_may_not_be_read_are_named(what):
    """For root every file is readable: it becomes another user for this, in a process of its own."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # pytest's own folders are closed to others
        Path(folder).chmod(0o755)
        model = Path(folder) / "model"
        model.mkdir()
        files = {"config.json": "{}", "model.safetensors": "", "tokenizer.json": "{}", "optimizer.pt": ""}
        for name, text in files.items():
            (model / name).write_text(text)
        (model / "optimizer.pt").chmod(0o000)  # nobody needs it
        tokenizer = model / "tokenizer.json"
        refused = {"the folder": model, "a shard": model / "model.safetensors", "the tokenizer": tokenizer}
        refused[what].chmod(0o000)
        try:
            code = (
                "import os, sys\n"
                "from pathlib import Path\n"
                "from quantcore.checkpoint.headers import check_files\n"
                "from quantcore.errors import ModelError\n"
                "if os.geteuid() == 0:\n"
                "    os.setgroups([]), os.setegid(10001), os.seteuid(10001)\n"
                "try:\n"
                "    check_files(Path(sys.argv[1]))\n"
                "except ModelError as error:\n"
                "    print(error.code, error.message)\n"
            )
            ran = subprocess.run([sys.executable, "-c", code, str(model)], capture_output=True, text=True, check=True)
        finally:
            refused[what].chmod(0o755)
    assert ran.stdout.startswith("model_not_readable This process") and str(refused[what]) in ran.stdout
