"""Rows of dequantized weights of every format, by our arithmetic and by gguf's, and rows that lie on no grid."""

from collections.abc import Callable

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize

from quantcore.config.layer_plan import LayerPlan
from quantcore.engine.solvers.rtn import round_to_nearest
from quantcore.formats.grid import Grid, find_grid
from tests.support.exporting import CONFIGS

HALF_SUBNORMAL = 2.0**-25
BY_WEIGHT = {config.weight: name for name, config in reversed(CONFIGS.items()) if config.weight is not None}
NAMES = {
    "gguf_q4_1": "Q4_1", "gguf_q5_1": "Q5_1", "gguf_q4_k": "Q4_K", "gguf_q5_k": "Q5_K", "gguf_q6_k": "Q6_K",
    "mxfp4": "MXFP4", "nvfp4": "NVFP4", "nf4": "nf4", "fp4_bnb": "fp4_bnb", "fp8_block": "fp8_e4m3",
    "gguf_iq4_nl": "iq4_nl", "gguf_iq4_xs": "iq4_nl", "gguf_iq3_xxs": "iq3_xxs",
    "gguf_iq2_xxs": "iq2", "gguf_iq2_xs": "iq2", "gguf_iq2_s": "iq2",
    "gguf_nvfp4": "NVFP4", "gguf_iq1_m": "iq1", "gguf_iq1_s": "asymmetric",  # three levels in a group
    "mxfp6_e2m3": "MXFP6 (e2m3)", "mxfp6_e3m2": "MXFP6 (e3m2)", "mxfp8": "MXFP8 (e4m3)", "mxfp8_e5m2": "MXFP8 (e5m2)",
}  # fmt: skip


def weights(*, num_rows: int = 64, width: int = 512) -> torch.Tensor:
    """Weights whose rows and columns differ in size, as those of trained models do."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.rand(num_rows, 1, generator=generator) + 0.5
    columns = torch.exp(0.3 * torch.randn(width, generator=generator))
    return 0.02 * rows * columns * torch.randn(num_rows, width, generator=generator)


def found_in(weight: torch.Tensor) -> Grid | None:
    half = HALF_SUBNORMAL if weight.dtype == torch.float16 else 0.0
    return find_grid(weight[[30, 31, 63]].double().tolist(), smallest_error=half)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", BY_WEIGHT.values())
def test_every_format_that_we_write_is_found(name: str, dtype: torch.dtype) -> None:
    config = CONFIGS[name]
    layer = LayerPlan("model.layers.0.self_attn.k_proj", 0, (64, 512), config)
    spec = layer.weight
    unit = 16 if name == "gguf_nvfp4" else 1  # the scales of small weights are multiples of one number
    found = found_in(round_to_nearest((unit * weights()).bfloat16(), spec).dequantize().to(dtype))
    assert found is not None
    size = spec.group_size if spec.block_size is None else spec.block_size[1]
    bits = 2 if name == "gguf_iq1_s" else spec.format.bits
    assert (found.bits, found.group_size) == (bits, None if size == -1 else size)
    scope = {"per_tensor": "tensor", "per_channel": "row", "per_group": "group", "per_block": "block"}[spec.qscheme]
    assert found.scope == ("row" if size == -1 else scope)
    is_integer = "int" in spec.dtype
    assert found.name == NAMES.get(name, found.name)
    if is_integer and name not in NAMES:
        assert found.name == ("symmetric" if spec.symmetric else "asymmetric")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("Q4_0", "Q4_0, groups of 32"), ("Q4_1", "Q4_1, groups of 32"), ("Q5_0", "Q5_0, groups of 32"),
        ("Q5_1", "Q5_1, groups of 32"), ("Q8_0", "8 bits, symmetric, groups of 32"), ("BF16", None),
    ],
)  # fmt: skip
def test_types_of_gguf_are_found_as_another_program_writes_them(kind: str, expected: str | None) -> None:
    quantized = gguf.GGMLQuantizationType[kind]
    values = dequantize(quantize(weights().numpy(), quantized), quantized)
    found = found_in(torch.from_numpy(np.array(values)).bfloat16())
    assert (None if found is None else str(found)) == expected


def test_a_scale_of_the_whole_tensor_is_none_of_a_row() -> None:
    assert str(found_in(ternary(one_scale=True))) == "2 bits, symmetric, one scale per tensor"
    assert str(found_in(ternary(one_scale=False))) == "2 bits, symmetric, one scale per row"


def ternary(*, one_scale: bool) -> torch.Tensor:
    weight = weights()
    scale = weight.abs().mean() if one_scale else weight.abs().mean(1, keepdim=True)
    return ((weight / scale).round().clamp(-1, 1) * scale).bfloat16()


def test_a_file_in_float32_may_hold_a_rounded_model() -> None:
    """Products are rounded to bfloat16 first, which leaves more room than float32 has."""
    layer = LayerPlan("x", 0, (64, 512), CONFIGS["int4_wo_128"])
    rounded = round_to_nearest(weights(), layer.weight).dequantize().bfloat16().float()
    assert str(found_in(rounded)) == "4 bits, symmetric, groups of 128"


def test_a_few_groups_may_be_otherwise() -> None:
    layer = LayerPlan("x", 0, (64, 512), CONFIGS["int4_wo_32"])
    weight = round_to_nearest(weights(), layer.weight).dequantize().bfloat16()
    weight[30, 5] *= 1.01
    assert str(found_in(weight)) == "4 bits, symmetric, groups of 32"
    weight[30:32, ::32] *= 1.01
    assert found_in(weight) is None


def heavy_tails() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    spread = torch.rand(64, 512, generator=generator).clamp(min=0.05) ** -0.5
    return weights() * spread


def pruned() -> torch.Tensor:
    weight = weights()
    return weight * (weight.abs() > weight.abs().median())


NO_GRIDS: dict[str, Callable[[], torch.Tensor]] = {
    "normal": weights,
    "narrow": lambda: weights(width=64),
    "uniform": lambda: torch.rand(64, 512, generator=torch.Generator().manual_seed(2)) - 0.5,
    "heavy tails": heavy_tails,
    "pruned": pruned,
    "tiny": lambda: weights() * 1e-4,
    "huge": lambda: weights() * 1e4,
    "zero": lambda: torch.zeros(64, 512),
    "one value": lambda: torch.full((64, 512), 0.0123),
    "ones": lambda: torch.ones(64, 512),
    "whole numbers": lambda: torch.randint(-3, 4, (64, 512), generator=torch.Generator().manual_seed(3)).float(),
    "eighths": lambda: torch.randint(-90, 90, (64, 512), generator=torch.Generator().manual_seed(4)) / 8,
    "identity": lambda: torch.eye(64, 512),
    "infinite": lambda: weights().fill_(torch.inf),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", NO_GRIDS)
def test_other_weights_lie_on_no_grid(case: str, dtype: torch.dtype) -> None:
    assert found_in(NO_GRIDS[case]().to(dtype)) is None


def test_random_weights_of_many_seeds_lie_on_no_grid() -> None:
    generator = torch.Generator().manual_seed(5)
    for _ in range(50):
        width = int(torch.randint(1, 9, (1,), generator=generator)) * 32
        weight = (0.05 * torch.randn(3, width, generator=generator)).bfloat16()
        assert find_grid(weight.double().tolist()) is None
