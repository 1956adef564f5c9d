"""What ModelQuantizer tells of its work: errors and times of layers, edges, progress; how values show themselves."""

import sys
import xml.etree.ElementTree as ElementTree

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import quantcore
from quantcore import (
    AWQConfig,
    Config,
    ConfigError,
    GPTQConfig,
    ModelQuantizer,
    QuantizationConfig,
    QuantizationMode,
    QuantizationSpec,
    events,
    presets,
)
from quantcore.engine.modules.layers import QuantizedLayer
from quantcore.nn import progress
from tests.support.models import SHAPE

INT4 = QuantizationConfig(weight=QuantizationSpec("int4", qscheme="per_group", group_size=32))
BATCHES = [torch.arange(48)[None] * 7 % 512, torch.arange(40)[None] * 5 % 512]


def llama():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **{**SHAPE, "num_hidden_layers": 2})).eval()


def relative_errors(model, before):
    """The errors of the layers that a model has now, measured from outside."""
    return {
        name: ((module.weight - before[f"{name}.weight"]).norm() / before[f"{name}.weight"].norm()).item()
        for name, module in model.named_modules()
        if isinstance(module, QuantizedLayer)
    }


def test_the_errors_of_plain_rounding_are_those_of_the_weights():
    model = llama()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    quantizer = ModelQuantizer(Config(global_quant_config=INT4, exclude=["lm_head"]))
    assert quantizer.result is None
    assert quantizer.quantize_model(model) is model
    result = quantizer.result
    found = {layer.name: layer.relative_error for layer in result.layers}
    assert len(found) == 14 and found == pytest.approx(relative_errors(model, before), abs=2e-6)
    assert all(layer.output_error is None and layer.seconds > 0 for layer in result.layers)
    assert result.kept.keys() == {"lm_head", "model.embed_tokens"} and result.edges == ()
    assert result.seconds.keys() == {"round", "total"} and result.seconds["round"] <= result.seconds["total"]


def test_algorithms_tell_output_errors_and_edges():
    quantizer = ModelQuantizer(
        Config(global_quant_config=INT4, exclude=["lm_head"], algo_config=[AWQConfig(), GPTQConfig()])
    )
    quantizer.quantize_model(llama(), BATCHES)
    result = quantizer.result
    assert len(result.layers) == 14
    for layer in result.layers:
        assert 0 < layer.output_error < layer.rounding_error and layer.num_tokens == 88
    moved = {(edge.block, edge.consumers) for edge in result.edges if not edge.reason}
    assert {(0, ("mlp.down_proj",)), (1, ("mlp.down_proj",))} <= moved
    assert all(edge.change < 1e-4 for edge in result.edges if not edge.reason)


def test_a_graph_tells_errors_by_the_names_that_it_has():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 4)).eval()
    config = Config(
        global_quant_config=QuantizationConfig(weight=QuantizationSpec("int8")),
        quant_mode=QuantizationMode.fx_graph_mode,
    )
    quantizer = ModelQuantizer(config)
    graph = quantizer.quantize_model(net, [torch.randn(1, 3, 8, 8)])
    names = [name for name, module in graph.named_modules() if isinstance(module, QuantizedLayer)]
    assert sorted(layer.name for layer in quantizer.result.layers) == sorted(names) and len(names) == 2


@pytest.fixture(scope="module")
def result():
    quantizer = ModelQuantizer(Config(global_quant_config=INT4))
    quantizer.quantize_model(llama())
    return quantizer.result


def test_a_result_is_a_table(result, monkeypatch):
    table = result.to_pandas()
    worst = max(result.layers, key=lambda layer: layer.relative_error)
    assert table["relative_error"].idxmax() == worst.name
    assert table.loc[worst.name, "scheme"] == "int4 per_group 32"
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError, match="pip install pandas"):
        result.to_pandas()


def test_a_result_is_a_chart(result, tmp_path):
    chart = result.plot(tmp_path / "errors.svg")
    picture = ElementTree.fromstring((tmp_path / "errors.svg").read_text())
    points = picture.findall(".//{http://www.w3.org/2000/svg}circle")
    assert len(points) == len(result.layers) == 15
    assert chart._repr_html_() in result._repr_html_()
    assert "errors.svg" not in repr(chart) and len(repr(chart)) < 100


def test_a_result_shows_the_worst_layers(result):
    lines = repr(result).splitlines()
    worst = max(result.layers, key=lambda layer: layer.relative_error)
    assert lines[0].startswith("QuantizationResult: 15 layers in ")
    assert lines[1] == f"  {worst.name}  int4 per_group 32  error {worst.relative_error:.4f}"
    assert len(lines) == 7 and lines[-1] == "  ... and 10 with less error"


def test_progress_calls_back():
    calls = []
    config = Config(global_quant_config=INT4, exclude=["lm_head"], algo_config=[AWQConfig()])
    ModelQuantizer(config).quantize_model(llama(), BATCHES, progress=lambda *call: calls.append(call))
    assert [call for call in calls if call[0] == "quantize"] == [("quantize", 1, 2), ("quantize", 2, 2)]
    assert [call for call in calls if call[0] == "round"] == [("round", number, 14) for number in range(1, 15)]


def test_progress_without_a_terminal_is_a_line_now_and_then(monkeypatch, capsys):
    steps = progress.Progress()
    assert list(steps.track(range(3), "calibrate")) == [0, 1, 2]
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(events, "INTERVAL_S", 0.0)
    list(steps.track(range(2), "calibrate"))
    list(steps.track(iter([5]), "round"))
    assert capsys.readouterr().err.splitlines() == [
        "[QUANTCORE-INFO]: calibrate: 1 of 2, 0 s",
        "[QUANTCORE-INFO]: calibrate: 2 of 2, 0 s",
        "[QUANTCORE-INFO]: round: 1, 0 s",
    ]
    assert steps.seconds.keys() == {"calibrate", "round"}


@pytest.mark.parametrize("name", presets.PRESETS)
def test_a_config_shows_the_shortest_call_that_makes_it(name):
    config = presets.resolve(name)
    shown = repr(config)
    assert eval(shown, vars(quantcore) | {part: getattr(quantcore, part) for part in quantcore.__all__}) == config
    assert "None" not in shown


def test_short_specs_and_algorithms_show_what_was_given():
    assert repr(QuantizationSpec("int8")) == "QuantizationSpec(dtype='int8')"
    assert repr(quantcore.SmoothQuantConfig(alpha=0.5)) == "SmoothQuantConfig(alpha=0.5)"
    short = quantcore.Int4PerGroupSpec(ch_axis=1, group_size=128)
    assert eval(repr(short), {"Int4PerGroupSpec": quantcore.Int4PerGroupSpec}) == short


def test_a_layer_shows_its_scheme():
    net = nn.Sequential(nn.Linear(32, 4))
    ModelQuantizer(Config(global_quant_config=INT4)).quantize_model(net)
    assert "bias=True, int4 per_group 32, not frozen" in repr(net)
