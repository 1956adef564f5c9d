"""Encoders, rerankers and sequence-to-sequence models: what a job measures is what Transformers computes."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import PreTrainedModel

from quantcore.config import presets
from quantcore.config.task import Task
from quantcore.engine.evaluation.text import EvaluationText, evaluation_text
from quantcore.engine.model.kinds import Kind, declared_class
from quantcore.engine.model.skeleton import kind_of
from quantcore.engine.model.tiny_model import build_tiny_model
from quantcore.engine.pipeline import job
from quantcore.errors import ConfigError
from tests.support.params import with_rare
from tests.support.tokenizers import save_byte_tokenizer

NUM_WINDOWS, SEQ_LEN = 6, 32
SCHEMES = ("int8_weight_only", "int4_wo_per_channel")
SMALL = {"vocab_size": 320, "max_position_embeddings": 64}
BERT = SMALL | {
    "model_type": "bert", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "T5ForConditionalGeneration": {
        "model_type": "t5", "vocab_size": 320, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_heads": 4, "num_layers": 3,
        "num_decoder_layers": 2, "is_encoder_decoder": True, "decoder_start_token_id": 0,
    },
    "BertForMaskedLM": BERT,
    "BertModel": BERT,
    "BertForSequenceClassification": BERT,
}  # fmt: skip


@dataclass(frozen=True)
class Result:
    """A job on a small model of a class: its report, and both models as Transformers loads them, in float32."""

    report: dict[str, Any]
    original: PreTrainedModel
    quantized: PreTrainedModel
    text: EvaluationText


def quantize(folder: Path, name: str, **changes: Any) -> Result:
    config = MODELS[name] | {"architectures": [name]}
    declared, kind = declared_class(config), kind_of(config)
    original = build_tiny_model(config, 0, declared)
    original.save_pretrained(folder / "model")
    save_byte_tokenizer(folder / "model", of_encoder=kind is not Kind.sequence_to_sequence)
    task = Task.model_validate(
        {
            "model_dir": str(folder / "model"), "output_dir": str(folder / "out"), "export": ["fake_quantized"],
            "config": presets.resolve("int4_wo_per_channel").to_dict() | {"algo_config": [{"name": "gptq"}]},
            "calibration": {"num_samples": 16, "seq_len": SEQ_LEN}, "gate": "warn",
            "evaluation": {"num_windows": NUM_WINDOWS, "seq_len": SEQ_LEN, "num_prompts": 0},
        }
        | changes
    )  # fmt: skip
    job.run(task, lambda event: None)
    report = json.loads((folder / "out" / "report.json").read_text())
    quantized = declared.from_pretrained(folder / "out", dtype=torch.float32).train(False)
    return Result(report, original, quantized, evaluation_text(task, job.read_windows(task), kind))


@torch.no_grad()
def test_the_loss_of_a_decoder_is_that_of_transformers(tmp_path, proof_in_this_process):
    """It predicts the second half of each window, from its first half and what was before in the second."""
    result = quantize(tmp_path, "T5ForConditionalGeneration")
    read, predicted = result.text.ids_NT.chunk(2, dim=1)
    for model, which in ((result.original, "before"), (result.quantized, "after")):
        expected = model(input_ids=read, labels=predicted.contiguous()).loss.exp().item()
        assert result.report["quality"][which]["token_perplexity"]["value"] == pytest.approx(expected, rel=1e-4)
    assert result.report["quality"]["before"] != result.report["quality"]["after"]
    assert {layer["name"].split(".")[0] for layer in result.report["layers"]} == {"encoder", "decoder"}
    assert any(".EncDecAttention." in layer["name"] for layer in result.report["layers"])


@torch.no_grad()
def test_the_loss_of_masked_tokens_is_that_of_transformers(tmp_path, proof_in_this_process):
    result = quantize(tmp_path, "BertForMaskedLM")
    labels = result.text.targets_NP.masked_fill(result.text.targets_NP < 0, -100)
    is_masked = result.text.ids_NT == 258
    assert 0.05 < is_masked.float().mean() < 0.3 and torch.equal(is_masked, labels != -100)
    assert set(result.text.ids_NT[:, 0].tolist()) == {256} and set(result.text.ids_NT[:, -1].tolist()) == {257}
    for model, which in ((result.original, "before"), (result.quantized, "after")):
        expected = model(input_ids=result.text.ids_NT, labels=labels).loss.exp().item()
        assert result.report["quality"][which]["token_perplexity"]["value"] == pytest.approx(expected, rel=1e-4)


@torch.no_grad()
def test_embeddings_are_compared(tmp_path, proof_in_this_process):
    result = quantize(tmp_path, "BertModel")
    ours, theirs = (
        model(input_ids=result.text.ids_NT).last_hidden_state for model in (result.quantized, result.original)
    )
    cosine = functional.cosine_similarity(ours.mean(1), theirs.mean(1)).mean().item()
    measured = result.report["encoder"]
    assert measured["cosine"]["value"] == pytest.approx(cosine, abs=1e-5) and cosine < 0.9999
    assert measured["output_error"] == pytest.approx(((ours - theirs).norm() / theirs.norm()).item(), rel=1e-3)
    assert 0.5 < measured["rank_agreement"]["value"] <= 1 and result.report["quality"] is None
    assert "cosine of the embeddings" in (tmp_path / "out" / "README.md").read_text()
    assert "cosine of the embeddings" in (tmp_path / "out" / "report.html").read_text()


@torch.no_grad()
def test_scores_are_compared(tmp_path, proof_in_this_process):
    from scipy.stats import kendalltau  # takes half a second to import

    result = quantize(tmp_path, "BertForSequenceClassification")
    ours, theirs = (model(input_ids=result.text.ids_NT).logits for model in (result.quantized, result.original))
    measured = result.report["encoder"]
    assert measured["output_error"] == pytest.approx(((ours - theirs).norm() / theirs.norm()).item(), rel=1e-3)
    order = kendalltau(ours[:, 0], theirs[:, 0]).statistic, kendalltau(ours[:, 1], theirs[:, 1]).statistic
    assert measured["cosine"] is None
    assert measured["rank_agreement"]["value"] == pytest.approx((sum(order) / 2 + 1) / 2, abs=1e-6)


@pytest.mark.parametrize("asked", with_rare(["mix", "tasks"], ["tasks"]))
def test_what_only_causal_models_have_is_refused(tmp_path, asked):
    configs = {name: presets.resolve(name).to_dict() for name in SCHEMES}
    mix = {"schemes": SCHEMES, "configs": configs, "max_bits": 6.0}
    changes = {
        "mix": {"mix": mix, "config": {"global_quant_config": {}}},
        "tasks": {"evaluation": {"num_windows": 2, "seq_len": SEQ_LEN, "tasks": ["arc_easy"]}},
    }[asked]
    with pytest.raises(ConfigError, match="can only be measured with causal language models"):
        quantize(tmp_path, "BertModel", **changes)
