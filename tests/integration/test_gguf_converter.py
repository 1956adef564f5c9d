"""GGUF files that llama.cpp's own converter lays out (``make test`` installs it), with tiny models.

``tests/consumers/test_llamacpp_converter.py`` lets llama.cpp compute with such files.
"""

import json
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import quantcore
from quantcore.config import presets
from quantcore.engine.containers.dequantize import open_source
from quantcore.engine.data.tokenizer import load_tokenizer
from quantcore.errors import ConfigError, ModelError, ProofError, QuantError
from quantcore.export.gguf import converter, tensor_names
from quantcore.export.gguf.converted import MODULE
from quantcore.importing.model import read_model
from tests.support.gguf import run
from tests.support.models import MIXTURES, tiny_model
from tests.support.tokenizers import saved, sentencepiece

ROWS = "model.rows.safetensors"


def model_with_tokenizer(folder, **settings):
    model = tiny_model(folder, vocab_size=300, **settings)
    saved(model, sentencepiece(added=()), bos_token="<s>", eos_token="</s>")
    return model


@pytest.fixture
def arcee(tmp_path):
    """Its queries and keys are permuted, and its tables are in no module of ours."""
    return model_with_tokenizer(tmp_path / "model", model_type="arcee", tie_word_embeddings=False)


def tensors_of(folder):
    [file] = folder.glob("*.gguf")
    return {tensor.name: tensor for tensor in GGUFReader(file).tensors}


def test_a_model_of_another_architecture(tmp_path, arcee, proof_in_this_process):
    config = replace(presets.resolve("gguf_q4_1"), exclude=("*.v_proj",))
    report = run(arcee, tmp_path / "out", config)
    written = tensors_of(tmp_path / "out")
    assert {written[f"blk.0.{name}.weight"].tensor_type.name for name in ("attn_q", "ffn_up", "ffn_down")} == {"Q4_1"}
    assert written["blk.0.attn_v.weight"].tensor_type.name == "BF16"
    assert written["blk.0.attn_norm.weight"].tensor_type.name == "F32"
    assert report["warnings"] == [] and not (tmp_path / "out/.staged").exists()
    assert "quantcore" not in report["summary"]["exports"]["gguf"]["load"]
    tensors = load_file(tmp_path / "out" / ROWS)
    save_file({name: tensor for name, tensor in tensors.items() if name != "model"}, tmp_path / "out" / ROWS)
    with pytest.raises(ModelError, match="architecture 'arcee', which is not read as input") as caught:
        read_model(tmp_path / "out")
    assert "llama.cpp runs it. Its quality was measured when it was made" in str(caught.value.hint)
    listed = (tmp_path / "out/reproduce.sh").read_text().partition("END_OF_SUMS'\n")[2].partition("END_OF_SUMS")[0]
    names = [line.split()[1] for line in listed.splitlines()]
    assert names and all((tmp_path / "out" / name).exists() for name in names)


def test_the_map_beside_it_makes_it_a_model_again(tmp_path, proof_in_this_process):
    """All tensors, permuted queries among them, and the logits and the tokens of the rounded model."""
    settings = {"model_type": "arcee", "tie_word_embeddings": False, "dtype": torch.float32}
    arcee = model_with_tokenizer(tmp_path / "model", **settings)
    config = replace(presets.resolve("gguf_q8_0"), exclude=("*.v_proj",))
    run(arcee, tmp_path / "out", config, ("gguf", "fake_quantized"))
    rounded, folder = load_file(tmp_path / "out/fake_quantized/model.safetensors"), tmp_path / "out/gguf"
    found = read_model(folder)
    assert {name: header.shape for name, header in found.headers.tensors.items()} == {
        name: tuple(tensor.shape) for name, tensor in rounded.items()
    }
    source = open_source(found)
    assert all(torch.equal(source.read(name).to(tensor.dtype), tensor) for name, tensor in rounded.items())
    model, _ = quantcore.load(folder)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out/fake_quantized")
    ids = torch.arange(40).mul(7).remainder(300)[None]
    with torch.inference_mode():
        torch.testing.assert_close(model(ids).logits, plain(ids).logits, rtol=1e-3, atol=1e-3)
    assert load_tokenizer(folder)("a b c")["input_ids"] == load_tokenizer(arcee)("a b c")["input_ids"]


def test_its_metadata_come_from_the_name_of_the_model(tmp_path, proof_in_this_process):
    """The converter reads the name of the folder that it is given, so a random one made other bytes each time."""
    model = model_with_tokenizer(tmp_path / "Tiny-Instruct", model_type="arcee", tie_word_embeddings=False)
    run(model, tmp_path / "out", presets.resolve("gguf_q8_0"))
    fields = GGUFReader(tmp_path / "out/model.gguf").fields
    about = {name: fields[f"general.{name}"].contents() for name in ("name", "basename", "finetune")}
    assert about == {"name": "Tiny-Instruct", "basename": "Tiny", "finetune": "Instruct"}


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_the_files_of_both_ways_are_equal(tmp_path, monkeypatch, proof_in_this_process, name):
    """What we lay out ourselves is the oracle: permuted heads, stacked experts, types, every byte of every tensor."""
    settings = MIXTURES.get(name, {}) | {"tie_word_embeddings": False}
    model = model_with_tokenizer(tmp_path / "model", model_type=name, **settings)
    config = replace(presets.resolve("gguf_q4_0"), exclude=("*.v_proj",))
    run(model, tmp_path / "own", config)
    monkeypatch.delitem(tensor_names.ARCHITECTURES, name)
    run(model, tmp_path / "converted", config)
    own, converted = tensors_of(tmp_path / "own"), tensors_of(tmp_path / "converted")
    assert own.keys() == converted.keys()
    for tensor in own.values():
        assert tensor.tensor_type == converted[tensor.name].tensor_type, tensor.name
        assert np.array_equal(tensor.data, converted[tensor.name].data), tensor.name


def test_the_proof_sees_two_rows_in_each_others_place(tmp_path, arcee, monkeypatch, proof_in_this_process):
    def swap(task, folder, expected, emit):
        tensor = tensors_of(folder)["blk.1.attn_q.weight"]
        size = tensor.data.shape[-1]
        with (folder / "model.gguf").open("r+b") as file:
            file.seek(int(tensor.data_offset))
            rows = file.read(2 * size)
            file.seek(int(tensor.data_offset))
            file.write(rows[size:] + rows[:size])
        return proof_in_this_process(task, folder, expected, emit)

    monkeypatch.setattr("quantcore.engine.pipeline.job.prove_in_fresh_process", swap)
    with pytest.raises(ProofError, match=r"model\.layers\.1\.self_attn\.q_proj\.weight"):
        run(arcee, tmp_path / "out", presets.resolve("gguf_q4_1"))


def test_without_the_converter_nothing_is_begun(tmp_path, arcee, monkeypatch):
    monkeypatch.setattr(converter, "FOLDER", tmp_path / "nowhere")
    with pytest.raises(ModelError, match="of type 'arcee'") as refusal:
        run(arcee, tmp_path / "out", presets.resolve("gguf_q8_0"))
    assert refusal.value.code == "converter_not_installed" and "install-converter" in str(refusal.value.hint)
    assert not (tmp_path / "out").exists()


def test_an_architecture_that_llama_cpp_does_not_convert(tmp_path):
    model = model_with_tokenizer(tmp_path / "model", model_type="helium")
    with pytest.raises(ConfigError, match="does not know the architecture 'HeliumForCausalLM'") as refusal:
        run(model, tmp_path / "out", presets.resolve("gguf_q8_0"))
    assert refusal.value.code == "incompatible_export"


def test_a_tokenizer_that_it_does_not_know_is_refused_before_any_layer(tmp_path):
    model = tiny_model(tmp_path / "model", model_type="olmo2", tie_word_embeddings=False)
    with pytest.raises(ModelError, match="BPE pre-tokenizer was not recognized") as refusal:
        run(model, tmp_path / "out", presets.resolve("gguf_q8_0"))
    assert refusal.value.code == "unsupported_architecture"


EVIL = """
from pathlib import Path
Path(__file__).with_name("{canary}").touch()
Path("{path}").touch()
from transformers import PreTrainedTokenizerFast as Evil
"""


def test_no_code_of_a_model_runs_in_the_converter(tmp_path):
    """Some of its classes load the tokenizer with ``trust_remote_code``."""
    model, canary = model_with_tokenizer(tmp_path / "model", model_type="hunyuan_v1_dense"), tmp_path / "canary"
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": [None, "evil.Evil"]}}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    (model / "evil.py").write_text(EVIL.format(canary="canary", path=canary))
    loading = f"AutoTokenizer.from_pretrained({str(model)!r}, trust_remote_code=True)"
    code = f"from transformers import AutoTokenizer\nimport {MODULE} as driver\n"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [*converter.paths(), *sys.path]))}
    environment |= {"HF_MODULES_CACHE": str(tmp_path / "modules")}
    python = [sys.executable, "-c"]
    subprocess.run([*python, f"{code}driver.refuse_foreign_code()\n{loading}"], env=environment, check=False)
    assert not canary.exists()
    subprocess.run([*python, code + loading], env=environment, check=False)
    assert canary.exists()  # the check can fail
    canary.unlink()
    with suppress(QuantError):  # the tokenizer is loaded by its usual name, or refused
        run(model, tmp_path / "out", presets.resolve("gguf_q8_0"))
    assert not canary.exists()


def test_a_named_mix_gives_its_tensors_the_types_of_llama_cpp(tmp_path, proof_in_this_process):
    """Their names are known before any layer: half of the values and of the second matrices have more bits."""
    wide = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 4}
    model = model_with_tokenizer(tmp_path / "Tiny", model_type="arcee", tie_word_embeddings=False, **wide)
    report = run(model, tmp_path / "out", presets.resolve("Q4_K_M"))
    written = {name: tensor.tensor_type.name for name, tensor in tensors_of(tmp_path / "out").items()}
    assert (tmp_path / "out/Tiny-Q4_K_M.gguf").exists() and report["warnings"] == []
    for role in ("attn_v", "ffn_down"):
        assert [written[f"blk.{index}.{role}.weight"] for index in range(4)] == ["Q4_K", "Q4_K", "Q6_K", "Q6_K"], role
    assert {written[f"blk.{index}.{role}.weight"] for index in range(4) for role in ("attn_q", "ffn_up")} == {"Q4_K"}
    assert (written["token_embd.weight"], written["output.weight"]) == ("Q4_K", "Q6_K")


def test_the_service_plans_a_named_mix(client, settings):
    """The converter runs in the confined process that reads the model."""
    wide = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 4}
    model = tiny_model(settings.model_roots[0] / "tiny", model_type="arcee", **wide)
    asked = {"model": {"path": str(model)}, "config": {"preset": "Q4_K_M"}}
    answer = client.post("/v1/jobs?dry_run=true", json=asked)
    assert answer.status_code == 200, answer.text
    layers = {layer["name"]: layer["scheme"] for layer in answer.json()["layers"]}
    assert [layers[f"model.layers.{index}.mlp.down_proj"][:5] for index in range(4)] == [
        "uint4",
        "uint4",
        "int6 ",
        "int6 ",
    ]
