"""``evaluate --kv_cache_dtypes`` beside Transformers with a cache that rounds, on several families."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from quantcore.cli.main import main
from quantcore.config.cache_dtypes import cache_dtypes
from quantcore.engine.data.tokenizer import load_tokenizer
from quantcore.engine.evaluation.cache_dtypes import measure_cache_dtypes
from quantcore.engine.evaluation.cache_rounding import stored
from quantcore.engine.evaluation.model import open_model
from quantcore.engine.evaluation.text import of_windows
from quantcore.errors import ConfigError
from quantcore.events import silence
from quantcore.importing.model import read_model
from tests.support.decoder_blocks import CONFIGS
from tests.support.models import tiny_model

SHARED = {"num_kv_shared_layers": 1, "vocab_size_per_layer_input": 512, "hidden_size_per_layer_input": 16,
          "laurel_rank": 8, "intermediate_size": 128, "activation_sparsity_pattern": [0.0] * 3,
          "layer_types": ["full_attention"] * 3}  # fmt: skip
FAMILIES = {
    "llama": (3, 0, {"head_dim": 128}),
    "qwen3": (3, 0, {"head_dim": 32}),
    "gpt_oss": (3, 0, {}),
    "falcon": (3, 0, {}),
    "gemma3_text": (3, 0, {}),
    "qwen3_next": (1, 2, {"head_dim": 32}),
}


class RoundingCache(DynamicCache):
    """Transformers' cache, which keeps keys and values as ``dtype`` does, but for those of the blocks ``spared``."""

    def __init__(self, dtype, config, spared):
        super().__init__(config=config)
        self.kept_as, self.spared = dtype, spared

    def update(self, key_states, value_states, layer_idx, *rest, **named):
        if layer_idx not in self.spared:
            key_states = stored(key_states, self.kept_as, are_keys=True)
            value_states = stored(value_states, self.kept_as, are_keys=False)
        return super().update(key_states, value_states, layer_idx, *rest, **named)


def windows(num=3, length=40):
    return torch.randint(1, 500, (num, length), generator=torch.Generator().manual_seed(3))


def divergence(folder, dtype, ids_NT, spared=()):
    """Mean KL of Transformers' own predictions with a rounding cache from those with the usual one, in nats."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    losses = []
    with torch.inference_mode():
        for ids in ids_NT:
            caches = DynamicCache(config=model.config), RoundingCache(dtype, model.config, spared)
            usual, other = (
                model(input_ids=ids[None], past_key_values=cache).logits[0, :-1].double().log_softmax(-1)
                for cache in caches
            )
            losses.append((usual.exp() * (usual - other)).sum(-1))
    return torch.stack(losses).mean().item()


def made(tmp_path, name, **overrides):
    options = {"dtype": torch.float32, **CONFIGS.get(name, {}), **overrides}
    return tiny_model(tmp_path / name, model_type=name, **options)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_divergence_is_that_of_transformers_with_such_a_cache(tmp_path, name):
    num_blocks, num_without, overrides = FAMILIES[name]
    folder, ids_NT = made(tmp_path, name, **overrides), windows()
    dtypes = cache_dtypes(["fp8", "int4_per_token_head", *(["q4_0"] if "head_dim" in overrides else [])])
    text = of_windows(ids_NT, load_tokenizer(folder))
    found = measure_cache_dtypes(open_model(read_model(folder)), text, dtypes, silence)
    for dtype, each in zip(dtypes, found, strict=True):
        assert (each.dtype, each.num_blocks, each.num_blocks_without) == (dtype.name, num_blocks, num_without)
        kl = each.quality.divergence.kl_mean.value
        assert kl == pytest.approx(divergence(folder, dtype, ids_NT), rel=1e-3)
        assert kl > 1e-5, "the cache was rounded at all"


def test_layers_that_share_a_cache_read_what_was_rounded(tmp_path):
    folder, ids_NT = made(tmp_path, "gemma3n_text", **SHARED), windows()
    (dtype,) = cache_dtypes(["fp8"])
    text = of_windows(ids_NT, load_tokenizer(folder))
    (found,) = measure_cache_dtypes(open_model(read_model(folder)), text, [dtype], silence)
    assert (found.num_blocks, found.num_blocks_without) == (2, 1)
    assert found.quality.divergence.kl_mean.value == pytest.approx(divergence(folder, dtype, ids_NT), rel=1e-3)


@pytest.mark.parametrize(("name", "spared"), [("llama", (0, 2)), ("qwen3_next", ())])
def test_turboquant_spares_the_ends_of_a_model_with_attention_everywhere(tmp_path, name, spared):
    """Two blocks at each end in vLLM, but no more than half of all."""
    folder, ids_NT = made(tmp_path, name, head_dim=32), windows()
    (dtype,) = cache_dtypes(["turboquant_k3v4_nc"])
    text = of_windows(ids_NT, load_tokenizer(folder))
    (found,) = measure_cache_dtypes(open_model(read_model(folder)), text, [dtype], silence)
    expected = divergence(folder, dtype, ids_NT, spared)
    assert found.quality.divergence.kl_mean.value == pytest.approx(expected, rel=1e-3)
    assert found.num_blocks_spared == len(spared)
    if name == "llama":
        of_16_bits, of_one = 2 * 2 * 2 * 32 * 2, 2 * (32 * 3 + 32 * 4 + 2 * 24) // 8
        assert found.bytes_per_token == of_16_bits + of_one


def test_sizes_count_codes_and_scales(tmp_path):
    folder = made(tmp_path, "llama", head_dim=32)
    text = of_windows(windows(1), load_tokenizer(folder))
    found = measure_cache_dtypes(open_model(read_model(folder)), text, cache_dtypes(["q8_0", "vllm"]), silence)
    sizes = {each.dtype: each.bytes_per_token for each in found}
    whole = 3 * 2 * 2 * 32  # blocks, keys and values, heads, channels
    assert {each.bytes_per_token_of_16_bits for each in found} == {2 * whole}
    assert sizes["q8_0"] == whole * 34 // 32
    assert sizes["fp8"] == whole
    assert sizes["int4_per_token_head"] == whole // 2 + 3 * 2 * 2 * 4


def test_latent_attention_and_encoders_are_refused(tmp_path):
    folder = made(tmp_path, "deepseek_v3")
    text = of_windows(windows(1), load_tokenizer(folder))
    with pytest.raises(ConfigError, match="multi-head latent attention") as caught:
        measure_cache_dtypes(open_model(read_model(folder)), text, cache_dtypes(["fp8"]), silence)
    assert caught.value.code == "cache_dtypes_not_measured"


def test_the_command_shows_every_dtype(tmp_path, capsys):
    folder = made(tmp_path, "llama", head_dim=32)
    command = ["evaluate", str(folder), "--kv_cache_dtypes", "q4_0,fp8", "--num_eval_data", "2", "--eval_seq_len", "64"]
    assert main([*command, "--json"]) == 0
    caches = json.loads(capsys.readouterr().out)["kv_caches"]
    assert [each["dtype"] for each in caches] == ["q4_0", "fp8"]
    assert (
        caches[0]["quality"]["divergence"]["kl_mean"]["value"] > caches[1]["quality"]["divergence"]["kl_mean"]["value"]
    )
    assert [each["last"] for each in caches[0]["quality"]["by_position"]] == [16, 63]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "llama.cpp: --cache-type-k NAME --cache-type-v NAME" in shown
    assert "vLLM: --kv-cache-dtype NAME" in shown


def test_files_that_quantize_their_cache_are_refused(tmp_path, capsys):
    folder, out = made(tmp_path, "llama"), tmp_path / "out"
    small = ["--num_calib_data", "4", "--seq_len", "32", "--skip_evaluation"]
    assert main(["quantize", str(folder), "fp8", "--kv_cache_dtype", "fp8", "-o", str(out), *small]) == 0
    text = ["--num_eval_data", "1", "--eval_seq_len", "64"]
    assert main(["evaluate", str(out), "--kv_cache_dtypes", "fp8", *text]) == 1
    assert "its files quantize the KV cache themselves (first model.layers.0.self_attn.k_proj)" in " ".join(
        capsys.readouterr().err.split()
    )


def test_an_unknown_dtype_is_a_wrong_use(tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["evaluate", str(tmp_path), "--kv_cache_dtypes", "q8"])
    assert caught.value.code == 2
    assert "Did you mean 'q8_0'?" in capsys.readouterr().err
