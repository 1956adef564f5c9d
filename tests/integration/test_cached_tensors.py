"""Scales of the KV cache are those of what enters it. The judges: Transformers' own cache, and compressed-tensors."""

import copy
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from quantcore.config import presets
from quantcore.config.quantization import Config, QuantizationConfig
from quantcore.engine.blockwise import algorithms
from quantcore.engine.calibration import ranges
from quantcore.engine.evaluation.model import open_model
from quantcore.engine.evaluation.text import of_windows
from quantcore.engine.modules.loading import load
from quantcore.engine.pipeline.job import read_windows, run
from quantcore.engine.verification import cache_proof
from quantcore.errors import ModelError, ProofError
from quantcore.importing.model import read_model
from quantcore.nn.quantizer import ModelQuantizer
from tests.support.jobs import task
from tests.support.models import tiny_model, tiny_tokenizer
from tests.support.params import with_rare

FP8_KV = presets.resolve("fp8", kv_cache="fp8")
LARGEST = 448.0  # of fp8
SLIDING = {"layer_types": ["sliding_attention", "full_attention", "full_attention"]}
CLASSES = {
    "llama": {},
    "qwen3": {},  # keys are normalized, each head
    "olmo2": {},  # all heads together
    "gemma3_text": {"sliding_window": 128, **SLIDING},
    "gemma4_text": {
        "sliding_window": 128,
        "global_head_dim": 16,
        "num_global_key_value_heads": 2,
        **SLIDING,
    },  # values, too
    "glm4_moe": {"num_experts_per_tok": 2, "n_routed_experts": 4, "moe_intermediate_size": 64, "use_qk_norm": True},
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "opt": {},  # no RoPE
}


def saved(folder, model_type, *, times=1.0, dtype=torch.bfloat16, **overrides):
    """Save a tiny model whose keys and values are ``times`` as large behind their norms."""
    tiny_model(folder, model_type=model_type, dtype=dtype, **overrides)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("k_norm.weight", "v_norm.weight")):
                parameter.mul_(times).add_(times - 1 if "gemma3" in model_type else 0.0)  # Gemma 3 stores 1 less
    model.save_pretrained(folder)
    return folder


def quantized(model_dir, out, config=FP8_KV, export=("compressed_tensors",)):
    job = task(model_dir, out, config=config, export=export)
    return job, run(job, lambda event: None)


def scales_of(folder):
    tensors = load_file(folder / "model.safetensors")
    return {name: tensor.float().item() for name, tensor in tensors.items() if name.endswith(("k_scale", "v_scale"))}


@pytest.mark.parametrize("model_type", with_rare(CLASSES, ("olmo2", "glm4_moe", "minimax_m2", "opt")))
def test_scales_are_the_largest_of_what_transformers_caches(model_type, tmp_path, proof_in_this_process):
    model_dir = saved(tmp_path / "model", model_type, times=4.0, **CLASSES[model_type])
    job, _ = quantized(model_dir, tmp_path / "out")
    whole = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16)
    largest: dict[tuple[int, str], float] = {}
    with torch.no_grad():
        for window in read_windows(job).calibration_NT:
            for index, layer in enumerate(whole(window[None], use_cache=True).past_key_values.layers):
                for part, tensor in (("k", layer.keys), ("v", layer.values)):
                    largest[index, part] = max(largest.get((index, part), 0.0), tensor.abs().max().item())
    scales = scales_of(tmp_path / "out")
    assert len(scales) == 6
    for name, scale in scales.items():
        index, part = int(name.split("layers.")[1].split(".")[0]), name[-7]
        assert scale * LARGEST == pytest.approx(largest[index, part], rel=0.02)  # bfloat16: two roundings


def test_clipping_is_that_of_the_cached_tensors(tmp_path, proof_in_this_process):
    _, report = quantized(saved(tmp_path / "model", "qwen3", times=8.0), tmp_path / "out")
    print(report.to_dict().keys())
    shares = report.to_dict()["clipping"]
    assert shares["k_proj cache"] < 1e-3 and shares["v_proj cache"] < 1e-3


def test_the_evaluation_computes_with_the_cache_of_compressed_tensors(tmp_path, proof_in_this_process):
    """It rounds what enters the cache, with the scales in the files: Transformers runs its code."""
    config = presets.resolve("int8_weight_only", kv_cache="fp8")
    model_dir = saved(tmp_path / "model", "qwen3", times=8.0, dtype=torch.float32)
    quantized(model_dir, tmp_path / "out", config)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert sum(hasattr(module, "kv_cache") for module in theirs.modules()) == 3
    ids_NT = torch.randint(512, (1, 48), generator=torch.Generator().manual_seed(1))
    found = {}
    for rounded in (True, False):
        for module in theirs.modules():
            if hasattr(module, "kv_cache"):
                module.quantization_enabled = rounded
        with torch.no_grad():
            found[rounded] = theirs(ids_NT).logits[0]
    ours = load(tmp_path / "out").model
    with torch.no_grad():
        logits = ours(ids_NT).logits[0]
    lost = (found[True] - found[False]).norm()
    assert (logits - found[True]).norm() < 0.05 * lost < 0.05 * found[False].norm()
    model = open_model(read_model(tmp_path / "out"))
    states = model.last_states(of_windows(ids_NT, tiny_tokenizer()), lambda done: None)
    with model.head() as head:
        streamed = head(states[0])[0].float()
    assert (streamed - found[True]).norm() < 0.05 * lost


class OutputsOfLayers:
    """The mutant: ``tap_caches`` that shows the outputs of k_proj and v_proj."""

    def __call__(self, modules, within, through):
        for layer, module in modules.items():
            if layer.is_cached and (function := through(layer)) is not None:
                yield module.register_forward_hook(lambda _, __, output, function=function: function(output))


def test_taps_on_the_layers_are_caught_before_the_first_block(tmp_path, monkeypatch):
    monkeypatch.setattr(cache_proof, "tap_caches", OutputsOfLayers())
    cache_proof._not_in_cache.cache_clear()
    model_dir = saved(tmp_path / "model", "llama")  # even where RoPE alone makes the difference
    with pytest.raises(ModelError, match="differs from what Transformers caches") as caught:
        quantized(model_dir, tmp_path / "out")
    assert caught.value.code == "kv_cache_not_found"
    cache_proof._not_in_cache.cache_clear()


@pytest.mark.parametrize("export", ["compressed_tensors", "quark", "fp8"])
def test_scales_of_the_layers_are_caught_in_the_proof(export, tmp_path, monkeypatch, proof_in_this_process):
    """The mutant: calibration learns the ranges of the layers' outputs; all else is right."""
    collect = ranges.collect_ranges

    def collect_from_layers(modules, within):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ranges, "tap_caches", OutputsOfLayers())
            with collect(modules, within) as watched:
                yield watched

    monkeypatch.setattr(algorithms, "collect_ranges", contextmanager(collect_from_layers))
    with pytest.raises(ProofError, match="do not fit its input") as caught:
        quantized(saved(tmp_path / "model", "qwen3", times=8.0), tmp_path / "out", export=(export,))
    assert caught.value.code == "proof_cache_cut_off" and not (tmp_path / "out").exists()


def test_attention_that_gives_its_cache_nothing_is_refused(tmp_path, monkeypatch):
    from transformers.models.llama.modeling_llama import LlamaAttention

    plain = LlamaAttention.forward

    def forward(self, hidden_states, position_embeddings, attention_mask=None, past_key_values=None, **named):
        return plain(self, hidden_states, position_embeddings, attention_mask, None, **named)

    monkeypatch.setattr(LlamaAttention, "forward", forward)
    cache_proof._not_in_cache.cache_clear()
    with pytest.raises(ModelError, match="it wrote nothing to its cache") as caught:
        quantized(saved(tmp_path / "model", "llama"), tmp_path / "out")
    assert caught.value.code == "kv_cache_not_found" and "--kv_cache_dtype" in str(caught.value.hint)
    cache_proof._not_in_cache.cache_clear()


def test_a_model_in_memory_and_its_copy_round_what_enters_the_cache(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(saved(tmp_path / "model", "qwen3", times=8.0), dtype=torch.float32)
    ids_NT = torch.randint(512, (2, 48), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        filled = model(ids_NT, use_cache=True).past_key_values
    none = QuantizationConfig(output_tensors=presets.KV_CACHE_SPECS["fp8"])
    config = Config(QuantizationConfig(), kv_cache_quant_config=dict.fromkeys(("*k_proj", "*v_proj"), none))
    ModelQuantizer(config).quantize_model(model, [ids_NT])
    copied = copy.deepcopy(model)
    nn.init.zeros_(model.lm_head.weight)  # the copy does not use the first one's parts
    for index, layer in enumerate(filled.layers):
        attention = copied.model.layers[index].self_attn
        scale = attention.k_proj.output_quantizer.scale
        assert scale.item() == pytest.approx(layer.keys.abs().max().item() / LARGEST, rel=1e-5)
        if index == 0:  # later ones have rounded inputs
            with torch.no_grad():
                again = copied(ids_NT, use_cache=True).past_key_values.layers[0].keys
            expected = (layer.keys / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float() * scale
            torch.testing.assert_close(again, expected, rtol=0.07, atol=0)  # at ties another code, at most
            assert (again != expected).float().mean() < 1e-3
