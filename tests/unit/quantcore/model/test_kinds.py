"""The class that is built for a config, what it computes, and what it is given."""

import pytest
import torch

from quantcore.model.kinds import Kind, decoder_inputs, halves, inputs_of, model_class, neutral_token
from quantcore.model.skeleton import build_skeleton, clean_config

CHOSEN = {
    "a model with a tower": ("llava", "LlavaForConditionalGeneration", Kind.causal),
    "a base model": ("llama", "LlamaModel", Kind.embedding),
    "a reranker": ("xlm-roberta", "XLMRobertaForSequenceClassification", Kind.scores),
    "an encoder": ("bert", "BertForMaskedLM", Kind.masked),
    "an encoder without a head": ("bert", "BertModel", Kind.embedding),
    "an encoder beside a decoder": ("t5", "T5ForConditionalGeneration", Kind.sequence_to_sequence),
    "a decoder that belongs to an encoder": ("bart", "BartForCausalLM", Kind.causal),
    "an encoder that hears": ("whisper", "WhisperForConditionalGeneration", Kind.speech),
    "a tower that hears": ("qwen2_audio", "Qwen2AudioForConditionalGeneration", Kind.causal),
}


def chosen(raw_config):
    built, kind = model_class(clean_config(raw_config), raw_config)
    return built.__name__, kind


@pytest.mark.parametrize("case", CHOSEN)
def test_the_declared_class_is_built(case):
    model_type, declared, kind = CHOSEN[case]
    assert chosen({"model_type": model_type, "architectures": [declared]}) == (declared, kind)


UNDECLARED = {
    "t5": ("T5ForConditionalGeneration", Kind.sequence_to_sequence),
    "llama": ("LlamaForCausalLM", Kind.causal),
    "internlm3": ("LlamaForCausalLM", Kind.causal),  # built by the class of another model type
    "qwen3_5": ("Qwen3_5ForConditionalGeneration", Kind.causal),  # it has a vision_config
}


@pytest.mark.parametrize("model_type", UNDECLARED)
def test_without_a_declared_class_the_whole_model_is_built(model_type):
    assert chosen({"model_type": model_type}) == UNDECLARED[model_type]
    declared_part = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForCausalLM"]}
    assert chosen(declared_part) == UNDECLARED["qwen3_5"]


def test_a_decoder_reads_what_it_predicts_one_place_later():
    ids_NT = torch.arange(10, 18)[None]
    config = clean_config({"model_type": "t5", "vocab_size": 64, "num_layers": 1})
    read, predicted = halves(ids_NT)
    assert read.tolist() == [[10, 11, 12, 13]] and predicted.tolist() == [[14, 15, 16, 17]]
    assert decoder_inputs(config, predicted).tolist() == [[config.pad_token_id, 14, 15, 16]]
    model = build_skeleton({"model_type": "t5", "vocab_size": 64, "num_layers": 1}, torch.float32)
    assert inputs_of(model, Kind.sequence_to_sequence, ids_NT).keys() == {"input_ids", "decoder_input_ids", "use_cache"}
    assert neutral_token(config) not in (config.pad_token_id, config.eos_token_id)
