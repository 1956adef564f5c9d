"""Tokenizers as GGUF metadata."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from quantcore.engine.data.tokenizer import load_tokenizer
from quantcore.errors import ModelError
from quantcore.export.gguf.gguf_tokenizer import (
    BYTE,
    CONTROL,
    NORMAL,
    PRE_TOKENIZERS,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    describe_tokenizer,
)
from tests.support.models import tiny_tokenizer
from tests.support.tokenizers import CUTS, byte_level, saved, sentencepiece


@pytest.mark.parametrize("name", CUTS)
def test_the_cuts_of_a_text_are_called_as_in_llama_cpp(tmp_path, name):
    found = describe_tokenizer(load_tokenizer(saved(tmp_path, byte_level(CUTS[name]))), 300)
    assert (found.model, found.pre) == ("gpt2", name)
    assert bool(found.warnings) == (name == "default")
    if found.warnings:
        assert "has no known name in GGUF" in found.warnings[0] and r"'\\d'" in found.warnings[0]


def test_llama3_also_takes_whole_words(tmp_path):
    found = describe_tokenizer(load_tokenizer(saved(tmp_path, byte_level(CUTS["dbrx"], ignore_merges=True))), 300)
    assert found.pre == "llama-bpe" and set(CUTS) - {"default"} < set(PRE_TOKENIZERS.values())


def test_a_space_in_front_of_texts_is_told(tmp_path):
    found = describe_tokenizer(
        load_tokenizer(saved(tmp_path, byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True)))), 300
    )
    assert found.pre == "gpt-2" and "does not put a space before a text" in found.warnings[0]


def test_byte_level_bpe(tmp_path):
    tokenizer = byte_level()
    tokenizer.add_tokens(["<|looks special|>", "plain"])
    folder = saved(tmp_path, tokenizer, bos_token="<s>", eos_token="</s>")
    size = tokenizer.get_vocab_size()
    found = describe_tokenizer(load_tokenizer(folder), size + 3)
    assert found.tokens[:size] == [tokenizer.id_to_token(index) for index in range(size)]
    assert found.tokens[size:] == [f"[PAD{size + index}]" for index in range(3)]
    assert found.types[:3] == [CONTROL, CONTROL, NORMAL]
    assert found.types[size - 2 :] == [CONTROL, USER_DEFINED, UNUSED, UNUSED, UNUSED]
    assert found.merges[:2] == ["h e", "t he"] and found.scores == []
    assert found.special == {"bos": 0, "eos": 1} and not found.add_bos and not found.add_eos


def test_sentencepiece_bpe(tmp_path):
    folder = saved(tmp_path, sentencepiece(), bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    found = describe_tokenizer(load_tokenizer(folder), 273)
    assert (found.model, found.pre, found.merges) == ("llama", "default", [])
    assert found.types[:4] == [UNKNOWN, CONTROL, CONTROL, BYTE] and found.types[272] == USER_DEFINED
    assert found.tokens[272] == "  "
    assert found.scores[found.tokens.index("th")] == 0 and found.scores[found.tokens.index("▁cat")] == -5
    assert found.scores[found.tokens.index("a")] < -1000
    assert found.add_bos and not found.add_eos and found.add_space_prefix
    assert found.special == {"bos": 1, "eos": 2, "unk": 0}


def test_tokens_without_a_row_are_left_out_and_told(tmp_path):
    tiny_tokenizer().save_pretrained(tmp_path)
    found = describe_tokenizer(load_tokenizer(tmp_path), 500)
    assert len(found.tokens) == len(found.types) == 500 and "12 token(s)" in found.warnings[0]


def test_a_chat_template_travels(tmp_path):
    folder = saved(tmp_path, byte_level(), bos_token="<s>", chat_template="{{ messages }}")
    assert describe_tokenizer(load_tokenizer(folder), 300).chat_template == "{{ messages }}"


def test_other_kinds_of_tokenizers_are_refused(tmp_path):
    folder = saved(tmp_path, Tokenizer(models.Unigram([("a", -1.0)])))
    with pytest.raises(ModelError, match=r"that of .* is Unigram"):
        describe_tokenizer(load_tokenizer(folder), 1)
