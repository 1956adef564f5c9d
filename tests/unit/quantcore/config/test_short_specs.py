"""The short forms of specs, held against what AMD Quark's documentation says of theirs, and the flat import."""

import dataclasses
import pickle

import pytest

import quantcore
from quantcore import ConfigError, ProgressiveSpec, QuantizationSpec, ScaleQuantSpec
from quantcore.config.short_specs import HELPER_SPECS

AXIS_0, GROUP = {"ch_axis": 0}, {"ch_axis": 1, "group_size": 32}
INT = {"symmetric": True, "scale_type": "float", "round_method": "half_even", "is_dynamic": False}
UINT = INT | {"symmetric": False}
MX = {"qscheme": "per_group", "ch_axis": -1, "group_size": 32, "scale_type": "e8m0", "scale_calculation_mode": "even"}
DYNAMIC_GROUP = {"qscheme": "per_group", **GROUP, "is_dynamic": True, "scale_type": "float"}

# class, arguments -> the spec in full
SPECS = [
    ("Int8PerTensorSpec", {}, {"dtype": "int8", **INT}),
    ("Int8PerChannelSpec", AXIS_0, {"dtype": "int8", "qscheme": "per_channel", **AXIS_0, **INT, "symmetric": False}),
    ("Int4PerChannelSpec", AXIS_0, {"dtype": "int4", "qscheme": "per_channel", **AXIS_0, **INT}),
    ("Int4PerGroupSpec", GROUP, {"dtype": "int4", "qscheme": "per_group", **GROUP, **INT}),
    ("Int3PerGroupSpec", GROUP, {"dtype": "int3", "qscheme": "per_group", **GROUP, **INT}),
    ("Int2PerGroupSpec", GROUP, {"dtype": "int2", "qscheme": "per_group", **GROUP, **INT}),
    ("Uint4PerGroupSpec", GROUP, {"dtype": "uint4", "qscheme": "per_group", **GROUP, **UINT}),
    ("Uint8PerChannelSpec", AXIS_0, {"dtype": "uint8", "qscheme": "per_channel", **AXIS_0, **UINT}),
    ("Uint4PerTensorSpec", {"is_dynamic": True}, {"dtype": "uint4", **UINT, "is_dynamic": True}),
    (
        "Uint4PerChannelSpec",
        {"ch_axis": 0, "zero_point_type": "float32"},
        {"dtype": "uint4", "qscheme": "per_channel", **AXIS_0, **UINT, "zero_point_type": "float32"},
    ),
    ("FP8E4M3PerTensorSpec", {}, {"dtype": "fp8_e4m3"}),
    (
        "FP8E4M3PerTensorSpec",
        {"observer_method": "percentile", "scale_type": "float32"},
        {"dtype": "fp8_e4m3", "observer_cls": "PerTensorPercentileObserver", "scale_type": "float32"},
    ),
    ("FP8E5M2PerTensorSpec", {"observer_method": "MSE"}, {"dtype": "fp8_e5m2", "observer_cls": "PerTensorMSEObserver"}),
    ("FP8E4M3PerChannelSpec", AXIS_0, {"dtype": "fp8_e4m3", "qscheme": "per_channel", **AXIS_0}),
    ("FP8E5M2PerGroupSpec", GROUP, {"dtype": "fp8_e5m2", **DYNAMIC_GROUP}),
    ("FP4PerGroupSpec", GROUP, {"dtype": "fp4", **DYNAMIC_GROUP}),
    (
        "FP4PerGroupSpec",
        {
            "ch_axis": -1,
            "group_size": 32,
            "scale_format": "e8m0",
            "scale_calculation_mode": "even",
            "is_dynamic": False,
        },
        {"dtype": "fp4", **MX},
    ),
    ("FP6E3M2PerGroupSpec", GROUP, {"dtype": "fp6_e3m2", **DYNAMIC_GROUP}),
    ("FP6E2M3PerGroupSpec", GROUP | {"is_dynamic": False}, {"dtype": "fp6_e2m3", **DYNAMIC_GROUP, "is_dynamic": False}),
    ("Float16Spec", {}, {"dtype": "float16", "observer_cls": "PlaceholderObserver"}),
    ("Bfloat16Spec", {}, {"dtype": "bfloat16", "observer_cls": "PlaceholderObserver"}),
    ("OCP_MXFP4Spec", {"ch_axis": -1, "is_dynamic": False}, {"dtype": "fp4", **MX}),
    ("OCP_MXFP8E4M3Spec", {"ch_axis": -1}, {"dtype": "fp8_e4m3", **MX, "is_dynamic": True}),
    (
        "OCP_MXFP6E2M3Spec",
        {"ch_axis": -1, "scale_calculation_mode": "floor"},
        {"dtype": "fp6_e2m3", **MX, "is_dynamic": True, "scale_calculation_mode": "floor"},
    ),
    ("OCP_MXINT8Spec", {"ch_axis": -1}, {"dtype": "int8", **MX, "is_dynamic": True}),
]


@pytest.mark.parametrize(
    ("name", "given", "expected"), SPECS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_short_form_stands_for_a_spec(name, given, expected):
    assert getattr(quantcore, name)(**given).to_quantization_spec() == QuantizationSpec(**expected)


def minimal(cls):
    required = [option.name for option in dataclasses.fields(cls) if option.default is dataclasses.MISSING]
    return cls(**{name: {"ch_axis": 1 if "group_size" in required else 0, "group_size": 64}[name] for name in required})


@pytest.mark.parametrize("name", HELPER_SPECS)
def test_every_short_form_is_legal_with_its_defaults(name):
    short = minimal(getattr(quantcore, name))
    spec = short.to_quantization_spec()
    # The name says what it is: FP8E4M3PerChannelSpec is fp8_e4m3, per_channel.
    words = name.removesuffix("Spec").removeprefix("OCP_MX").replace("Per", "_per_").lower()
    letters = spec.dtype.value.replace("_", "")
    assert words.startswith(letters) and (spec.scale_type == "e8m0") == name.startswith("OCP_MX")
    assert ("_per_" not in words) or words.endswith(spec.qscheme.value)
    assert pickle.loads(pickle.dumps(short)) == short
    with pytest.raises(ConfigError, match="no such field"):
        type(short)(typo=1)


def test_the_documents_families_are_complete():
    families = {
        f"{dtype}Per{scheme}Spec"
        for dtype in ("Int2", "Int3", "Int4", "Uint4", "Int8", "Uint8", "FP8E4M3", "FP8E5M2")
        for scheme in ("Tensor", "Channel", "Group")
    }
    assert families <= set(HELPER_SPECS)


def test_two_stages_become_one_spec():
    progressive = ProgressiveSpec(
        first_stage=quantcore.FP8E4M3PerTensorSpec(observer_method="min_max", is_dynamic=False),
        second_stage=quantcore.Int4PerChannelSpec(symmetric=True, scale_type="float", ch_axis=0, is_dynamic=False),
    ).to_quantization_spec()
    assert progressive == QuantizationSpec(
        dtype="int4", qscheme="per_channel", ch_axis=0, over=QuantizationSpec(dtype="fp8_e4m3")
    )
    first = quantcore.FP4PerGroupSpec(ch_axis=-1, group_size=16, is_dynamic=False)
    nvfp4 = ScaleQuantSpec(first_stage=first, second_stage=quantcore.FP8E4M3PerTensorSpec()).to_quantization_spec()
    assert nvfp4 == QuantizationSpec(dtype="fp4", qscheme="per_group", ch_axis=-1, group_size=16, scale_type="e4m3")
    with pytest.raises(ConfigError, match="scales cannot be kept as int8 per_tensor"):
        ScaleQuantSpec(first, quantcore.Int8PerTensorSpec()).to_quantization_spec()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: quantcore.Int8PerTensorSpec(observer_method="minmax"), "Did you mean 'min_max'"),
        (lambda: quantcore.FP4PerGroupSpec(ch_axis=1, group_size=32, scale_format="e5m3"), "float32, e8m0, e4m3"),
    ],
)
def test_unknown_names_are_answered_with_the_list(make, text):
    with pytest.raises(ConfigError, match=text):
        make().to_quantization_spec()


def test_every_public_name_can_be_imported() -> None:
    """Under the name that the object has; neither the version nor the table of formats has one."""
    own_names = {name: getattr(getattr(quantcore, name), "__name__", name) for name in quantcore.__all__}
    assert {name: own for name, own in own_names.items() if own.rpartition(".")[2] != name} == {}


def test_an_unknown_name_is_an_import_error():
    with pytest.raises(ImportError, match="QuantisationConfig"):
        exec("from quantcore import QuantisationConfig")


def test_all_short_forms_are_public():
    assert set(HELPER_SPECS) <= set(quantcore.__all__)
