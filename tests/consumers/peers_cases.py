"""The cases of the comparison with peers, read in the peers' own environment and in ours."""

from __future__ import annotations

from dataclasses import dataclass

import torch

GROUP, MX_GROUP, NVFP4_GROUP = 64, 32, 16
BLOCK = (8, 64)


@dataclass(frozen=True)
class Case:
    """A peer that quantizes a weight [out, in] by one rule.

    ``rule`` names how the peer finds scales: ``symmetric``, ``asymmetric`` (whole zero point), ``float_zero_point``,
    ``no_clipping``, ``even`` / ``floor`` / ``ceil`` (e8m0), ``nvfp4``, ``pof2`` (a power of two), ``two_level`` (int4
    over fp8).
    """

    peer: str
    dtype: str
    scheme: str
    rule: str = "symmetric"

    @property
    def name(self) -> str:
        return f"{self.peer}-{self.dtype}-{self.scheme}-{self.rule}"

    @property
    def block_size(self) -> tuple[int, int] | None:
        return BLOCK if self.scheme == "per_block" else None

    @property
    def group_size(self) -> int | None:
        if self.scheme != "per_group":
            return None
        return {"even": MX_GROUP, "floor": MX_GROUP, "ceil": MX_GROUP, "nvfp4": NVFP4_GROUP}.get(self.rule, GROUP)


SCHEMES = ("per_tensor", "per_channel", "per_group")
E8M0_MODES = ("even", "floor", "ceil")
MX_FLOATS = ("fp4", "fp6_e2m3", "fp6_e3m2", "fp8_e4m3", "fp8_e5m2")

FLOAT8 = (
    *(Case("quark", dtype, scheme) for dtype in ("fp8_e4m3", "fp8_e5m2") for scheme in SCHEMES),
    *(Case("torchao", dtype, scheme) for dtype in ("fp8_e4m3", "fp8_e5m2") for scheme in SCHEMES),
    *(Case("compressed_tensors", "fp8_e4m3", scheme) for scheme in SCHEMES),
    *(Case(peer, "fp8_e4m3", "per_block") for peer in ("torchao", "compressed_tensors")),
)
SIGNED = tuple(
    Case(peer, dtype, scheme)
    for peer, dtypes in (
        ("quark", ("int2", "int3", "int4", "int8")),
        ("torchao", ("int2", "int3", "int4", "int8")),
        ("compressed_tensors", ("int2", "int3", "int4", "int8")),
    )
    for dtype in dtypes
    for scheme in SCHEMES
)
ASYMMETRIC = tuple(
    Case(peer, dtype, scheme, "asymmetric")
    for peer, dtypes in (
        ("quark", ("uint2", "uint4", "uint8", "int4", "int8")),
        ("torchao", ("uint2", "uint4", "uint8", "int8")),
        ("compressed_tensors", ("int4", "int8")),
    )
    for dtype in dtypes
    for scheme in SCHEMES
)
FLOAT_ZERO_POINT = tuple(
    Case("quark", dtype, scheme, "float_zero_point") for dtype in ("uint2", "uint4") for scheme in ("per_group",)
)
NO_CLIPPING = tuple(
    Case("torchao", dtype, scheme, "no_clipping") for dtype in ("int2", "int4", "int8") for scheme in SCHEMES
)
MX = (
    *(Case("quark", dtype, "per_group", mode) for dtype in MX_FLOATS for mode in E8M0_MODES),
    *(Case("torchao", dtype, "per_group", mode) for dtype in MX_FLOATS for mode in E8M0_MODES),
    *(Case("compressed_tensors", dtype, "per_group", "even") for dtype in ("fp4", "fp6_e2m3")),
    *(Case("quark", "int8", "per_group", mode) for mode in E8M0_MODES),
    Case("gguf", "fp4", "per_group", "floor"),
)
NVFP4 = tuple(Case(peer, "fp4", "per_group", "nvfp4") for peer in ("quark", "torchao", "compressed_tensors"))
TWO_LEVEL = (Case("quark", "int4", "per_channel", "two_level"),)
POF2 = tuple(Case("quark", "int8", scheme, "pof2") for scheme in ("per_tensor", "per_channel"))
CASES = (*FLOAT8, *SIGNED, *ASYMMETRIC, *FLOAT_ZERO_POINT, *NO_CLIPPING, *MX, *NVFP4, *POF2, *TWO_LEVEL)


def power_of_two(scale: torch.Tensor) -> torch.Tensor:
    """Round each scale to a power of two. Its reciprocal is exact, so that all ways to divide by it agree."""
    return torch.exp2(scale.double().clamp(2.0**-100, 2.0**100).log2().round()).to(scale.dtype)
