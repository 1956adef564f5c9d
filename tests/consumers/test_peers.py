"""Number formats and rounding rules against programs that we did not write (``make consumers``).

AMD Quark, torchao, compressed-tensors, bitsandbytes, gguf and ml_dtypes quantize the tensors of peers_inputs.py in an
environment of their own. Where a rule is the same, scales are equal; where ours differs on purpose (symmetric integers
never clip, docs/decisions/0002), they differ as much as that rule says. Given the peer's scales, our codes are the
peer's.
Peers that multiply by a rounded reciprocal where we divide may take the other neighbour of a value that lies half-way
between two codes to within the rounding of that quotient, and only then; with scales of a power of two all agree.
"""

from __future__ import annotations

import pytest
import torch

from quantcore.config.grouping import weight_grouping
from quantcore.formats import FORMATS
from quantcore.formats.floats import encode_e8m0
from quantcore.tensors import affine
from quantcore.tensors.affine import QParams
from tests.consumers import peers_cases
from tests.consumers.peers_cases import E8M0_MODES, Case, power_of_two
from tests.consumers.peers_compare import (
    TINY,
    ULP,
    assert_same,
    assert_same_but_ties,
    exact_quotient,
    find_params,
    given_params,
    is_near,
    largest,
    spec_of,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SMALLEST_SCALE = {"quark": 2.0**-23}
"""The minimum scale of integers in Quark; the other peers and we use the smallest normal number."""
SIMULATED = tuple(
    case
    for case in (*peers_cases.FLOAT8, *peers_cases.MX)
    if case.peer == "quark" and case.scheme == "per_group" and "8" in case.dtype
)
"""Cases for which Quark has only values, no codes."""
WITH_CODES = tuple(case for case in peers_cases.CASES if case not in (*SIMULATED, *peers_cases.POF2))
WITH_VALUES = tuple(case for case in WITH_CODES if case.peer != "torchao" or case.rule not in (*E8M0_MODES, "nvfp4"))
INTEGERS = tuple(
    case for case in peers_cases.CASES if "int" in case.dtype and case.rule not in (*E8M0_MODES, "pof2", "two_level")
)


def divides_as_we_do(case: Case) -> bool:
    """Return True if the peer's arithmetic is ours operation by operation, so that ties must be rounded alike."""
    if case.rule == "nvfp4":
        return case.peer == "quark"
    if case.rule in E8M0_MODES or case.dtype.startswith("fp"):
        return case.peer != "gguf"
    return case.peer == "compressed_tensors"


def usable(case: Case, params: QParams) -> torch.Tensor:
    """Return a mask of groups with a usable scale: torchao's and gguf's arithmetic breaks at zero and denormal ones."""
    step = params.scale if params.global_scale is None else params.scale * params.global_scale
    return torch.isfinite(step) & (step >= (TINY if case.peer in ("torchao", "gguf") else 2.0**-149))


@pytest.mark.parametrize("case", WITH_CODES, ids=lambda case: case.name)
def test_codes_with_the_peers_scales(each, case):
    spec, num_compared = spec_of(case), 0
    grouping = weight_grouping(spec)
    for name, x_OI, outputs in each(case.name):
        x_RGS, theirs = grouping.split(x_OI), grouping.split(outputs["levels"].float())
        params = given_params(case, outputs, grouping.num_scales(tuple(x_OI.shape)))
        keep = usable(case, params)
        ours = spec.format.decode(affine.quantize(x_RGS, params, spec))[keep]
        if divides_as_we_do(case):
            assert_same(ours, theirs[keep], name)
        else:
            exact, size = (value[keep] for value in exact_quotient(case, x_RGS, params, outputs))
            assert_same_but_ties(ours, theirs[keep], exact, spec.format.grid(), size * ULP, name)
        num_compared += int(keep.sum())
    assert num_compared > 0


@pytest.mark.parametrize("case", WITH_VALUES, ids=lambda case: case.name)
def test_values_of_the_peers_codes(each, case):
    spec = spec_of(case)
    grouping = weight_grouping(spec)
    for name, x_OI, outputs in each(case.name):
        params = given_params(case, outputs, grouping.num_scales(tuple(x_OI.shape)))
        codes = spec.format.encode(grouping.split(outputs["levels"].float()))
        keep = grouping.join(usable(case, params).unsqueeze(-1).expand(codes.shape), tuple(x_OI.shape))
        ours = grouping.join(affine.dequantize(codes, params, spec), tuple(x_OI.shape))[keep]
        theirs = outputs["values"][keep]
        if case.peer == "compressed_tensors" and case.rule == "nvfp4":  # it divides by the reciprocal that it stores
            torch.testing.assert_close(ours, theirs, rtol=ULP, atol=0, msg=name)
        else:
            assert_same(ours, theirs, name)


@pytest.mark.parametrize("case", INTEGERS, ids=lambda case: case.name)
def test_integer_codes_with_scales_of_a_power_of_two(each, case):
    spec = spec_of(case)
    grouping = weight_grouping(spec)
    for name, x_OI, outputs in each(case.name):
        x_RGS, theirs = grouping.split(x_OI), grouping.split(outputs["power_of_two_levels"])
        params = given_params(case, outputs, grouping.num_scales(tuple(x_OI.shape)))
        params = QParams(power_of_two(params.scale), params.zero_point)
        ours = spec.format.decode(affine.quantize(x_RGS, params, spec))
        if case.peer == "torchao" and case.rule == "asymmetric":
            # It adds the zero point after rounding: with an odd one, half-way values go to the other neighbour. And we
            # add it in float32.
            exact, size = exact_quotient(case, x_RGS, params, outputs)
            assert_same_but_ties(ours, theirs, exact, spec.format.grid(), size * ULP, name)
        else:
            assert_same(ours, theirs, name)


@pytest.mark.parametrize("case", (*peers_cases.FLOAT8, *peers_cases.NO_CLIPPING), ids=lambda case: case.name)
def test_scales_by_the_same_rule(each, case):
    grouping = weight_grouping(spec_of(case))
    for name, x_OI, outputs in each(case.name):
        x_RGS = grouping.split(x_OI)
        ours = find_params(case, x_RGS).scale
        theirs = outputs["scale"].reshape(ours.shape)
        keep = largest(x_RGS) / spec_of(case).format.max >= TINY
        assert_same(ours[keep], theirs[keep], name)
        assert (ours > 0).all()


@pytest.mark.parametrize("case", peers_cases.SIGNED, ids=lambda case: case.name)
def test_symmetric_integer_scales_differ_as_decided(each, case):
    """Peers divide the largest value by half of all steps; we divide by the codes there are on its side."""
    fmt = spec_of(case).format
    steps = fmt.max - fmt.min
    lowest, highest = steps / 2 / -fmt.min, steps / 2 / fmt.max
    grouping = weight_grouping(spec_of(case))
    for name, x_OI, outputs in each(case.name):
        x_RGS = grouping.split(x_OI)
        ours = find_params(case, x_RGS).scale
        theirs = outputs["scale"].reshape(ours.shape)
        keep = (theirs > SMALLEST_SCALE.get(case.peer, TINY)) & (largest(x_RGS) / steps > TINY)
        ratio = ours[keep].double() / theirs[keep].double()
        assert ((ratio >= lowest - ULP) & (ratio <= highest + ULP)).all(), f"{name}: {ratio.min()} to {ratio.max()}"


@pytest.mark.parametrize("case", peers_cases.ASYMMETRIC, ids=lambda case: case.name)
def test_asymmetric_scales_and_zero_points_by_the_same_rule(each, case):
    """All divide the range by all steps, in some order of operations: half-way zero points may be rounded otherwise."""
    fmt = spec_of(case).format
    steps = fmt.max - fmt.min
    grouping = weight_grouping(spec_of(case))
    for name, x_OI, outputs in each(case.name):
        x_RGS = grouping.split(x_OI)
        params = find_params(case, x_RGS)
        theirs = outputs["scale"].reshape(params.scale.shape)
        keep = (theirs > SMALLEST_SCALE.get(case.peer, TINY)) & (largest(x_RGS) / steps > TINY)
        ours, theirs = params.scale[keep].double(), theirs[keep].double()
        assert ((ours / theirs - 1).abs() <= ULP).all(), name
        zero_point, other = params.zero_point[keep], outputs["zero_point"].reshape(params.scale.shape)[keep]
        ideal = fmt.min - affine.min_max(x_RGS)[0][keep].double().clamp(max=0) / ours
        middle = (zero_point + other).double() / 2
        is_tie = ((zero_point - other).abs() == 1) & ((ideal - middle).abs() <= steps * ULP)
        assert ((zero_point == other) | is_tie).all(), name


@pytest.mark.parametrize("case", [case for case in peers_cases.MX if case.dtype != "int8"], ids=lambda case: case.name)
def test_e8m0_scales(each, case):
    """quark (floor, ceil) and gguf take a float32 logarithm, which is wrong beside powers of two and far from 1."""
    takes_logarithm = case.peer == "gguf" or (case.peer == "quark" and case.rule != "even")
    grouping, num_compared = weight_grouping(spec_of(case)), 0
    for name, x_OI, outputs in each(case.name):
        x_RGS = grouping.split(x_OI)
        ours, size = find_params(case, x_RGS).scale, largest(x_RGS)
        keep = size > 0  # a group of zeros: the peers store 2^-127 or 2^-126, we store 1
        if takes_logarithm:
            keep &= (size > 2.0**-100) & ~(is_near(size, (1.0, 2.0)) & (size.frexp()[0] != 0.5))
        assert_same(ours[keep], outputs["scale"].reshape(ours.shape)[keep], name)
        byte = encode_e8m0(ours).to(torch.int16)
        byte = byte.clamp(min=1) if case.peer == "quark" else byte  # which never writes the smallest scale
        assert_same(byte[keep], outputs["scale_byte"].reshape(ours.shape).to(torch.int16)[keep], name)
        num_compared += int(keep.sum())
    assert num_compared > 1000


@pytest.mark.parametrize("case", peers_cases.NVFP4, ids=lambda case: case.name)
def test_nvfp4_scales(each, case):
    """The tensor's scale is the peer's, except that its reciprocal must give it back.

    Scales of blocks, rounded to e4m3, are the same except where a peer's rounding of the quotient decides. For a block
    too small for e4m3 we and Quark store 1, torchao 2^-6, compressed-tensors 1/8."""
    grid = FORMATS["fp8_e4m3"].grid()
    grouping = weight_grouping(spec_of(case))
    for name, x_OI, outputs in each(case.name):
        x_RGS = grouping.split(x_OI)
        ours = find_params(case, x_RGS)
        theirs = given_params(case, outputs, tuple(ours.scale.shape))
        size = largest(x_RGS)
        if size.amax() / 2688 < TINY:
            continue  # ours is then the smallest normal number
        if case.peer == "compressed_tensors":
            torch.testing.assert_close(ours.global_scale, theirs.global_scale, rtol=ULP, atol=0)
        else:
            assert ours.global_scale == 1 / (1 / theirs.global_scale), name
            ends = affine.min_max(x_RGS)
            ours = affine.find_params(*ends, spec_of(case), torch.float32, theirs.global_scale)
        exact = size.double() / (6 * ours.global_scale.double())
        smallest = {"quark": 0.0, "torchao": 2.0**-6, "compressed_tensors": 2.0**-10 * (1 + ULP)}[case.peer]
        keep = (exact > smallest) & (size > 0)
        expected = ours.scale[keep]
        assert_same_but_ties(expected, theirs.scale[keep], exact[keep], grid, exact[keep] * 2 * ULP, name)
        if case.peer == "quark":
            assert_same(ours.scale, theirs.scale, name)


@pytest.mark.parametrize("case", peers_cases.POF2, ids=lambda case: case.name)
def test_scales_of_a_power_of_two(each, case):
    """Quark takes the nearest one and clips; we take the next one above, which clips nothing."""
    fmt, grouping = spec_of(case).format, weight_grouping(spec_of(case))
    for name, x_OI, outputs in each(case.name):
        x_RGS = grouping.split(x_OI)
        minimum, maximum = affine.min_max(x_RGS)
        keep = largest(x_RGS) > 2.0**-100
        theirs, ours = outputs["scale"][keep].double(), find_params(case, x_RGS).scale[keep].double()
        clips = (maximum[keep] > theirs * fmt.max) | (minimum[keep] < theirs * fmt.min)
        assert_same(ours, torch.where(clips, 2 * theirs, theirs), name)


def test_two_level_scales(each):
    """int4 over fp8: the first stage by the same rule; the second never clips, where Quark's divides by 7.5."""
    (case,) = peers_cases.TWO_LEVEL
    grouping = weight_grouping(spec_of(case))
    for name, x_OI, outputs in each(case.name):
        x_RGS = grouping.split(x_OI)
        if x_OI.abs().amax() / 448 < TINY:
            continue
        ours, fp8_RGS = find_params(case, x_RGS), grouping.split(outputs["fp8"])
        assert_same(ours.global_scale, outputs["global_scale"], name)
        expected = torch.maximum(fp8_RGS.amax(-1) / 7, fp8_RGS.amin(-1) / -8)
        keep = expected > 0
        assert_same(ours.scale[keep], expected[keep], name)
        ratio = ours.scale[keep] / outputs["scale"][keep]
        keep_ratio = outputs["scale"][keep] > 2.0**-23
        assert ((ratio >= 7.5 / 8 - ULP) & (ratio <= 7.5 / 7 + ULP))[keep_ratio].all(), name


@pytest.mark.parametrize("case", SIMULATED, ids=lambda case: case.name)
def test_simulated_values(each, case):
    """Quark's fake quantization with its own scales equals ours, in groups whose scales are equal."""
    spec = spec_of(case)
    grouping, num_compared = weight_grouping(spec), 0
    for name, x_OI, outputs in each(case.name):
        x_RGS, theirs = grouping.split(x_OI), grouping.split(outputs["fake_values"])
        params = find_params(case, x_RGS)
        keep = (largest(x_RGS) > 2.0**-100) & ~is_near(largest(x_RGS), (1.0, 2.0))
        ours = affine.dequantize(affine.quantize(x_RGS, params, spec), params, spec)
        if case.dtype == "int8":  # its even rule counts 8 mantissa bits instead of 6, and it leaves out the code -128
            keep &= (largest(x_RGS).frexp()[0] * 2 < 2 - 2.0**-7) | torch.tensor(case.rule != "even")
            ours = torch.maximum(ours, -127 * params.scale.unsqueeze(-1))
        assert_same(ours[keep], theirs[keep], name)
        num_compared += int(keep.sum())
    assert num_compared > 1000
