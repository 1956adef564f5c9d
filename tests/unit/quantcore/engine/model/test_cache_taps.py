"""Taps see and change what attention gives to its cache, and leave every cache as they found it."""

import pytest
import torch
from torch import nn
from transformers import DynamicCache, EncoderDecoderCache

from quantcore.config.layer_plan import LayerPlan
from quantcore.config.presets import KV_CACHE_SPECS
from quantcore.config.quantization import QuantizationConfig
from quantcore.engine.model.cache_taps import tap_caches
from quantcore.errors import ModelError

CACHED = QuantizationConfig(output_tensors=KV_CACHE_SPECS["fp8"])


class Attention(nn.Module):
    """Gives twice its keys, and its values, to the cache: two heads of four channels."""

    def __init__(self, *, has_values=True, fails=False, updates=True, width=8):
        super().__init__()
        self.k_proj = nn.Linear(8, width, bias=False)
        self.v_proj = nn.Linear(8, width, bias=False) if has_values else None
        self.fails, self.updates = fails, updates

    def forward(self, x, mask=None, past_key_values=None):
        keys = 2 * self.k_proj(x).view(1, -1, self.k_proj.out_features // 4, 4).transpose(1, 2)
        values = 3 * keys if self.v_proj is None else self.v_proj(x).view(1, -1, 2, 4).transpose(1, 2)
        if self.fails:
            raise ValueError("of the model")
        if self.updates and isinstance(past_key_values, EncoderDecoderCache):
            past_key_values = past_key_values.cross_attention_cache
        return past_key_values.update(keys, values, 0) if self.updates else (keys, values)


class Decoder(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.self_attn = attention


def tapped(attention, through, width=8):
    """Tap the keys and values of ``attention`` by ``through(name, x)``; returns the handles."""
    names = [name for name in ("k_proj", "v_proj") if getattr(attention, name) is not None]
    layers = {
        LayerPlan(f"layers.0.self_attn.{name}", 0, (width, 8), CACHED, in_cache=True): getattr(attention, name)
        for name in names
    }
    return list(
        tap_caches(layers, Decoder(attention), lambda layer: lambda x: through(layer.name.rpartition(".")[2], x))
    )


def x():
    return torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(0))


def test_it_sees_what_the_cache_gets_and_not_the_outputs_of_the_layers():
    attention, seen = Attention(), {}
    handles = tapped(attention, lambda name, tensor: seen.setdefault(name, tensor))
    keys, _ = attention(x(), past_key_values=None)
    assert torch.equal(seen["k_proj"], 2 * attention.k_proj(x()))  # [1, T, I], as the layer's own outputs
    assert torch.equal(seen["v_proj"], attention.v_proj(x()))
    assert torch.equal(keys.transpose(1, 2).flatten(2), seen["k_proj"])
    for handle in handles:
        handle.remove()
    seen.clear()
    attention(x(), past_key_values=DynamicCache())
    assert not seen


@pytest.mark.parametrize("position", ["by name", "by position"])
def test_what_it_returns_is_in_the_cache_and_taps_follow_each_other(position):
    attention, seen, cache = Attention(), [], DynamicCache()
    tapped(attention, lambda name, tensor: seen.append((name, tensor.clone())) or tensor)
    tapped(attention, lambda name, tensor: torch.full_like(tensor, 7.0) if name == "k_proj" else tensor)
    for _ in range(2):  # a cache that is kept from call to call
        if position == "by name":
            keys, values = attention(x(), past_key_values=cache)
        else:
            keys, values = attention(x(), None, cache)
    assert keys.shape == (1, 2, 10, 4) and (keys == 7).all() and torch.equal(cache.layers[0].keys, keys)
    assert [name for name, _ in seen] == ["k_proj", "v_proj"] * 2 and not (seen[0][1] == 7).any()
    assert torch.equal(values[:, :, 5:].transpose(1, 2).flatten(2), attention.v_proj(x()))
    assert "update" not in vars(cache)


def test_both_parts_of_the_cache_beside_an_encoder_are_tapped():
    attention, seen, cache = Attention(), [], EncoderDecoderCache(DynamicCache(), DynamicCache())
    tapped(attention, lambda name, tensor: seen.append(name) or tensor)
    attention(x(), past_key_values=cache)
    assert seen == ["k_proj", "v_proj"] and cache.cross_attention_cache.get_seq_length() == 5


def test_one_tap_stands_for_keys_and_for_values_that_have_no_layer():
    """Gemma 4 computes both from k_proj in some layers, and vLLM then takes k_scale for both."""
    attention, seen = Attention(has_values=False), []
    tapped(attention, lambda name, tensor: seen.append(tensor) or tensor)
    attention(x(), past_key_values=None)
    assert len(seen) == 2
    torch.testing.assert_close(seen[1], 3 * seen[0])


def test_a_failure_of_the_model_is_its_own_and_leaves_the_cache_alone():
    attention, cache = Attention(fails=True), DynamicCache()
    tapped(attention, lambda name, tensor: tensor)
    for given in (cache, None):
        with pytest.raises(ValueError, match="of the model"):
            attention(x(), past_key_values=given)
    assert "update" not in vars(cache)


class WithoutCache(Attention):
    def forward(self, x):
        return super().forward(x, past_key_values=DynamicCache())


@pytest.mark.parametrize(
    ("attention", "width", "named", "why"),
    [
        (WithoutCache(), 8, {}, "WithoutCache takes no cache"),
        (Attention(), 8, {}, "the model calls it without passing a cache"),
        (Attention(updates=False), 8, {"past_key_values": None}, "it wrote nothing to its cache"),
        (
            Attention(width=16),
            8,
            {"past_key_values": None},
            r"a tensor \[1, 4, 5, 4\] to its cache, but its layer has 8 channels",
        ),
    ],
)
def test_what_cannot_be_found_out_is_refused(attention, width, named, why):
    with pytest.raises(ModelError, match=why) as caught:
        tapped(attention, lambda name, tensor: tensor, width)
        attention(x(), **named)
    assert caught.value.code == "kv_cache_not_found" and "layers.0.self_attn" in caught.value.message
    assert "--kv_cache_dtype" in str(caught.value.hint)
