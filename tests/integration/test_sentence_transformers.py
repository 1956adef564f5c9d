"""What sentence-transformers adds to a model (pooling, dense steps, prompts) travels with it. The library decides.

It takes a second to import: these tests alone do.
"""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertModel

from quantcore.checkpoint.side_files import copy_side_files
from quantcore.config import presets
from quantcore.config.task import Task
from quantcore.engine.pipeline import job
from quantcore.errors import ModelError
from quantcore.importing.model import read_model
from tests.support.tokenizers import save_byte_tokenizer

TEXTS = ["A model is quantized.", "Nothing is lost.", "The files are read by another program."]


@pytest.fixture
def model_dir(tmp_path):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=320, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=128, architectures=["BertModel"],
    )  # fmt: skip
    BertModel(config).save_pretrained(tmp_path / "bert")
    save_byte_tokenizer(tmp_path / "bert", of_encoder=True)
    steps = [Transformer(str(tmp_path / "bert")), Pooling(64, pooling_mode="cls"), Dense(64, 32), Normalize()]
    SentenceTransformer(modules=steps, device="cpu", prompts={"query": "query: "}).save(str(tmp_path / "model"))
    return tmp_path / "model"


def embed(folder, prompt=None, **given):
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device="cpu", **given)
    return model.encode(TEXTS, prompt_name=prompt, convert_to_tensor=True)


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")  # which is meant
@pytest.mark.parametrize("preset", ["int8_dynamic", "int8_weight_only", "fp8", "w4a16_sym"])
def test_compressed_tensors_are_decompressed_as_the_docs_say(preset, model_dir, tmp_path, proof_in_this_process):
    """The library calls the model past the hook that decompresses it, so it is loaded decompressed."""
    from transformers import CompressedTensorsConfig

    task = {
        "model_dir": str(model_dir), "output_dir": str(tmp_path / "out"), "export": ["compressed_tensors"],
        "config": presets.resolve(preset, group_size=32 if preset == "w4a16_sym" else None).to_dict(), "gate": "off",
        "calibration": {"num_samples": 2, "seq_len": 32},
        "evaluation": {"num_windows": 2, "seq_len": 32, "num_prompts": 0},
    }  # fmt: skip
    job.run(Task.model_validate(task), lambda event: None)
    decompressed = {"quantization_config": CompressedTensorsConfig(run_compressed=False)}
    ours, theirs = embed(tmp_path / "out", model_kwargs=decompressed), embed(model_dir)
    assert not torch.equal(ours, theirs) and (ours * theirs).sum(1).min() > 0.97


def test_embeddings_are_those_of_the_float_model_but_for_rounding(model_dir, tmp_path, proof_in_this_process):
    task = {
        "model_dir": str(model_dir), "output_dir": str(tmp_path / "out"), "export": ["fake_quantized"],
        "config": presets.resolve("int8_weight_only").to_dict(), "gate": "fail",
        "calibration": {"num_samples": 2, "seq_len": 32},
        "evaluation": {"num_windows": 2, "seq_len": 32, "num_prompts": 0},
    }  # fmt: skip
    job.run(Task.model_validate(task), lambda event: None)
    for prompt in (None, "query"):
        ours, theirs = embed(tmp_path / "out", prompt), embed(model_dir, prompt)
        assert ours.shape == (3, 32) and not torch.equal(ours, theirs)
        assert (ours * theirs).sum(1).min() > 0.999
    listed = {entry["path"] for entry in json.loads((tmp_path / "out" / "MANIFEST.json").read_text())["files"]}
    assert {"modules.json", "1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"} <= listed
    weights = tmp_path / "out" / "2_Dense" / "model.safetensors"
    save_file({name: tensor * -1 for name, tensor in load_file(weights).items()}, weights)
    assert (embed(tmp_path / "out") * embed(model_dir)).sum(1).max() < 0.5, "the dense step decides"


def test_steps_that_cannot_be_carried_over_are_refused(model_dir, tmp_path):
    (tmp_path / "artifact").mkdir()
    (model_dir / "2_Dense" / "model.safetensors").rename(model_dir / "2_Dense" / "pytorch_model.bin")
    modules = json.loads((model_dir / "modules.json").read_text())
    outside = [{**module, "path": "../bert" if module["path"] == "1_Pooling" else module["path"]} for module in modules]
    cases = {"as safetensors": modules, "not the name of a folder": outside, "not a list of modules": {"1_Pooling": 2}}
    for why, content in cases.items():
        (model_dir / "modules.json").write_text(json.dumps(content))
        for use in (read_model, lambda folder: copy_side_files(folder, tmp_path / "artifact")):
            with pytest.raises(ModelError, match=why) as caught:
                use(model_dir)
            assert caught.value.code == "unreadable_modules"
    (model_dir / "modules.json").unlink()
    assert read_model(model_dir) and "modules.json" not in copy_side_files(model_dir, tmp_path / "artifact")
