"""Plans of every text model that Transformers can build, file to file: compared with the classes of its modules."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn

from quantcore.checkpoint.blocks import find_blocks
from quantcore.checkpoint.headers import ModelHeaders
from quantcore.checkpoint.layers import is_head, is_matrix
from quantcore.checkpoint.roles import DRAFT, GATE, INDEXER, LATENT, ROUTER, TINY
from quantcore.config import presets
from quantcore.config.job_spec import JobSpec
from quantcore.engine.model.parameter_names import check_not_rearranged, check_shares_nothing, place_tensors
from quantcore.engine.model.regrouping import place_converted
from quantcore.engine.model.skeleton import find_block_lists
from quantcore.errors import ModelError
from quantcore.plan.planner import make_plan
from tests.support.architectures import Outline, model_classes, outline
from tests.support.params import with_rare

CLASSES = model_classes()
NOT_BUILT = {
    "AyaVisionForConditionalGeneration", "ChameleonForConditionalGeneration", "CohereCompassForCausalLM",
    "CohereCompassForConditionalGeneration", "DbrxForCausalLM", "DeepseekOcr2ForConditionalGeneration",
    "DiffusionGemmaForBlockDiffusion", "Emu3ForConditionalGeneration", "FastVlmForConditionalGeneration",
    "Gemma3nForConditionalGeneration", "Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM",
    "Granite4VisionForConditionalGeneration", "HunYuanVLForConditionalGeneration",
    "MoonshineStreamingForConditionalGeneration", "PerceptionLMForConditionalGeneration",
    "Qwen3OmniMoeForConditionalGeneration", "Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration",
}  # fmt: skip
"""Their default configs do not give a model, or need a library for pictures."""

SEVERAL_LISTS = {"BltForCausalLM"}
"""The layers of their language models lie in more than one list, which do not take turns."""

RESTACKED = {"JetMoeForCausalLM"}
"""Transformers keeps the experts of their layers in modules that ``engine.model.stacks`` replaces."""

BUILT_OTHERWISE = {"ZambaForCausalLM"}
"""Transformers shares weights between their blocks."""

USUAL = {
    "LlavaForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration", "T5ForConditionalGeneration",
    "WhisperForConditionalGeneration", "AriaTextForCausalLM", "MambaForCausalLM", "GPT2LMHeadModel", "ZayaForCausalLM",
    "GptOssForCausalLM", "OlmoHybridForCausalLM",
}  # fmt: skip
BUILT = [name for name in CLASSES if name not in NOT_BUILT]
TOWER_DEPTHS = {"a longer tower": 7, "a tower as long": 6}
KEPT_LINEAR = {
    DRAFT, ROUTER, GATE, INDEXER, LATENT, TINY, "parameter whose name is not that of a layer's weight",
}  # fmt: skip


@pytest.mark.parametrize("tower", with_rare(TOWER_DEPTHS, ["a tower as long"]))
@pytest.mark.parametrize("name", with_rare(BUILT, set(BUILT) - USUAL))
def test_the_linear_layers_of_the_text_model_are_planned_and_nothing_else(name, tower):
    found = outline(name, CLASSES[name], 6, TOWER_DEPTHS[tower])
    config = replace(presets.resolve("int8_weight_only"), exclude=())
    headers = ModelHeaders(found.config, found.tensors)
    if name in SEVERAL_LISTS:
        with pytest.raises(ModelError, match=r"encoder and a decoder|several lists") as caught:
            make_plan(JobSpec(config=config, file2file=True), headers)
        assert caught.value.code == "unsupported_architecture"
        return
    plan = make_plan(
        JobSpec(config=config, export=("fake_quantized",), file2file=True), ModelHeaders(found.config, found.tensors)
    )
    if len(plan.blocks.lists) == 2 and not plan.blocks.take_turns:
        assert has_encoder(found) and found.model.main_input_name == "input_ids"
    else:
        assert {name for name in found.tensors if name.startswith(plan.blocks.prefixes)} <= text_tensors(found)
    planned = {f"{layer.name}.weight" for layer in plan.layers}
    assert {name for name in planned if not is_head(name) and not is_multiplied(found, name)} == set()
    reasons = {entry.name: entry.reason for entry in plan.kept}
    matrices = {name for name, one in found.tensors.items() if name.startswith(plan.blocks.prefixes) and is_matrix(one)}
    rest = matrices - planned
    assert {name for name in rest if name.removesuffix(".weight") not in reasons} == set()
    linear = {name for name in rest if isinstance(found.owner(name), nn.Linear)}
    allowed = KEPT_LINEAR | {"embedding"} if name.startswith("ProphetNet") else KEPT_LINEAR  # its name says so
    assert {reasons[name.removesuffix(".weight")] for name in linear} <= allowed


@pytest.mark.slow
def test_a_whole_checkpoint_is_never_said_to_lack_a_tensor():
    """Where Transformers builds the model otherwise than it is stored, that is said."""
    refused = set()
    for name in BUILT:
        found = outline(name, CLASSES[name]) if name.endswith("ForCausalLM") else None
        if found is None or has_encoder(found) or name in SEVERAL_LISTS | RESTACKED:
            continue
        placed, assembled = place_converted(found.model, found.tensors, place_tensors(found.model, found.tensors))
        try:
            places, _ = find_block_lists(found.model, placed, find_blocks(found.tensors, found.config))
            check_shares_nothing(found.model, places)
            check_not_rearranged(found.model, found.tensors, placed, assembled)
        except ModelError as error:
            assert error.code == "unsupported_architecture"
            refused.add(name)
            continue
        filled = {*placed.values(), *assembled, *found.model.all_tied_weights_keys}
        split = {place.rsplit(".", 3)[0] for place in filled}
        assert {place for place in found.model.state_dict() if place.rpartition(".")[0] not in split} <= filled, name
    assert refused == BUILT_OTHERWISE


def has_encoder(found: Outline) -> bool:
    configs = (found.model.config, found.model.config.get_text_config())
    return any(getattr(config, "is_encoder_decoder", False) for config in configs)


def is_multiplied(found: Outline, name: str) -> bool:
    """Whether the tensor is the matrix of a linear layer, or of an expert whose weights Transformers stacks."""
    owner = found.owner(name)
    is_expert = ".experts." in name and "Experts" in type(owner).__name__
    return isinstance(owner, nn.Linear) or type(owner).__name__ == "Conv1D" or is_expert


def text_tensors(found: Outline) -> set[str]:
    """The tensors of what Transformers calls the decoder of the model; of all of it if that has no blocks."""
    decoder = found.model.get_decoder()
    has_blocks = any(isinstance(module, nn.ModuleList) for module in decoder.modules())
    parts = {id(module) for module in (decoder if has_blocks else found.model).modules()}
    return {name for name in found.tensors if id(found.owner(name)) in parts}
