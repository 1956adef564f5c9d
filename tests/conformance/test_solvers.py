"""Every solver with every scheme that an exporter is tested with."""

import pytest
import torch

from quantcore.algorithms import GPTAQConfig, GPTQConfig, QronosConfig, RTNConfig
from quantcore.layer import LayerPlan
from quantcore.solvers import SOLVERS
from tests.conformance.test_exporters import CONFIGS

SOLVER_CONFIGS = {"rtn": RTNConfig(), "gptq": GPTQConfig(), "gptaq": GPTAQConfig(), "qronos": QronosConfig()}


@pytest.mark.parametrize("solver", list(SOLVERS))
@pytest.mark.parametrize("config_name", CONFIGS)
def test_every_solver_with_every_scheme(solver, config_name):
    layer = LayerPlan("model.layers.0.self_attn.k_proj", 0, (64, 128), CONFIGS[config_name])
    weight = torch.randn(64, 128).bfloat16()
    weight[3] = 0  # a dead row
    weight[5, 7] = 30  # an outlier
    quantized = SOLVERS.get(solver)(SOLVER_CONFIGS[solver]).solve({layer: weight}, None)[layer]
    restored = quantized.dequantize()
    assert restored.shape == (64, 128) and torch.isfinite(restored).all()
    assert (restored[3] == 0).all()
    assert quantized.params.scale.shape == layer.num_scales
