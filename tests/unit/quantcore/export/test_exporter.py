"""Default formats, refusals and draft heads: what the formats have in common, in the words of their consumers."""

import re
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatch
from typing import Any

import pytest

from quantcore.config import presets
from quantcore.config.layer_plan import DRAFTS, LayerPlan, usual_layers
from quantcore.errors import ConfigError
from quantcore.export import EXPORTERS, adapted, check_exports, default_format, formats_for, holds_codes
from quantcore.export.exporter import draft_patterns

W4 = presets.resolve("w4a16_sym")
LAYERS = tuple(
    LayerPlan(f"model.layers.{block}.{name}", block, (64, 64), W4.global_quant_config)
    for block in range(61)
    for name in ("self_attn.q_a_proj", "mlp.down_proj")
)
KEPT = ("lm_head", "model.layers.60.mlp.gate", "model.layers.61.eh_proj", "model.layers.61.self_attn.q_a_proj")
IN_VLLM = "model.layers.61.mtp_block.self_attn.q_a_proj"  # deepseek_mtp.py


def test_blocks_behind_the_others_and_modules_of_drafts_are_recognized():
    [pattern] = draft_patterns(LAYERS, KEPT)
    assert re.match(pattern, IN_VLLM) and re.match(pattern, KEPT[2])
    others = (*KEPT[:2], "model.layers.610.x", "layers.6.1.x", LAYERS[0].name)
    assert not any(re.match(pattern, name) for name in others)
    for name in ("mtp.layers.0.self_attn.q_proj", "model.mtp_layers.0.fc", "eagle3.fc"):
        [pattern] = draft_patterns(LAYERS, [name])
        assert re.match(pattern, name) and re.match(pattern, f"model.{name}") and not re.match(pattern, LAYERS[0].name)


def test_blocks_that_are_excluded_and_towers_are_no_drafts():
    kept = ["model.layers.7.mlp.up_proj", "vision_tower.layers.70.fc1", "model.layers.0.mlp.gate", "lm_head"]
    assert draft_patterns(LAYERS, kept) == []


def test_quantized_drafts_are_named_by_a_pattern_with_their_scheme():
    """vLLM would else read their layers with the scheme of the model, or leave them out."""
    own = presets.resolve("w4a16_sym", group_size=32).global_quant_config
    draft = LayerPlan("model.layers.61.self_attn.q_a_proj", None, (64, 64), own, chosen_by=DRAFTS)
    layers, kept = (*LAYERS, draft), KEPT[:3]
    assert draft_patterns(layers, kept) == []
    of = {name: EXPORTERS.get(name).quantization_config(W4, layers, kept) for name in ("compressed_tensors", "quark")}
    groups = of["compressed_tensors"]["config_groups"].values()
    [chosen] = [
        group["weights"]["group_size"]
        for group in groups
        if any(target.startswith("re:") and re.match(target[3:], IN_VLLM) for target in group["targets"])
    ]
    assert chosen == 32 and of["compressed_tensors"]["ignore"] == [*kept]
    [pattern] = [name for name in of["quark"]["layer_quant_config"] if fnmatch(IN_VLLM, name)]
    assert of["quark"]["layer_quant_config"][pattern]["weight"]["group_size"] == 32
    dynamic = EXPORTERS.get("gptq").quantization_config(W4, layers, kept)["dynamic"]
    first = next(key for key in dynamic if re.match(key[2:], KEPT[2]))
    assert first.startswith("-:")  # eh_proj is kept: GPTQModel takes the first pattern that matches
    [pattern] = [key for key in dynamic if re.match(key[2:], IN_VLLM)]
    assert pattern.startswith("+:") and dynamic[pattern]["group_size"] == 32


def test_every_format_that_knows_patterns_has_them():
    [pattern] = draft_patterns(LAYERS, KEPT)
    of = {
        name: EXPORTERS.get(name).quantization_config(W4, LAYERS, KEPT)
        for name in ("compressed_tensors", "quark", "gptq")
    }
    assert of["compressed_tensors"]["ignore"] == [*KEPT, f"re:{pattern}"]
    assert of["quark"]["exclude"] == [*KEPT, f"re:{pattern}"]
    assert of["gptq"]["dynamic"][f"-:{pattern}"] == {}


@pytest.mark.parametrize(
    ("preset", "changes", "wanted"),
    [
        ("int8_dynamic", {}, "compressed_tensors"),  # Transformers and vLLM
        ("fp8", {"kv_cache": "fp8"}, "compressed_tensors"),
        ("w4a16_sym", {}, "compressed_tensors"),
        ("w4a16", {}, "awq"),  # Transformers misreads asymmetric int4 in compressed_tensors
        ("w4a16", {"towers": "fp8"}, "compressed_tensors"),  # AWQ cannot hold fp8
        ("w4a16", {"kv_cache": "fp8"}, "compressed_tensors"),
        ("gguf_q4_0", {}, "gguf"),
        ("nf4", {}, "bitsandbytes"),
        ("mxfp4_fp8", {}, "quark"),
    ],
)
def test_the_default_is_the_format_that_most_programs_load(
    preset: str, changes: Mapping[str, Any], wanted: str
) -> None:
    config = presets.resolve(preset, **changes)
    assert default_format(config) == wanted == formats_for(config)[0]


def test_the_default_of_several_schemes_holds_all_of_them() -> None:
    w4, int8, q6 = (presets.resolve(name) for name in ("w4a16", "int8_weight_only", "gguf_q6_k"))
    assert default_format(w4, int8) == "compressed_tensors"
    other_groups = presets.resolve("w4a16", group_size=32)
    assert default_format(w4, other_groups) == "compressed_tensors"  # AWQ has one group size
    inside = replace(w4, layer_quant_config={"*.down_proj": int8.global_quant_config})
    assert default_format(inside) == "compressed_tensors"
    assert not any(map(holds_codes, formats_for(w4, q6)))


def test_the_default_never_drops_activations() -> None:
    """The format that holds weights alone is for those who name it: else a part of the scheme would be left out."""
    config = presets.resolve("int4_wa_64")
    assert formats_for(config) == ["fake_quantized"]
    assert default_format(config) != "fake_quantized"


def refusal(preset: str, export: str) -> ConfigError | None:
    """The error for a preset in a format, as in a plan; None if the format can hold it."""
    layers = usual_layers(presets.resolve(preset))
    try:
        check_exports(adapted(layers, (export,))[0], (export,), layers)
    except ConfigError as error:
        return error
    return None


CAN = {(preset, export) for preset in presets.PRESETS for export in EXPORTERS if refusal(preset, export) is None}


@pytest.mark.parametrize("export", [*EXPORTERS])
def test_the_error_names_what_can_hold_it(export: str) -> None:
    for preset in presets.PRESETS:
        if (error := refusal(preset, export)) is not None:
            assert {*error.allowed} == {other for other in EXPORTERS if (preset, other) in CAN}, preset
            named = re.findall(rf"Presets that {export} can store: (.*?)(?: and \d+ more)?\. Formats", error.hint)
            assert {(name, export) for name in named[0].split(", ")} <= CAN, preset


def test_presets_with_the_same_dtype_come_first() -> None:
    error = refusal("w4a16", "gguf")
    assert error is not None
    hint = error.hint
    assert hint.startswith("Presets that gguf can store: uint4_wo_32, gguf_q4_1, gguf_q4_k, ")
    assert hint.endswith("Formats that can store these layers: awq, compressed_tensors, quark, gptq_v2, onnx, mlx, "
                         "fake_quantized.")  # fmt: skip
