"""The algorithms that are recommended for a scheme: what each kind of scheme gets, and what an effort excludes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quantcore.config import presets
from quantcore.config.algorithms import GPTQConfig, config_of
from quantcore.config.quantization import Config, QuantizationConfig, QuantizationSpec
from quantcore.config.recipes import EFFORTS, Effort, advice_on, algorithms_text, recipe, with_recipe
from quantcore.errors import ConfigError


@pytest.mark.parametrize("name", presets.PRESETS)
def test_fast_needs_no_data_and_the_others_are_chains_that_a_config_takes(name: str) -> None:
    config = presets.resolve(name)
    assert recipe([config], "fast") == ()
    for effort in EFFORTS:
        assert replace(config, algo_config=recipe([config], effort)).algo_config == recipe([config], effort)


def test_the_scheme_that_loses_most_decides() -> None:
    four, static, eight = (presets.resolve(name) for name in ("w4a16", "int8_static", "int8_weight_only"))
    for few, most in (([eight, four], four), ([four, static], static)):
        assert recipe(few, "balanced") == recipe([most], "balanced") != recipe([few[0]], "balanced")
    inputs = presets.resolve("nvfp4")
    assert recipe([inputs, four], "balanced") == recipe([inputs], "balanced") != recipe([four], "balanced")
    layers = replace(eight, layer_quant_config={"*.o_proj": four.global_quant_config})
    assert recipe([layers], "balanced") == recipe([four], "balanced")


def test_a_cast_has_nothing_to_choose() -> None:
    cast = Config(global_quant_config=QuantizationConfig(weight=QuantizationSpec(dtype="bfloat16")))
    assert all(recipe([cast], effort) == () for effort in EFFORTS)


def test_what_says_its_own_algorithms_keeps_them() -> None:
    own = replace(presets.resolve("w4a16"), algo_config=(GPTQConfig(damp_percent=0.05),))
    assert with_recipe(own, None, preset="w4a16") is own
    with pytest.raises(ConfigError, match="sets algo_config") as refusal:
        with_recipe(own, "best", preset="w4a16")
    assert (refusal.value.code, refusal.value.field) == ("conflicting_effort", "/effort")


def test_in_words() -> None:
    assert algorithms_text({"algo_config": [{"name": "smooth"}, {"name": "gptq"}]}) == "smoothquant, gptq"
    assert algorithms_text({}) == algorithms_text({"algo_config": []}) == "none (rounds to nearest)"


@pytest.mark.parametrize(
    ("preset", "used", "advised"),
    [
        ("w4a16", None, "Use effort balanced (gptq)."),
        ("w4a16", "balanced", "Use effort best (yaqa): slower, usually better."),
        ("mxfp4", "balanced", "Use effort best (autosmoothquant, gptaq): slower, usually better."),
        ("int4_wa_64", "balanced", "Use effort best (gptaq): slower, usually better."),
        ("int4_fp8", "balanced", "Use effort best (gptaq): slower, usually better."),
        ("w4a16", "best", "A goal gives more bits"),
        ("w2a16", "balanced", "Use effort best (yaqa): slower, usually better."),
        ("w2a16", "best", "Tune the scales for the predictions as well (algorithms yaqa, distill)."),
        ("w3a16_sym", "best", "Tune the scales"),
        ("int8_static", "balanced", "Use effort best (smoothquant, gptaq)"),
        ("int8_dynamic", None, "Use effort best (gptaq)"),
    ],
)
def test_advice_names_the_next_better_chain(preset: str, used: Effort | None, advised: str) -> None:
    config = presets.resolve(preset)
    if used is not None:
        config = replace(config, algo_config=recipe([config], used))
    first, *_ = advice = advice_on(config, "awq")
    assert first.text.startswith(advised)
    assert advice[-1].changes == {"goal": {"runtime": "vllm", "device": "24GB"}}


def test_advice_leaves_out_what_was_done() -> None:
    chain = (config_of("yaqa"), config_of("distill"))
    (goal,) = advice_on(replace(presets.resolve("w2a16"), algo_config=chain), "gguf")
    assert goal.text.startswith("A goal gives more bits") and goal.changes["goal"]["runtime"] == "llama_cpp"
