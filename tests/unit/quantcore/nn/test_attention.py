"""fp8 attention and rotation R3: what is turned and quantized inside attention, nothing else, and only when asked."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from quantcore import (
    CalibrationError,
    Config,
    ConfigError,
    GPTQConfig,
    ModelExporter,
    ModelQuantizer,
    NumericsError,
    QuantizationConfig,
    QuantizationMode,
    QuantizationSpec,
    RotationConfig,
)
from quantcore.engine.modules.tensor_quantizer import TensorQuantizer
from quantcore.engine.transforms.rotation.hadamard import orthogonal
from quantcore.nn.attention import HeadRotation, attention_watched, quantized_attention
from tests.support.models import MIXTURES, SHAPE

FP8 = QuantizationSpec(dtype="fp8_e4m3")
DYNAMIC = QuantizationSpec(dtype="fp8_e4m3", qscheme="per_channel", is_dynamic=True)
WEIGHT_ONLY = QuantizationConfig(weight=QuantizationSpec(dtype="int8", qscheme="per_channel"))
CONFIG = Config(global_quant_config=WEIGHT_ONLY, softmax_quant_spec=FP8)
R3 = (RotationConfig(r1=False, r3=True),)
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
    "no attention": (lambda: nn.Sequential(nn.Linear(4, 4)), CONFIG, [], ConfigError, "has no replaceable attention"),
    "no data": (language_model, CONFIG, [], CalibrationError, "static activation specs need data"),
    "a graph": (
        language_model,
        Config(
            global_quant_config=WEIGHT_ONLY, softmax_quant_spec=FP8, quant_mode=QuantizationMode.fx_graph_mode
        ),
        [IDS], ConfigError, "which a graph no longer has",
    ),
    "no attention to turn": (
        lambda: nn.Sequential(nn.Linear(4, 4)), Config(global_quant_config=WEIGHT_ONLY, algo_config=R3), [IDS],
        ConfigError, "Sequential has no replaceable attention, so rotation r3 does not apply",
    ),
    "overflow behind r3": (
        overflowing, Config(global_quant_config=WEIGHT_ONLY, softmax_quant_spec=FP8, algo_config=R3), [IDS],
        NumericsError, "layers.1.self_attn became NaN or infinite",
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
    with pytest.raises(ConfigError, match="quantized later"):
        ModelExporter(tmp_path / "out").export_safetensors_model(model, CONFIG)


def keys(spec, layer=WEIGHT_ONLY, algorithms=R3, **options):
    """A config in which the outputs of k_proj, and nothing else inside attention, have ``spec``."""
    quantized = {"*k_proj": replace(layer, output_tensors=spec)}
    return Config(global_quant_config=layer, kv_cache_quant_config=quantized, algo_config=algorithms, **options)


def per_tensor(dtype):
    return QuantizationSpec(dtype=dtype, qscheme="per_tensor")


def with_outliers(**options):
    """A model one channel of whose keys is much larger than the others, in every head."""
    model = language_model(**options)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(5)
        for block in model.model.layers:
            block.self_attn.k_proj.weight.view(-1, 16, 64)[:, 4] *= 20
    return model


def turned_keys(model, ids):
    """What the first block's keys [B, T, H D] are behind RoPE and R3, from the operations of Transformers."""
    block, hidden = model.model.layers[0], model.model.embed_tokens(ids)
    projected = nn.functional.linear(block.input_layernorm(hidden), block.self_attn.k_proj.weight)
    key = projected.unflatten(-1, (-1, 16)).transpose(1, 2)
    positions = model.model.rotary_emb(hidden, torch.arange(ids.shape[1])[None])
    behind_rope, _ = apply_rotary_pos_emb(key, key, *positions)
    return (behind_rope @ orthogonal(16, random_signs=False).dense().float()).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    ("model_type", "options"),
    [("llama", {}), ("llama", {"head_dim": 18}), ("qwen3", {}), ("gemma2", {}), ("phi3", {}), ("gpt_oss", {}),
     ("deepseek_v3", MIXTURES["deepseek_v3"])],
)  # fmt: skip
def test_r3_turns_queries_and_keys_and_leaves_the_logits(model_type, options):
    model = language_model(model_type, **options)
    plain, before = copy.deepcopy(model), model.config._attn_implementation
    ModelQuantizer(Config(global_quant_config=WEIGHT_ONLY, algo_config=R3)).quantize_model(model, [IDS])
    ModelQuantizer(Config(global_quant_config=WEIGHT_ONLY)).quantize_model(plain)
    seen = []
    for part in model.modules():
        if isinstance(part, HeadRotation):
            part.register_forward_hook(lambda _, args, output: seen.append((args[0], output)))
    torch.testing.assert_close(model(IDS).logits, plain(IDS).logits, atol=1e-5, rtol=1e-5)
    assert len(seen) == 2 * model.config.num_hidden_layers
    for x, turned in seen:
        rotation = orthogonal(x.shape[-1], random_signs=False).dense().float()
        torch.testing.assert_close(turned, x @ rotation)
        assert not torch.allclose(turned, x, atol=0.01)
    assert model.config._attn_implementation == {"sdpa": "quantcore_sdpa", "eager": "quantcore"}[before]
    quantizers = [name for name, part in model.named_modules() if isinstance(part, TensorQuantizer)]
    assert all(name.endswith("weight_quantizer") for name in quantizers)


@pytest.mark.parametrize(("dtype", "share"), [("int4", 0.75), ("int8", 0.4), ("fp8_e4m3", 0.8)])
def test_keys_with_outliers_lose_less_behind_r3(dtype, share):
    """``share`` of the error; seen on this model: 0.68, 0.29 and 0.73."""

    def error(*algorithms):
        model = with_outliers()
        before = model(IDS).logits
        config = keys(per_tensor(dtype), QuantizationConfig(), algorithms)
        return (ModelQuantizer(config).quantize_model(model, [IDS])(IDS).logits - before).norm()

    assert error(*R3) < share * error()


@pytest.mark.parametrize(
    "spec", [per_tensor("int8"), QuantizationSpec(dtype="int8", qscheme="per_channel", ch_axis=-1)]
)
def test_the_ranges_of_keys_are_those_behind_rope_and_r3(spec):
    model = with_outliers(num_hidden_layers=1)
    key_TI = turned_keys(model, IDS).flatten(0, 1)
    scales = torch.maximum(key_TI.amax(0) / 127, key_TI.amin(0) / -128)  # of each channel of the two heads
    plain = copy.deepcopy(model)
    ModelQuantizer(keys(spec, QuantizationConfig())).quantize_model(model, [IDS[:1], IDS[1:]])
    attention = model.model.layers[0].self_attn
    expected = scales if spec.ch_axis == -1 else scales.max()
    torch.testing.assert_close(attention.key_quantizer.scale.squeeze(), expected, rtol=1e-4, atol=0)
    assert attention.k_proj.output_quantizer is None
    ModelQuantizer(keys(spec, QuantizationConfig(), ())).quantize_model(plain, [IDS])
    attention = plain.model.layers[0].self_attn
    assert attention.k_proj.output_quantizer.scale.numel() == expected.numel()
    assert not hasattr(attention, "key_quantizer")


@pytest.mark.parametrize(
    "spec", [per_tensor("int8"), QuantizationSpec(dtype="int8", qscheme="per_channel", is_dynamic=True)]
)
def test_keys_that_the_cache_remembers_count_as_they_did(spec):
    """After a whole chain of algorithms."""
    model = with_outliers()
    chain = (RotationConfig(r2=True, r3=True), GPTQConfig())
    ModelQuantizer(keys(spec, algorithms=chain)).quantize_model(model, [IDS])
    whole = model(IDS).logits
    cache = model(IDS[:, :10], use_cache=True).past_key_values
    steps = [model(IDS[:, index : index + 1], past_key_values=cache).logits for index in range(10, 16)]
    torch.testing.assert_close(torch.cat(steps, 1), whole[:, 10:], atol=2e-3, rtol=1e-3)
    assert torch.equal(copy.deepcopy(ModelQuantizer.freeze(model))(IDS).logits, whole)


def test_fp8_attention_behind_r3():
    """Queries are turned, then quantized; so are the keys."""
    model = with_outliers(num_hidden_layers=1)
    ModelQuantizer(keys(per_tensor("int4"), softmax_quant_spec=FP8)).quantize_model(model, [IDS])
    assert model.config._attn_implementation == "quantcore"
    module = model.model.layers[0].self_attn
    here = type("Attention", (nn.Module,), {"__module__": __name__})()
    for name in ("head_rotation", "query_quantizer", "key_quantizer", "softmax_quantizer"):
        here.add_module(name, module.get_submodule(name))
    query, key, value = torch.randn(3, 2, 4, 5, 16)
    mask = torch.zeros(5, 5).masked_fill(torch.ones(5, 5).triu(1) > 0, -torch.inf)
    output, _ = quantized_attention(here, query, key, value, mask, scaling=0.4)
    turned_query, turned_key = (orthogonal(16, random_signs=False).apply(x) for x in (query, key))
    query_scale, key_scale, scale = (
        float(getattr(module, f"{name}_quantizer").scale) for name in ("query", "key", "softmax")
    )
    rounded = (turned_key / key_scale).round().clamp(-8, 7) * key_scale
    logits = e4m3(turned_query, query_scale) @ rounded.transpose(-1, -2) * 0.4 + mask
    weights = torch.cat([logits, torch.full_like(logits[..., :1], 0.5)], -1).softmax(-1)
    torch.testing.assert_close(output, e4m3(weights, scale)[..., :-1] @ value)


def test_r3_says_where_it_gains_nothing(capsys):
    ModelQuantizer(Config(global_quant_config=WEIGHT_ONLY, algo_config=R3)).quantize_model(language_model(), [IDS])
    assert "Rotation r3 only costs time here" in capsys.readouterr().err
    ModelQuantizer(keys(FP8)).quantize_model(language_model(), [IDS])
    assert "WARNING" not in capsys.readouterr().err


@pytest.mark.parametrize("which", ["r3", "r4"])
def test_files_of_a_model_with_an_online_rotation_are_refused(tmp_path, which):
    r4 = Config(global_quant_config=WEIGHT_ONLY, exclude=("lm_head",), algo_config=RotationConfig(r1=False, r4=True))
    config = keys(FP8) if which == "r3" else r4
    model = ModelQuantizer.freeze(ModelQuantizer(config).quantize_model(language_model(), [IDS]))
    with pytest.raises(
        ConfigError, match=rf"No format stores rotation {which}.*\n?.*Only the model in memory"
    ) as caught:
        ModelExporter(tmp_path / "out").export_safetensors_model(model, config)
    assert caught.value.code == "incompatible_export" and not (tmp_path / "out").exists()
