"""The bytes of every GGUF type: gguf's own dequantizer reads in them what we encoded, and we read what it does."""

import numpy
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize

from quantcore.checkpoint.layout import GGUF_BLOCKS
from quantcore.config.gguf_types import GGUF_TYPES, SHORT_ROWS
from quantcore.engine.solvers.rtn import round_to_nearest
from quantcore.errors import ModelError
from quantcore.export.gguf.gguf_exporter import BLOCKS, gguf_type
from quantcore.tensors.qtensor import QTensor

WITH_MINIMUM = ("Q2_K", "Q4_1", "Q5_1", "Q4_K", "Q5_K")


def as_gguf_reads(data: torch.Tensor, name: str) -> torch.Tensor:
    return torch.from_numpy(dequantize(data.numpy(), GGMLQuantizationType[name]).copy())


def test_every_type_is_known_everywhere() -> None:
    assert GGUF_TYPES.keys() == GGUF_BLOCKS.keys() == BLOCKS.keys()
    assert {name: gguf_type(spec) for name, spec in GGUF_TYPES.items()} == {name: name for name in GGUF_TYPES}
    for name, block in BLOCKS.items():
        assert GGML_QUANT_SIZES[GGMLQuantizationType[name]] == GGUF_BLOCKS[name]
        assert block.num_bytes == GGUF_BLOCKS[name][1]
    assert {name for name, (width, _) in GGUF_BLOCKS.items() if width > 32} == SHORT_ROWS.keys()


@pytest.mark.parametrize("name", GGUF_TYPES)
def test_gguf_reads_the_rounded_weights(name: str) -> None:
    """To the last bit; a minimum is added there and subtracted as a zero point here: two roundings."""
    weight = 0.02 * torch.randn(16, 1024, generator=torch.Generator().manual_seed(0))
    weight[3] = 0
    weight[5, 7] = 1
    weight[6, :40] = 0
    rounded = round_to_nearest(weight, GGUF_TYPES[name])
    data = BLOCKS[name].encode(rounded)
    ours, theirs = rounded.dequantize(), as_gguf_reads(data, name)
    slack = 2.0**-22 * ours.abs().max() if name in WITH_MINIMUM else 0.0
    assert (theirs - ours).abs().max() <= slack
    again: QTensor = BLOCKS[name].decode(data, GGUF_TYPES[name])
    assert torch.equal(again.codes, rounded.codes) and torch.equal(again.dequantize(), ours)
    assert ours[3].abs().max() < 2e-6  # IQ4_NL has no zero


@pytest.mark.parametrize("name", ["TQ1_0", "TQ2_0"])
def test_ternary_weights_get_the_bytes_that_gguf_gives_them(name: str) -> None:
    weight = torch.randint(-1, 2, (16, 1024), generator=torch.Generator().manual_seed(0)) * 0.0371
    data = BLOCKS[name].encode(round_to_nearest(weight, GGUF_TYPES[name]))
    assert numpy.array_equal(data.numpy(), quantize(weight.numpy(), GGMLQuantizationType[name]))


def test_a_code_that_is_no_ternary_number_is_refused() -> None:
    with pytest.raises(ModelError, match="holds the code 3") as refusal:
        BLOCKS["TQ2_0"].decode(torch.full((1, 66), 0xFF, dtype=torch.uint8), GGUF_TYPES["TQ2_0"])
    assert refusal.value.code == "invalid_gguf"


@pytest.mark.parametrize("name", GGUF_TYPES)
def test_any_bytes_are_read_as_gguf_reads_them(name: str) -> None:
    """Scales of any sign, zeros among them: there all codes stand for the minimum. Units are 0.01 to 0.02.

    Scales of one byte: all powers of two with which no value is infinite, and all of e4m3.
    """
    width, num_bytes = GGUF_BLOCKS[name]
    data = numpy.random.default_rng(0).integers(0, 256, (8, 2048 // width, num_bytes), dtype=numpy.uint8)
    if name not in ("MXFP4", "NVFP4"):
        unit = numpy.random.default_rng(1).uniform(0.01, 0.02, (8, 2048 // width, 2)).astype(numpy.float16)
        at = {"Q2_K": 80, "Q3_K": 108, "Q6_K": 208, "TQ1_0": 52, "TQ2_0": 64}.get(name, 0)
        num_units = 2 if name in WITH_MINIMUM else 1
        data[..., at : at + 2 * num_units] = unit[..., :num_units].copy().view(numpy.uint8)
    if name == "IQ1_M":  # the unit is in the highest bits of its last four numbers
        words = data[..., -8:].view(numpy.uint16)
        words[...] = words & 0xFFF | (unit[..., :1].view(numpy.uint16) >> numpy.arange(0, 16, 4)) << 12
    if name == "TQ2_0":
        data[..., :64] &= data[..., :64] >> 1 & 0x55 ^ 0xFF  # no code is 3
    if name == "MXFP4":
        data[..., 0] = numpy.arange(8 * 2048 // width).reshape(8, -1) % 253
    if name == "NVFP4":
        data[..., :4] = numpy.arange(8 * 2048 // width * 4).reshape(8, -1, 4) % 256
    if name == "Q4_1":
        data[0, 0, :2] = 0  # a group of one value, as llama.cpp writes it
    rows = torch.from_numpy(data.reshape(8, -1))
    ours, theirs = BLOCKS[name].decode(rows, GGUF_TYPES[name]).dequantize(), as_gguf_reads(rows, name)
    assert ours.isfinite().all()
    if name in WITH_MINIMUM:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2.0**-20 * float(theirs.abs().max()))
    else:
        assert torch.equal(ours, theirs)
