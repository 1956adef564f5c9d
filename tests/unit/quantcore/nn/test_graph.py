"""FX graph mode: the same function as a graph, batch norms folded, and the same numbers as eager mode."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from quantcore import (
    AWQConfig,
    CalibrationError,
    Config,
    ConfigError,
    GPTQConfig,
    ModelError,
    ModelQuantizer,
    QuantizationConfig,
    QuantizationMode,
    QuantizationSpec,
    RotationConfig,
    RTNConfig,
    SmoothQuantConfig,
)
from quantcore.engine.modules.layers import quantized_layers
from quantcore.nn.graph import trace
from tests.support.models import SHAPE

INT8 = QuantizationSpec(dtype="int8", qscheme="per_channel")
STATIC = QuantizationConfig(weight=INT8, input_tensors=QuantizationSpec(dtype="int8", symmetric=False))
GRAPH = QuantizationMode.fx_graph_mode


class Block(nn.Module):
    """Two convolutions and what went in."""

    def __init__(self, channels, norm):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=not norm)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding="same", groups=2)
        self.norm1, self.norm2 = (nn.BatchNorm2d(channels, eps=0.01) if norm else nn.Identity() for _ in range(2))

    def forward(self, x):
        inner = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(inner)) + x)


class Net(nn.Module):
    """A small residual net, with a decoder and an operation on a bare parameter."""

    def __init__(self, norm=True):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8) if norm else nn.Identity(), nn.ReLU())
        self.blocks = nn.Sequential(Block(8, norm), Block(8, norm))
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2, groups=2)
        self.up_norm = nn.BatchNorm2d(4, affine=False) if norm else nn.Identity()
        self.head = nn.Linear(4, 10)
        self.matrix = nn.Parameter(torch.randn(6, 10))
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2)
                if module.affine:
                    nn.init.normal_(module.weight)
                    nn.init.normal_(module.bias)

    def forward(self, x):
        x = self.up_norm(self.up(self.blocks(self.stem(x))))
        return functional.linear(self.head(x.mean((2, 3))), self.matrix)


IMAGES = torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(1))
CONVOLUTIONS = ["stem.0", "blocks.0.conv1", "blocks.0.conv2", "blocks.1.conv1", "blocks.1.conv2", "up"]


def quantize(model, config, mode, batches):
    quantizer = ModelQuantizer(Config(global_quant_config=config, quant_mode=mode))
    return quantizer.quantize_model(model, batches)


def test_the_graph_computes_what_the_model_computes_without_its_batch_norms():
    model = Net().train()
    graph = trace(model, IMAGES[:1])
    assert model.training and not [name for name, module in graph.named_modules() if "Norm" in type(module).__name__]
    assert "batch_norm" not in str(graph.graph)
    model.train(False)
    for images in (IMAGES, torch.randn(1, 3, 12, 12), torch.randn(3, 3, 20, 16)):
        torch.testing.assert_close(graph(images), model(images), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("config", [STATIC, QuantizationConfig(weight=INT8)], ids=["static", "weight only"])
def test_a_convolutional_net_has_the_numbers_of_eager_mode(config):
    eager = quantize(Net(norm=False), config, QuantizationMode.eager_mode, [IMAGES])
    graph = quantize(Net(norm=False), config, GRAPH, [IMAGES])
    assert [name for name, _ in quantized_layers(graph)] == [*CONVOLUTIONS, "head", "matrix_layer"]
    eager.matrix.data = graph.matrix_layer.weight.data  # the one that eager mode does not see
    graph.matrix_layer.input_quantizer = None
    assert torch.equal(graph(IMAGES), eager(IMAGES))
    assert torch.equal(ModelQuantizer.freeze(graph)(IMAGES), ModelQuantizer.freeze(eager)(IMAGES))


def test_quantized_batch_norms_are_those_that_were_folded():
    """Folding first and quantizing in eager mode gives the same numbers as graph mode."""
    model, folded = Net(), Net(norm=False)
    folded.load_state_dict(trace(model, IMAGES).state_dict() | {"matrix": model.matrix}, strict=False)
    graph = quantize(model, STATIC, GRAPH, [IMAGES])
    eager = quantize(folded, STATIC, QuantizationMode.eager_mode, [IMAGES])
    eager.matrix.data = graph.matrix_layer.weight.data
    graph.matrix_layer.input_quantizer = None
    assert torch.equal(graph(IMAGES), eager(IMAGES))
    difference = (graph(IMAGES) - model.train(False)(IMAGES)).norm() / model(IMAGES).norm()
    assert 0 < difference < 0.1


def language_model(model_type, **options):
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**SHAPE, "num_hidden_layers": 2, **options})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).train(False)


@pytest.mark.parametrize(
    ("model_type", "options", "num_layers"),
    [
        pytest.param("llama", {"tie_word_embeddings": False}, 15, marks=pytest.mark.slow),
        ("gpt2", {"n_embd": 64, "n_head": 4}, 8),
    ],
)
@pytest.mark.filterwarnings("ignore:.*bos_token_id")
def test_a_language_model_has_the_numbers_of_eager_mode(model_type, options, num_layers):
    ids = torch.randint(0, 512, (3, 24))
    eager, graph = (
        quantize(language_model(model_type, **options), STATIC, mode, [ids[:1], ids])
        for mode in (QuantizationMode.eager_mode, GRAPH)
    )
    assert {name for name, _ in quantized_layers(graph)} == {name for name, _ in quantized_layers(eager)}
    assert len(list(quantized_layers(graph))) == num_layers
    assert torch.equal(graph(ids).logits, eager(ids).logits)
    assert eager.config.use_cache


def test_the_float_model_stays_float_and_shares_memory_until_the_graph_is_frozen():
    model = Net(norm=False).train(False)
    before = model(IMAGES)
    graph = quantize(model, QuantizationConfig(weight=INT8), GRAPH, [IMAGES])
    assert graph.head._parameters["weight"].data_ptr() == model.head.weight.data_ptr()
    quantized = graph(IMAGES)
    ModelQuantizer.freeze(graph)
    assert torch.equal(graph(IMAGES), quantized) and torch.equal(model(IMAGES), before)
    assert not torch.equal(quantized, before)


class Twice(nn.Module):
    """One convolution before two norms, one weight in two convolutions, and a norm behind something else."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(4, 4, 1)
        self.weight = nn.Parameter(torch.randn(4, 4, 1, 1))
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(5))
        for norm in self.norms:
            nn.init.normal_(norm.weight)

    def forward(self, x):
        x = self.norms[0](self.conv(x)) + self.norms[1](self.conv(self.norms[2](x)))
        wide = self.norms[3](functional.conv2d(x, self.weight))
        return wide[..., ::2, ::2] + self.norms[4](functional.conv2d(x, self.weight, stride=2))


def test_a_norm_that_does_not_belong_to_one_layer_alone_stays():
    model, x = Twice().train(False), torch.randn(2, 4, 4, 4)
    graph = trace(model, x)
    assert str(graph.graph).count("aten.batch_norm") == 5
    torch.testing.assert_close(graph(x), model(x))
    quantized = quantize(model, QuantizationConfig(weight=INT8), GRAPH, [x])
    assert [name for name, _ in quantized_layers(quantized)] == ["conv", "weight_layer", "weight_layer1"]
    assert quantized.weight_layer._parameters["weight"] is quantized.weight_layer1._parameters["weight"]


def test_shared_weights_stay_shared():
    model = language_model("llama", tie_word_embeddings=True, num_hidden_layers=1)
    config = Config(
        global_quant_config=QuantizationConfig(weight=INT8),
        layer_type_quant_config={"Embedding": QuantizationConfig(weight=INT8)}, quant_mode=GRAPH,
    )  # fmt: skip
    graph = ModelQuantizer(config).quantize_model(model, [torch.arange(16).view(2, 8)])
    ModelQuantizer.freeze(graph)
    assert graph.lm_head.weight is graph.model.embed_tokens.weight
    assert model.lm_head.weight is model.model.embed_tokens.weight is not graph.lm_head.weight


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x) if x.sum() > 0 else x


def test_refusals_teach():
    with pytest.raises(ModelError, match=r"cannot be traced into a graph.*eager mode") as caught:
        quantize(Branching(), STATIC, GRAPH, [torch.randn(2, 4)])
    assert caught.value.code == "not_traceable"
    for nothing in (None, []):
        with pytest.raises(CalibrationError, match="traces the model with the first batch"):
            quantize(Net(), QuantizationConfig(weight=INT8), GRAPH, nothing)


UINT4 = QuantizationSpec(dtype="uint4", qscheme="per_group", group_size=16, symmetric=False)
INT8_INPUTS = QuantizationSpec(dtype="int8", symmetric=False)
ALGORITHMS = {
    "smooth": (SmoothQuantConfig(alpha=0.5),),
    "awq, gptq": (AWQConfig(), GPTQConfig()),
    "rotation": (RotationConfig(r1=True, r4=True),),
}


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize(
    "inputs",
    [pytest.param(None, id="weights", marks=pytest.mark.slow), pytest.param(INT8_INPUTS, id="static")],
)
def test_algorithms_give_the_numbers_of_eager_mode(name, inputs):
    """They work on decoder blocks, so on a copy of the model before it is traced."""
    batches = [torch.randint(0, 512, (2, 24), generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    config = Config(
        global_quant_config=QuantizationConfig(weight=UINT4, input_tensors=inputs), algo_config=ALGORITHMS[name]
    )
    model = language_model("llama", tie_word_embeddings=False)
    with torch.no_grad():
        before = model(batches[0]).logits
        graph = ModelQuantizer(replace(config, quant_mode=GRAPH)).quantize_model(model, batches)
        assert torch.equal(model(batches[0]).logits, before)
        eager = ModelQuantizer(config).quantize_model(model, batches)
        assert torch.equal(graph(batches[0]).logits, eager(batches[0]).logits)
        plain = ModelQuantizer(replace(config, algo_config=())).quantize_model(
            language_model("llama", tie_word_embeddings=False), batches
        )
        assert not torch.equal(graph(batches[0]).logits, plain(batches[0]).logits)
        assert torch.equal(ModelQuantizer.freeze(graph)(batches[0]).logits, eager(batches[0]).logits)


class Normed(nn.Module):
    """Decoder blocks of a convolution and a batch norm, and one of both behind them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Conv1d(16, 16, 1), nn.BatchNorm1d(16)) for _ in range(2))
        self.last = nn.Conv1d(16, 16, 1)
        self.norm = nn.BatchNorm1d(16)
        for norm in (self.norm, *(layer[1] for layer in self.layers)):
            nn.init.normal_(norm.weight)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.norm(self.last(x))


def test_no_norm_is_folded_into_a_weight_that_an_algorithm_rounded():
    model, x = Normed().train(False), torch.randn(3, 16, 16)
    config = Config(global_quant_config=QuantizationConfig(weight=INT8), algo_config=RTNConfig(range_search=False))
    graph = ModelQuantizer(replace(config, quant_mode=GRAPH)).quantize_model(model, [x])
    assert str(graph.graph).count("aten.batch_norm") == 2
    eager = ModelQuantizer(config).quantize_model(model, [x])
    for index in range(2):
        assert torch.equal(graph.get_submodule(f"layers.{index}.0").weight, eager.layers[index][0].weight)


def test_rotation_inside_attention_is_refused_in_a_graph():
    config = Config(
        global_quant_config=QuantizationConfig(weight=UINT4), algo_config=RotationConfig(r3=True), quant_mode=GRAPH
    )
    with pytest.raises(ConfigError, match=r"r3 works on attention modules.*eager mode"):
        ModelQuantizer(config).quantize_model(language_model("llama"), [torch.arange(8)[None]])


class Bags(nn.Module):
    """Embeddings of every kind, in the ways that they can be called."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.mean = nn.EmbeddingBag(20, 8)
        self.max = nn.EmbeddingBag(20, 8, mode="max", padding_idx=0)
        self.sum = nn.EmbeddingBag(20, 8, mode="sum")
        self.offsets = nn.EmbeddingBag(20, 8, mode="sum", include_last_offset=True)
        self.plain = nn.Embedding(20, 8, padding_idx=1)
        self.head = nn.Linear(8, 4)

    def forward(self, ids, weights, offsets):
        bags = self.mean(ids) + self.max(ids) + self.sum(ids, per_sample_weights=weights) + self.plain(ids).mean(1)
        return self.head(bags), self.offsets(ids.flatten(), offsets)


BAG = (torch.tensor([[3, 1, 0], [5, 5, 0]]), torch.tensor([[0.5, 1, 2], [1, 3, 0.1]]), torch.tensor([0, 2, 2, 6]))


def test_embeddings_of_every_kind_have_the_numbers_of_eager_mode():
    weights = QuantizationConfig(weight=QuantizationSpec(dtype="int4", qscheme="per_channel"))
    typed = {"EmbeddingBag": weights, "Embedding": weights}
    models = [
        ModelQuantizer(
            Config(global_quant_config=weights, layer_type_quant_config=typed, quant_mode=mode, strict=True)
        ).quantize_model(Bags(), [BAG])
        for mode in (QuantizationMode.eager_mode, GRAPH)
    ]
    names = [{name: layer.plan.kind for name, layer in quantized_layers(model)} for model in models]
    assert names[0] == names[1] and sorted(names[1].values()) == ["Embedding", *["EmbeddingBag"] * 4, "Linear"]
    other = (torch.tensor([[7, 0, 2], [4, 1, 19], [1, 1, 1]]), torch.rand(3, 3), torch.tensor([0, 1, 5, 9]))
    for batch in (BAG, other):
        for graph, eager, unquantized in zip(models[1](*batch), models[0](*batch), Bags()(*batch), strict=True):
            assert torch.equal(graph, eager) and not torch.equal(eager, unquantized)


class Bare(nn.Module):
    """One layer that is called, and one whose weight alone is used, in an operation that is no layer."""

    def __init__(self):
        super().__init__()
        self.called = nn.Linear(4, 4)
        self.bare = nn.Linear(4, 4)

    def forward(self, x):
        return torch.matmul(self.called(x), self.bare.weight.T)


def test_a_layer_that_the_graph_has_in_another_form_is_refused():
    """Eager mode quantizes its weight; a graph that left it in float would be something else."""
    with pytest.raises(ConfigError, match=r"the weight of bare \(Linear\) is used by an operation") as caught:
        quantize(Bare(), QuantizationConfig(weight=INT8), GRAPH, [torch.randn(2, 4)])
    assert caught.value.code == "unsupported_layer"
    config = Config(global_quant_config=QuantizationConfig(weight=INT8), exclude=["bare"], quant_mode=GRAPH)
    graph = ModelQuantizer(config).quantize_model(Bare(), [torch.randn(2, 4)])
    assert [name for name, _ in quantized_layers(graph)] == ["called"]
