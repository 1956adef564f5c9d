"""Tokenizers as GGUF metadata."""

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from quantcore.errors import ModelError
from quantcore.export.gguf.tokenizer import (
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

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False)
CUTS = {
    "gpt-2": WORDS,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), WORDS]),
    "dbrx": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3), "isolated"), BYTES]),
    "qwen2": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(QWEN2), "isolated"), BYTES]),
    "tekken": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(TEKKEN), "isolated"), BYTES]),
    "default": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\d"), "isolated"), BYTES]),
}


def saved(folder, tokenizer, **special):
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return folder


def byte_level(pre_tokenizer=None, *, ignore_merges=False):
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizer or CUTS["gpt-2"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(["the cat and the dog and the cat"] * 3, trainer)
    return tokenizer


def sentencepiece(added=("▁▁",)):
    """As Llama 2's tokenizer.json: BPE with byte fallback, spaces as ▁ with one in front."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁tehacd"]
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("c", "a"), ("ca", "t"), ("▁", "cat")]
    vocab = {piece: index for index, piece in enumerate([*pieces, *("".join(pair) for pair in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.add_tokens(list(added))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


@pytest.mark.parametrize("name", CUTS)
def test_the_cuts_of_a_text_are_called_as_in_llama_cpp(tmp_path, name):
    found = describe_tokenizer(saved(tmp_path, byte_level(CUTS[name])), 300)
    assert (found.model, found.pre) == ("gpt2", name)
    assert bool(found.warnings) == (name == "default")
    if found.warnings:
        assert "has no name in GGUF that is known here" in found.warnings[0] and r"'\\d'" in found.warnings[0]


def test_llama3_also_takes_whole_words(tmp_path):
    found = describe_tokenizer(saved(tmp_path, byte_level(CUTS["dbrx"], ignore_merges=True)), 300)
    assert found.pre == "llama-bpe" and set(CUTS) - {"default"} < set(PRE_TOKENIZERS.values())


def test_a_space_in_front_of_texts_is_told(tmp_path):
    found = describe_tokenizer(saved(tmp_path, byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True))), 300)
    assert found.pre == "gpt-2" and "puts no space in front" in found.warnings[0]


def test_byte_level_bpe(tmp_path):
    tokenizer = byte_level()
    tokenizer.add_tokens(["<|looks special|>", "plain"])
    folder = saved(tmp_path, tokenizer, bos_token="<s>", eos_token="</s>")
    size = tokenizer.get_vocab_size()
    found = describe_tokenizer(folder, size + 3)
    assert found.tokens[:size] == [tokenizer.id_to_token(index) for index in range(size)]
    assert found.tokens[size:] == [f"[PAD{size + index}]" for index in range(3)]
    assert found.types[:3] == [CONTROL, CONTROL, NORMAL]
    assert found.types[size - 2 :] == [CONTROL, USER_DEFINED, UNUSED, UNUSED, UNUSED]
    assert found.merges[:2] == ["h e", "t he"] and found.scores == []
    assert found.special == {"bos": 0, "eos": 1} and not found.add_bos and not found.add_eos


def test_sentencepiece_bpe(tmp_path):
    folder = saved(tmp_path, sentencepiece(), bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    found = describe_tokenizer(folder, 273)
    assert (found.model, found.pre, found.merges) == ("llama", "default", [])
    assert found.types[:4] == [UNKNOWN, CONTROL, CONTROL, BYTE] and found.types[272] == USER_DEFINED
    assert found.tokens[272] == "  "
    assert found.scores[found.tokens.index("th")] == 0 and found.scores[found.tokens.index("▁cat")] == -5
    assert found.scores[found.tokens.index("a")] < -1000
    assert found.add_bos and not found.add_eos and found.add_space_prefix
    assert found.special == {"bos": 1, "eos": 2, "unk": 0}


def test_tokens_without_a_row_are_left_out_and_told(tmp_path):
    tiny_tokenizer().save_pretrained(tmp_path)
    found = describe_tokenizer(tmp_path, 500)
    assert len(found.tokens) == len(found.types) == 500 and "12 token(s)" in found.warnings[0]


def test_a_chat_template_travels(tmp_path):
    folder = saved(tmp_path, byte_level(), bos_token="<s>", chat_template="{{ messages }}")
    assert describe_tokenizer(folder, 300).chat_template == "{{ messages }}"


def test_other_kinds_of_tokenizers_are_refused(tmp_path):
    folder = saved(tmp_path, Tokenizer(models.Unigram([("a", -1.0)])))
    with pytest.raises(ModelError, match=r"that of .* is Unigram"):
        describe_tokenizer(folder, 1)
