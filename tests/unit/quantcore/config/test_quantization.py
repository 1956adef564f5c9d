"""Configs: JSON in and out, defaults, and every refusal with its place."""

import json
from dataclasses import FrozenInstanceError, replace

import jsonschema
import pytest

from quantcore.config import algorithms, presets
from quantcore.config.algorithm_chain import check_chain
from quantcore.config.algorithms import NAMES, SmoothQuantConfig, config_of
from quantcore.config.quantization import (
    Config,
    Dtype,
    QSchemeType,
    QuantizationConfig,
    QuantizationMode,
    QuantizationSpec,
    RoundType,
    ScaleType,
    json_schema,
    parse_config,
)
from quantcore.errors import ConfigError

WEIGHT = {"dtype": "int8", "qscheme": "per_channel", "ch_axis": 0}
BLOCKS = {"dtype": "fp8_e4m3", "qscheme": "per_block", "block_size": [128, 128]}


@pytest.mark.parametrize("name", presets.PRESETS)
def test_a_preset_survives_json(name):
    config = presets.PRESETS[name].config
    data = json.loads(json.dumps(config.to_dict()))
    assert parse_config(data) == config
    jsonschema.Draft202012Validator(json_schema()).validate(data)


def test_null_means_the_default_as_other_tools_write_it():
    given = {"dtype": "int8", "observer_cls": None, "is_dynamic": None, "group_size": None, "symmetric": None}
    assert QuantizationSpec(**given) == QuantizationSpec(
        dtype=Dtype.int8, observer_cls="PerTensorMinMaxObserver", symmetric=True, is_dynamic=False
    )


def test_the_observer_may_be_given_as_a_class():
    class PerGroupMinMaxObserver: ...

    spec = QuantizationSpec(dtype="uint4", qscheme="per_group", group_size=32, observer_cls=PerGroupMinMaxObserver)
    assert spec.observer_cls == "PerGroupMinMaxObserver"


REFUSED = {
    "no global config": ({}, "/global_quant_config"),
    "unknown dtype": ({"global_quant_config": {"weight": {"dtype": "int7"}}}, "/global_quant_config/weight/dtype"),
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
    "axis 4": ({"global_quant_config": {"weight": {**WEIGHT, "ch_axis": 4}}}, "/global_quant_config/weight"),
    "inputs alone": ({"global_quant_config": {"input_tensors": WEIGHT}}, "/global_quant_config"),
    "static token scales": (
        {"global_quant_config": {"weight": WEIGHT, "input_tensors": WEIGHT}},
        "/global_quant_config",
    ),
    "groups of a tensor's outputs in blocks": (
        {"global_quant_config": {"output_tensors": {**BLOCKS}}},
        "/global_quant_config",
    ),
    "blocks without a size": (
        {"global_quant_config": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_block"}}},
        "/global_quant_config/weight",
    ),
    "size without blocks": (
        {"global_quant_config": {"weight": {**WEIGHT, "block_size": [8, 8]}}},
        "/global_quant_config/weight",
    ),
    "mx without an element": ({"global_quant_config": {"weight": {"dtype": "mx"}}}, "/global_quant_config/weight"),
    "an element without mx": (
        {"global_quant_config": {"weight": {"dtype": "fp4", "mx_element_dtype": "fp4"}}},
        "/global_quant_config/weight",
    ),
    "asymmetric e8m0": (
        {"global_quant_config": {"weight": {"dtype": "int8", "symmetric": False, "scale_type": "e8m0"}}},
        "/global_quant_config/weight",
    ),
    "e4m3 scales without groups": (
        {"global_quant_config": {"weight": {"dtype": "fp4", "scale_type": "e4m3"}}},
        "/global_quant_config/weight",
    ),
    "a scale rule without e8m0": (
        {"global_quant_config": {"weight": {**WEIGHT, "scale_calculation_mode": "floor"}}},
        "/global_quant_config/weight",
    ),
    "a float zero point of symmetric codes": (
        {"global_quant_config": {"weight": {**WEIGHT, "zero_point_type": "float32"}}},
        "/global_quant_config/weight",
    ),
    "a cast with channels": (
        {"global_quant_config": {"weight": {"dtype": "bfloat16", "qscheme": "per_channel"}}},
        "/global_quant_config/weight",
    ),
    "a placeholder where a scale is needed": (
        {"global_quant_config": {"weight": {"dtype": "int8", "observer_cls": "PlaceholderObserver"}}},
        "/global_quant_config/weight",
    ),
    "a percentile of one batch": (
        {
            "global_quant_config": {
                "weight": WEIGHT,
                "input_tensors": {"dtype": "int8", "is_dynamic": True, "observer_cls": "PerTensorPercentileObserver"},
            }
        },
        "/global_quant_config/input_tensors",
    ),
    "two stages of integers": (
        {"global_quant_config": {"weight": {**WEIGHT, "over": {"dtype": "int8"}}}},
        "/global_quant_config/weight",
    ),
    "unknown observer": (
        {"global_quant_config": {"weight": {**WEIGHT, "observer_cls": "MinMax"}}},
        "/global_quant_config/weight/observer_cls",
    ),
    "unknown layer type": (
        {"global_quant_config": {"weight": WEIGHT}, "layer_type_quant_config": {"LSTM": {"weight": WEIGHT}}},
        "/layer_type_quant_config/LSTM/[key]",
    ),
    "unknown algorithm": (
        {"global_quant_config": {"weight": WEIGHT}, "algo_config": [{"name": "magic"}]},
        "/algo_config/0",
    ),
    "algorithm's option": (
        {"global_quant_config": {"weight": WEIGHT}, "algo_config": {"name": "gptq", "damp_percent": 2}},
        "/algo_config/0/damp_percent",
    ),
    "two solvers": (
        {"global_quant_config": {"weight": WEIGHT}, "algo_config": [{"name": "rtn"}, {"name": "gptq"}]},
        "/algo_config",
    ),
    "a solver before a transform": (
        {"global_quant_config": {"weight": WEIGHT}, "algo_config": [{"name": "gptaq"}, {"name": "awq"}]},
        "/algo_config",
    ),
    "a transform twice": (
        {"global_quant_config": {"weight": WEIGHT}, "algo_config": [{"name": "smooth"}, {"name": "smoothquant"}]},
        "/algo_config",
    ),
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


def test_the_schema_says_what_the_options_of_algorithms_do():
    """Also those that an algorithm has from the one that it builds on. The schema lists algorithms in a valid order."""
    schema = json_schema()
    choices = schema["properties"]["algo_config"]["items"]["oneOf"]  # those that other tests added have no reference
    listed = [choice["$ref"].rpartition("/")[2] for choice in choices if "$ref" in choice]
    helps = {name: schema["$defs"][name]["properties"] for name in listed}
    assert helps["YAQAConfig"]["damp_percent"]["description"] == helps["GPTQConfig"]["damp_percent"]["description"]
    assert "outliers" in helps["SmoothQuantConfig"]["alpha"]["description"]
    assert "corrected" in helps["YAQAConfig"]["alpha"]["description"]
    chain = [name for name in listed if name in ("AWQConfig", "RotationConfig", "GPTQConfig", "BiasCorrectionConfig")]
    check_chain([getattr(algorithms, name)() for name in chain])


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
    assert {config: 1}[QuantizationConfig(**config.to_dict())] == 1
    with pytest.raises(FrozenInstanceError):
        config.weight = None
    assert Config(global_quant_config=config).exclude == ()


def test_replace_checks_again():
    config = presets.PRESETS["fp8"].config
    assert replace(config, exclude=["lm_head", "*.o_proj"]).exclude == ("lm_head", "*.o_proj")
    with pytest.raises(ConfigError, match="whole number above 0"):
        replace(config.global_quant_config.weight, qscheme="per_group")


def test_the_words_of_the_vocabulary_are_those_of_the_documents():
    spec = QuantizationSpec(
        dtype=Dtype.uint4,
        observer_cls="PerChannelMinMaxObserver",
        symmetric=False,
        scale_type=ScaleType.float,
        round_method=RoundType.half_even,
        qscheme=QSchemeType.per_group,
        ch_axis=0,
        is_dynamic=False,
        group_size=32,
    )
    assert spec.observer_cls == "PerGroupMinMaxObserver"  # how many scales there are is qscheme's to say
    assert spec.observer_method == "min_max"
    assert QuantizationMode.fx_graph_mode == "fx_graph_mode"


def test_mx_with_an_element_is_that_element_in_blocks_of_32():
    spec = QuantizationSpec(dtype=Dtype.mx, mx_element_dtype=Dtype.fp6_e3m2)
    assert spec == QuantizationSpec(dtype="fp6_e3m2", qscheme="per_group", group_size=32, ch_axis=-1, scale_type="e8m0")
    assert (spec.observer_cls, spec.scale_calculation_mode) == ("PerBlockMXObserver", "even")


class TestChoosing:
    """exclude, then names, then the type, then the global config."""

    GLOBAL, NAMED, TYPED = (
        QuantizationConfig(weight=QuantizationSpec(dtype=dtype)) for dtype in ("int8", "int4", "int2")
    )
    FP8 = QuantizationSpec(dtype="fp8_e4m3")
    CACHE = QuantizationConfig(output_tensors=FP8)

    def config(self, **fields):
        return Config(global_quant_config=self.GLOBAL, **fields)

    def test_the_order(self):
        config = self.config(
            exclude=["lm_head"],
            layer_quant_config={"*_proj": self.NAMED, "*q_proj": self.GLOBAL, "lm_head": self.NAMED},
            layer_type_quant_config={"nn.Conv2d": self.TYPED},
        )
        assert config.choose("lm_head", "Linear") == (None, "excluded by 'lm_head'")
        assert config.choose("a.q_proj", "Linear") == (self.NAMED, "layer_quant_config '*_proj'")
        assert config.choose("a.conv", "Conv2d") == (self.TYPED, "layer_type_quant_config 'Conv2d'")
        assert config.choose("a.fc", "Linear") == (self.GLOBAL, "global_quant_config")

    def test_a_kv_cache_adds_outputs_to_keys_and_values_alone(self):
        config = self.config(kv_cache_quant_config={"*k_proj": self.CACHE, "*v_proj": self.CACHE})
        with_outputs = replace(self.GLOBAL, output_tensors=self.FP8)
        assert config.choose("a.k_proj", "Linear") == (with_outputs, "kv_cache_quant_config '*k_proj'")
        for name in ("a.qkv_proj", "a.kv_proj", "a.o_v_proj"):
            assert config.choose(name, "Linear") == (self.GLOBAL, "global_quant_config")
        assert config.choose("a.k_proj", "Linear", in_cache=False)[0] == self.GLOBAL
        assert config.unmatched_patterns(["a.qkv_proj"]) == ["*k_proj", "*v_proj"]

    def test_a_kv_cache_leaves_layers_the_weights_that_were_asked_for_by_name(self):
        config = self.config(
            kv_cache_quant_config={"*k_proj": self.CACHE}, layer_quant_config={"*.0.k_proj": self.NAMED}
        )
        combined = replace(self.NAMED, output_tensors=self.FP8)
        why = "kv_cache_quant_config '*k_proj' with layer_quant_config '*.0.k_proj'"
        assert config.choose("a.0.k_proj", "Linear") == (combined, why)
        assert config.choose("a.1.k_proj", "Linear")[0] == replace(self.GLOBAL, output_tensors=self.FP8)

    def test_a_kv_cache_may_say_weights_and_inputs_too_as_in_the_documents(self):
        whole = replace(self.TYPED, output_tensors=self.FP8)
        config = self.config(kv_cache_quant_config={"*k_proj": whole}, layer_type_quant_config={"Linear": self.NAMED})
        assert config.choose("a.k_proj", "Linear") == (whole, "kv_cache_quant_config '*k_proj'")

    def test_a_kv_cache_without_outputs_is_refused(self):
        with pytest.raises(ConfigError, match="'\\*k_proj' has no output_tensors"):
            self.config(kv_cache_quant_config={"*k_proj": self.GLOBAL})

    def test_an_embedding_waits_to_be_asked_for(self):
        assert self.config().choose("embed", "Embedding")[0] is None
        assert self.config(layer_quant_config={"embed": self.NAMED}).choose("embed", "Embedding")[0] == self.NAMED
        assert self.config(layer_type_quant_config={"Embedding": self.TYPED}).choose("e", "Embedding")[0] == self.TYPED

    def test_a_type_may_be_given_as_a_class(self):
        class Conv2d: ...

        assert self.config(layer_type_quant_config={Conv2d: self.TYPED}).choose("c", "Conv2d")[0] == self.TYPED


class TestUsersPresets:
    def test_they_stand_beside_the_built_in_ones(self, tmp_path):
        file = tmp_path / "presets.json"
        file.write_text(json.dumps({
            "house": {"title": "ours", "config": {"preset": "w4a16", "group_size": 32, "kv_cache": "fp8"}},
            "plain": {"config": {"global_quant_config": {"weight": {"dtype": "int4"}}}},
        }))  # fmt: skip
        found = presets.read_presets(file)
        assert set(presets.PRESETS) < set(found)
        house = presets.resolve("house", presets=found)
        assert house.global_quant_config.weight.group_size == 32
        assert house.kv_cache_quant_config["*k_proj"].output_tensors.dtype == "fp8_e4m3"
        assert presets.resolve("plain", presets=found).exclude == ()

    @pytest.mark.parametrize(
        "content", ["nonsense", "[]", '{"x": {}}', '{"fp8": {"config": {"preset": "fp8"}}}', '{"x": {"config": 1}}',
                    '{"x": {"config": {"preset": "fp8", "colour": 1}}}'],
    )  # fmt: skip
    def test_a_broken_file_is_named(self, tmp_path, content):
        file = tmp_path / "mine.json"
        file.write_text(content)
        with pytest.raises(ConfigError, match=r"mine\.json"):
            presets.read_presets(file)


def test_a_kv_cache_scheme_goes_to_keys_and_values():
    config = presets.resolve("fp8", kv_cache="int8_per_tensor_static")
    layer, why = config.choose("model.layers.0.self_attn.v_proj", "Linear")
    assert layer.output_tensors.dtype == "int8" and layer.weight.dtype == "fp8_e4m3" and "*v_proj" in why
    with pytest.raises(ConfigError, match="Did you mean 'fp8'"):
        presets.resolve("fp8", kv_cache="fp9")


def test_a_dynamic_weight_is_a_static_one():
    dynamic, static = (
        QuantizationConfig(**{part: QuantizationSpec(dtype="int8", is_dynamic=flag) for part in ("weight", "bias")})
        for flag in (True, False)
    )
    assert dynamic == static and dynamic.weight.is_dynamic is False


def test_a_chain_is_transforms_and_then_one_solver():
    base = {"global_quant_config": {"weight": WEIGHT}}
    names = ["rotation", "smooth", "autosmoothquant", "awq", "qronos"]
    chain = parse_config({**base, "algo_config": [{"name": name} for name in names]}).algo_config
    assert [algorithm.name for algorithm in chain] == names
    assert [config_of(name).name for name in (*NAMES, "smooth")] == [*NAMES, "smooth"]
    with pytest.raises(ConfigError, match="gptq rounds the weights, so it comes last: smooth, awq, gptq"):
        replace(parse_config(base), algo_config=(SmoothQuantConfig(), config_of("gptq"), config_of("awq")))


@pytest.mark.parametrize("name", ["F16", "bf16", "F32"])
def test_files_of_floats_are_no_presets(name):
    with pytest.raises(ConfigError, match=f"'{name}' files are not quantized") as raised:
        presets.spelled(name)
    assert raised.value.code == "unknown_preset" and f"--outtype {name.lower()}" in raised.value.hint
