"""The class that is built for a config, what it computes, and what it is given."""

import pytest
import torch

from quantcore.engine.model.kinds import (
    Kind,
    body_of,
    decoder_inputs,
    halves,
    inputs_of,
    language_model,
    loading_class,
    model_class,
    neutral_token,
    num_tokens,
    outputs_of,
)
from quantcore.engine.model.skeleton import build_skeleton, clean_config
from quantcore.errors import ModelError
from tests.sweep.classes import build, find_class

CHOSEN = {
    "a model with a tower": ("llava", "LlavaForConditionalGeneration", Kind.causal),
    "a base model": ("llama", "LlamaModel", Kind.embedding),
    "a reranker": ("xlm-roberta", "XLMRobertaForSequenceClassification", Kind.scores),
    "an encoder": ("bert", "BertForMaskedLM", Kind.masked),
    "an encoder without a head": ("bert", "BertModel", Kind.embedding),
    "an encoder beside a decoder": ("t5", "T5ForConditionalGeneration", Kind.sequence_to_sequence),
    "a decoder that belongs to an encoder": ("bart", "BartForCausalLM", Kind.causal),
    "an encoder that hears": ("whisper", "WhisperForConditionalGeneration", Kind.speech),
    "an encoder beside a decoder that speaks": ("dia", "DiaForConditionalGeneration", Kind.sequence_to_sequence),
    "an encoder of features of sound": ("pop2piano", "Pop2PianoForConditionalGeneration", Kind.speech),
    "a part that no table lists": ("emu3_text_model", "Emu3TextModel", Kind.embedding),
    "such a part with a head": ("emu3_text_model", "Emu3ForCausalLM", Kind.causal),
    "a tower that hears": ("qwen2_audio", "Qwen2AudioForConditionalGeneration", Kind.causal),
}


def chosen(raw_config):
    built, kind = model_class(clean_config(raw_config), raw_config)
    return built.__name__, kind


@pytest.mark.parametrize("case", CHOSEN)
def test_the_declared_class_is_built(case):
    model_type, declared, kind = CHOSEN[case]
    assert chosen({"model_type": model_type, "architectures": [declared]}) == (declared, kind)


@pytest.mark.parametrize(
    ("model_type", "declared", "expected"),
    [
        ("llama", "LlamaForCausalLM", "AutoModelForCausalLM"),
        ("gemma3", "Gemma3ForConditionalGeneration", "AutoModelForCausalLM"),
        ("llava", "LlavaForConditionalGeneration", "LlavaForConditionalGeneration"),
        ("bert", "BertForMaskedLM", "BertForMaskedLM"),  # AutoModelForCausalLM would load a BertLMHeadModel
        ("internlm3", "InternLM3ForCausalLM", "AutoModelForCausalLM"),  # its class is in the model's own code
        ("llama", None, "AutoModelForCausalLM"),
    ],
)
def test_the_class_that_loads_a_model_is_the_declared_one(model_type, declared, expected):
    assert loading_class({"model_type": model_type, "architectures": declared and [declared]}) == expected


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


def test_a_class_that_transformers_lists_without_having_it_is_named():
    with pytest.raises(ModelError, match="voxtral_realtime_text") as caught:
        build_skeleton({"model_type": "voxtral_realtime_text", "hidden_size": 64}, torch.float32)
    assert caught.value.code == "unsupported_architecture"


def test_a_decoder_reads_what_it_predicts_one_place_later():
    ids_NT = torch.arange(10, 18)[None]
    config = clean_config({"model_type": "t5", "vocab_size": 64, "num_layers": 1})
    read, predicted = halves(ids_NT)
    assert read.tolist() == [[10, 11, 12, 13]] and predicted.tolist() == [[14, 15, 16, 17]]
    assert decoder_inputs(config, predicted).tolist() == [[config.pad_token_id, 14, 15, 16]]
    model = build_skeleton({"model_type": "t5", "vocab_size": 64, "num_layers": 1}, torch.float32)
    assert inputs_of(model, Kind.sequence_to_sequence, ids_NT).keys() == {"input_ids", "decoder_input_ids", "use_cache"}
    assert neutral_token(config) not in (config.pad_token_id, config.eos_token_id)


def test_a_model_with_a_head_says_how_the_one_inside_runs():
    """BLIP's text model is an encoder by default."""
    ids_NT = torch.arange(10, 18)[None]
    blip, bert = build(find_class("BlipForConditionalGeneration")), build(find_class("BertForMaskedLM"))
    text = language_model(blip, Kind.causal)
    assert inputs_of(text, Kind.causal, ids_NT).keys() == {"input_ids", "use_cache", "is_decoder"}
    assert inputs_of(text, Kind.causal, ids_NT)["is_decoder"] is True
    assert inputs_of(bert, Kind.masked, ids_NT).keys() <= {"input_ids", "use_cache"}


def test_every_codebook_reads_the_tokens_and_the_first_predicts():
    music, ids_NT = build(find_class("MusicgenForCausalLM")), torch.arange(10, 18)[None]
    named = inputs_of(music, Kind.causal, ids_NT)
    assert torch.equal(named["input_ids"], ids_NT.expand(music.config.num_codebooks, 8))
    assert num_tokens(music) == music.config.vocab_size + 1
    with torch.no_grad():
        output = music(**named)
    assert torch.equal(outputs_of(output), output.logits[:1]) and len(output.logits) == music.config.num_codebooks == 4


def test_a_decoder_that_speaks_reads_the_second_half_in_every_codebook():
    dia, ids_NT = build(find_class("DiaForConditionalGeneration")), torch.arange(10, 18)[None]
    named, decoder = inputs_of(dia, Kind.sequence_to_sequence, ids_NT), dia.config.decoder_config
    assert named["input_ids"].tolist() == [[10, 11, 12, 13]]
    read = torch.tensor([decoder.bos_token_id, 14, 15, 16])
    assert torch.equal(named["decoder_input_ids"], read[None, :, None].expand(1, 4, decoder.num_channels))
    assert num_tokens(dia) == dia.config.encoder_config.vocab_size < decoder.vocab_size
    with torch.no_grad():
        output = dia(**named)
    assert torch.equal(outputs_of(output), output.logits[:1]) and len(output.logits) == decoder.num_channels == 9


def test_a_model_whose_part_has_other_names_for_its_inputs_runs_whole():
    speech, bart = build(find_class("SpeechT5ForSpeechToText")), build(find_class("BartForConditionalGeneration"))
    assert body_of(speech) is speech and body_of(bart) is bart.model
