"""Every exporter says which programs read its files; an installed package's may say it too."""

import json
from dataclasses import replace

import pytest

from quantcore.config import presets
from quantcore.config.layer_plan import usual_layers
from quantcore.export import EXPORTERS, formats_for, readers_of
from quantcore.export.loading import TABLE, LoadedModel, program_lines
from quantcore.export.readers import Readers
from quantcore.export.unread import not_in_vllm, unread


def test_every_built_in_format_names_its_main_program() -> None:
    seen = {row["consumer"] for row in json.loads(TABLE.read_text())}
    for name in EXPORTERS:
        readers = readers_of(name)
        assert readers.main in seen or readers.main_reads_all, name


def test_a_format_of_another_package_comes_last_and_promises_nothing(other_format: type) -> None:
    layers = usual_layers(config := presets.resolve("int8_weight_only"))
    assert formats_for(config)[-2:] == ["mine", "fake_quantized"]
    assert unread("mine", tuple(layers)) == "The proof does not run a program that reads mine files."
    assert not_in_vllm("mine", layers, ()) is None
    assert lines_of(layers) == {"mine": "load('out')"}


def test_a_format_of_another_package_can_say_all_that_ours_do(other_format: type) -> None:
    class Mine(Readers):
        def not_in_transformers(self, layers):
            return "Transformers reads it in March."

    layers = usual_layers(config := presets.resolve("int8_weight_only"))
    other_format.readers = Mine("Transformers", main_reads_all=True, preference=0, in_vllm=True, in_transformers=True)
    assert formats_for(config)[0] == "mine"
    assert unread("mine", tuple(layers)) == "Transformers reads it in March."
    assert lines_of(layers) == {"Transformers": "load('out')"}
    heads = [replace(layer, name="lm_head", block=None) for layer in layers[:1]]
    assert not_in_vllm("mine", heads, ()) == "vLLM does not read a quantized lm_head in the mine format."
    other_format.readers = replace(other_format.readers, vllm_reads_head=True)
    assert not_in_vllm("mine", heads, ()) is None


def lines_of(layers) -> dict[str, str]:
    return program_lines("mine", layers, "out", LoadedModel("llama"), is_read_by_transformers=False)


@pytest.fixture
def other_format(monkeypatch: pytest.MonkeyPatch) -> type:
    """The class of a format that holds everything; its exporter is registered."""
    codes = EXPORTERS.get("quark")

    class Other:
        name, title = "mine", "a format of another package"
        refuse = staticmethod(lambda layer: None)
        layout, encode, decode = codes.layout, codes.encode, codes.decode
        quantization_config = codes.quantization_config
        load_hint = staticmethod(lambda path: f"load({path!r})")

    list(EXPORTERS)
    monkeypatch.setitem(EXPORTERS._entries, "mine", Other())
    return Other
