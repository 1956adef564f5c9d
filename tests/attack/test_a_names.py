"""A model names files of the machine in its settings: no library opens them (part A of the attacks)."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoProcessor, AutoTokenizer

from quantcore.checkpoint.harmless import CONFIG, PROCESSOR, TOKENIZER, Known
from quantcore.engine.data.media import load_processor
from quantcore.engine.data.tokenizer import load_tokenizer
from quantcore.engine.model.skeleton import build_skeleton
from quantcore.errors import ModelError, QuantError
from tests.support.canary import FORMS, Canary
from tests.support.class_keys import config_classes, config_keys, processor_keys, tokenizer_classes, tokenizer_keys
from tests.support.models import SHAPE, tiny_tokenizer

TOKENIZER_FILES = """
vocab merges vocab_file merges_file emoji_file entity_vocab_file normalizer_file spm_file src_vocab_file tgt_vocab_file
word_pronunciation_file word_shape_file tokenizer_file gguf_file files_loaded
"""
"""Keys of a tokenizer that Transformers opens."""
TOKENIZER_OBJECTS = """
init_inputs name_or_path tokenizer tokenizer_object post_processor tokenizer_padding tokenizer_truncation _json_padding
_json_truncation _spm_precompiled_charsmap jumanpp_kwargs mecab_kwargs sudachi_kwargs phonemizer_backend phonemizer_lang
cache_dir revision subfolder repo_id token proxies commit_message _commit_hash _from_auto _from_pipeline
"""
"""Keys that stand for a repository, a dictionary or an object of the library."""
TOKENIZER_NUMBERS = """
add_blank add_bos_token add_eos_token add_prefix_space cell_trim_length clean_text clean_up_tokenization_spaces
clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output cls_token_box do_basic_tokenize do_clean_text
do_lower_case do_lowercase do_lowercase_and_remove_accent do_phonemize do_subword_tokenize do_word_tokenize extra_ids
fix_mistral_regex force_download is_uroman keep_accents legacy legacy_behaviour local_files_only max_column_id max_depth
max_entity_length max_len max_length max_mention_length max_question_length max_row_id max_target_length max_width
min_question_length normalization normalize offset only_label_first_subword pad_to_multiple_of pad_token_box
pad_token_label pad_token_type_id pad_width phonemize predict_timestamps remove_space sanitize_control_tokens
save_jinja_files sep_token_box split_by_punct split_special_tokens stride strip_accents strip_column_names
token_type_ids_include_special_tokens tokenize_chinese_chars trim_offsets unk_id update_answer_coordinates
use_default_system_prompt use_source_tokenizer verbose pair suffix text_pair text_pair_target text_target
"""
"""Keys of numbers and flags, and arguments of single calls."""
CONFIG_FILES = """
backbone dataset dataset_revision dataset_split doc_sep title_sep index_name index_path passages_path cache_dir revision
code_revision token local_files_only trust_remote_code transformers_version
"""
CONFIG_OBJECTS = """
attention_other_setting backbone_kwargs decoder image_codebook_config_dict image_config_dict language_config
linear_attn_config mtp_config multimodal_config_dict per_layer_config rope_scaling sparse_attention_config
text_config_dict vision_config_dict vit_config whisper_config
"""
CONFIG_NUMBERS = """
adapter_output_size attention_windows block_ff_dim capacity_factor compress_rate_csa compress_rate_hca compress_ratios
dense_intermediate_size dense_mlp_idx embed_dim first_k_dense_replace frame_rate full_attention_interval
global_attn_every_n_layers global_head_dim global_rope_theta head_dim heads image_default_input_size image_num_pos
image_patch_size image_size index_skip_topk_offset index_topk_freq initializer_range is_causal layers local_rope_theta
ls_init_value mamba_chunk_size mamba_conv_bias mamba_d_conv mamba_dt_init_floor mamba_dt_limit mamba_dt_max mamba_dt_min
mamba_expand mamba_n_groups mask_loss_coefficient moe_layer_freq moe_shared_expert_intermediate_size n_embed
no_rope_layer_interval num_channels num_experts num_global_key_value_heads num_hash_layers num_heads num_labels
num_nextn_predict_layers out_indices output_stride pad_token_id partial_rotary_factor partial_rotary_factors
pooler_hidden_size pyramid_num_routed qk_rope_head_dim qkv_bias rope_local_base_freq rope_theta rotary_dim
rotary_emb_base rotary_pct router_scale segmentation_indices sliding_window sliding_window_size swa_qk_rope_head_dim
swa_rope_theta tie_embedding tie_word_embeddings use_bias use_dsa use_falcon_mambapy use_sliding_window
use_timm_backbone vit_layers whisper_adapter_in_dim whisper_adapter_out_dim width
"""
PROCESSOR_FILES = """
class_info_file repo_path speaker_embeddings tesseract_config ocr_lang pretrained_cfg architecture device
"""
PROCESSOR_OBJECTS = """
alignment_tokenizer audio_processor audio_tokenizer feature_extractor image_processor protein_tokenizer
qformer_tokenizer tokenizer video_processor streaming_modes
"""
PROCESSOR_NUMBERS = """
codebook_crop_size codebook_size crop_size default_num_lookahead_tokens downsample_rate mask_pad_size mask_size
max_image_size num_image_tokens num_query_tokens pad_size patch_size size stem_indices supported_num_lookahead_tokens
"""
KINDS = {
    "tokenizer": (TOKENIZER, tokenizer_keys, TOKENIZER_FILES, TOKENIZER_OBJECTS + TOKENIZER_NUMBERS),
    "config": (CONFIG, config_keys, CONFIG_FILES, CONFIG_OBJECTS + CONFIG_NUMBERS),
    "processor": (PROCESSOR, processor_keys, PROCESSOR_FILES, PROCESSOR_OBJECTS + PROCESSOR_NUMBERS),
}


@pytest.fixture
def canary(tmp_path: Path) -> Iterator[Canary]:
    watched = Canary(tmp_path / "elsewhere")
    yield watched
    watched.close()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model with the settings of a tokenizer, and no file with its vocabulary: Transformers looks where they say."""
    folder = tmp_path / "models" / "m"
    tiny_tokenizer().save_pretrained(folder)
    (folder / "tokenizer.json").unlink()
    return folder


def is_listed(known: Known, key: str) -> bool:
    return key in known.texts | known.words | known.data or (known.tokens and key.endswith("_token"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_key_that_the_classes_read_is_known(kind: str) -> None:
    """A new release of Transformers that reads another key fails here: decide whether it may have text."""
    known, find_keys, files, others = KINDS[kind]
    keys = find_keys()
    assert len(keys) > 50
    assert sorted(key for key in keys if not is_listed(known, key) and key not in f"{files} {others}".split()) == []
    assert not [key for key in files.split() if is_listed(known, key)]


def write(model: Path, file: str, **changes: Any) -> None:
    path = model / file
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**before, **changes}))


def attempt(model: Path, canary: Canary, load: Any) -> str:
    """Return what an attacker sees of the attempt to load something of the model."""
    try:
        loaded = load(model)
    except QuantError as error:
        return json.dumps(error.to_dict())
    vocabulary = loaded.get_vocab() if hasattr(loaded, "get_vocab") else {}
    return f"{vocabulary} {getattr(loaded, 'init_kwargs', '')}"


ONE_OF_EACH = ("BertTokenizer", "LlamaTokenizer", "XLNetTokenizer", "BertJapaneseTokenizer", "WhisperTokenizer")
"""Classes with a vocabulary of words, of pieces, of sentencepiece, in Python, and with further files."""
SAMPLES = {
    "a vocabulary": ("tokenizer_config.json", "BertTokenizer", ("vocab",)),
    "merges": ("tokenizer_config.json", "GPT2Tokenizer", ("vocab", "merges")),
    "special tokens": ("special_tokens_map.json", "BertTokenizer", ("vocab",)),
    "settings of sentencepiece": ("tokenizer_config.json", "XLNetTokenizer", ("sp_model_kwargs", "vocab_file")),
    "files of another class": ("tokenizer_config.json", "FSMTTokenizer", ("src_vocab_file", "tgt_vocab_file")),
    "positional arguments": ("tokenizer_config.json", "BertTokenizer", ("init_inputs",)),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sample", SAMPLES)
def test_a_tokenizer_opens_no_file_that_it_names(sample: str, form: str, model: Path, canary: Canary) -> None:
    file, kind, keys = SAMPLES[sample]
    named = canary.named(form, model)
    values: dict[str, Any] = {"sp_model_kwargs": {"model_file": named}, "init_inputs": [named]}
    write(model, "tokenizer_config.json", tokenizer_class=kind)
    write(model, file, **{key: values.get(key, named) for key in keys})
    shown = attempt(model, canary, load_tokenizer)
    assert canary.secret not in shown and not canary.was_opened()


def test_the_library_alone_would_open_it(model: Path, canary: Canary) -> None:
    """The test above can fail."""
    write(model, "tokenizer_config.json", tokenizer_class="BertTokenizer", vocab=str(canary.path))
    opened = AutoTokenizer.from_pretrained(str(model))
    assert canary.was_opened() and canary.secret in str(opened.get_vocab())


def test_a_key_that_the_class_reads_is_refused_by_its_name(model: Path, canary: Canary) -> None:
    write(model, "tokenizer_config.json", tokenizer_class="BertTokenizer", vocab=str(canary.path))
    with pytest.raises(ModelError, match="'vocab'") as caught:
        load_tokenizer(model)
    assert caught.value.code == "unsafe_setting" and str(canary.path) not in str(caught.value.to_dict())


def test_usual_settings_change_nothing(model: Path) -> None:
    """What published tokenizers have in their settings is either passed on or changes nothing."""
    tiny_tokenizer().save_pretrained(model)
    before = load_tokenizer(model)
    write(
        model, "tokenizer_config.json", name_or_path="/home/somebody/checkpoint-7", tokenizer_file="/root/t.json",
        special_tokens_map_file=None, clean_up_tokenization_spaces=False, sp_model_kwargs={}, padding_side="left",
        model_max_length=1e30, use_default_system_prompt=False, extra_special_tokens={"image_token": "<image>"},
    )  # fmt: skip
    after = load_tokenizer(model)
    assert after.padding_side == "left" and after("some text")["input_ids"] == before("some text")["input_ids"]
    assert after.image_token == "<image>"


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_no_key_of_any_tokenizer_opens_a_file(form: str, model: Path, canary: Canary) -> None:
    """Every class with all keys at once; classes of each kind also with each key that is passed on by itself."""
    named = canary.named(form, model)
    keys = sorted(tokenizer_keys() - {"tokenizer_class"})
    before = (model / "tokenizer_config.json").read_text()
    assert len(tokenizer_classes()) > 60
    cases = [(kind.__name__, keys) for kind in tokenizer_classes()]
    cases += [(kind, [key]) for kind in ONE_OF_EACH for key in keys if is_listed(TOKENIZER, key)]
    for kind, chosen in cases:
        for file in ("tokenizer_config.json", "special_tokens_map.json"):
            (model / "tokenizer_config.json").write_text(before)
            (model / "special_tokens_map.json").unlink(missing_ok=True)
            write(model, file, **dict.fromkeys(chosen, named))
            write(model, "tokenizer_config.json", tokenizer_class=kind)
            shown = attempt(model, canary, load_tokenizer)
            assert not canary.was_opened() and canary.secret not in shown, f"{kind}: {chosen}"


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_no_key_of_any_config_opens_a_file(form: str, model: Path, canary: Canary) -> None:
    """Every class of a config with every key of text; where a model can be built from it, it is.

    Each key by itself is written in one of the forms, which takes turns: all of them would take an hour. A model with
    a text part gets a small one: Transformers fills in that of a published model, and builds it in two minutes.
    """
    import torch

    named = canary.named(form, model)
    keys = sorted(config_keys() | set(CONFIG_FILES.split()))
    turn = FORMS.index(form)
    for number, kind in enumerate(kind for kind in config_classes() if kind.model_type):
        parts = {"text_config": SHAPE} if "text_config" in kind.sub_configs else {}
        alone = [key for place, key in enumerate(CONFIG_FILES.split()) if (number + place) % len(FORMS) == turn]
        for chosen in (keys, *([key] for key in alone)):
            raw = {"model_type": kind.model_type, **SHAPE, **parts, **dict.fromkeys(chosen, named)}
            shown = attempt(model, canary, lambda _, raw=raw: build_skeleton(raw, torch.float32))
            assert not canary.was_opened() and canary.secret not in shown, f"{kind.__name__}: {chosen}"


@pytest.mark.parametrize("file", ["processor_config.json", "preprocessor_config.json"])
@pytest.mark.parametrize("form", FORMS)
def test_no_key_of_a_processor_opens_a_file(form: str, file: str, model: Path, canary: Canary) -> None:
    named = canary.named(form, model)
    keys = f"{PROCESSOR_FILES} audio_tokenizer tokenizer image_processor feature_extractor".split()
    nested = {"audio_tokenizer": {"audio_tokenizer_class": "DacModel", "audio_tokenizer_name_or_path": named}}
    for kind in ("LlavaProcessor", "DiaProcessor", "BarkProcessor", "OneFormerProcessor", "WhisperProcessor"):
        write(model, file, **dict.fromkeys(keys, named) | nested, processor_class=kind)
        write(model, "config.json", model_type="llava", processor_class=kind)
        shown = attempt(model, canary, lambda folder: load_processor(folder, AutoProcessor))
        assert not canary.was_opened() and canary.secret not in shown, kind
