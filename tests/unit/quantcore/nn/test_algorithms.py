"""Algorithms on a model in memory: what they compute stays what it was, and rounding hurts less."""

import re

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from quantcore import ModelQuantizer
from quantcore.config.algorithms import (
    AutoRoundConfig,
    AutoSmoothQuantConfig,
    AWQConfig,
    GPTAQConfig,
    GPTQConfig,
    QronosConfig,
    RotationConfig,
    RTNConfig,
    SmoothQuantConfig,
    YAQAConfig,
)
from quantcore.config.quantization import Config, QuantizationConfig
from quantcore.config.spec import QuantizationSpec
from quantcore.engine.modules.layers import QuantizedLayer
from quantcore.engine.solvers.autoround import AutoRound
from quantcore.engine.transforms.rotation.fold import rotates_input
from quantcore.errors import CalibrationError, ModelError
from tests.support.models import MIXTURES, SHAPE, correlate
from tests.support.params import with_rare

UINT2 = QuantizationSpec(dtype="uint2", qscheme="per_group", group_size=16, symmetric=False)
INT16 = QuantizationSpec(dtype="int16", qscheme="per_channel", ch_axis=0)
LAST = re.compile(r"down_proj|w2|4h_to_h")  # of an MLP
FP8 = QuantizationSpec(dtype="fp8_e4m3", qscheme="per_tensor")


def tiny(model_type="llama", dtype=torch.float32, **overrides):
    """A random model whose norms and biases are not trivial, with a few inputs much larger than the others."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**SHAPE, **overrides}), dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
                parameter[3] *= 20
            else:
                parameter.mul_(8)
    return model.train(False)


def batches(seed=1, shapes=((2, 40), (1, 48), (3, 32), (2, 40))):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 512, shape, generator=generator) for shape in shapes]


def config(*algorithms, weight=UINT2, inputs=None):
    plain = QuantizationConfig(weight=weight, input_tensors=inputs)
    return Config(global_quant_config=plain, exclude=("lm_head",), algo_config=algorithms)


def logits(model, seed=1):
    with torch.no_grad():
        return torch.cat([model(batch).logits.flatten(0, 1) for batch in batches(seed)])


def change(model, before, seed=1):
    return ((logits(model, seed) - before).norm() / before.norm()).item()


@pytest.mark.parametrize("model_type", with_rare(["llama", "mixtral", "gemma2", "opt"], ["llama", "gemma2"]))
@pytest.mark.parametrize("algorithm", [SmoothQuantConfig(alpha=0.5), AutoSmoothQuantConfig(), AWQConfig()])
def test_moving_scales_keeps_what_the_model_computes(model_type, algorithm):
    overrides = MIXTURES.get(model_type, {}) | {"ffn_dim": 128, "word_embed_proj_dim": 64, "num_hidden_layers": 2}
    model = tiny(model_type, **overrides)
    before = logits(model)
    norms = {name: one.clone() for name, one in model.named_parameters() if "norm" in name and "weight" in name}
    inputs = FP8 if isinstance(algorithm, AutoSmoothQuantConfig) else None
    weight = QuantizationSpec(dtype="uint4", qscheme="per_group", group_size=16, symmetric=False)
    ModelQuantizer(config(algorithm, weight=weight, inputs=inputs)).quantize_model(model, batches())
    moved = [name for name, norm in norms.items() if not torch.equal(norm, model.get_parameter(name))]
    assert moved
    exact = tiny(model_type, **overrides)
    ModelQuantizer(config(algorithm, weight=INT16)).quantize_model(exact, batches())
    assert change(exact, before) < 5e-3  # rounding to 16 bits; a token of a mixture may get another expert


@pytest.mark.parametrize("model_type", ["llama", "mixtral"])
@pytest.mark.parametrize("tied", [True, False])
def test_rotating_keeps_what_the_model_computes(model_type, tied):
    model = tiny(model_type, tie_word_embeddings=tied, **MIXTURES.get(model_type, {}))
    before, embedding = logits(model), model.get_input_embeddings().weight.clone()
    rotation = RotationConfig(r2=True, random_r1=True)
    ModelQuantizer(config(rotation, weight=INT16)).quantize_model(model, batches())
    assert change(model, before) < 5e-3
    assert not torch.equal(model.get_input_embeddings().weight, embedding)
    assert model.get_output_embeddings().weight is not model.get_input_embeddings().weight
    assert model.config.tie_word_embeddings is False


@pytest.mark.parametrize(
    ("model_type", "r1"),
    [("llama", True), ("llama", False), ("mixtral", True), ("gemma2", False), ("phi3", False), ("gpt_neox", False)],
)
def test_r4_turns_what_the_last_layers_of_mlps_read(model_type, r1):
    """Not what attention's read; and with 16 bits the model stays what it was."""
    model = tiny(model_type, **MIXTURES.get(model_type, {}))
    before = logits(model)
    ModelQuantizer(config(RotationConfig(r1=r1, r4=True), weight=INT16)).quantize_model(model, batches())
    turned = {name for name, part in model.named_modules() if rotates_input(part)}
    expected = {name for name, part in model.named_modules() if isinstance(part, QuantizedLayer) and LAST.search(name)}
    assert turned == expected and turned
    assert change(model, before) < 5e-3


def test_r4_spreads_outliers_of_the_input():
    """Activations of 4 bits: one channel of the MLP that is 50 times as large costs the others less."""

    def error(*algorithms):
        model = tiny()
        for block in model.model.layers:
            block.mlp.up_proj.weight.data[3] *= 50
            block.mlp.down_proj.weight.data[:, 3] /= 50
        before = logits(model)
        inputs = QuantizationSpec(dtype="int4", qscheme="per_channel", ch_axis=1, is_dynamic=True, symmetric=True)
        ModelQuantizer(config(*algorithms, weight=INT16, inputs=inputs)).quantize_model(model, batches())
        return change(model, before)

    assert error(RotationConfig(r1=False, r4=True)) < 0.8 * error()


@pytest.mark.parametrize(
    "algorithm",
    [RTNConfig(), AWQConfig(), GPTQConfig(), GPTQConfig(true_sequential=True), GPTAQConfig(), YAQAConfig(),
     QronosConfig(), AutoRoundConfig(iters=20, batch_size=4)],
    ids=lambda one: one.name,
)  # fmt: skip
def test_two_bits_hurt_less(algorithm):
    """On text that calibration has not seen."""

    def quantized(*algorithms):
        model = tiny()
        torch.manual_seed(0)
        correlate(model, 8)
        before = logits(model, seed=7)
        return change(ModelQuantizer(config(*algorithms)).quantize_model(model, batches()), before, seed=7)

    assert quantized(algorithm) < 0.6 * quantized()


@pytest.mark.parametrize("kind", [GPTQConfig, AutoRoundConfig])
def test_only_the_layers_inside_are_solved(kind):
    """The others are rounded to nearest."""
    options = {"iters": 2} if kind is AutoRoundConfig else {}

    def weights(*algorithms):
        quantized = ModelQuantizer(config(*algorithms)).quantize_model(tiny(), batches())
        return ModelQuantizer.freeze(quantized).state_dict()

    plain, solved = weights(), weights(kind(inside_layer_modules=("mlp.up_proj",), **options))
    differing = {name for name in plain if not torch.equal(plain[name], solved[name])}
    assert differing and all(".mlp.up_proj." in name for name in differing)


def test_autoround_tunes_the_codes_of_yaqa(monkeypatch):
    def weights(algorithm):
        quantized = ModelQuantizer(config(algorithm)).quantize_model(tiny(), batches())
        return ModelQuantizer.freeze(quantized).state_dict()

    monkeypatch.setattr(AutoRound, "tune", lambda tuner, modules, start, *_: dict(start))
    start, yaqa, gptaq = map(weights, (AutoRoundConfig(), YAQAConfig(), GPTAQConfig()))
    assert all(map(torch.equal, start.values(), yaqa.values()))
    assert not all(map(torch.equal, start.values(), gptaq.values()))


@pytest.mark.parametrize("algorithm", [GPTQConfig(), AWQConfig()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_freezing_keeps_every_bit(algorithm, dtype):
    model = tiny(dtype=dtype)
    ModelQuantizer(config(algorithm, inputs=FP8, weight=FP8)).quantize_model(model, batches())
    before = logits(model)
    assert torch.equal(logits(ModelQuantizer.freeze(model)), before)


def test_padded_batches_as_a_tokenizer_gives_them():
    model = tiny()
    model.config.use_cache = True
    ids = batches()[0]
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    ModelQuantizer(config(GPTQConfig())).quantize_model(model, [{"input_ids": ids, "attention_mask": mask}] * 2)
    assert model.config.use_cache is True
    assert torch.isfinite(logits(model)).all()


def test_a_model_without_blocks():
    with pytest.raises(ModelError, match="decoder blocks"):
        ModelQuantizer(config(GPTQConfig())).quantize_model(nn.Sequential(nn.Linear(32, 32)), [torch.randn(2, 32)])


def test_algorithms_want_data():
    with pytest.raises(CalibrationError, match="is empty"):
        ModelQuantizer(config(AWQConfig())).quantize_model(tiny(), [])
