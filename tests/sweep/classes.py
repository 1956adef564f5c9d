"""The classes of the installed Transformers that the sweep quantizes, each as a tiny model with random weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from quantcore.engine.model.kinds import inputs_of
from quantcore.engine.model.skeleton import kind_of
from quantcore.engine.model.tiny_model import VOCAB_SIZE, build_tiny_model, tiny_config
from tests.support.architectures import OVERRIDES, shrink
from tests.support.tokenizers import save_byte_tokenizer

TASKS = {
    "causal": "CAUSAL_LM",
    "image-text-to-text": "IMAGE_TEXT_TO_TEXT",
    "masked": "MASKED_LM",
    "sequence-to-sequence": "SEQ_TO_SEQ_CAUSAL_LM",
    "speech": "SPEECH_SEQ_2_SEQ",
    "embedding": "TEXT_ENCODING",
}
"""Kind of model -> the part of the name of Transformers' mapping from model types to classes of that kind."""

DEPTH, TOWER_DEPTH = 4, 3
ROPE = {"rope_type": "default", "rope_theta": 1e4}
CODES = {"<image>": 5, "<|visual token 000000|>": 6, "<|visual token 000001|>": 7, "<|extra_200|>": 8}
SLIDING = {"per_layer_config": {"02": {"qk_nope_head_dim": 8}, "03": {"qk_nope_head_dim": 8}}}
SMALL: dict[str, dict[str, Any]] = {
    "aya_vision": {"vision_config": {"num_attention_heads": 4, "hidden_size": 64}},
    "chameleon": {"vocabulary_map": {"<image>": 5, "IMGIMGA": 6, "IMGIMGB": 7}},
    "cohere_compass": {"text_config": {"rope_parameters": {"full_attention": ROPE}}},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0}},
    "deepseek_ocr2": {
        "text_config": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "num_experts_per_tok": 2}
    },
    "deepseek_v4": {"moe_intermediate_size": 32},
    "dots1": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "diffusion_gemma": {"text_config": {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 32}},
    "dots3_note": {
        "text_config": SLIDING,
        "vision_config": {"adapter_in_dim": 64, "adapter_out_dim": 40},
        "audio_config": {"adapter_input_size": 64, "adapter_out_dim": 40},
    },
    "dots3_note_text": SLIDING,
    "emu3": {"vocabulary_map": CODES, "vq_config": {"base_channels": 32}},
    "ernie4_5_vl_moe": {"text_config": {"rope_parameters": {"mrope_section": [2, 2, 4]}}},
    "esm": {"vocab_size": VOCAB_SIZE, "pad_token_id": 1, "mask_token_id": 2},
    "esmc": {"vocab_size": VOCAB_SIZE},
    "falcon_h1": {"mamba_n_heads": 2},
    "gemma3n": {"text_config": {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2}},
    "gemma3n_text": {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2},
    "glm4_moe": {"hidden_size": 96},
    "granite4_vision": {"deepstack_layer_map": [[-1, 0]], "downsample_rate": "1/2"},
    "hunyuan_vl": {"text_config": {"rope_parameters": {"mrope_section": [2, 2, 2, 2]}}},
    "inkling_mm_model": {"text_config": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}},
    "janus": {"vq_config": {"base_channels": 32}},
    "mobilebert": {"embedding_size": 32, "intra_bottleneck_size": 32, "true_hidden_size": 32},
    "molmo2": {"adapter_config": {"vision_feature_layer": [2, 1], "text_hidden_size": 64}},
    "qwen2_5_vl": {"vision_config": {"out_hidden_size": 512}},
    "speecht5": {"vocab_size": VOCAB_SIZE},
    "step3p7": {"text_config": {"sliding_window": 16}},
    "xmod": {"default_language": "en_XX"},
}
"""Values of small configs whose numbers do not fit together otherwise."""
MAX_VALUES = 100_000_000


@dataclass(frozen=True)
class ModelClass:
    """A class of Transformers with the model type whose default config it is built from."""

    kind: str
    model_type: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name} ({self.model_type})"


def model_classes(kinds: tuple[str, ...] = tuple(TASKS), only: str | None = None) -> list[ModelClass]:
    """Return every class of ``kinds``. A class of several kinds is taken once, one of several types in its own type.

    Transformers imports each of them, which takes seconds; with ``only`` just the class of that name.
    """
    classes: dict[str, ModelClass] = {}
    for kind in kinds:
        mapping: dict[str, str | tuple[str, ...]] = getattr(modeling_auto, f"MODEL_FOR_{TASKS[kind]}_MAPPING_NAMES")
        for model_type, names in mapping.items():
            for name in (names,) if isinstance(names, str) else names:
                if only not in (None, name) or model_type not in CONFIG_MAPPING or not hasattr(transformers, name):
                    continue
                is_its_own = CONFIG_MAPPING[model_type] is getattr(transformers, name).config_class
                if name not in classes or (is_its_own and classes[name].kind == kind):
                    classes[name] = ModelClass(kind, model_type, name)
    return list(classes.values())


def find_class(name: str) -> ModelClass:
    """Return the class called ``name``."""
    [found] = model_classes(only=name)
    return found


def small_config(model_class: ModelClass) -> dict[str, Any]:
    """Return the default config of the class, with a few narrow blocks, as config.json holds it."""
    config: PretrainedConfig = CONFIG_MAPPING[model_class.model_type](**OVERRIDES.get(model_class.model_type, {}))
    built: type[PreTrainedModel] = getattr(transformers, model_class.name)
    if not isinstance(config, built.config_class):
        config = config.get_text_config(decoder=True)
    shrink(config, DEPTH, TOWER_DEPTH)
    small = tiny_config(_for_depth(json.loads(config.to_json_string(use_diff=False))))
    return _merged(small, SMALL.get(model_class.model_type, {}))


def _merged(config: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return ``config`` with ``values``; a dict that is not empty changes only its keys in a nested dict."""
    inside = {name: part for name, part in values.items() if isinstance(part, dict) and part}
    return {**config, **values, **{name: _merged(config.get(name) or {}, part) for name, part in inside.items()}}


def _for_depth(config: dict[str, Any]) -> dict[str, Any]:
    """Return ``config`` without the settings of layers that are no more."""
    config = {key: _for_depth(value) if isinstance(value, dict) else value for key, value in config.items()}
    if per_layer := config.get("per_layer_config"):
        depth = config["num_hidden_layers"]
        config["per_layer_config"] = {index: value for index, value in per_layer.items() if int(index) < depth}
    return config


def build(model_class: ModelClass, seed: int = 0) -> PreTrainedModel:
    """Return a tiny model of the class on the CPU, in float32. Raises whatever Transformers raises."""
    model = build_tiny_model(small_config(model_class), seed, getattr(transformers, model_class.name))
    if model.num_parameters() > MAX_VALUES:
        raise ValueError(f"with small widths it has {model.num_parameters() / 1e6:.0f} million values: add an override")
    return model


def save(model: PreTrainedModel, folder: Path) -> None:
    """Write the model and a tokenizer with one token a byte: in bfloat16, or in float32 if it only runs in that."""
    save_byte_tokenizer(folder)
    model.to(torch.bfloat16).save_pretrained(folder)
    config = json.loads(model.config.to_json_string(use_diff=False)) | {"architectures": [type(model).__name__]}
    try:
        loaded = type(model).from_pretrained(folder, dtype=torch.bfloat16)  # XLNet's has parameters in float32
        with torch.no_grad():
            loaded(**inputs_of(loaded, kind_of(config), torch.arange(8)[None]))
    except RuntimeError as error:
        if "dtype" in str(error) or "scalar type" in str(error):
            model.to(torch.float32).save_pretrained(folder)
    except Exception:  # it needs other inputs: the job says so
        pass


def linear_weights(model: PreTrainedModel, fills: dict[str, str]) -> set[str]:
    """Return the tensors of the checkpoint that are weights of linear layers.

    ``fills``: the parameter of ``model`` that each tensor fills. Stacks of experts are parameters of modules that are
    no linear layers themselves: whatever is a matrix, and no embedding, norm, convolution or table, counts.
    """
    weights: set[str] = set()
    for name, place in fills.items():
        module = model.get_submodule(place.rpartition(".")[0])
        parameter = dict(module.named_parameters(recurse=False)).get(place.rpartition(".")[2])
        if parameter is None:
            continue
        is_linear = isinstance(module, (nn.Linear, transformers.pytorch_utils.Conv1D)) and parameter.ndim == 2
        path, is_parametrized, _ = place.partition(".parametrizations.")  # a kernel as direction and length (wav2vec 2)
        owner = model.get_submodule(path) if is_parametrized else module
        is_stack = parameter.ndim == 3 and len(parameter) > 1 and not isinstance(owner, nn.modules.conv._ConvNd)
        is_stack = is_stack or (parameter.ndim == 2 and ".experts." in place and "bias" not in name)  # DBRX
        if is_linear or is_stack:
            weights.add(name)
    return weights
