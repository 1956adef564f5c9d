"""The clipped share by kind of tensor."""

from __future__ import annotations

import torch

from quantcore.config.layer_plan import LayerPlan
from quantcore.config.presets import KV_CACHE_SPECS
from quantcore.config.quantization import QuantizationConfig
from quantcore.engine.evaluation.clipping import Clipping
from quantcore.tensors.affine import QParams


def test_blocks_and_experts_of_one_kind_count_together_by_their_numbers_of_values():
    counts = {
        "model.layers.0.self_attn.q_proj input": (torch.tensor(1), 100),
        "model.layers.1.self_attn.q_proj input": (torch.tensor(5), 200),
        "model.layers.1.self_attn.q_proj output": (torch.tensor(0), 50),
        "model.layers.0.mlp.experts.3.down_proj input": (torch.tensor(3), 10),
        "model.layers.0.mlp.experts.4.down_proj input": (torch.tensor(0), 0),  # no token reached it
    }
    shares = Clipping(counts).by_kind()
    assert shares == {"q_proj input": 0.02, "q_proj output": 0.0, "down_proj input": 0.3}
    assert Clipping().by_kind() == {}


def test_what_ranges_cut_off_a_cache_is_measured_by_its_norm():
    spec = KV_CACHE_SPECS["int8_per_tensor_static"]
    clipping = Clipping()
    see = clipping._see_cached("layer cache", spec, QParams(torch.tensor([[1.0]]), None))
    x = torch.tensor([[[3.0, 127.5 + 40.0, -128.5 - 30.0]]])
    assert see(x) is x and see(torch.zeros(1, 2, 3)).sum() == 0
    name, share = clipping.worst_cache()
    assert name == "layer cache" and abs(share - 50.0 / x.norm().item()) < 1e-6  # (40, 30) of (3, 167.5, 158.5)
    assert clipping.by_kind() == {"layer cache": 2 / 9} and Clipping().worst_cache() is None


def test_a_layer_is_cached_where_its_outputs_are_keys_or_values_and_quantized():
    config = QuantizationConfig(output_tensors=KV_CACHE_SPECS["fp8"])
    assert LayerPlan("k_proj", 0, (4, 4), config, in_cache=True).is_cached
    assert not LayerPlan("k_proj", 0, (4, 4), config).is_cached
    assert not LayerPlan("k_proj", 0, (4, 4), QuantizationConfig(), in_cache=True).is_cached
