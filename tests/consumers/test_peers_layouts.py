"""The values and the packing of codes, compared with programs that we did not write (``make consumers``)."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from quantcore.config.grouping import Grouping
from quantcore.config.spec import QuantizationSpec
from quantcore.formats import FORMATS
from quantcore.formats.floats import decode_e8m0
from quantcore.tensors import affine
from quantcore.tensors.affine import QParams
from quantcore.tensors.double_quant import NestedScales, dynamic_map
from quantcore.tensors.packing import AWQ_ORDER, HIGH_FIRST, pack, unpack, unpack_halves
from tests.consumers import peers_inputs
from tests.consumers.peers_compare import TINY, ULP, assert_same, assert_same_but_ties, largest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_every_code_stands_for_what_ml_dtypes_says(peers):
    for name in ("fp8_e4m3", "fp8_e4m3fnuz", "fp8_e5m2", "fp6_e3m2", "fp6_e2m3", "fp4", "bfloat16", "e8m0"):
        theirs = peers["ml_dtypes-decode"][name]["values"]
        storage = torch.int32 if name == "bfloat16" else torch.uint8
        codes = torch.arange(len(theirs), dtype=storage)
        if name == "e8m0":
            ours = decode_e8m0(codes)
        elif FORMATS[name].storage == "uint8":
            ours = FORMATS[name].decode(codes)
        else:
            codes = codes.to(torch.int16) if name == "bfloat16" else codes
            ours = FORMATS[name].decode(codes.view(getattr(torch, FORMATS[name].storage)))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True, msg=name)
        assert torch.equal(ours.signbit(), theirs.signbit()) or name == "fp8_e4m3fnuz"


@pytest.mark.parametrize("peer", ["ml_dtypes", "torchao"])
def test_codes_of_small_floats(each, peer):
    for name, x_OI, outputs in each(f"{peer}-encode"):
        for dtype, theirs in outputs.items():
            ours = FORMATS[dtype].encode(x_OI)
            assert_same(ours.view(theirs.dtype), theirs, f"{dtype} {name}")


@pytest.mark.parametrize("dtype", ["nf4", "fp4"])
def test_bitsandbytes(each, dtype):
    """Table, largest magnitudes, codes and values are the same.

    On a tie fp4 of its CPU code takes the lower value, ours (like its CUDA code) the one nearer to zero."""
    fmt = FORMATS[dtype if dtype == "nf4" else "fp4_bnb"]
    spec = QuantizationSpec(dtype=fmt.name, qscheme="per_group", group_size=64, scale_type="float32")
    grouping = Grouping(axis=-1, size=64)
    for name, x_OI, outputs in each(f"bitsandbytes-{dtype}"):
        assert_same(torch.tensor(fmt.table), outputs["table"], name)
        x_RGS = grouping.split(x_OI)
        keep = largest(x_RGS) >= TINY
        params = affine.find_params(*affine.min_max(x_RGS), spec, torch.float32)
        assert_same(params.scale[keep], outputs["absmax"].reshape(keep.shape)[keep], name)
        codes = unpack(outputs["packed"].flatten(), fmt, HIGH_FIRST).reshape(x_RGS.shape)
        ours, theirs = fmt.decode(affine.quantize(x_RGS, params, spec)), fmt.decode(codes)
        exact = x_RGS.double() / params.scale.double().unsqueeze(-1)
        slack = torch.full_like(exact, ULP)
        assert_same_but_ties(ours[keep], theirs[keep], exact[keep], fmt.grid(), slack[keep], name)
        values = affine.dequantize(codes, params, spec)
        assert_same(values[keep], grouping.split(outputs["values"])[keep], name)


def test_double_quantization_of_bitsandbytes(each):
    """Map, mean, largest distances, codes and values of scales are the same.

    Its CPU code uses a coarse table and sometimes takes the neighbour of a value near the middle of two; its GPU code
    and ours take the nearest."""
    for name, x_OI, outputs in each("bitsandbytes-nested"):
        scale = x_OI.abs()
        if not (scale - scale.mean()).any():
            continue  # where there are no distances, codes mean nothing
        nested = NestedScales.of(scale)
        assert_same(dynamic_map(scale.device), outputs["map"], name)
        assert_same(nested.offset, outputs["offset"].view(()), name)
        assert_same(nested.absmax, outputs["absmax"], name)
        keep = nested.absmax.repeat_interleave(256).view(scale.shape) >= TINY
        assert_same(nested.codes[keep], outputs["codes"].view(scale.shape)[keep], name)
        assert_same(nested.decode()[keep], outputs["values"].view(scale.shape)[keep], name)
        apart = (nested.codes.int() - outputs["cpu_codes"].view(scale.shape).int()).abs()[keep]
        if name != "extreme_exponents":  # on which its CPU code fails
            assert not (apart > 1).any() and (apart > 0).sum() <= 0.02 * apart.numel(), name


@pytest.mark.parametrize("layout", ["Q8_0", "Q4_0", "Q4_1"])
def test_gguf_blocks(each, layout):
    """Codes of blocks of 32 by gguf's scales: symmetric, with the sign of the largest value, with a real zero point."""
    fmt = FORMATS["int8" if layout == "Q8_0" else "int4" if layout == "Q4_0" else "uint4"]
    is_asymmetric = layout == "Q4_1"
    spec = QuantizationSpec(
        dtype=fmt.name, qscheme="per_group", group_size=32, scale_type="float32", symmetric=not is_asymmetric,
        zero_point_type="float32" if is_asymmetric else "int32", round_method="round",
    )  # fmt: skip
    for name, x_OI, outputs in each("gguf"):
        x_RGS = Grouping(axis=-1, size=32).split(x_OI)
        minimum, maximum = affine.min_max(x_RGS)
        if layout == "Q8_0":
            scale, zero_point = largest(x_RGS) / 127, None
        elif layout == "Q4_0":
            first = x_RGS.abs().argmax(-1, keepdim=True)
            scale, zero_point = x_RGS.gather(-1, first).squeeze(-1) / -8, None
        else:
            scale = (maximum - minimum) / 15
            zero_point = -minimum / scale
        keep = scale.abs() >= 2.0**-100
        blocks = outputs[layout].reshape(*scale.shape, -1)[..., 4 if is_asymmetric else 2 :]
        theirs = blocks.view(torch.int8).float() if layout == "Q8_0" else unpack_halves(blocks).float() + fmt.min
        ours = fmt.decode(affine.quantize(x_RGS, QParams(scale, zero_point), spec))
        exact = x_RGS.double() / scale.double().unsqueeze(-1)
        size = exact.abs()
        if zero_point is not None:
            exact, size = (
                exact - (minimum.double() / scale.double()).unsqueeze(-1),
                size + zero_point.abs().unsqueeze(-1),
            )
        assert_same_but_ties(ours[keep], theirs[keep], exact[keep], fmt.grid(), (size * ULP)[keep], name)


@dataclass(frozen=True)
class Layout:
    """A peer's packed codes, and the options that pack ours the same."""

    peer: str
    part: str
    dtype: str
    order: tuple[int, ...] | None = None
    word: torch.dtype = torch.uint8
    down: bool = False  # along the columns of the matrix: its transpose is packed
    back: bool = False  # and transposed again
    offset: bool = False  # the smallest code is stored as 0

    @property
    def name(self) -> str:
        return f"{self.peer}-{self.part}"


LOW_LAST = (3, 2, 1, 0)
BITS = (2, 3, 4, 8)
SMALL_FLOATS = ("fp4", "fp6_e2m3", "fp6_e3m2")
LAYOUTS = (
    *(
        Layout("quark", f"{dtype}-{scheme}-{name}", dtype, order, torch.int32, down=scheme == "per_group")
        for dtype in ("int4", "uint4")
        for scheme in ("per_channel", "per_group")
        for name, order in (("order", None), ("reorder", AWQ_ORDER))
    ),
    Layout("quark", "int3", "int3"),
    Layout("quark", "uint2", "uint2", LOW_LAST),
    Layout("quark", "int8-per_group", "int8", down=True),
    *(Layout("quark", dtype, dtype) for dtype in SMALL_FLOATS),
    Layout("torchao", "fp4", "fp4"),
    *(Layout("compressed_tensors", dtype, dtype) for dtype in ("fp4", "fp6_e2m3")),
    *(
        Layout("compressed_tensors", f"int{b}-dim{dim}", f"int{b}", None, torch.int32, dim == 0, dim == 0, offset=True)
        for b in BITS
        for dim in (0, 1)
    ),
)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_packed_layouts(peers, layout):
    fmt, matrix = FORMATS[layout.dtype], peers_inputs.codes()[layout.dtype]
    codes = matrix.T.contiguous() if layout.down else matrix
    stored = codes.int() - int(fmt.min) if layout.offset else codes
    theirs = peers["pack"][layout.peer][layout.part]
    theirs = theirs.T.contiguous() if layout.back else theirs
    theirs = theirs.view(torch.uint8) if theirs.dtype == torch.int8 else theirs
    assert_same(pack(stored, fmt.bits, layout.order, layout.word), theirs, "packed")
    back = unpack(theirs, fmt, layout.order, codes.shape[-1])
    if layout.offset:  # the same bits, read without sign
        back = (back.int() & (1 << fmt.bits) - 1) + int(fmt.min)
    assert_same(back, codes.to(back.dtype), "unpacked")


def test_every_packed_output_has_a_test(peers):
    outputs = {f"{peer}-{part}" for peer, parts in peers["pack"].items() for part in parts}
    assert outputs == {layout.name for layout in LAYOUTS}
