"""The numeric parts of the engine, each on made-up data: what they compute on a device, and how exact it must be.

The data come from a seed on the CPU, so every device gets the same. A ``reference`` computes the same otherwise: in
float64, or without torch. It stands in for the other device where there is only a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch

from quantcore.config import presets
from quantcore.config.algorithms import AlgoConfig, GPTAQConfig, GPTQConfig, RTNConfig
from quantcore.config.layer_plan import LayerPlan
from quantcore.engine.calibration.reduction import Sums
from quantcore.engine.calibration.stats import Needs, Stats
from quantcore.engine.selftest.values import Allowed
from quantcore.engine.solvers import SOLVERS
from quantcore.engine.transforms.rotation.hadamard import orthogonal
from quantcore.formats import BUILT_IN, Format, IntFormat
from quantcore.formats.codebooks import CodebookFormat
from quantcore.tensors.affine import fake_quantize_activation
from quantcore.tensors.kernels import switch
from quantcore.tensors.packing import AWQ_ORDER, pack, unpack

NUM_VALUES = 1 << 18
NUM_OUTPUTS, NUM_INPUTS, NUM_TOKENS = 128, 256, 1024
ROTATED = 6144
"""A width whose Hadamard matrix has a factor of 12 beside powers of two."""
ACTIVATIONS = ("int8_dynamic", "fp8_dynamic", "fp8_block", "mxfp4", "mxfp6_e2m3", "mxfp8", "mxint8", "nvfp4")
SEARCHED = ("w4a16", "int8_weight_only", "fp8", "mxfp4", "nvfp4", "gguf_q4_k", "nf4")
LOOPED = ("int4", "uint4", "int8", "fp8_e4m3", "fp6_e2m3", "fp4")
SOLVED = "w4a16"
"""The only scheme that GPTQ solves here: its parts are proven for others."""
NONE, CPU = torch.empty(0), torch.device("cpu")

EXACT = Allowed(share=0, largest=0, why="Each number is rounded separately, by operations that are exact in IEEE 754.")
EXACT_BUT_ITS_SUM = Allowed(
    share=0,
    largest=1e-12,
    why="Each number is rounded separately. The compared value is the sum of squared errors in float64, in any order.",
)
NEARLY_EXACT = Allowed(
    share=0.02,
    largest=2e-3,
    why="CUDA divides by a constant by multiplying with its inverse, so the last bit of a scale may differ, and so "
    "may values midway between two codes, of which bfloat16 has many. The compared value is the sum of squared "
    "errors.",
)
IN_ANY_ORDER = Allowed(
    share=0,
    largest=1e-5,
    why="Sums of products in float32, in any order. Sums in bfloat16, or operands rounded to TensorFloat-32, would "
    "differ by 1e-4 or more.",
)
NEARLY_TIED = Allowed(
    share=0.02,
    largest=1e-3,
    why="The error of each range is a sum in float32, in any order, so either of two nearly equal ranges may be "
    "chosen. The compared value is the error of the layer's output, which must not increase.",
)
FED_BACK = Allowed(
    share=0.05,
    largest=2e-2,
    why="Each error moves the following weights, so a code midway between two values changes later ones. The "
    "compared value is the error of the layer's output, which must not increase.",
)


@dataclass(frozen=True)
class Computed:
    """The integer ``codes`` and the ``numbers`` that a part gives, of any shape and on any device."""

    codes: torch.Tensor = field(default_factory=lambda: NONE)
    numbers: torch.Tensor = field(default_factory=lambda: NONE)


@dataclass(frozen=True)
class Part:
    """A computation that takes milliseconds, or seconds if it ``is_long``: then it is run once on each device.

    On the CPU alone it is compared with its ``reference``, and without one with itself in all threads; a long one is
    compared with nothing.
    """

    group: str
    name: str
    allowed: Allowed
    compute: Callable[[torch.device], Computed]
    reference: Callable[[], Computed] | None = None
    is_long: bool = False


def parts() -> Iterator[Part]:
    """Yield all parts, those that others build on first."""
    for name, fmt in BUILT_IN.items():
        reference = partial(rounded_in_float64, fmt) if fmt.scaled else None  # a cast, to too many values to list
        yield Part("rounding", name, EXACT, partial(rounded, fmt), reference)
    for name in ("uint2", "int3", "uint4", "uint5", "int6", "uint8"):
        fmt = BUILT_IN[name]
        yield Part("packing", name, EXACT, partial(packed, fmt), partial(packed_as_one_number, fmt))
    yield Part("packing", "uint4 in AWQ's order", EXACT, partial(packed, BUILT_IN["uint4"], order=AWQ_ORDER))
    for name in ACTIVATIONS:
        has_exact_scales = name.startswith("mx")  # powers of two
        allowed = EXACT_BUT_ITS_SUM if has_exact_scales else NEARLY_EXACT
        yield Part("activations", name, allowed, partial(activations, name))
    for name in LOOPED:
        yield Part("kernels", f"loop of GPTQ, {name}", EXACT, partial(looped, BUILT_IN[name]))
    precisely = partial(rotated, CPU, torch.float64)
    yield Part("rotation", f"Hadamard {ROTATED}", IN_ANY_ORDER, rotated, precisely)
    precisely = partial(gram, CPU, float64=True)
    yield Part("statistics", "Gram matrix of bfloat16", IN_ANY_ORDER, gram, precisely)
    for name in SEARCHED:
        yield Part("range search", name, NEARLY_TIED, partial(solved, name, RTNConfig()))
    for config in (GPTQConfig, GPTAQConfig):
        precisely = partial(solved, SOLVED, config(hessian_dtype="float64"), CPU)
        yield Part(config.name, SOLVED, FED_BACK, partial(solved, SOLVED, config()), precisely)


def rounded(fmt: Format, device: torch.device) -> Computed:
    """Round numbers to the format, encode and decode them."""
    x = _to_round(fmt).to(device)
    codes = fmt.encode(x)
    numbers = torch.stack([fmt.round(x).float(), fmt.decode(codes)])
    return Computed(_bits(codes), numbers)


def rounded_in_float64(fmt: Format) -> Computed:
    """Find the nearest value of the format's grid, without its codes."""
    x = _to_round(fmt).double()
    if isinstance(fmt, IntFormat):
        nearest = x.round().clamp(fmt.min, fmt.max)
    else:
        grid = torch.tensor(fmt.grid(), dtype=torch.float64)
        middle = (grid[1:] + grid[:-1]) / 2
        index = torch.searchsorted(middle, x)  # of the lower neighbour, in the middle of two
        if isinstance(fmt, CodebookFormat):
            goes_up = (x < 0) & fmt.sign_bit
        else:
            goes_up = (index - torch.searchsorted(grid, 0.0)) % 2 == 1  # to an even mantissa
        index += goes_up & (middle[index.clamp(max=len(middle) - 1)] == x)
        nearest = grid[index].float()
    return Computed(numbers=torch.stack([nearest, nearest]))


def packed(fmt: Format, device: torch.device, order: tuple[int, ...] | None = None) -> Computed:
    """Pack codes to words, and unpack the words."""
    codes = _codes(fmt).to(device)
    words = pack(codes, fmt.bits, order)
    back = unpack(words, fmt, order, codes.shape[-1])
    return Computed(torch.cat([words.view(torch.uint8).flatten().to(torch.int16), back.flatten().to(torch.int16)]))


def packed_as_one_number(fmt: Format) -> Computed:
    """Pack the codes of each row as the digits of one large number."""
    codes, mask = _codes(fmt), (1 << fmt.bits) - 1
    num_bytes = 4 * -(-codes.shape[-1] * fmt.bits // 32)
    rows = [sum((code & mask) << place * fmt.bits for place, code in enumerate(row)) for row in codes.tolist()]
    words = [list(row.to_bytes(num_bytes, "little")) for row in rows]
    return Computed(torch.cat([torch.tensor(words, dtype=torch.int16).flatten(), codes.flatten().to(torch.int16)]))


def activations(preset: str, device: torch.device) -> Computed:
    """Quantize and dequantize an input of a layer in bfloat16, with the scales of each token."""
    spec = presets.PRESETS[preset].layer_config.input_tensors
    assert spec is not None
    x = (_normal(256, 2048, seed=2) * _normal(2048, seed=3).exp()).bfloat16()
    found = fake_quantize_activation(x.to(device), spec, None)
    return Computed(_bits(found), (found.cpu().double() - x.double()).square().sum()[None])


def looped(fmt: Format, device: torch.device) -> Computed:
    """Round weights input by input by the kernel of GPTQ's loop; where kernels are not used, by a plain loop."""
    num_inputs, num_outputs = 64, 100
    value_KO = _normal(num_inputs, num_outputs, seed=10)
    error_KO = value_KO + 0.1 * _normal(num_inputs, num_outputs, seed=11)
    feedback_KK = 0.3 * _normal(num_inputs, num_inputs, seed=12)
    step_JO = _normal(3, num_outputs, seed=13).abs() * 2.5 / fmt.max + 1e-3
    zero_JO = (_normal(3, num_outputs, seed=14) + (fmt.max + fmt.min) / 2).round() if fmt.zero_point_ok else None
    group_K = torch.arange(num_inputs, device=device) * 7 % 3
    zeros = None if zero_JO is None else zero_JO.to(device)
    values, errors, feedback_KK, steps = (x.to(device) for x in (value_KO, error_KO, feedback_KK, step_JO))
    if switch.are_used_on(device):
        from quantcore.tensors.kernels import columns, rounding

        found = rounding.rounding_of(fmt, "half_even")
        assert found is not None
        columns.round_in_turn(values, errors, feedback_KK, group_K, steps, zeros, found)
    else:
        values, errors = in_turn(values, errors, feedback_KK, group_K, steps, zeros, fmt)
    return Computed(numbers=torch.stack([values, errors]))


def in_turn(
    moved_KO: torch.Tensor,
    target_KO: torch.Tensor,
    feedback_KK: torch.Tensor,
    group_K: torch.Tensor,
    step_JO: torch.Tensor,
    zero_JO: torch.Tensor | None,
    fmt: Format,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what ``tensors.kernels.columns.round_in_turn`` gives, as values and errors, by a plain loop in the same
    order."""
    value_KO, error_KO = torch.empty_like(moved_KO), torch.empty_like(moved_KO)
    for k, group in enumerate(group_K.tolist()):
        moved_O = moved_KO[k]
        for before in range(k):
            moved_O = moved_O + feedback_KK[k, before] * error_KO[before]
        zero_O = torch.zeros_like(moved_O) if zero_JO is None else zero_JO[group]
        value_KO[k] = fmt.round(moved_O / step_JO[group] + zero_O)
        error_KO[k] = target_KO[k] - (value_KO[k] - zero_O) * step_JO[group]
    return value_KO, error_KO


def gram(device: torch.device, *, float64: bool = False) -> Computed:
    """Sum x^T x over a window of inputs in bfloat16."""
    x_TI = _normal(NUM_TOKENS, NUM_INPUTS, seed=10).bfloat16().to(device)
    sums = Sums(NUM_INPUTS, Needs(gram=True, float64=float64), device)
    sums.add(x_TI, None, None, 0, 1)
    gram_II = sums.stats().gram_II
    assert gram_II is not None
    return Computed(numbers=gram_II.float())


def rotated(device: torch.device, dtype: torch.dtype = torch.float32) -> Computed:
    """Rotate states by a Hadamard matrix with random signs."""
    return Computed(numbers=orthogonal(ROTATED).apply(_normal(256, ROTATED, seed=4).to(device, dtype)))


def solved(preset: str, config: AlgoConfig, device: torch.device) -> Computed:
    """Quantize a weight with calibration data: its codes, and the error of the layer's output."""
    layer = LayerPlan("layer", 0, (NUM_OUTPUTS, NUM_INPUTS), presets.PRESETS[preset].layer_config)
    weight_OI = _normal(NUM_OUTPUTS, NUM_INPUTS, seed=5) * NUM_INPUTS**-0.5
    given = _stats()
    here = Stats(
        given.num_tokens,
        given.largest_I.to(device),
        given.mean_I.to(device),
        given.mean_abs_I.to(device),
        gram_II=_on(given.gram_II, device),
        shift_II=_on(given.shift_II, device),
    )
    found = SOLVERS.get(config.name)(config).solve({layer: weight_OI.to(device)}, here)[layer]
    error_OI = (weight_OI - found.dequantize().cpu()).double()
    assert given.gram_II is not None
    return Computed(_bits(found.codes), ((error_OI @ given.gram_II.double()) * error_OI).sum()[None])


def _on(x: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    return None if x is None else x.to(device)


def _stats() -> Stats:
    """Return statistics of correlated inputs, and of their change behind quantized layers."""
    y_TI = _normal(NUM_TOKENS, 96, seed=6) @ _normal(96, NUM_INPUTS, seed=7) / 96**0.5
    y_TI += 0.3 * _normal(NUM_TOKENS, NUM_INPUTS, seed=8)
    x_TI = y_TI + 0.05 * y_TI.flip(1)
    return Stats(
        NUM_TOKENS,
        x_TI.abs().amax(0),
        x_TI.mean(0),
        x_TI.abs().mean(0),
        gram_II=x_TI.T @ x_TI / NUM_TOKENS,
        shift_II=(y_TI - x_TI).T @ x_TI / NUM_TOKENS,
    )


def _normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _to_round(fmt: Format) -> torch.Tensor:
    """Return numbers of all sizes that the format has, some beyond its ends, and some in the middle of two values."""
    x = _normal(NUM_VALUES, seed=0) * (fmt.max / 2 if fmt.max < 1e6 else torch.exp(4 * _normal(NUM_VALUES, seed=1)))
    return torch.cat([x, (4 * x).round() / 4])


def _codes(fmt: Format) -> torch.Tensor:
    shape, generator = (64, 1000), torch.Generator().manual_seed(9)
    return torch.randint(int(fmt.min), int(fmt.max) + 1, shape, generator=generator, dtype=torch.int32)


def _bits(x: torch.Tensor) -> torch.Tensor:
    """Return numbers of at most 16 bits as integers that are equal where the bits are."""
    return x.contiguous().view({1: torch.uint8, 2: torch.int16}[x.itemsize])
