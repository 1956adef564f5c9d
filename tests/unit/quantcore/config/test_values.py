"""Constructors of configs: values by position, and every wrong argument as a ConfigError in plain words."""

from collections.abc import Mapping
from typing import Annotated

import pytest
from pydantic import Field, StrictBool, TypeAdapter, ValidationError

import quantcore
from quantcore import (
    AWQConfig,
    Config,
    ExporterConfig,
    GPTQConfig,
    JsonExporterConfig,
    ModelExporter,
    ModelQuantizer,
    ProgressiveSpec,
    QuantizationConfig,
    QuantizationSpec,
    SmoothQuantConfig,
)
from quantcore.config.job_spec import MixConfig
from quantcore.config.quantization import CalibrationConfig
from quantcore.config.short_specs import HELPER_SPECS
from quantcore.config.task import EvaluationConfig, Task
from quantcore.config.values import sentence_of
from quantcore.errors import ConfigError

FP8 = QuantizationSpec(dtype="fp8_e4m3")
INT8 = QuantizationSpec(dtype="int8")
BOTH = QuantizationConfig(weight=FP8, input_tensors=FP8)

# The order of the fields of AMD Quark's dataclasses of the same names, as far as releases 0.8 and 0.10 agree.
BY_POSITION = [
    (
        QuantizationSpec,
        ("uint4", "PerGroupMinMaxObserver", False, "per_group", 1, 32, False, "floor", "float16"),
        ("dtype", "observer_cls", "is_dynamic", "qscheme", "ch_axis", "group_size", "symmetric", "round_method",
         "scale_type"),
    ),
    (QuantizationConfig, (FP8, INT8, FP8, INT8), ("input_tensors", "output_tensors", "weight", "bias")),
    (
        Config,
        (BOTH, {"Linear": BOTH}, {"*.a": BOTH}, {"*.k_proj": QuantizationConfig(output_tensors=FP8)}),
        ("global_quant_config", "layer_type_quant_config", "layer_quant_config", "kv_cache_quant_config"),
    ),
    (ExporterConfig, (JsonExporterConfig(kv_cache_group=["*a"]), None), ("json_export_config", "onnx_export_config")),
    (ProgressiveSpec, (FP8, INT8), ("first_stage", "second_stage")),
    (quantcore.FP8E4M3PerTensorSpec, ("mse",), ("observer_method",)),
    (quantcore.Int8PerTensorSpec, ("percentile",), ("observer_method",)),
    (quantcore.Uint4PerGroupSpec, (1, 64), ("ch_axis", "group_size")),
    (quantcore.Int4PerChannelSpec, (0,), ("ch_axis",)),
]  # fmt: skip


@pytest.mark.parametrize(("cls", "values", "names"), BY_POSITION, ids=lambda value: getattr(value, "__name__", ""))
def test_values_by_position_are_the_fields_in_order(cls, values, names):
    for count in range(len([name for name in names if name in ("dtype", "global_quant_config")]), len(names) + 1):
        if cls in (ProgressiveSpec, quantcore.Uint4PerGroupSpec, quantcore.Int4PerChannelSpec) and count < len(names):
            continue  # all of them are required
        by_name = dict(zip(names[count:], values[count:], strict=True))
        assert cls(*values[:count], **by_name) == cls(**dict(zip(names, values, strict=True)))


def test_none_by_position_is_the_default():
    assert QuantizationConfig(FP8, None, FP8) == BOTH
    assert QuantizationSpec("int8", None, None, "per_channel") == QuantizationSpec(dtype="int8", qscheme="per_channel")


WRONG = {
    "too many": (lambda: QuantizationConfig(FP8, None, FP8, None, FP8), "", "takes 4 value", "bias"),
    "twice": (lambda: QuantizationConfig(FP8, input_tensors=FP8), "/input_tensors", "twice", "weight"),
    "by position, of an algorithm": (lambda: GPTQConfig("gptq", 128), "", "fields by name", "block_size"),
    "by position, of a short form": (
        lambda: quantcore.Int8PerTensorSpec("mse", True), "", "takes 1 value", "symmetric",
    ),
    "by position, of settings": (lambda: CalibrationConfig("builtin"), "", "fields by name", "source"),
    "by position, of an export": (lambda: JsonExporterConfig(None, ["*k_proj"]), "", "by name", "kv_cache_group"),
    "order of Quark 0.10's groups": (
        lambda: quantcore.Int4PerGroupSpec(True, 1).to_quantization_spec(), "/ch_axis", "True was given", "",
    ),
    "wrong type": (lambda: QuantizationConfig("fp8"), "/input_tensors", "'fp8' was given", ""),
    "a config for a spec": (lambda: QuantizationConfig(BOTH), "/input_tensors", "a QuantizationConfig was given", ""),
    "unknown word": (lambda: QuantizationSpec(dtype="int7"), "/dtype", "'int7' was given", "int8"),
    "unknown word of a short form": (
        lambda: quantcore.Int8PerTensorSpec(round_method="up").to_quantization_spec(), "/round_method", "'up'", "floor",
    ),
    "unknown field": (
        lambda: QuantizationSpec(dtype="int8", simmetric=True), "/simmetric", "no such field", "symmetric",
    ),
    "unknown field of an algorithm": (lambda: AWQConfig(grid=20), "/grid", "no such field", "scaling_layers"),
    "unknown field of a short form": (
        lambda: quantcore.Float16Spec(symmetric=True), "/symmetric", "no such field", "",
    ),
    "unknown field of an export": (
        lambda: JsonExporterConfig(pack_method="order"), "/pack_method", "no such field", "weight_format",
    ),
    "missing": (lambda: Config(), "/global_quant_config", "required", ""),
    "missing in a short form": (lambda: quantcore.Int4PerGroupSpec(1), "/group_size", "required", ""),
    "number out of range": (lambda: SmoothQuantConfig(alpha=2), "/alpha", "less than or equal to 1; 2 was given", ""),
    "deep inside": (
        lambda: Config(global_quant_config=BOTH, layer_quant_config={"*.a": {"weight": {"dtype": "x"}}}),
        "/layer_quant_config/*.a/weight/dtype", "'x' was given", "fp4",
    ),
    "does not go together": (lambda: QuantizationConfig(input_tensors=FP8), "", "input_tensors need weight", ""),
    "no stage": (lambda: ProgressiveSpec("fp8", INT8), "/first_stage", "'fp8' was given", ""),
    "calibration": (lambda: CalibrationConfig(seq_len=4), "/seq_len", "greater than or equal to 8", ""),
    "evaluation": (lambda: EvaluationConfig(windows=4), "/windows", "no such field", "num_windows"),
    "mix": (lambda: MixConfig(schemes=("a", "b"), max_bits="4"), "/max_bits", "'4' was given", ""),
    "task": (lambda: Task(output_dir="out"), "/config", "required", ""),
    "quantizer": (lambda: ModelQuantizer(BOTH), "", "a QuantizationConfig was given", ""),
    "exporter": (lambda: ModelExporter(JsonExporterConfig(), "out"), "/config", "a JsonExporterConfig was given", ""),
    "exporter's config": (lambda: ExporterConfig("quark"), "/json_export_config", "'quark' was given", ""),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_argument_is_an_error_in_plain_words(case):
    make, field, text, allowed = WRONG[case]
    with pytest.raises(ConfigError) as caught:
        make()
    error = caught.value
    assert (error.code, error.field) == ("invalid_config", field)
    assert text in error.message and (not allowed or allowed in error.allowed)
    for word in ("pydantic", "input_value", "[type=", "Input should", "Value error", "__init__", "\n"):
        assert word not in str(error)


def test_a_near_name_is_proposed():
    with pytest.raises(ConfigError, match="Did you mean 'symmetric'"):
        QuantizationSpec(dtype="int8", simmetric=True)


ANY_TYPE = {
    "an object such as {...}": (dict[str, int], MixConfig, CalibrationConfig, AWQConfig, Mapping[str, int]),
    "a list such as [...]": (list[int], tuple[int, ...], set[int], frozenset[int], tuple[str, str]),
    "a text in quotes": (Annotated[str, Field(strict=True)],),
    "a whole number": (int, Annotated[int, Field(strict=True)]),
    "a number": (float, Annotated[float, Field(strict=True)]),
    "true or false": (bool, StrictBool),
    "null": (None,),
}
WRONG_TYPE = [(kind, words) for words, kinds in ANY_TYPE.items() for kind in kinds]


@pytest.mark.parametrize(("kind", "words"), WRONG_TYPE, ids=[str(kind) for kind, _ in WRONG_TYPE])
def test_a_value_of_another_type_is_refused_in_the_words_of_json(kind, words):
    given = 7 if words != "null" and "number" not in words and "true" not in words else "x"
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(kind).validate_python(given)
    assert sentence_of(caught.value.errors()[0]) == f"it must be {words}; {given!r} was given"


@pytest.mark.parametrize(
    ("kind", "given", "words"),
    [
        (Annotated[tuple[int, ...], Field(min_length=1)], [], "it must have at least 1 item, not 0"),
        (Annotated[dict[str, int], Field(max_length=1)], {"a": 1, "b": 2}, "it must have at most 1 item"),
        (Annotated[str, Field(min_length=1)], "", "it must have at least 1 character"),
        (int, 1.5, "it must be a whole number"),
    ],
)
def test_a_length_is_told_without_a_type_of_python(kind, given, words):
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(kind).validate_python(given)
    assert sentence_of(caught.value.errors()[0]).startswith(f"{words}; ")


def test_nested_data_is_still_checked_by_pydantic_with_its_whole_path():
    """A service that reads bodies lists all the problems of a body."""
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(dict[str, CalibrationConfig]).validate_python({"a": {"seq_len": 4, "seed": -1}})
    assert [error["loc"] for error in caught.value.errors()] == [("a", "seq_len"), ("a", "seed")]


@pytest.mark.parametrize("name", HELPER_SPECS)
def test_short_forms_refuse_more_positions_than_all_releases_agree_on(name):
    with pytest.raises(ConfigError, match=r"by position|by name"):
        HELPER_SPECS[name](1, 2, 3)
