"""Removes everything not known to be harmless from a model's JSON files before a library reads them. No torch.

Transformers opens whatever some keys name ("vocab": "/etc/passwd" in tokenizer_config.json, or an audio tokenizer in
processor_config.json), and each release may add such keys. So the lists here say what stays; they do not say what goes.
``tests/attack/test_a_names.py`` compares them with what the classes of the installed Transformers read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_WORD = re.compile(r"[\w.+*|<>() -]{0,2000}")
"""Text that names no path and no URL: it has no slash, backslash, colon or tilde."""
_OPENED = ("_file", "_path", "vocab", "merges")
"""Ends of keys that tokenizers and processors open: a small number there would stand for an open file."""


KeyPath = tuple[str, ...]
"""The keys that lead to a value in nested objects."""


class _Unknown(Exception):
    """A value that is not known to be harmless."""


@dataclass(frozen=True)
class Known:
    """The keys of a JSON file that may have text.

    Numbers, flags and null stay, since they name no file, and objects and lists are searched. ``texts`` may have any
    text, ``words`` a word that names no path, and all of what is under ``data`` stays as it is. With ``tokens``, a key
    that ends in ``_token`` has a special token of the model.
    """

    texts: frozenset[str] = frozenset()
    words: frozenset[str] = frozenset()
    data: frozenset[str] = frozenset()
    tokens: bool = False

    def keep(self, values: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[KeyPath, ...]]:
        """Return what of ``values`` is harmless, and the paths of the keys that were left out."""
        left_out: list[KeyPath] = []
        return self._mapping(values, (), left_out), tuple(left_out)

    def _mapping(self, values: Mapping[str, Any], path: KeyPath, left_out: list[KeyPath]) -> dict[str, Any]:
        kept = {}
        for key, value in values.items():
            try:
                kept[key] = self._value(key, value, (*path, key), left_out)
            except _Unknown:
                left_out.append((*path, key))
        return kept

    def _value(self, key: str, value: Any, path: KeyPath, left_out: list[KeyPath]) -> Any:
        """Return what of ``value`` is harmless. Raises _Unknown for a text or number that is not known to be."""
        is_token = self.tokens and key.endswith("_token")
        if isinstance(value, Mapping):
            return value if is_token or key in self.data else self._mapping(value, path, left_out)
        if isinstance(value, list):  # whole or not at all: the rest of a list means something else
            return value if key in self.data else [self._value(key, part, path, left_out) for part in value]
        if isinstance(value, str):
            is_known = is_token or key in self.texts or (key in self.words and _WORD.fullmatch(value))
        else:
            is_known = value is None or not (self.tokens and key.endswith(_OPENED))
        if not is_known:
            raise _Unknown
        return value


_TEMPLATES = (
    "chat_template",
    "response_template",
    "response_schema",
    "chat_control_tokens",
    "grounded_generation_template",
    "tool_use_template",
)
_CLASSES = (
    "tokenizer_class",
    "processor_class",
    "image_processor_type",
    "feature_extractor_type",
    "video_processor_type",
)
"""Names of classes; Transformers takes only its own."""

TOKENIZER = Known(
    texts=frozenset((
        *_TEMPLATES, *_CLASSES, "errors", "padding", "padding_side", "truncation_side", "truncation_strategy",
        "truncation", "backend", "language", "language_codes", "task", "src_lang", "tgt_lang", "target_lang",
        "token_type_ids_pattern", "special_tokens_pattern", "wordpieces_prefix", "replace_word_delimiter_char",
        "word_tokenizer_type", "subword_tokenizer_type", "model_input_names", "langs", "never_split",
        "additional_special_tokens", "extra_special_tokens", "tokenizer_type", "auto_map",
        "entity_token_1", "entity_token_2", "mask_token_sent",
    )),
    words=frozenset((
        "model_max_length", "fast_tokenizer_files", "mecab_dic", "sudachi_split_mode", "sudachi_dict_type",
    )),
    data=frozenset((
        *_TEMPLATES, "added_tokens_decoder", "additional_special_tokens", "extra_special_tokens",
        "model_specific_special_tokens", "entity_vocab", "id2lang", "lang2id", "tags_dict",
        "auto_map",  # never followed: Transformers refuses a class of the model's own
    )),
    tokens=True,
)  # fmt: skip
"""tokenizer_config.json and special_tokens_map.json, of which the library treats all keys alike."""

PROCESSOR = Known(
    texts=frozenset((
        *_TEMPLATES, *_CLASSES, "default_transcription_prompt", "query_prefix", "visual_prompt_prefix", "header_text",
        "model_input_names", "prompt_dictionary", "padding_side", "truncation_side",
    )),
    words=frozenset((
        "data_format", "input_data_format", "channel_dim", "format", "resample", "padding", "truncation", "pad_mode",
        "padding_mode", "padding_type", "downsample_mode", "ratio", "small_image_upsize", "streaming_mode",
        "vision_aspect_ratio", "vision_feature_select_strategy", "decoder_type", "window", "win_function", "mel_norms",
        "mel_filters_dtype", "audio_processor_type", "transformers_version", "do_sample_frames", "return_tensors",
    )),
    data=frozenset((*_TEMPLATES, "policy_definitions", "prompt_dictionary")),
    tokens=True,
)  # fmt: skip
"""processor_config.json, preprocessor_config.json and video_preprocessor_config.json."""

CHAT_TEMPLATE = Known(texts=frozenset(("chat_template",)), data=frozenset(("chat_template",)))

_ACTIVATIONS = """
activation activation_function adapter_act afn classifier_activation conv_activation conv_norm_activation
csp_activation decoder_activation decoder_activation_function decoder_hidden_act dense_act_fn depth_decoder_activation
encoder_activation_function encoder_feedforward_activation encoder_hidden_act feat_extract_activation feed_forward_proj
ff_activation hidden_act hidden_activation hidden_mamba_act mamba_hidden_act mask_downsampler_hidden_act
memory_attention_feed_forward_hidden_act memory_attention_mlp_hidden_act memory_fuser_hidden_act
mlp_activation_function mlp_hidden_act nemo_activation pooler_act pooler_hidden_act projection_hidden_act
projector_hidden_act prompt_hidden_act readout_activation segmentation_head_activation_function
speech_encoder_hidden_act stem_act_func summary_activation
"""
_LAYERS = """
architectures attention_layers attention_types attn_layers block_types gnn_layers_types indexer_types layer_type
layer_types layers_block_type
mlp_layer_types mtp_layer_types mtp_layers_block_type mtp_mlp_layer_types hybrid_override_pattern
mtp_hybrid_override_pattern sliding_window_pattern index_topk_pattern moe_layers_enum out_features _out_features
stage_names qkv_projection_method pos_att_type
"""
_KINDS = """
model_type type rope_type name dtype torch_dtype tokenizer_class problem_type alpha_initializer alpha_type approx_mode
architecture attention_type attn_impl attn_type attractor_kind autocast_kernel_dtype average_approximation_function
bin_centers_type bins_strategy chunkwise_kernel class_distance_type classifier_pooling conv_glu_type
cross_attention_shape_for_attention ctc_loss_reduction decoder_method default_language depth_estimation_type
distribution_output downsample_mode downsample_rate encoder_attention_type encoder_fuse_op encoder_type esm_type
expert_selection_fn feat_extract_norm flow_type force_dequant fusion_type gating global_padding head_aggregation
inference_state_dtype init_device interpolate_mode link_tower_type logit_scale loss loss_reduction mamba_d_head
mamba_dt_rank mamba_ssm_cache_dtype mask_type mode norm norm_mlp norm_rel_ebd norm_strategy norm_type
normalization_type output_gate_type pad_mode padding_mode patching_mode pooling pooling_type position_embedding_type
position_embeddings_type positional_encoding_type prefix qk_norm_type readout_type resi_connection router_dtype scaling
scoring_func second_expert_policy sequence_kernel shared_expert_combination_strategy spatial_pool_mode stem_type
step_kernel summary_type time_step_init_scheme time_step_rank tokenize_function topk_method upsampler
use_bidirectional_attention variant vision_aspect_ratio vision_feature_select_strategy visual_prompter_apply
visual_prompter_type weight_mode cache_implementation finetuning_task langs languages
"""
CONFIG = Known(
    words=frozenset((*_ACTIVATIONS.split(), *_LAYERS.split(), *_KINDS.split(), "__float__")),
    data=frozenset(("id2label", "label2id", "vocab_list", "vocabulary_map", "speaker_id", "aggregation_labels")),
)
"""config.json."""

FILTERED = {
    "config.json": CONFIG,
    "tokenizer_config.json": TOKENIZER,
    "special_tokens_map.json": TOKENIZER,
    "processor_config.json": PROCESSOR,
    "preprocessor_config.json": PROCESSOR,
    "video_preprocessor_config.json": PROCESSOR,
    "chat_template.json": CHAT_TEMPLATE,
}
"""The JSON files with settings that a library may read, and what is known of each."""

VOCABULARIES = frozenset((
    "tokenizer.json", "tekken.json", "added_tokens.json", "vocab.json", "vocab-src.json", "vocab-tgt.json",
    "entity_vocab.json", "emoji.json", "byte_maps.json", "word_shape.json", "word_pronunciation.json",
    "normalizer.json",
))  # fmt: skip
"""JSON files with tokens and tables, whose content a library takes for text and never for a path."""


def harmless_file(name: str, data: bytes) -> tuple[bytes, tuple[KeyPath, ...]]:
    """Return what of the file of settings ``name`` is harmless, and the paths of the keys that were left out.

    A file that is no JSON object is returned as it is: the library says what is wrong with it.
    """
    try:
        values: Any = json.loads(data)
    except (ValueError, RecursionError):
        return data, ()
    if not isinstance(values, dict):
        return data, ()
    kept, left_out = FILTERED[name].keep(values)
    return json.dumps(kept).encode(), left_out


UNTRUSTED_KEYS = ("auto_map", "trust_remote_code", "quantization_config")
UNTRUSTED_PREFIXES = (
    "attn_implementation",
    "_attn_implementation",
    "experts_implementation",
    "_experts_implementation",
)


def harmless_config(raw: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[KeyPath, ...]]:
    """Return what of config.json Transformers may read, and the keys of text that is not known to be harmless."""
    return CONFIG.keep(_without_untrusted(raw))


def _without_untrusted(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``raw``, nested configs included, without the keys that can make loading run foreign code."""
    return {
        key: _without_untrusted(value) if isinstance(value, dict) else value
        for key, value in raw.items()
        if key not in UNTRUSTED_KEYS and not str(key).startswith(UNTRUSTED_PREFIXES)
    }
