"""fp8 attention: queries and probabilities are quantized, nothing else is, and only when asked."""

import copy

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from quantcore import (
    CalibrationError,
    Config,
    ConfigError,
    ModelExporter,
    ModelQuantizer,
    NumericsError,
    QuantizationConfig,
    QuantizationMode,
    QuantizationSpec,
)
from quantcore.nn.attention import attention_watched, quantized_attention
from tests.factories import SHAPE

FP8 = QuantizationSpec(dtype="fp8_e4m3")
DYNAMIC = QuantizationSpec(dtype="fp8_e4m3", qscheme="per_channel", is_dynamic=True)
WEIGHT_ONLY = QuantizationConfig(weight=QuantizationSpec(dtype="int8", qscheme="per_channel"))
CONFIG = Config(global_quant_config=WEIGHT_ONLY, softmax_quant_spec=FP8)
IDS = torch.randint(0, 512, (2, 16), generator=torch.Generator().manual_seed(0))


def language_model(model_type="llama", **options):
    torch.manual_seed(0)
    extra = {"num_local_experts": 4, "ffn_dim": 128, "word_embed_proj_dim": 64}
    config = AutoConfig.for_model(model_type, **{**SHAPE, **extra, "tie_word_embeddings": False, **options})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).train(False)


def eager_attention_forward(module, query, key, value, attention_mask, scaling):
    """Attention with a sink: one more logit, whose probability goes nowhere."""
    logits = query @ key.transpose(-1, -2) * scaling + attention_mask
    sink = torch.full_like(logits[..., :1], 0.5)
    return torch.cat([logits, sink], -1).softmax(-1)[..., :-1] @ value, torch.softmax(value, -1)


def e4m3(x, scale):
    """With torch's own cast."""
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def test_the_models_own_eager_attention_runs_on_quantized_numbers():
    model = language_model(num_hidden_layers=1)
    with attention_watched(model, FP8) as modules:
        model(IDS)
    module = modules["model.layers.0.self_attn"]
    here = type("Attention", (nn.Module,), {"__module__": __name__})()
    here.query_quantizer, here.softmax_quantizer = module.query_quantizer, module.softmax_quantizer
    query, key, value = torch.randn(3, 2, 4, 5, 8)
    mask = torch.zeros(5, 5).masked_fill(torch.ones(5, 5).triu(1) > 0, -torch.inf)
    output, other = quantized_attention(here, query, key, value, mask, scaling=0.4)
    query_scale, scale = (float(part.scale) for part in (here.query_quantizer, here.softmax_quantizer))
    logits = e4m3(query, query_scale) @ key.transpose(-1, -2) * 0.4 + mask
    weights = torch.cat([logits, torch.full_like(logits[..., :1], 0.5)], -1).softmax(-1)
    assert torch.equal(output, e4m3(weights, scale)[..., :-1] @ value)
    assert torch.equal(other, e4m3(torch.softmax(value, -1), scale))
    assert scale == torch.tensor(1 / 448)  # the first token attends to itself alone


def test_the_scale_of_the_query_is_that_of_the_calibration_data():
    model = language_model(num_hidden_layers=1, num_key_value_heads=4)
    seen = []
    handle = model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *args: seen.append(args[-1]))
    ModelQuantizer(CONFIG).quantize_model(model, [IDS[:1], IDS[1:]])
    handle.remove()
    norms = torch.cat([x.unflatten(-1, (4, 16)).norm(dim=-1).flatten() for x in seen[:2]])
    # Rotary embeddings turn pairs and keep the norm: the largest element lies between norm / sqrt(16) and the norm.
    largest = model.model.layers[0].self_attn.query_quantizer.scale * 448
    assert norms.max() / 4 <= largest <= norms.max()


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt_oss", "mixtral", "opt", "gpt2"])
@pytest.mark.filterwarnings("ignore:.*token_id")
def test_models_of_many_kinds(model_type):
    model = language_model(model_type)
    plain = copy.deepcopy(model)
    with_attention, without = CONFIG, Config(global_quant_config=WEIGHT_ONLY)
    ModelQuantizer(with_attention).quantize_model(model, [IDS])
    ModelQuantizer(without).quantize_model(plain)
    difference = (model(IDS).logits - plain(IDS).logits).norm() / plain(IDS).logits.norm()
    assert 1e-4 < difference < 0.05
    before = model(IDS).logits
    assert torch.equal(ModelQuantizer.freeze(model)(IDS).logits, before)
    assert torch.equal(copy.deepcopy(model)(IDS).logits, before)


def test_dynamic_scales_need_no_data():
    model = language_model()
    ModelQuantizer(Config(global_quant_config=WEIGHT_ONLY, softmax_quant_spec=DYNAMIC)).quantize_model(model)
    assert model.model.layers[0].self_attn.softmax_quantizer.scale is None
    assert model(IDS).logits.isfinite().all()


def overflowing():
    model = language_model()
    with torch.no_grad():
        model.model.norm.weight.fill_(1)
        model.model.layers[1].self_attn.q_proj.weight[0] = 3e38
    return model


REFUSED = {
    "no attention": (lambda: nn.Sequential(nn.Linear(4, 4)), CONFIG, [], ConfigError, "Sequential has no attention"),
    "no data": (language_model, CONFIG, [], CalibrationError, "static activation specs need some"),
    "a graph": (
        language_model,
        Config(
            global_quant_config=WEIGHT_ONLY, softmax_quant_spec=FP8, quant_mode=QuantizationMode.fx_graph_mode
        ),
        [IDS], ConfigError, "which a graph has no more",
    ),
    "overflow": (overflowing, CONFIG, [IDS], NumericsError, "layers.1.self_attn became NaN or infinite"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_teaches_and_leaves_the_model_as_it_was(case):
    make, config, batches, kind, text = REFUSED[case]
    model = make()
    before = str(model)
    with pytest.raises(kind, match=text):
        ModelQuantizer(config).quantize_model(model, batches)
    assert str(model) == before
    assert not hasattr(model, "config") or model.config._attn_implementation == "sdpa"


def test_an_export_that_would_compute_something_else_is_refused(tmp_path):
    model = ModelQuantizer.freeze(ModelQuantizer(CONFIG).quantize_model(language_model(), [IDS]))
    with pytest.raises(ConfigError, match="No format stores quantized attention"):
        ModelExporter(tmp_path / "out").export_safetensors_model(model, CONFIG)
