"""Plans of every text model that Transformers can build, file to file: held against the classes of its modules."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
from torch import nn

from quantcore import presets
from quantcore.blocks.names import check_not_rearranged, check_shares_nothing, place_tensors
from quantcore.blocks.skeleton import find_block_list
from quantcore.checkpoint.blocks import find_blocks
from quantcore.checkpoint.layers import is_head, is_matrix
from quantcore.errors import ModelError
from quantcore.plan import resolve
from tests.architectures import Outline, model_classes, outline
from tests.params import with_rare

CLASSES = model_classes()
NOT_BUILT = {
    "AyaVisionForConditionalGeneration", "ChameleonForConditionalGeneration", "CohereCompassForCausalLM",
    "CohereCompassForConditionalGeneration", "DbrxForCausalLM", "DeepseekOcr2ForConditionalGeneration",
    "DiffusionGemmaForBlockDiffusion", "Emu3ForConditionalGeneration", "FastVlmForConditionalGeneration",
    "Gemma3nForConditionalGeneration", "Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM",
    "Granite4VisionForConditionalGeneration", "HunYuanVLForConditionalGeneration",
    "MoonshineStreamingForConditionalGeneration", "PerceptionLMForConditionalGeneration", "Qwen3OmniMoeForConditionalGeneration",
    "Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration",
}  # fmt: skip
"""Their default configs do not give a model, or need a library for pictures."""

SEVERAL_LISTS = {"BltForCausalLM", "HrmTextForCausalLM", "IdeficsForVisionText2Text", "XLMWithLMHeadModel"}
"""The layers of their language models lie in more than one list."""

ODD_EXPERTS = {
    "AriaTextForCausalLM", "AriaForConditionalGeneration", "InklingForCausalLM", "InklingForConditionalGeneration",
    "Inkling2ForCausalLM", "Inkling2ForConditionalGeneration", "JetMoeForCausalLM", "Llama4ForCausalLM",
    "Llama4ForConditionalGeneration", "Step3p7ForConditionalGeneration",
}  # fmt: skip

USUAL = (
    "LlavaForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration", "T5ForConditionalGeneration",
    "WhisperForConditionalGeneration", "AriaTextForCausalLM", "MambaForCausalLM", "GPT2LMHeadModel", "ZayaForCausalLM",
    "GptOssForCausalLM", "OlmoHybridForCausalLM",
)  # fmt: skip
BUILT = [name for name in CLASSES if name not in NOT_BUILT]
DEPTHS = {"a longer tower": (6, 7), "a shorter tower": (7, 6), "a tower as long": (6, 6)}


@pytest.mark.parametrize("depths", with_rare(DEPTHS, ["a shorter tower", "a tower as long"]))
@pytest.mark.parametrize("name", with_rare(BUILT, set(BUILT) - set(USUAL)))
def test_the_linear_layers_of_the_text_model_are_planned_and_nothing_else(name, depths):
    found = outline(name, CLASSES[name], *DEPTHS[depths])
    config = replace(presets.resolve("int8_weight_only"), exclude=("*.experts.*",) if name in ODD_EXPERTS else ())
    if has_encoder(found) or name in SEVERAL_LISTS:
        with pytest.raises(ModelError, match=r"an encoder beside its decoder|several lists|these are none") as caught:
            find_blocks(found.tensors, found.config)
        assert caught.value.code == "unsupported_architecture"
        return
    if name in ODD_EXPERTS:
        with pytest.raises(ModelError, match="experts of this model are stored in a layout"):
            resolve(replace(config, exclude=()), found.config, found.tensors, file2file=True)
        return
    plan = resolve(config, found.config, found.tensors, exports=("fake_quantized",), file2file=True)
    assert plan.block_prefix in text_prefixes(found)
    planned = {f"{layer.name}.weight" for layer in plan.layers}
    wrong = {
        name: type(found.owner(name)).__name__ for name in planned if not is_head(name) and not computes(found, name)
    }
    assert wrong == {}
    named = {layer.name for layer in plan.layers} | {entry.name for entry in plan.kept}
    matrices = {name for name, one in found.tensors.items() if name.startswith(plan.block_prefix) and is_matrix(one)}
    assert {name for name in matrices if name.removesuffix(".weight") not in named} == set()
    linear = {name for name in matrices if isinstance(found.owner(name), nn.Linear)}
    reasons = {entry.name: entry.reason for entry in plan.kept}
    assert {reasons[name.removesuffix(".weight")] for name in linear - planned} <= KEPT_LINEAR
    gc.collect()


KEPT_LINEAR = {"router", "parameter that is no layer's weight by its name", "only for multi-token prediction"}


def has_encoder(found: Outline) -> bool:
    return any(
        getattr(one, "is_encoder_decoder", False) for one in (found.model.config, found.model.config.get_text_config())
    )


def computes(found: Outline, name: str) -> bool:
    """Whether the tensor is a matrix that a linear layer, or an expert among stacked ones, multiplies with."""
    owner = found.owner(name)
    stacked = any("xperts" in type(owner).__name__ for name in (name,)) and ".experts." in name
    return isinstance(owner, nn.Linear) or type(owner).__name__ == "Conv1D" or stacked


def text_prefixes(found: Outline) -> set[str]:
    """Where the checkpoint holds the lists of blocks of what Transformers calls the decoder of the model."""
    decoder = found.model.get_decoder()
    lists = [module for module in decoder.modules() if isinstance(module, nn.ModuleList)]
    inside = decoder if lists else found.model
    parts = {id(module) for module in inside.modules()}
    return {
        f"{name.split(f'.{index}.')[0]}."
        for name in found.tensors
        if id(found.owner(name)) in parts
        for index in name.split(".")
        if index.isdigit()
    }


@pytest.mark.slow
def test_every_parameter_of_a_block_that_is_run_has_its_tensor():
    """A whole checkpoint is never said to lack one: else Transformers builds the model otherwise, and that is said."""
    refused = []
    for name in BUILT:
        if not name.endswith("ForCausalLM") or name in SEVERAL_LISTS | ODD_EXPERTS:
            continue
        found = outline(name, CLASSES[name])
        if has_encoder(found):
            continue
        prefix, num_blocks = find_blocks(found.tensors, found.config)
        placed = place_tensors(found.model, found.tensors)
        try:
            path, _ = find_block_list(found.model, placed, prefix, num_blocks)
            check_shares_nothing(found.model, path)
            check_not_rearranged(found.model, found.tensors, placed)
        except ModelError as error:
            assert error.code == "unsupported_architecture"
            refused.append(name)
            continue
        filled = {*placed.values(), *found.model.all_tied_weights_keys}
        split = {place.rsplit(".", 3)[0] for place in filled}
        assert {place for place in found.model.state_dict() if place.rpartition(".")[0] not in split} <= filled, name
    assert {"KimiLinearForCausalLM", "LongcatFlashForCausalLM", "OlmoHybridForCausalLM", "ZambaForCausalLM"} <= {
        *refused
    }
    assert len(refused) < 10
