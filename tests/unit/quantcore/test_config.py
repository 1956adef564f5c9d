"""Configs: JSON in and out, defaults, and every refusal with its place."""

import pytest

from quantcore import presets
from quantcore.config import Config, Dtype, QSchemeType, QuantizationConfig, QuantizationSpec, parse_config
from quantcore.errors import ConfigError

WEIGHT = {"dtype": "int8", "qscheme": "per_channel", "ch_axis": 0}


@pytest.mark.parametrize("name", presets.PRESETS)
def test_a_preset_survives_json(name):
    config = presets.PRESETS[name].config
    assert parse_config(config.model_dump(mode="json")) == config


def test_null_means_the_default_as_other_tools_write_it():
    given = {"dtype": "int8", "observer_cls": None, "is_dynamic": None, "group_size": None, "symmetric": None}
    assert QuantizationSpec.model_validate(given) == QuantizationSpec(
        dtype=Dtype.int8, observer_cls="PerTensorMinMaxObserver", symmetric=True, is_dynamic=False
    )


def test_the_observer_may_be_given_as_a_class():
    class PerGroupMinMaxObserver: ...

    spec = QuantizationSpec(dtype="uint4", qscheme="per_group", group_size=32, observer_cls=PerGroupMinMaxObserver)
    assert spec.observer_cls == "PerGroupMinMaxObserver"


REFUSED = {
    "no global config": ({}, "/global_quant_config"),
    "unknown dtype": ({"global_quant_config": {"weight": {"dtype": "int5"}}}, "/global_quant_config/weight/dtype"),
    "unknown field": ({"global_quant_config": {"weight": WEIGHT, "wieght": 1}}, "/global_quant_config/wieght"),
    "group size missing": (
        {"global_quant_config": {"weight": {"dtype": "int4", "qscheme": "per_group"}}},
        "/global_quant_config/weight",
    ),
    "group size zero": (
        {"global_quant_config": {"weight": {"dtype": "int4", "qscheme": "per_group", "group_size": 0}}},
        "/global_quant_config/weight",
    ),
    "group size -2": (
        {"global_quant_config": {"weight": {"dtype": "int4", "qscheme": "per_group", "group_size": -2}}},
        "/global_quant_config/weight",
    ),
    "group size without groups": (
        {"global_quant_config": {"weight": {**WEIGHT, "group_size": 32}}},
        "/global_quant_config/weight",
    ),
    "group size as text": (
        {"global_quant_config": {"weight": {"dtype": "int4", "qscheme": "per_group", "group_size": "32"}}},
        "/global_quant_config/weight/group_size",
    ),
    "symmetric as number": (
        {"global_quant_config": {"weight": {**WEIGHT, "symmetric": 1}}},
        "/global_quant_config/weight/symmetric",
    ),
    "asymmetric float": (
        {"global_quant_config": {"weight": {"dtype": "fp8_e4m3", "symmetric": False}}},
        "/global_quant_config/weight",
    ),
    "symmetric unsigned": (
        {"global_quant_config": {"weight": {"dtype": "uint4", "symmetric": True}}},
        "/global_quant_config/weight",
    ),
    "axis 2": ({"global_quant_config": {"weight": {**WEIGHT, "ch_axis": 2}}}, "/global_quant_config/weight"),
    "weight channels on axis 1": (
        {"global_quant_config": {"weight": {**WEIGHT, "ch_axis": 1}}},
        "/global_quant_config",
    ),
    "dynamic weight": ({"global_quant_config": {"weight": {**WEIGHT, "is_dynamic": True}}}, "/global_quant_config"),
    "inputs alone": ({"global_quant_config": {"input_tensors": WEIGHT}}, "/global_quant_config"),
    "static token scales": (
        {"global_quant_config": {"weight": WEIGHT, "input_tensors": WEIGHT}},
        "/global_quant_config",
    ),
    "outputs": (
        {"global_quant_config": {"weight": WEIGHT, "output_tensors": WEIGHT}},
        "/global_quant_config/output_tensors",
    ),
    "kv cache": (
        {"global_quant_config": {"weight": WEIGHT}, "kv_cache_quant_config": {"*k_proj": {"weight": WEIGHT}}},
        "/kv_cache_quant_config",
    ),
    "algorithm": ({"global_quant_config": {"weight": WEIGHT}, "algo_config": {"name": "awq"}}, "/algo_config"),
    "not an object": ([1, 2], "/"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_says_where(case):
    data, pointer = REFUSED[case]
    with pytest.raises(ConfigError) as caught:
        parse_config(data)
    assert caught.value.code == "invalid_config"
    assert (caught.value.field or "/") == pointer
    assert pointer in caught.value.message


def test_quark_names_are_aliases_and_unknown_names_are_answered_with_the_list():
    assert presets.resolve("w_fp8_a_fp8") == presets.PRESETS["fp8"].config
    assert presets.resolve("w_uint4_per_group_asym", group_size=32).global_quant_config.weight.group_size == 32
    assert presets.resolve("fp8", exclude=()).exclude == ()
    with pytest.raises(ConfigError, match="Did you mean 'int8_dynamic'") as caught:
        presets.resolve("int8_dynamc")
    assert "w4a16" in caught.value.allowed
    with pytest.raises(ConfigError, match="no groups"):
        presets.resolve("fp8", group_size=64)


def test_values_are_frozen_and_usable_as_keys():
    config = QuantizationConfig(weight=QuantizationSpec(dtype="int8", qscheme=QSchemeType.per_channel))
    assert {config: 1}[QuantizationConfig.model_validate(config.model_dump())] == 1
    with pytest.raises(Exception, match="frozen"):
        config.weight = None
    assert Config(global_quant_config=config).exclude == ()
