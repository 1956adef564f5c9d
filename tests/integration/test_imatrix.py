"""Importance matrices: what is written is what Transformers' model computes, and what is read chooses the ranges."""

import json
import struct

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from transformers import AutoModelForCausalLM

from quantcore.cli.main import main
from quantcore.config import presets
from quantcore.config.quantization import parse_config
from quantcore.config.texts import CalibrationConfig
from quantcore.engine.calibration.imatrix import (
    CHUNK_SIZE,
    DATASETS,
    NUM_CHUNKS,
    Entry,
    InputSums,
    in_file,
    inputs_of_layers,
    read_imatrix,
    write_imatrix,
)
from quantcore.engine.commands.imatrix import windows_of
from quantcore.engine.containers.dequantize import open_source
from quantcore.errors import CalibrationError, ConfigError
from quantcore.export.gguf.tensor_names import Place
from quantcore.importing.model import read_model
from tests.support.gguf import WIDE, run
from tests.support.models import MIXTURES, tiny_model
from tests.support.tokenizers import saved, sentencepiece

SETTINGS = {DATASETS: ["a text"], NUM_CHUNKS: 1, CHUNK_SIZE: 8}


@pytest.fixture
def model(tmp_path):
    return tiny_model(tmp_path / "model", dtype=torch.float32, **WIDE)


def matrix_of(folder, file, *flags):
    assert main(["imatrix", str(folder), "-o", str(file), "--num_calib_data", "4", "--seq_len", "64", *flags]) == 0
    return {tensor.name: tensor for tensor in GGUFReader(file).tensors}


def with_imatrix(preset, file):
    config = {**presets.resolve(preset).to_dict(), "algo_config": [{"name": "rtn", "imatrix": str(file)}]}
    return parse_config(config)


def test_its_sums_are_those_of_transformers(tmp_path, model):
    written = matrix_of(model, tmp_path / "im.gguf")
    theirs, seen = AutoModelForCausalLM.from_pretrained(model), {}
    layer = theirs.get_submodule("model.layers.1.mlp.down_proj")
    layer.register_forward_pre_hook(lambda _, inputs: seen.update(x=inputs[0].flatten(0, -2)))
    ids_NT = windows_of(model, CalibrationConfig(num_samples=4, seq_len=64))
    with torch.no_grad():
        theirs(ids_NT)
    name = "blk.1.ffn_down.weight"
    assert written[f"{name}.counts"].data.tolist() == [[256.0]]
    assert np.allclose(written[f"{name}.in_sum2"].data[0], seen["x"].square().sum(0), rtol=1e-4)
    assert np.allclose(written[f"{name}.in_sum"].data[0], seen["x"].sum(0), rtol=1e-3, atol=1e-3)
    fields = GGUFReader(tmp_path / "im.gguf").fields
    assert fields[DATASETS].contents() == ["builtin"] and fields[NUM_CHUNKS].contents() == 4
    assert fields["general.type"].contents() == "imatrix" and "general.architecture" not in fields


def test_each_expert_has_the_tokens_that_reach_it(tmp_path):
    mixture = tiny_model(tmp_path / "model", model_type="mixtral", **MIXTURES["mixtral"])
    written = matrix_of(mixture, tmp_path / "im.gguf")
    counts = written["blk.0.ffn_down_exps.weight.counts"].data[:, 0]
    per_token = json.loads((mixture / "config.json").read_text())["num_experts_per_tok"]
    assert len(counts) == len(written["blk.0.ffn_down_exps.weight.in_sum2"].data) and counts.sum() == 256 * per_token
    run(mixture, tmp_path / "out", with_imatrix("gguf_q4_0", tmp_path / "im.gguf"))


def error_of(folder, model, column):
    name = "model.layers.0.mlp.down_proj.weight"
    read, given = (open_source(read_model(each)).read(name).float() for each in (folder, model))
    return ((read - given)[:, column]).norm() / given[:, column].norm()


def written_by_hand(model, file, change):
    """The matrix of a model whose sums ``change`` has changed, by the names of the tensors."""
    original = file.with_name("original.gguf")
    tensors = matrix_of(model, original)
    names = {name.removesuffix(".counts") for name in tensors if name.endswith(".counts")}
    sums = {
        name: [
            InputSums(torch.from_numpy(total.copy()), torch.from_numpy(squares.copy()), int(count))
            for total, squares, [count] in zip(
                *(tensors[f"{name}.{part}"].data for part in ("in_sum", "in_sum2", "counts")), strict=True
            )
        ]
        for name in names
    }
    write_imatrix(file, change(sums), SETTINGS)
    return file


@pytest.mark.parametrize("preset", ["gguf_q4_k", "gguf_q4_0", "w4a16"])
def test_an_input_of_much_power_keeps_its_values(tmp_path, model, preset, proof_in_this_process):
    def loud(sums):
        sums["blk.0.ffn_down.weight"][0].square_I[5] *= 1e4
        return sums

    file = written_by_hand(model, tmp_path / "loud.gguf", loud)
    exports = ("gguf",) if preset.startswith("gguf") else ("awq",)
    report = run(model, tmp_path / "loud", with_imatrix(preset, file), exports)
    run(model, tmp_path / "usual", with_imatrix(preset, tmp_path / "original.gguf"), exports)
    assert error_of(tmp_path / "loud", model, 5) < 0.6 * error_of(tmp_path / "usual", model, 5)
    assert report["warnings"] == []
    assert {layer["num_tokens"] for layer in report["layers"]} == {256}


def test_weight_by_weight_it_gives_the_same_file(tmp_path, model):
    matrix_of(model, tmp_path / "im.gguf")
    flags = ["--imatrix", str(tmp_path / "im.gguf"), "--skip_evaluation"]
    for name, more in (("blocks", []), ("files", ["--file2file_quantization"])):
        assert main(["quantize", str(model), "gguf_q4_k", "-o", str(tmp_path / name), *flags, *more]) == 0
    blocks, files = ((tmp_path / name / "model.gguf").read_bytes() for name in ("blocks", "files"))
    assert blocks == files


def test_the_older_form_says_the_same(tmp_path, model):
    matrix_of(model, tmp_path / "im.gguf")
    entries = read_imatrix(tmp_path / "im.gguf")
    packed = struct.pack("<i", len(entries))
    for name, entry in entries.items():
        values = (entry.mean_square_MI.flatten() * 7).numpy().astype("<f4")
        packed += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", 7, len(values)) + values.tobytes()
    (tmp_path / "old.dat").write_bytes(packed + struct.pack("<ii", 4, 6) + b"a text")
    older = read_imatrix(tmp_path / "old.dat")
    assert older.keys() == entries.keys()
    for name, entry in entries.items():
        assert torch.allclose(entry.mean_square_MI, older[name].mean_square_MI, rtol=1e-6), name
    (tmp_path / "short.dat").write_bytes(packed[:-3])
    with pytest.raises(CalibrationError, match="ends too early") as caught:
        read_imatrix(tmp_path / "short.dat")
    assert caught.value.code == "invalid_imatrix"


def test_what_it_lacks_is_said(tmp_path, model, proof_in_this_process):
    def without(sums):
        sums["blk.1.attn_v.weight"][0] = InputSums(torch.zeros(256), torch.zeros(256), 0)
        return {name: parts for name, parts in sums.items() if "attn_q" not in name}

    file = written_by_hand(model, tmp_path / "some.gguf", without)
    report = run(model, tmp_path / "out", with_imatrix("gguf_q4_0", file))
    missing, unseen = (warning["message"] if isinstance(warning, dict) else warning for warning in report["warnings"])
    assert "no entry for 2 layer(s)" in missing and "model.layers.0.self_attn.q_proj" in missing
    assert "saw no token of 1 layer(s)" in unseen and "model.layers.1.self_attn.v_proj" in unseen


OTHERS = {
    "a tensor that this model does not have": (
        lambda sums: sums | {"blk.7.attn_q.weight": sums["blk.0.attn_q.weight"]},
        "1 tensor\\(s\\) that this model does not have, first 'blk.7.attn_q.weight'",
    ),
    "rows of another width": (
        lambda sums: sums | {"blk.0.attn_q.weight": sums["blk.0.ffn_down.weight"]},
        "'blk.0.attn_q.weight' has 512 values for 1 matrices, and the layer has 256 inputs",
    ),
    "fewer blocks": (
        lambda sums: {name: parts for name, parts in sums.items() if name.startswith("blk.0.")},
        "entries for 1 of the 2 blocks",
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_that_of_another_model_is_refused_before_any_layer(tmp_path, model, case):
    change, message = OTHERS[case]
    file = written_by_hand(model, tmp_path / "other.gguf", change)
    with pytest.raises(CalibrationError, match=message) as caught:
        run(model, tmp_path / "out", with_imatrix("gguf_q4_0", file))
    assert caught.value.code == "imatrix_does_not_fit" and not (tmp_path / "out").exists()


def test_files_of_other_kinds_are_refused(tmp_path, model):
    run(model, tmp_path / "q8", presets.resolve("gguf_q8_0"))
    (tmp_path / "text.dat").write_bytes(b"no numbers")
    nan = written_by_hand(model, tmp_path / "nan.gguf", lambda sums: (
        sums | {"blk.0.attn_q.weight": [InputSums(torch.zeros(256), torch.full((256,), torch.nan), 4)]}
    ))  # fmt: skip
    for file, reason in (
        (tmp_path / "q8/model.gguf", "of the type 'model'"), (tmp_path / "text.dat", "neither a GGUF file"),
        (nan, "not all finite"),
    ):  # fmt: skip
        with pytest.raises(CalibrationError, match=reason) as caught:
            read_imatrix(file)
        assert caught.value.code == "invalid_imatrix"
    with pytest.raises(CalibrationError, match="no importance matrix at") as caught:
        read_imatrix(tmp_path / "nowhere.gguf")
    assert caught.value.code == "imatrix_not_found"


def test_static_activations_need_a_text(tmp_path, model):
    with pytest.raises(ConfigError, match="which an importance matrix does not have") as caught:
        run(model, tmp_path / "out", with_imatrix("int8", tmp_path / "im.gguf"), ("compressed_tensors",))
    assert caught.value.code == "needs_calibration"


def test_a_model_that_llama_cpps_converter_names(tmp_path, proof_in_this_process):
    """Bloom's queries, keys and values are one matrix here, and stacked in another order in the file."""
    folder = tiny_model(tmp_path / "model", model_type="bloom", vocab_size=300, tie_word_embeddings=False)
    saved(folder, sentencepiece(added=()), bos_token="<s>", eos_token="</s>")
    written = matrix_of(folder, tmp_path / "im.gguf")
    assert "blk.0.attn_qkv.weight.in_sum2" in written and "blk.1.ffn_down.weight.in_sum2" in written
    report = run(folder, tmp_path / "out", with_imatrix("w4a16", tmp_path / "im.gguf"), ("compressed_tensors",))
    assert {layer["num_tokens"] for layer in report["layers"]} == {256}


def test_columns_that_the_file_moves_come_back(tmp_path):
    """``tests/consumers/test_llamacpp_converter.py`` compares the order with that of llama.cpp's converter."""
    place = Place("blk.0.ssm_out.weight", moved_heads=(2, 3))
    given_I = torch.arange(24.0)
    stored_I = in_file(given_I, place)
    assert stored_I[:8].tolist() == [0, 1, 2, 3, 12, 13, 14, 15]  # the first head of each key
    entries = {place.name: Entry(stored_I[None], torch.ones(1, dtype=torch.long))}
    found = inputs_of_layers(tmp_path, entries, {"out_proj.weight": (place,)}, {"out_proj": 24})
    assert torch.equal(found.mean_squares["out_proj"], given_I)
