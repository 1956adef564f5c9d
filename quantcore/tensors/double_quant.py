"""Double quantization: stores the scales of 4-bit blocks in 8 bits each (Dettmers et al. 2023, "QLoRA", section 3).

Around their mean, 256 scales of a weight (row after row) share one float32 number, the largest distance from the mean.
Each scale is a code of a dynamic map (Dettmers 2015, "8-Bit Approximations for Parallelism in Deep Learning"): decades
with more and more steps, both signs, 0 and 1. Values and codes are those of bitsandbytes
(``functional.create_dynamic_map``, ``quantize_blockwise``). The stored form of a scale is fixed here, before any code
of a weight is chosen.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quantcore.config.spec import SCALE_BLOCK
from quantcore.formats.tables import kept

NUM_DECADES = 7
SMALLEST_NORMAL = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class NestedScales:
    """Scales [R, G] in their stored form.

    ``codes`` uint8 [R, G]; ``absmax`` float32 [ceil(R * G / 256)], the value of a code of 1 in each block; ``offset``,
    a float32 scalar, is added to all.
    """

    codes: torch.Tensor
    absmax: torch.Tensor
    offset: torch.Tensor

    @classmethod
    def of(cls, scale_RG: torch.Tensor) -> NestedScales:
        """Return the stored form of float32 scales; none of them decodes to 0, so that all can be divided by."""
        offset = scale_RG.flatten().mean()
        distance_BS = _blocks(scale_RG - offset)
        absmax_B = distance_BS.abs().amax(-1)
        share = distance_BS * (1 / absmax_B.clamp(min=SMALLEST_NORMAL)).unsqueeze(
            -1
        )  # rounds like bitsandbytes' GPU code
        nested = cls(_nearest(share).flatten()[: scale_RG.numel()].view(scale_RG.shape), absmax_B, offset)
        return cls(nested.codes + (nested.decode() == 0).to(torch.uint8), absmax_B, offset)

    def decode(self) -> torch.Tensor:
        """Return the decoded scales, float32 [R, G]; a scale far from the mean may be below 0."""
        map_256 = dynamic_map(self.codes.device)
        values_BS = map_256[_blocks(self.codes.int())] * self.absmax.unsqueeze(-1)
        return values_BS.flatten()[: self.codes.numel()].view(self.codes.shape) + self.offset


def dynamic_map(device: torch.device) -> torch.Tensor:
    """Return the values of all codes, float32 [256], ascending."""
    return kept(_dynamic_map, "dynamic", device)


def _dynamic_map(_: str, device: torch.device) -> torch.Tensor:
    decades = []
    for decade in range(NUM_DECADES):
        ends = torch.linspace(0.1, 1, 2**decade + 1, dtype=torch.float32)
        decades.append(10.0 ** (decade + 1 - NUM_DECADES) * ((ends[:-1] + ends[1:]) / 2))
    positive = torch.cat(decades)
    return torch.cat([-positive, positive, torch.tensor([0.0, 1.0])]).sort().values.to(device)


def _nearest(share: torch.Tensor) -> torch.Tensor:
    """Return the codes of values in [-1, 1]; a tie goes to the lower code."""
    map_256 = dynamic_map(share.device)
    return torch.bucketize(share, (map_256[:-1] + map_256[1:]) / 2, out_int32=True).to(torch.uint8)


def _blocks(x: torch.Tensor) -> torch.Tensor:
    """Return all of x in rows of SCALE_BLOCK, the last one padded with zeros."""
    flat = x.flatten()
    return torch.nn.functional.pad(flat, (0, -len(flat) % SCALE_BLOCK)).view(-1, SCALE_BLOCK)
