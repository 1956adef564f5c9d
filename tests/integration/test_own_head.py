"""A head of its own beside ``tie_word_embeddings: true`` is used, as Transformers uses it, and so it is written."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from quantcore import ModelExporter, ModelQuantizer
from quantcore.checkpoint.own_head import untie_own_head
from quantcore.cli import main as cli
from quantcore.config import presets
from quantcore.config.quantization import Config
from quantcore.engine.evaluation.model import open_model
from quantcore.engine.modules.loading import load
from quantcore.engine.pipeline.job import run
from quantcore.importing.model import read_model
from tests.support.jobs import perplexity_of, task
from tests.support.models import tiny_model, tiny_tokenizer

IDS = torch.arange(5, 29)[None]
WITH_HEAD = Config(global_quant_config=presets.PRESETS["int8_weight_only"].layer_config)


def with_own_head(folder, embedding="model.embed_tokens.weight"):
    """Give the model a head; its config.json goes on saying that there is none."""
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    like = tensors[embedding]
    tensors["lm_head.weight"] = (0.2 * torch.randn(like.shape, generator=generator)).to(like.dtype)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module", params=["llama", "gemma3_text"])
def model_dir(request, tmp_path_factory):
    """Gemma's config.json says nothing: its class ties by default."""
    folder = tiny_model(tmp_path_factory.mktemp(request.param) / "model", model_type=request.param)
    if request.param == "gemma3_text":
        config = json.loads((folder / "config.json").read_text())
        config.pop("tie_word_embeddings", None)
        (folder / "config.json").write_text(json.dumps(config))
    return with_own_head(folder)


def logits(model):
    with torch.no_grad():
        return model.train(False)(IDS).logits


def test_it_is_read_as_transformers_reads_it(model_dir):
    expected = logits(AutoModelForCausalLM.from_pretrained(model_dir))
    assert torch.equal(logits(load(model_dir).model), expected)
    with open_model(read_model(model_dir)).whole() as model:
        assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("config", [presets.resolve("int8_weight_only"), WITH_HEAD], ids=["kept", "quantized"])
def test_the_result_has_it_and_ties_nothing(config, model_dir, tmp_path, proof_in_this_process):
    report = run(task(model_dir, tmp_path / "out", config=config, export=["compressed_tensors"]), lambda event: None)
    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"] is False
    before = report.to_dict()["quality"]["before"]["token_perplexity"]["value"]
    assert before == pytest.approx(perplexity_of(AutoModelForCausalLM.from_pretrained(model_dir)), rel=1e-3)
    theirs, ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out"), load(tmp_path / "out").model
    torch.testing.assert_close(logits(ours), logits(theirs), rtol=0.02, atol=0.02 * logits(theirs).abs().max().item())


def test_a_model_in_memory_is_written_so_as_well(model_dir, tmp_path):
    config = presets.resolve("int8_weight_only")
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    frozen = ModelQuantizer.freeze(ModelQuantizer(config).quantize_model(model))
    ModelExporter(tmp_path / "out").export_safetensors_model(frozen, config, tiny_tokenizer(), "compressed_tensors")
    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"] is False
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), logits(frozen))


def test_the_plan_says_so(tmp_path, capsys):
    folder = with_own_head(tiny_model(tmp_path / "model"))
    assert cli.main(["plan", str(folder), "--quant_scheme", "fp8", "--seq_len", "64"]) == 0
    assert "config.json says tie_word_embeddings" in " ".join(capsys.readouterr().out.split())
    assert not read_model(tiny_model(tmp_path / "tied")).headers.warnings


@pytest.mark.parametrize("said", [True, False])
def test_that_of_an_encoder_decoder_is_read_as_transformers_reads_it(said, tmp_path):
    """FLAN-T5: its class ties always, and the field decides whether logits are scaled."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 512}
    config = T5Config(**sizes, decoder_start_token_id=0, tie_word_embeddings=said)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path / "model")
    folder = with_own_head(tmp_path / "model", "shared.weight")
    kept = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": said}
    (folder / "config.json").write_text(json.dumps(kept))
    expected = AutoModelForSeq2SeqLM.from_pretrained(folder).train(False)
    ours = load(folder).model
    with torch.no_grad():
        expected_NTV = expected(input_ids=IDS, decoder_input_ids=IDS).logits
        assert torch.equal(ours(input_ids=IDS, decoder_input_ids=IDS).logits, expected_NTV)
    assert read_model(folder).headers.config["tie_word_embeddings"] is said


def test_which_configs_are_untied():
    nested = {"model_type": "llava", "text_config": {"model_type": "llama", "tie_word_embeddings": True}}
    config, warnings = untie_own_head(nested, ["language_model.lm_head.weight"])
    assert config["tie_word_embeddings"] is config["text_config"]["tie_word_embeddings"] is False and warnings
    for same in (
        (nested, ["language_model.model.embed_tokens.weight"]),
        ({"model_type": "bert", "tie_word_embeddings": True}, ["cls.predictions.decoder.weight"]),
        ({"model_type": "t5", "is_encoder_decoder": True, "tie_word_embeddings": True}, ["lm_head.weight"]),
        ({"architectures": ["XForMaskedLM"], "tie_word_embeddings": True}, ["lm_head.weight"]),
        ({"model_type": "deepseek_v3", "tie_word_embeddings": True}, ["mtp.lm_head.weight"]),
    ):
        assert untie_own_head(*same) == (same[0], ())
