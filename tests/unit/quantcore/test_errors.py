"""What an error of the engine says, and where it says it."""

import pytest

from quantcore.config.presets import PRESETS, resolve
from quantcore.config.target_devices import DEVICES
from quantcore.errors import ConfigError, QuantError, nearest_names


@pytest.mark.parametrize(
    ("message", "field", "text"),
    [
        ("Unknown preset 'fp9'.", "/config", "Unknown preset 'fp9' (at /config). Try fp8."),
        ("The config is not valid at /gate: no.", "/gate", "The config is not valid at /gate: no. Try fp8."),
        ("The scheme in /config.", "/config", "The scheme in /config. Try fp8."),
        ("Cannot read /config.json.", "/config", "Cannot read /config.json (at /config). Try fp8."),
        ("The disk is full.", "", "The disk is full. Try fp8."),
    ],
)
def test_an_error_names_the_fault_and_its_field_once(message: str, field: str, text: str) -> None:
    assert str(QuantError(message, code="x", field=field, hint="Try fp8.")) == text


def test_one_allowed_word_is_one_value() -> None:
    assert QuantError("No.", code="x", allowed="fp8").allowed == ("fp8",)
    assert QuantError("No.", code="x", allowed=(32, "fp8")).allowed == ("32", "fp8")


@pytest.mark.parametrize(
    ("given", "names", "meant"),
    [
        *(
            (spelled, PRESETS, name)
            for name in PRESETS
            for spelled in (name.upper(), name.replace("_", "-"), name + "x")
        ),
        ("w4-a16", PRESETS, "w4a16"),
        ("int8_dynamc", PRESETS, "int8_dynamic"),
        ("4090", DEVICES, "rtx4090"),
        ("RTX 4090", DEVICES, "rtx4090"),
        ("llama.cpp", ("vllm", "llama_cpp", "onnx"), "llama_cpp"),
        ("warning", ("off", "warn", "fail"), "warn"),
    ],
)
def test_the_nearest_name_is_the_one_that_was_meant(given, names, meant):
    assert nearest_names(given, names)[0] == meant


@pytest.mark.parametrize("given", ["q4_k", "Q4_K", "gguf q4 k"])
def test_a_type_of_gguf_is_found_by_a_part_of_its_name(given):
    assert "gguf_q4_k" in nearest_names(given, PRESETS)


def test_what_is_like_no_name_gets_none():
    assert nearest_names("zzz", PRESETS) == nearest_names("", PRESETS) == nearest_names("?", PRESETS) == []


def test_an_unknown_preset_names_a_few_and_the_command_that_lists_all():
    with pytest.raises(ConfigError) as refusal:
        resolve("w4-a16")
    hint = refusal.value.hint
    assert hint.startswith("Did you mean 'w4a16'? Similar: ") and hint.endswith("`bitfoundry presets` lists all.")
    assert sum(name in hint.replace("'", " ").replace(",", " ").replace("?", " ").split() for name in PRESETS) <= 6
    assert {*PRESETS} <= {*refusal.value.allowed}
