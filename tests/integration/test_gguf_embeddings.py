"""Embeddings and output projections in GGUF's types: one tensor or two, as llama.cpp's own tool quantizes them."""

import pytest
import torch
from gguf import GGUFReader, LlamaFileType
from gguf.quants import dequantize

from quantcore import ModelQuantizer
from quantcore.checkpoint.headers import read_local
from quantcore.config import presets
from quantcore.config.job_spec import JobSpec
from quantcore.config.quantization import parse_config
from quantcore.engine.containers.dequantize import open_source
from quantcore.errors import ConfigError
from quantcore.export.gguf.header import read_gguf_header
from quantcore.importing.model import read_model
from quantcore.plan.planner import make_plan
from tests.support.gguf import CALIBRATION, WIDE, run
from tests.support.models import tiny_model


def types_of(file):
    return {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(file).tensors}


def plan_of(model_dir, config, exports=("gguf",)):
    headers = read_local(model_dir)
    return make_plan(JobSpec(config=config, calibration=CALIBRATION, export=exports), headers)


@pytest.mark.parametrize("algorithms", [(), ("gptq",)])
def test_a_shared_matrix_is_one_tensor_of_codes(tmp_path, algorithms, proof_in_this_process):
    """The proof has compared the logits: the lookup and the head both use the values that are in the file."""
    model_dir = tiny_model(tmp_path / "model", dtype=torch.float32, rank=16, **WIDE)
    config = presets.resolve("gguf_q8_0", token_embedding_type="q4_0")
    config = parse_config({**config.to_dict(), "algo_config": [{"name": name} for name in algorithms]})
    report = run(model_dir, tmp_path / "out", config)
    tensors = {tensor.name: tensor for tensor in GGUFReader(tmp_path / "out/model.gguf").tensors}
    stored = tensors["token_embd.weight"]
    assert stored.tensor_type.name == "Q4_0" and "output.weight" not in tensors
    read = open_source(read_model(tmp_path / "out")).read("model.embed_tokens.weight")
    theirs = torch.from_numpy(dequantize(stored.data, stored.tensor_type).copy())
    assert torch.equal(read, theirs.bfloat16())  # no matrix of floats is left to read them as
    given = open_source(read_model(model_dir)).read("model.embed_tokens.weight")
    assert 0.05 < (read - given).norm() / given.norm() < 0.15
    [layer] = [layer for layer in report["layers"] if layer["name"] == "model.embed_tokens"]
    assert 0.05 < layer["relative_error"] < 0.15
    with_float = run(model_dir, tmp_path / "float", presets.resolve("gguf_q8_0"))
    kl, kl_of_float = (each["summary"]["kl_mean"] for each in (report, with_float))
    assert kl > 3 * kl_of_float  # what is measured includes the embedding
    assert report["summary"]["size_after_bytes"] < 0.8 * with_float["summary"]["size_after_bytes"]


def test_two_matrices_have_a_type_each(tmp_path, proof_in_this_process):
    model_dir = tiny_model(tmp_path / "model", tie_word_embeddings=False, **WIDE)
    config = presets.resolve("gguf_q4_0", token_embedding_type="Q5_1", output_type="Q6_K")
    run(model_dir, tmp_path / "out", config)
    types = types_of(tmp_path / "out/model.gguf")
    assert (types["token_embd.weight"], types["output.weight"], types["blk.0.attn_q.weight"]) == (
        "Q5_1",
        "Q6_K",
        "Q4_0",
    )


def test_either_flag_names_the_type_of_a_shared_matrix(tmp_path):
    model_dir = tiny_model(tmp_path / "model")
    for field in ("token_embedding_type", "output_type"):
        plan = plan_of(model_dir, presets.resolve("gguf_q4_0", **{field: "Q8_0"}))
        assert plan.layouts["gguf"]["model.embed_tokens.weight"].dtype == "Q8_0"
    plan = plan_of(model_dir, presets.resolve("gguf_q4_0", token_embedding_type="Q6_K"))
    assert plan.layouts["gguf"]["model.embed_tokens.weight"].dtype == "Q8_0"  # rows of 64
    assert any("first model.embed_tokens: they are stored as Q8_0 instead of Q6_K" in line for line in plan.warnings)
    with pytest.raises(ConfigError, match="one matrix as embedding and as output projection"):
        plan_of(model_dir, presets.resolve("gguf_q4_0", token_embedding_type="Q8_0", output_type="Q6_K"))


def test_what_cannot_be_is_refused(tmp_path):
    model_dir = tiny_model(tmp_path / "model")
    with pytest.raises(ConfigError, match="Unknown GGUF type 'q8_1'") as caught:
        presets.resolve("gguf_q4_0", token_embedding_type="q8_1")
    assert caught.value.code == "unknown_gguf_type" and "Q8_0" in caught.value.allowed
    with pytest.raises(ConfigError, match="output_type can be IQ1_S"):
        parse_config({**presets.resolve("gguf_q4_0").to_dict(), "gguf": {"output_type": "Q9"}})
    w4a16 = presets.resolve("w4a16", token_embedding_type="Q8_0")
    with pytest.raises(ConfigError, match="do not support a quantized Embedding"):
        plan_of(model_dir, w4a16, ("awq",))
    with pytest.raises(ConfigError, match="this model is in memory"):
        ModelQuantizer(w4a16)
    rotated = parse_config({
        **presets.resolve("gguf_q4_0", token_embedding_type="Q8_0").to_dict(), "algo_config": [{"name": "rotation"}],
    })  # fmt: skip
    with pytest.raises(ConfigError, match="changes the embedding"):
        plan_of(model_dir, rotated)


def test_a_result_larger_than_its_input_is_warned_of_before_the_work(tmp_path, proof_in_this_process):
    """The input of the second job is a GGUF file: sizes are compared with that file, not with its weights as floats."""
    model_dir = tiny_model(tmp_path / "model", vocab_size=2048)
    first = run(model_dir, tmp_path / "small", presets.resolve("gguf_q4_0", token_embedding_type="Q4_0"))
    assert "float_bytes" not in first["summary"] and not any("larger" in line for line in first["warnings"])
    again = run(tmp_path / "small/model.gguf", tmp_path / "large", presets.resolve("gguf_q8_0"))
    summary = again["summary"]
    assert summary["size_before_bytes"] == first["summary"]["size_after_bytes"] < summary["float_bytes"]
    [line] = [line for line in again["warnings"] if "larger" in line]
    assert line.startswith("The gguf files (") and "token_embedding_type quantizes it" in line


def test_a_named_mix_is_made_of_its_types_under_its_name(tmp_path, proof_in_this_process):
    """Whatever reads the folder finds the file: the proof, our own reader, the lines in the report."""
    deep = {**WIDE, "num_hidden_layers": 4}
    model_dir = tiny_model(tmp_path / "Tiny Llama-v1.5", tie_word_embeddings=False, **deep)
    report = run(model_dir, tmp_path / "out", presets.resolve("q4_k_m"))
    [file] = (tmp_path / "out").glob("*.gguf")
    assert file.name == "Tiny-Llama-v1.5-Q4_K_M.gguf" and not report["warnings"]
    assert "Llama('./Tiny-Llama-v1.5-Q4_K_M.gguf')" in report["summary"]["exports"]["gguf"]["load"]
    types, fields = types_of(file), read_gguf_header(file).fields
    assert [types[f"blk.{index}.ffn_down.weight"] for index in range(4)] == ["Q4_K", "Q4_K", "Q6_K", "Q6_K"]
    assert (types["token_embd.weight"], types["output.weight"]) == ("Q4_K", "Q6_K")
    assert fields["general.file_type"] == LlamaFileType.MOSTLY_Q4_K_M
    again = run(file, tmp_path / "again", presets.resolve("Q8_0"))
    assert [path.name for path in (tmp_path / "again").glob("*.gguf")] == ["Tiny-Llama-v1.5-Q8_0.gguf"]
    assert again["summary"]["size_before_bytes"] == report["summary"]["size_after_bytes"]
    plan = plan_of(model_dir, presets.resolve("Q4_K_M", exclude=("model.embed_tokens",)))
    assert plan.layouts["gguf"]["model.embed_tokens.weight"].dtype == "BF16" and not plan.warnings
