"""Configs as AMD Quark writes them, with all their nulls."""

import pytest

from quantcore.config import presets
from quantcore.config.quantization import parse_config
from quantcore.config.quark import read_config
from quantcore.errors import ConfigError

NULLS = {
    "block_size": None, "ch_axis": None, "enable_buffer_reuse": False, "group_size": None, "is_dynamic": False,
    "is_scale_quant": False, "max_input_numel": 4194304, "mx_element_dtype": None, "qscheme": "per_tensor",
    "round_method": "half_even", "scale_calculation_mode": None, "scale_format": None, "scale_type": "float",
    "symmetric": True, "zero_point_type": "int32",
}  # fmt: skip
FP8 = {**NULLS, "dtype": "fp8_e4m3", "observer_cls": "PerTensorMinMaxObserver"}
UINT4 = {**NULLS, "dtype": "uint4", "observer_cls": "PerGroupMinMaxObserver", "qscheme": "per_group", "ch_axis": -1,
         "group_size": 64, "symmetric": False}  # fmt: skip
MXFP4 = {**NULLS, "dtype": "fp4", "observer_cls": "PerBlockMXObserver", "qscheme": "per_group", "ch_axis": -1,
         "group_size": 32, "symmetric": None, "scale_format": "e8m0", "scale_calculation_mode": "even"}  # fmt: skip
INT4_CHANNEL = {**NULLS, "dtype": "int4", "observer_cls": "PerChannelMinMaxObserver", "qscheme": "per_channel",
                "ch_axis": 0, "scale_type": "float32"}  # fmt: skip
FP4_16 = {**NULLS, "dtype": "fp4", "observer_cls": "PerBlockMXObserver", "qscheme": "per_group", "ch_axis": -1,
          "group_size": 16, "symmetric": None, "scale_format": "float32", "scale_type": "float32"}  # fmt: skip


def exported(weight, inputs=None, **fields):
    layer = {"weight": weight, "input_tensors": inputs, "output_tensors": None, "bias": None, "target_device": None}
    return {
        "quant_method": "quark", "version": "0.13", "quant_mode": "eager_mode", "global_quant_config": layer,
        "layer_quant_config": {}, "layer_type_quant_config": {}, "kv_cache_quant_config": {}, "algo_config": None,
        "kv_cache_post_rope": False, "softmax_quant_spec": None, "exclude": ["lm_head"],
        "export": {"kv_cache_group": [], "pack_method": "reorder", "weight_format": "real_quantized"}, **fields,
    }  # fmt: skip


CASES = {
    "fp8": (exported(FP8, FP8), "fp8"),
    "uint4": (exported(UINT4), "w4a16"),
    "mxfp4": (exported(MXFP4, {**MXFP4, "is_dynamic": True}), "mxfp4"),
    "int4 over fp8": (exported([{**FP8, "scale_type": "float32"}, INT4_CHANNEL], {**FP8, "is_dynamic": True}),
                      "int4_fp8"),
    "nvfp4": (exported([FP4_16, {**FP8, "is_scale_quant": True}], [{**FP4_16, "is_dynamic": True},
                                                                  {**FP8, "is_scale_quant": True}]), "nvfp4"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_it_means_our_preset(name):
    data, preset = CASES[name]
    ours = presets.PRESETS[preset].config
    read = read_config(data)
    for part in ("weight", "input_tensors"):
        given, expected = (getattr(config.global_quant_config, part) for config in (read, ours))
        if given is not None:
            given = {**given.to_dict(), "ch_axis": None}
            assert given == {**expected.to_dict(), "ch_axis": None}
    assert read.exclude == ("lm_head",)


def test_a_whole_config_json_will_do_and_our_own_config_too():
    assert read_config({"model_type": "llama", "quantization_config": CASES["fp8"][0]}) == read_config(CASES["fp8"][0])
    ours = presets.PRESETS["mxfp4"].config.to_dict()
    assert read_config(ours) == parse_config(ours)


def test_overrides_types_and_algorithms():
    layer = exported(UINT4)["global_quant_config"]
    read = read_config(
        exported(
            FP8,
            layer_quant_config={"*down_proj": layer},
            layer_type_quant_config={"<class 'torch.nn.modules.conv.Conv2d'>": layer},
            algo_config=[
                {"name": "gptq", "damp_percent": 0.02, "desc_act": True, "inside_layer_modules": ["mlp.up_proj"]}
            ],
        )
    )
    assert read.choose("a.down_proj", "Linear")[0].weight.group_size == 64
    assert list(read.layer_type_quant_config) == ["Conv2d"]
    assert read.algo_config[0].damp_percent == 0.02
    older = read_config(exported(FP8, algo_config={"name": "smooth", "alpha": 0.5}))
    assert older.algo_config[0].alpha == 0.5


def test_what_only_quark_knows_is_said():
    with pytest.raises(ConfigError, match="stages"):
        read_config(exported([{**FP8, "is_scale_quant": True}, UINT4]))
    with pytest.raises(ConfigError, match="dtype"):
        read_config(exported({**NULLS, "dtype": "mx9", "observer_cls": "PerBlockMXObserver"}))
