"""Determines the task of a model from the class that config.json declares, and calls the model with tokens."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto as auto

from quantcore.checkpoint.model_config import ModelConfig
from quantcore.errors import ModelError

Media = Mapping[str, torch.Tensor]
"""Inputs of a model beside the token ids of a window: what its processor makes of images and sound. Empty for text."""


class Kind(StrEnum):
    """The task of a model, by what it computes.

    That is the next token, another text, a transcript, masked tokens, a score of a text, or an embedding.
    """

    causal = "causal"
    sequence_to_sequence = "sequence_to_sequence"
    speech = "speech"
    masked = "masked"
    scores = "scores"
    embedding = "embedding"

    @property
    def predicts_tokens(self) -> bool:
        """True if the model's outputs are logits of tokens, so that its loss on a text can be measured."""
        return self not in (Kind.scores, Kind.embedding)

    @property
    def tokens_per_state(self) -> int:
        """The number of tokens of a window for each state of its last block: an encoder reads half of them."""
        return 2 if self is Kind.sequence_to_sequence else 1


MAPPINGS = {
    Kind.causal: (
        auto.MODEL_FOR_CAUSAL_LM_MAPPING,
        auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        auto.MODEL_FOR_MULTIMODAL_LM_MAPPING,
    ),
    Kind.sequence_to_sequence: (auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,),
    Kind.speech: (auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,),
    Kind.masked: (auto.MODEL_FOR_MASKED_LM_MAPPING,),
    Kind.scores: (auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,),
    Kind.embedding: (auto.MODEL_FOR_TEXT_ENCODING_MAPPING, auto.MODEL_MAPPING),
}
"""Kind -> Transformers' tables from configs to classes of that kind. A class belongs to the first kind that has it."""


def model_class(config: PretrainedConfig, raw_config: Mapping[str, Any]) -> tuple[type[PreTrainedModel], Kind]:
    """Return the class of a model with this config, and what it computes.

    It is the class that config.json declares if Transformers lists it, else the first one that it has for the config.
    Raises ModelError ``unsupported_architecture`` if it has none.
    """
    classes: dict[type[PreTrainedModel], Kind] = {}
    for kind in _kinds(config):
        for mapping in MAPPINGS[kind]:
            for built in _listed(mapping, type(config)):
                is_part = built.config_class in type(config).sub_configs.values()
                if not is_part and (kind.predicts_tokens or built.main_input_name == "input_ids"):
                    classes.setdefault(built, kind)
    declared = declared_class(raw_config)
    is_own = getattr(declared, "config_class", None) is type(config)
    if not classes and is_own and declared.main_input_name == "input_ids":
        # The text part of a larger model, which no table lists.
        for end, part in (("ForCausalLM", Kind.causal), ("Model", Kind.embedding)):
            if declared.__name__.endswith(end):
                classes[declared] = part
    if not classes:
        raise ModelError(
            f"Transformers has no text model of type '{config.model_type}'.",
            code="unsupported_architecture",
            hint="A model that contains a language model can be quantized from file to file "
            "(--file2file_quantization) with a scheme that needs no data.",
        )
    chosen = declared if declared in classes else next(iter(classes))
    kind = classes[chosen]
    if kind in WITH_ENCODER and not config.is_encoder_decoder:
        kind = Kind.causal  # Transformers lists models that hear with a tower here as well
    if kind.predicts_tokens and config.is_encoder_decoder and _reads_in_both_halves(chosen):
        kind = Kind.sequence_to_sequence  # it lists models that see or speak elsewhere (Florence-2, Dia)
    return chosen, kind


def _listed(mapping: Any, config_class: type[PretrainedConfig]) -> tuple[type[PreTrainedModel], ...]:
    """Return the classes that a table has for a config. Some names in Transformers 5.23's tables are of no class."""
    try:
        found: Any = mapping.get(config_class, ())
    except ValueError:
        return ()
    return found if isinstance(found, tuple) else (found,)


def _reads_in_both_halves(built: type[PreTrainedModel]) -> bool:
    """Return True for a class whose encoder reads tokens, and no sound, and its decoder others."""
    parameters = inspect.signature(built.forward).parameters
    reads_tokens = built.main_input_name == "input_ids" and "input_features" not in parameters
    return reads_tokens and "decoder_input_ids" in parameters


def _kinds(config: PretrainedConfig) -> list[Kind]:
    """Return the kinds in the order in which a class is looked for."""
    return sorted(Kind, key=lambda kind: kind not in WITH_ENCODER) if config.is_encoder_decoder else list(Kind)


WITH_ENCODER = (Kind.sequence_to_sequence, Kind.speech)
"""The kinds of a decoder that also reads what an encoder makes of text or of sound."""


def declared_class(raw_config: Mapping[str, Any]) -> type[Any]:
    """Return the Transformers class that config.json names first in ``architectures``; else AutoModelForCausalLM."""
    names = raw_config.get("architectures")
    name = names[0] if isinstance(names, list) and names else ""
    declared = getattr(transformers, name, None) if isinstance(name, str) else None
    if isinstance(declared, type) and issubclass(declared, PreTrainedModel):
        return declared
    return AutoModelForCausalLM


def loading_class(raw_config: Mapping[str, Any]) -> str:
    """Return the name of the class of Transformers that loads a model: AutoModelForCausalLM if that finds its class."""
    declared = declared_class(raw_config).__name__
    is_found = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(raw_config.get("model_type"))) == declared
    return AutoModelForCausalLM.__name__ if is_found else declared


FEATURES = ("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim", "feature_size")
SAMPLES, FRAMES = 16000, 128
"""The length of the silence that encoders hear if they do not prescribe one: a second at 16 kHz, or frames of it."""


def decoder_inputs(config: PretrainedConfig, ids_NT: torch.Tensor) -> torch.Tensor:
    """Return what a decoder reads to predict ``ids_NT``: the same, one place later, behind its start token."""
    names, parts = ("decoder_start_token_id", "bos_token_id", "pad_token_id"), (config, config.get_text_config(True))
    starts = (getattr(part, name, None) for part in parts for name in names)
    start = next((token for token in starts if isinstance(token, int)), 0)
    return torch.cat([torch.full_like(ids_NT[:, :1], start), ids_NT[:, :-1]], dim=1)


def halves(ids_NT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens of each window that an encoder reads, and those that its decoder predicts from them."""
    half = ids_NT.shape[1] // 2
    return ids_NT[:, :half], ids_NT[:, half:]


def neutral_token(config: PretrainedConfig) -> int:
    """Return a token that no model uses for padding or the end of a text."""
    values = [getattr(config, name, None) for name in ("pad_token_id", "eos_token_id", "bos_token_id")]
    special = {token for value in values for token in (value if isinstance(value, list) else [value])}
    return next(token for token in range(len(special) + 1) if token not in special)


def language_model(model: PreTrainedModel, kind: Kind) -> PreTrainedModel:
    """Return the model that reads tokens: ``model``, or the one inside a class that cannot run without an image.

    BLIP-2 and Kosmos-2 hold a language model with its own head, to which they only give embeddings of an image.
    """
    if kind is Kind.speech or model.main_input_name == "input_ids":
        return model
    inner = [part for name, part in model.named_modules() if name and isinstance(part, PreTrainedModel)]
    readers = [part for part in inner if part.get_output_embeddings() is not None]  # type: ignore[no-untyped-call]
    return readers[0] if len(readers) == 1 else model


def inputs_of(model: PreTrainedModel, kind: Kind, ids_NT: torch.Tensor, media: Media | None = None) -> dict[str, Any]:
    """Return the named inputs with which ``model`` reads windows of token ids [N, T]: in all of its codebooks.

    ``media`` are those of a single window.
    """
    named: dict[str, Any] = {"input_ids": ids_NT}
    if kind is Kind.sequence_to_sequence:
        read, predicted = halves(ids_NT)
        named = {"input_ids": read, "decoder_input_ids": decoder_inputs(model.config, predicted)}
        if num_codebooks := _num_codebooks(model):
            named["decoder_input_ids"] = named["decoder_input_ids"][..., None].repeat(1, 1, num_codebooks)
    elif kind is Kind.speech:
        named = {model.main_input_name: silence(model), "decoder_input_ids": decoder_inputs(model.config, ids_NT)}
    elif kind is Kind.causal and isinstance(codebooks := model.get_input_embeddings(), nn.ModuleList):
        named = {"input_ids": ids_NT.repeat_interleave(len(codebooks), dim=0)}  # tokens of sound, several at each place
    has_cache = kind in (Kind.causal, *WITH_ENCODER)  # some take the switch among other arguments, without a name
    if has_cache or "use_cache" in inspect.signature(model.forward).parameters:
        named["use_cache"] = False
    return named | _own_defaults(model) | dict(media or {})


def _num_codebooks(model: PreTrainedModel) -> int:
    """Return how many tokens of sound the decoder of ``model`` predicts at each place; 0 for one of text."""
    decoder = model.config.get_text_config(decoder=True)
    return getattr(decoder, "num_channels", 0) if "audio" in getattr(model, "output_modalities", ()) else 0


def body_of(model: PreTrainedModel) -> nn.Module:
    """Return the part of ``model`` without its head; the model itself if that part's inputs have other names."""
    own, inner = (inspect.signature(part.forward).parameters for part in (model, model.base_model))
    return model if "decoder_input_ids" in own and "decoder_input_ids" not in inner else model.base_model


def _own_defaults(model: PreTrainedModel) -> dict[str, Any]:
    """Return the arguments that ``model`` has another default of than the model inside it, which has no head.

    BLIP's text model is an encoder by default (``is_decoder``), and a decoder inside the model with a head.
    """
    own, inner = (inspect.signature(part.forward).parameters for part in (model, model.base_model))
    both = {name: parameter.default for name, parameter in own.items() if name in inner}
    return {name: value for name, value in both.items() if value is True and inner[name].default is False}


def num_tokens(model: PreTrainedModel) -> int:
    """Return the number of tokens that a model has embeddings of, both in its encoder and in its decoder."""
    try:
        embeddings = model.get_input_embeddings()
    except NotImplementedError:  # each half has its own
        parts = [getattr(model.config, name) for name in model.config.sub_configs]
        sizes = [size for part in parts if (size := ModelConfig(part.to_dict()).vocab_size)]
        if not sizes:
            raise
        return min(sizes)
    first = embeddings[0] if isinstance(embeddings, nn.ModuleList) else embeddings
    return len(first.get_parameter("weight"))


def reads_no_media(model: PreTrainedModel) -> ModelError:
    """Return the error for images or sound that are given to a ``model`` of text."""
    return ModelError(
        f"A {type(model).__name__} cannot be calibrated or measured with images or sound: its language model reads "
        "only tokens.",
        code="unsupported_architecture",
        hint="Use text as calibration data.",
    )


def silence(model: PreTrainedModel) -> torch.Tensor:
    """Return empty audio for the encoder of a speech model: samples, or features of frames, all 0.

    Whisper's encoder takes [1, mel bins, frames] of 30 s, others [1, frames, features].
    """
    config = model.config
    if "input_values" in (model.main_input_name, model.get_encoder().main_input_name):
        return torch.zeros(1, SAMPLES, dtype=model.dtype, device=model.device)
    sizes = [
        getattr(part, name, None) for part in (config, getattr(config, "encoder_config", None)) for name in FEATURES
    ]
    num_features = next((size for size in sizes if isinstance(size, int)), 80)
    if hasattr(config, "num_mel_bins") and hasattr(config, "max_source_positions"):
        return torch.zeros(1, num_features, 2 * config.max_source_positions, dtype=model.dtype, device=model.device)
    return torch.zeros(1, FRAMES, num_features, dtype=model.dtype, device=model.device)


def outputs_of(result: Any) -> torch.Tensor:
    """Return the logits [1, T, V] of a model's output for one window; [1, T, H], its last states, if it has no head.

    Of a model that predicts several codebooks these are the logits of the first.
    """
    logits: torch.Tensor | None = getattr(result, "logits", None)
    outputs: torch.Tensor = result.last_hidden_state if logits is None else logits
    return outputs[:1]
